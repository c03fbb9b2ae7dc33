"""Refreshing the weight store of Qwen3-8B's shapes after an update of the masters: time, and what it holds.

``python -m benchmarks.gpu.store [--layers 36]``. A refresh reads every bf16 master once and writes FP8 codes, scales
and the transposed copy for DGrad in place, then looks for NaN and infinity.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import precgraph
from benchmarks.common.options import need_gpu, positive
from benchmarks.common.results import Result, append
from precgraph.lowering.packs import Fp8Weight

REPEATS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=positive, default=36)
    layers = parser.parse_args().layers
    need_gpu()
    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, num_hidden_layers=layers, max_position_embeddings=40960, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    masters = torch.cuda.memory_allocated()
    start = time.perf_counter()
    actor = precgraph.compile(model, "train")
    compiled = time.perf_counter() - start
    store = actor.precgraph.store
    for pack in store.packs.values():
        if isinstance(pack, Fp8Weight):
            pack.transposed()  # what the first backward asks for
    gc.collect()
    held = torch.cuda.memory_allocated() - masters
    refresh = milliseconds(store.refresh)
    shape = f"Qwen3-8B, {layers} layers"
    results = [
        Result(shape, "compile", compiled, "s"),
        Result(shape, "masters", masters / 1e9, "GB"),
        Result(shape, "FP8 weights and transposed copies", held / 1e9, "GB"),
        Result(shape, "refresh", refresh, "ms"),
        Result(shape, "refresh, bandwidth", (masters + held) / refresh / 1e9, "TB/s"),
    ]
    for r in results:
        print(f"{r.shape:24s} {r.metric:36s} {r.value:9.2f} {r.unit}")
    append("store", results)


def milliseconds(call: object) -> float:
    """Median wall time, the host's share included: nothing else can run before a refresh is over."""
    assert callable(call)
    times = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times[2:])[REPEATS // 2]


if __name__ == "__main__":
    main()
