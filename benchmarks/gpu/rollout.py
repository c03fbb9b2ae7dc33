"""Rollout throughput at Qwen3-8B's shapes (random weights): precgraph's exact FP8 in vLLM against stock vLLM.

``python -m benchmarks.gpu.rollout [--engines ours schedule bf16 fp8] [--requests 64 256 512 16] [--output-len 1024]
[--layers 36] [--logs DIR]`` prints output tokens/s of the whole run, the second one after a warm-up at the same size,
with time to first token, memory and start-up. ``bf16`` and ``fp8`` are vLLM as it comes (torch.compile, all CUDA
graphs, its own choice of runner and attention, ``quantization="fp8_per_block"``); all engines run in a process of their
own with asynchronous scheduling, and report the sampled tokens' log-probabilities. ``schedule`` is ``ours`` with vLLM's
own splits and tiles of attention, fast and not exact: what exactness costs; ``ours-v1`` is on vLLM's V1 runner.
``kernels`` compiles DeepGEMM's kernels in parallel before; ``sync`` and ``ipc`` time weight updates in one process and
between two. With ``--seats`` so many requests run at a time, and end after different numbers of tokens: prompts join
while others decode. ``--profile decode``, or, of 512 requests, ``prefill``, adds a table of what the card does in such
steps, of a run of its own; throughput is then that of an engine whose steps are annotated, so lower.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from benchmarks.common.engines import add_options, drive, folder_of, qwen3_8b, random_model, report, smollm2
from benchmarks.common.options import above_zero, positive
from benchmarks.common.results import Result
from benchmarks.common.spans import ON_CARD, of_trace, tell

ENGINES = ("kernels", "ours", "ours-v1", "schedule", "bf16", "fp8", "sync", "ipc")
NAMES = {
    "ours": "precgraph exact FP8, V2 runner",
    "ours-v1": "precgraph exact FP8, V1 runner",
    "schedule": "precgraph FP8, vLLM's attention schedule, V2 runner",
    "bf16": "vLLM BF16",
    "fp8": "vLLM fp8_per_block",
}
UNITS = {"tokens/s": "1/s", "ttft_s": "s", "start_s": "s", "weights_gib": "GiB", "cache_tokens": "1", "sync_ms": "ms",
         "growth_mib": "MiB", "late_growth_mib": "MiB", "compile_s": "s"}  # fmt: skip
COMPILERS = 12  # processes that compile kernels at once
SYNCS = 50
SKIPPED = {"prefill": 4, "decode": 48}  # steps before those that a profile shows; 512 prompts take 32
PROFILED = 16  # steps that it shows
PROFILED_LEN = SKIPPED["decode"] + 3 * PROFILED  # new tokens of a run that is profiled


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--requests", nargs="+", type=positive, default=[64, 256, 512, 16])
    parser.add_argument("--input-len", type=positive, default=512)
    parser.add_argument("--output-len", type=positive, default=1024)
    parser.add_argument("--seats", type=positive, help="requests at a time; by default all, of equal lengths")
    parser.add_argument("--warmup-len", type=positive, default=16, help="new tokens of the run that warms up")
    parser.add_argument("--layers", type=positive, default=36)
    parser.add_argument("--block-size", type=positive, help="tokens of a page of the cache, in precgraph's engines")
    parser.add_argument("--cache", type=above_zero, help="GiB of it, for engines that start while others hold memory")
    parser.add_argument("--profile", choices=SKIPPED)
    add_options(parser, limit=900, names=list(PARTS))
    return parser.parse_args()


# ------------------------------------------------------------------------------------------ driver


def main() -> None:
    options = arguments()
    if options.part:
        PARTS[options.part](options)
        return
    speeds: dict[tuple[str, int], float] = {}

    def rows(engine: str, found: dict[str, Any]) -> list[Result]:
        shape = f"Qwen3-8B shapes, {options.layers} layers"
        if "requests" in found:
            shape += f", {found['requests']} x ({options.input_len} + {options.output_len})"
            shape += f", {options.seats} at a time, lengths vary" if options.seats else ""
            speeds[engine, found["requests"]] = found["tokens/s"]
        name = NAMES.get(engine, engine)
        return [Result(shape, f"{name}, {k}", float(found[k]), unit) for k, unit in UNITS.items() if k in found]

    failed = drive("rollout", options.engines, options, rows)
    for requests in options.requests:
        line = [f"{name} {speeds[name, requests]:.0f}" for name in NAMES if (name, requests) in speeds]
        for other in NAMES:
            if other != "ours" and ("ours", requests) in speeds and (other, requests) in speeds:
                line.append(f"ours / {other} {speeds['ours', requests] / speeds[other, requests]:.3f}")
        if line:
            print(f"{requests:4d} requests: {', '.join(line)}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


# ------------------------------------------------------------------------------------------- parts


def throughput(engine: str, options: argparse.Namespace) -> None:
    begun = time.monotonic()
    llm = start(engine, options)
    report(start_s=time.monotonic() - begun, weights_gib=weights_gib(llm), cache_tokens=cache_tokens(llm))
    for requests in options.requests:
        run(llm, options, requests, options.warmup_len)
        report(requests=requests, **run(llm, options, requests, options.output_len))
        if options.profile:
            profile(engine, llm, options, requests)


def profile(engine: str, llm: Any, options: argparse.Namespace, requests: int) -> None:
    """Print, to the part's log, where the card's time goes in some steps of a run."""
    before = set(options.logs.glob("*.json.gz"))
    llm.start_profile()
    run(llm, options, requests, PROFILED_LEN)
    llm.stop_profile()
    for trace in set(options.logs.glob("*.json.gz")) - before:
        (spans,) = of_trace(trace, ON_CARD)
        tell(f"{engine}, {requests} requests, {options.profile}", spans, PROFILED)
        trace.rename(options.logs / f"{engine}-{requests}.trace.gz")


def start(engine: str, options: argparse.Namespace) -> Any:
    """The engine, with the same limits for all."""
    folder = folder_of(qwen3_8b(options.layers), f"qwen3-{options.layers}")
    longest = 2 * options.output_len if options.seats else options.output_len
    limits: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.92,
        "max_num_batched_tokens": 8192, "max_num_seqs": options.seats or max(options.requests),
        "max_model_len": options.input_len + max(longest, PROFILED_LEN if options.profile else 0) + 16,
        "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    if options.cache is not None:
        limits |= {"kv_cache_memory_bytes": int(options.cache * 2**30), "gpu_memory_utilization": 0.5}
    if options.profile:
        limits["profiler_config"] = {
            "profiler": "torch", "torch_profiler_dir": str(options.logs.absolute()), "ignore_frontend": True,
            "torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False,
            "delay_iterations": SKIPPED[options.profile], "max_iterations": PROFILED,
        }  # fmt: skip
    if engine in ("ours", "ours-v1", "schedule"):
        from precgraph.runtime.vllm import RUNNER
        from precgraph.vllm import LLM

        os.environ[RUNNER] = str(int(engine != "ours-v1"))
        if engine == "schedule":
            from benchmarks.common.splits import use_own_schedule

            use_own_schedule()
            own = min(2 * limits["max_num_seqs"], 512)  # what vLLM captures
            limits["compilation_config"] = {"max_cudagraph_capture_size": own}
        return LLM(folder, block_size=options.block_size, **limits).engine
    import vllm

    from precgraph.runtime.vllm.versions import foreign_deep_gemm

    if engine == "fp8" and (foreign := foreign_deep_gemm()):
        raise foreign
    return vllm.LLM(folder, dtype="bfloat16", quantization={"fp8": "fp8_per_block"}.get(engine), **limits)


def run(llm: Any, options: argparse.Namespace, requests: int, output: int) -> dict[str, float]:
    """All requests at once; tokens per second from the first submission to the last token."""
    from vllm import SamplingParams

    from precgraph.runtime.vllm.preserve import rare_full_collections

    rng = random.Random(requests + output)
    prompts = [
        {"prompt_token_ids": [rng.randrange(1000, 150000) for _ in range(options.input_len)]} for _ in range(requests)
    ]
    lengths = [rng.randint(1, 2 * output - 1) if options.seats else output for _ in range(requests)]
    params = [
        SamplingParams(max_tokens=n, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False) for n in lengths
    ]
    begun = time.monotonic()
    with rare_full_collections():  # for all engines: or this process, which reads the replies, is what is measured
        outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - begun
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert made == sum(lengths)
    first = [o.metrics.first_token_latency for o in outputs if o.metrics is not None]
    found = {"tokens/s": made / seconds, "seconds": seconds}
    return found | ({"ttft_s": statistics.median(first)} if first else {})


def weights_gib(llm: Any) -> float:
    return float(llm.collective_rpc(_model_memory)[0]) / 2**30


def _model_memory(worker: Any) -> float:
    return float(getattr(worker.model_runner, "model_memory_usage", math.nan))  # vLLM's CPU runner counts nothing


def cache_tokens(llm: Any) -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return int((cache.num_gpu_blocks or 0) * cache.block_size)


def kernels(options: argparse.Namespace) -> None:
    """Compile the kernels of every size of a step, in processes that share DeepGEMM's cache on disk."""
    begun = time.monotonic()
    sizes = warm_sizes(max(options.requests))
    share = math.ceil(len(sizes) / COMPILERS)  # neighbours in one process: they need the same kernels
    command = [sys.executable, "-m", "benchmarks.gpu.rollout", "--part", "compile", "--requests"]
    running = [subprocess.Popen([*command, *map(str, sizes[i : i + share])]) for i in range(0, len(sizes), share)]
    failed = [p.args for p in running if p.wait()]
    if failed:
        raise SystemExit(f"could not compile: {failed}")
    report(sizes=len(sizes), compile_s=time.monotonic() - begun)


def warm_sizes(requests: int) -> list[int]:
    """What the engine pads its steps to, and a trainer's batch of long sequences."""
    from precgraph.runtime.vllm.sizes import captured_sizes, sizes_of

    made = sizes_of(
        SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured_sizes(requests, 8192)),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=requests),
        )
    )
    return [*made.steps, 12288]


def compile_share(options: argparse.Namespace) -> None:
    """One layer and the head of both models' rollout programs, forward, at each of ``--requests`` rows."""
    import torch

    import precgraph
    from precgraph.runtime.contexts import PackedContext

    for config in (qwen3_8b(1), smollm2(1)):
        rollout = precgraph.compile(random_model(config), "infer").precgraph
        with torch.inference_mode():
            for rows in options.requests:
                ids = torch.zeros(1, rows, dtype=torch.int64, device="cuda")
                hidden = rollout.hidden(ids, torch.arange(rows, device="cuda")[None], PackedContext((0, rows)))
                if rows <= 512:
                    rollout.logits(hidden)
            torch.cuda.synchronize()


def sync(options: argparse.Namespace) -> None:
    """The trainer's store is the engine's: an update is the quantisation of all weights, in place."""
    import precgraph

    actor = precgraph.compile(random_model(qwen3_8b(options.layers)), "train")
    llm = small_engine(options, actor=actor)
    report(route="same process", **updates(actor, lambda: (actor.sync(), llm.sync())))
    llm.shutdown()


def ipc(options: argparse.Namespace) -> None:
    """The engine in another process on the same GPU: it maps the trainer's memory, checks it and copies it."""
    import precgraph

    llm = small_engine(options, load_format="dummy")
    actor = precgraph.compile(random_model(qwen3_8b(options.layers)), "train")
    report(route="CUDA IPC", **updates(actor, lambda: (actor.sync(), llm.sync(actor, route="ipc"))))
    assert llm.state()["version"] == actor.precgraph.store.version
    llm.shutdown()


def small_engine(options: argparse.Namespace, **more: Any) -> Any:
    from precgraph.vllm import LLM

    return LLM(
        folder_of(qwen3_8b(options.layers), f"qwen3-{options.layers}"), skip_tokenizer_init=True, max_model_len=2048,
        max_num_seqs=16, max_num_batched_tokens=2048, kv_cache_memory_bytes=1 << 32, gpu_memory_utilization=0.3,
        enforce_eager=True, **more,
    )  # fmt: skip


def updates(actor: Any, update: Any) -> dict[str, float]:
    """Median time of an update after an optimiser step, and what the card holds more after all than after the first
    and than after half of them."""
    import torch

    def timed() -> float:
        with torch.no_grad():
            for p in actor.parameters():
                p.add_(0)  # another version of the same values
        torch.cuda.synchronize()
        begun = time.perf_counter()
        update()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begun)

    timed()
    times, free = [], [torch.cuda.mem_get_info()[0] / 2**20]
    for _ in range(SYNCS):
        times.append(timed())
        free.append(torch.cuda.mem_get_info()[0] / 2**20)
    return {
        "syncs": SYNCS, "sync_ms": statistics.median(times), "slowest_ms": max(times), "growth_mib": free[0] - free[-1],
        "late_growth_mib": free[SYNCS // 2] - free[-1],
    }  # fmt: skip


PARTS = {
    "kernels": kernels, "compile": compile_share, "sync": sync, "ipc": ipc,
    **{engine: (lambda options, engine=engine: throughput(engine, options)) for engine in NAMES},
}  # fmt: skip

if __name__ == "__main__":
    main()
