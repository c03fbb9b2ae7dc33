"""One file of results for all benchmarks: ``benchmarks/results.csv``, a row a number.

Columns: commit, date (UTC), machine, versions, benchmark, shape, metric, value, unit.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

FILE = Path(__file__).parents[1] / "results.csv"
COLUMNS = ("commit", "date", "machine", "versions", "benchmark", "shape", "metric", "value", "unit")


@dataclass(frozen=True, slots=True)
class Result:
    """A measured number: ``shape`` is what it was measured on, ``metric`` what it is, ``unit`` its unit."""

    shape: str
    metric: str
    value: float
    unit: str


def append(benchmark: str, results: Iterable[Result], file: Path = FILE) -> None:
    """Add rows to the file; a new file gets its heading."""
    common = (_commit(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"), machine(), versions())
    new = not file.exists()
    with file.open("a", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for r in results:
            writer.writerow([*common, benchmark, r.shape, r.metric, f"{r.value:.6g}", r.unit])


def machine() -> str:
    """The card, or the CPU with its number of cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{_cpu()}, {len(os.sched_getaffinity(0))} cores"


def versions() -> str:
    """What the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["vllm"] = importlib.metadata.version("vllm")
    return "; ".join(f"{name} {version}" for name, version in found.items())


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit, with a + where the tree has changes; ``BENCHMARK_COMMIT`` names it for a copy without a history."""
    if named := os.environ.get("BENCHMARK_COMMIT"):
        return named
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=10"],
        cwd=FILE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
