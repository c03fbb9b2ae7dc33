"""One GRPO step at 135M on one card: where its time goes, and how much of it the GPU is busy.

``python -m benchmarks.gpu.train_step [--model PATH] [--arm exact] [--set A.B=C]`` makes a few steps of the trainer and
profiles the last. Without ``--model`` it is a random model of SmolLM2-135M's shapes and random prompts. Busy is the
time during which a kernel runs, over the time of a step that was not profiled; the rest waits for the host. Rows go to
``benchmarks/results.csv``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.options import need_gpu
from benchmarks.common.results import Result, append
from benchmarks.common.spans import ON_CARD, RECORDED, covered, of_trace
from trainer.config import Config, load
from trainer.loop import Trainer
from trainer.tasks import Item, Task

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "smollm2.toml"
WARM = 3  # steps before the one that is profiled


class Letters:
    """A tokenizer for random prompts: a character is an id."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def random_parts(config: Config) -> dict[str, Any]:
    """A model of SmolLM2-135M's shapes, prompts of 38 tokens, a reward that differs within groups."""
    shapes = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152,
        num_hidden_layers=30, tie_word_embeddings=True, max_position_embeddings=8192, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [Item(str(i), chr(33 + i % 90) * 38, "") for i in range(200)]
    task = Task("random", items, lambda item, text: float(len(text) % 2))
    model = LlamaForCausalLM._from_config(shapes, dtype=torch.bfloat16)
    return {"model": model, "tokenizer": Letters(), "task": task}


def measure(trainer: Trainer) -> tuple[list[Result], Counter[str]]:
    """Results of a step, and microseconds by kernel."""
    for _ in range(WARM):
        plain = trainer.train_step()
    open_phase: list[Any] = []

    def show(phase: str | None, line: str | None = None) -> None:
        torch.cuda.synchronize()
        if open_phase:
            open_phase.pop().__exit__(None, None, None)
        if phase:
            open_phase.append(record_function(f"phase:{phase.split()[0]}"))
            open_phase[-1].__enter__()

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, record_function("phase:step"):
        trainer.train_step(show)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:  # the profiler's own list of events takes minutes for so many
        trace = Path(folder, "trace.json")
        seen.export_chrome_trace(str(trace))
        kernels, phases = of_trace(trace, ON_CARD, RECORDED)
    arm, results = trainer.config.precision.arm, []
    spans = [(a, b, name.removeprefix("phase:")) for a, b, name in phases if name.startswith("phase:")]
    for phase in dict.fromkeys(name for _, _, name in spans if name != "sync"):
        own = [k for a, b, name in spans if name == phase for k in kernels if k[0] < b and k[1] > a]
        # The trainer takes the time of sync() out of its update, whose kernels are inside this span.
        seconds = plain[f"time/{phase}"] + (plain["time/sync"] if phase == "update" else 0.0)
        results += [
            Result(arm, f"{phase}: time", seconds, "s"),
            Result(arm, f"{phase}: GPU busy", covered(own) / 1e6 / seconds, "share"),
            Result(arm, f"{phase}: kernels", len(own), "count"),
        ]
    by_name: Counter[str] = Counter()
    for start, stop, name in kernels:
        by_name[name[:80]] += round(stop - start)
    return results, by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a directory, a .gguf or a hub id; random without one")
    parser.add_argument("--arm", default="exact")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    options = parser.parse_args()
    need_gpu()
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}", f"precision.arm={options.arm}", f"model.path={options.model}", "run.eval_every=0",
            *([] if options.model else ["task.chat=false", 'task.system=""']), *options.settings,
        ]  # fmt: skip
        config = load(CONFIG, settings)
        parts = {} if options.model else random_parts(config)
        trainer = Trainer(config, console=Console(quiet=True), **parts)
        results, kernels = measure(trainer)
    for r in results:
        print(f"{r.metric:<24} {r.value:10.4g} {r.unit}")
    for name, spent in kernels.most_common(25):
        print(f"{spent / 1000:10.1f} ms  {name}")
    append("train_step", results)


if __name__ == "__main__":
    main()
