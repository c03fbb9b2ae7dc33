"""Engines one after another on one card: each part runs in a process of its own and reports as it goes.

A part that fails or takes too long costs its own numbers only; what it had reported is kept. Its output goes to a log.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.common.options import above_zero, need_gpu, writable
from benchmarks.common.results import FILE, Result, append

ROOT = Path(__file__).parents[2]
_MARK = "@report "
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which would be compiled, or fetched
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for asking workers with a function of the benchmark's
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def report(**values: Any) -> None:
    """In a part: hand values to the driver, at once."""
    print(f"\n{_MARK}{json.dumps(values)}", flush=True)


def add_options(parser: argparse.ArgumentParser, limit: float, names: Sequence[str]) -> None:
    """The options that :func:`drive` reads; ``names`` are those that it may be given."""
    parser.add_argument("--limit", type=above_zero, default=limit, help="seconds that one part may take")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/precgraph-benchmarks/logs"))
    parser.add_argument("--results", type=writable, default=str(FILE), help="another file than benchmarks/results.csv")
    parser.add_argument("--commit", help="the commit, where the tree has no history")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)


def drive(
    benchmark: str,
    names: Sequence[str],
    options: argparse.Namespace,
    rows: Callable[[str, dict[str, Any]], Sequence[Result]],
) -> list[str]:
    """Run ``benchmarks.gpu.<benchmark> --part NAME`` for each name; print what it reports, and keep its ``rows``.

    Returns the names of those that did not end well.
    """
    need_gpu()
    if options.commit:
        os.environ["BENCHMARK_COMMIT"] = options.commit
    options.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or a part, in a session of its own, would go on alone
    # A part runs in the root of the tree, wherever this process does.
    places = ["--logs", str(options.logs.absolute()), "--results", str(options.results.absolute())]
    given = [*(a for a in sys.argv[1:] if a != "--"), *places]
    failed = []
    for name in names:
        begun = time.monotonic()
        print(f"== {name}", flush=True)
        for found in parts(
            f"benchmarks.gpu.{benchmark}", [*given, "--part", name], name=f"{benchmark}-{name}",
            logs=options.logs, limit=options.limit,
        ):  # fmt: skip
            if "problem" in found:
                print(f"   PROBLEM: {found['problem']}", flush=True)
                failed.append(name)
                continue
            line = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()]
            print("   " + "  ".join(line), flush=True)
            append(benchmark, rows(name, found), options.results)
        print(f"   {time.monotonic() - begun:.0f} s in all", flush=True)
    return failed


def parts(module: str, arguments: Sequence[str], *, name: str, logs: Path, limit: float) -> Iterator[dict[str, Any]]:
    """Run ``python -m module arguments``; yields what it reports, then ``{"problem": ...}`` if it did not end well.

    After ``limit`` seconds it is killed, with all processes that it started.
    """
    log = logs / f"{name}.log"
    begun, late = time.monotonic(), False
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", module, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, cwd=ROOT, env=_environment(),
    )  # fmt: skip

    def stop() -> None:
        nonlocal late
        late = True
        os.killpg(process.pid, signal.SIGKILL)

    timer = Timer(limit, stop)
    timer.start()
    lines: list[str] = []
    try:
        assert process.stdout is not None
        with log.open("w", buffering=1) as file:  # by lines: the driver itself may be killed
            for line in process.stdout:
                file.write(f"{time.monotonic() - begun:7.1f} {line}")
                lines = [*lines[-300:], line.rstrip()]
                if line.startswith(_MARK):
                    yield json.loads(line.removeprefix(_MARK))
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            stop()
    if late:
        yield {
            "problem": f"stopped after {limit:.0f} s; the last line was: {next(filter(None, lines[::-1]), '')[:300]}"
        }
    elif process.returncode:
        said = [line for line in lines if "Error" in line] or lines[-3:]
        yield {"problem": f"ended with {process.returncode}: {' | '.join(said[-2:])[-600:]} (see {log})"}


def _environment() -> dict[str, str]:
    """The part's environment: this one, the settings above, and precgraph's plugin even if it is not installed."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="precgraph"):
        path.insert(0, _plugin_folder())
    kernels = str(Path("~/.deep_gemm").expanduser())  # one cache for all: vLLM would choose another
    values = {"DG_JIT_CACHE_DIR": kernels, **ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if "CUDA_HOME" not in values and Path("/usr/local/cuda/bin/nvcc").exists():
        values["CUDA_HOME"] = "/usr/local/cuda"
    return values


def _plugin_folder() -> str:
    """A folder that names the entry point, as an installation of precgraph would."""
    folder = Path(tempfile.gettempdir(), "precgraph-plugin")
    made = folder / "precgraph-0.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: precgraph\nVersion: 0\n")
    (made / "entry_points.txt").write_text("[vllm.general_plugins]\nprecgraph = precgraph.runtime.vllm:register\n")
    return str(folder)


# ------------------------------------------------------------------------------------------ models


def qwen3_8b(layers: int = 36) -> Any:
    """The configuration of Qwen3-8B, or of one with fewer layers."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False, use_cache=True,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def smollm2(layers: int = 30) -> Any:
    """The configuration of SmolLM2-135M, or of one with fewer layers."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    return config


def random_model(config: Any) -> Any:
    """A model of random bf16 weights on the GPU, with RoPE frequencies as a checkpoint's model has them."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")  # made on the CPU: other bits
    return model.eval()


def folder_of(config: Any, name: str) -> str:
    """A directory with the configuration alone."""
    folder = Path(tempfile.gettempdir(), "precgraph-benchmarks", name)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return str(folder)
