"""What ``precgraph check`` costs on real shapes: wall time and memory of the whole command, and how it grows.

The command runs as a process of its own on a config.json, so that imports and the peak of its memory count. Targets:
Qwen3-8B 15 s, Llama-70B shapes 30 s, Llama-405B and DeepSeek-V3 shapes (256 experts) 60 s, each below 1.5 GB.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.results import Result, append
from precgraph.checking import lowered
from precgraph.loading import load_config_model
from precgraph.passes.pipeline import build
from precgraph.recipe import Recipe
from precgraph.trace import trace
from precgraph.verify import check_inclusion

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "Llama-3.1-405B": {
        **_LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
}  # fmt: skip
TARGETS = {"Qwen3-8B": 15.0, "Llama-3.1-70B": 30.0, "Llama-3.1-405B": 60.0, "DeepSeek-V3": 60.0}  # seconds
MEMORY_TARGET = 1.5  # GB
LAYERS = (20, 40, 80, 160)


def command_cost(folder: Path, name: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds (the same on a machine with nothing else to do) and peak GB of ``precgraph check``."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "precgraph", "check", str(path)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)  # the usage of this child alone
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"precgraph check failed on {name}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / (1 << 20)


def stage_costs(folder: Path, layers: int) -> dict[str, float]:
    """CPU milliseconds of each stage on a Llama of 70B shapes with ``layers`` layers."""
    path = folder / f"layers-{layers}.json"
    path.write_text(json.dumps({**CONFIGS["Llama-3.1-70B"], "num_hidden_layers": layers}))
    model, recipe = load_config_model(path), Recipe.jet_rl()
    gc.collect()
    gc.disable()  # a full collection in one of the stages would look like growth
    marks = [time.process_time()]
    traced = trace(model)
    marks.append(time.process_time())
    for mode in ("train", "infer"):
        build(traced.graph, mode, recipe)
    marks.append(time.process_time())
    train, infer = lowered(traced, "train", recipe), lowered(traced, "infer", recipe)
    marks.append(time.process_time())
    if not check_inclusion(train, infer).ok:
        raise SystemExit("the two programs of one recipe differ")
    marks.append(time.process_time())
    gc.enable()
    stages = ("trace", "passes", "passes, rules and lowering", "inclusion")
    return {s: 1e3 * (b - a) for s, a, b in zip(stages, marks, marks[1:], strict=False)}


def main() -> None:
    results: list[Result] = []
    commands = Table(
        "shape", "seconds", "target", "CPU seconds", "peak GB", "target", title="precgraph check, the whole command"
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape, target in TARGETS.items():
            seconds, cpu, memory = command_cost(folder, shape)
            commands.add_row(
                shape, f"{seconds:.1f}", f"{target:.0f}", f"{cpu:.1f}", f"{memory:.2f}", f"{MEMORY_TARGET}"
            )
            results += [Result(shape, "check", seconds, "s"), Result(shape, "check, CPU time", cpu, "s")]
            results += [Result(shape, "check, peak resident memory", memory, "GB")]
        costs = {n: stage_costs(folder, n) for n in LAYERS}
    growth = Table("stage", *(f"{n} layers" for n in LAYERS), title="CPU milliseconds per layer: constant if linear")
    for stage in costs[LAYERS[0]]:
        growth.add_row(stage, *(f"{costs[n][stage] / n:.2f}" for n in LAYERS))
        results += [Result(f"{n} layers of Llama-3.1-70B", stage, costs[n][stage], "ms") for n in LAYERS]
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(commands, growth)
    append("check_cost", results)


if __name__ == "__main__":
    main()
