"""The record of a machine: one small table of all that can change a bit and is no part of a model or a recipe.

Of the environment only the variables of :data:`precgraph.verify.environment.VARIABLES` are read; paths, host names and
secrets are not.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from precgraph import __version__, machine
from precgraph.verify.environment import KIND, SCHEMA, VARIABLES

# Packages beside those of the machine module, by the names of their distributions.
_MORE: dict[str, tuple[str, ...]] = {
    "flash_attn": ("flash-attn",),
    "flash_attn_3": ("flash-attn-3", "fa3-fwd"),
    "flash_attn_4": ("flash-attn-4",),
    "flashinfer": ("flashinfer-python",),
    "sglang": ("sglang",),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "torchao": ("torchao",),
    "xformers": ("xformers",),
}


def record(digests: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The record of this process on this machine, as JSON values; ``digests`` are of programs, by a name of theirs."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "versions": _versions(),
        "cards": _cards(),
        "cpu": _cpu(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "flags": {s.name: s.detail for s in machine.flags() if s.name not in ("threads", "NVIDIA_TF32_OVERRIDE")},
        "digests": dict(digests or {}),
    }


def _versions() -> dict[str, str]:
    found: dict[str, str | None] = {"precgraph": __version__, "python": platform.python_version()}
    found |= {name: machine.version(name) for name in machine.PACKAGES}
    found |= {name: machine.installed(distributions) for name, distributions in _MORE.items()}
    found["CUDA of torch"] = torch.version.cuda
    if torch.cuda.is_available():
        found["cuDNN"] = str(torch.backends.cudnn.version())
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    return {name: text for name, text in found.items() if text}


def _driver() -> str | None:
    """The card's driver, by the tool that comes with it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return text.splitlines()[0].strip() if text.strip() else None


def _cards() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append({"name": p.name, "capability": f"{p.major}.{p.minor}", "memory": p.total_memory,
                      "multiprocessors": p.multi_processor_count})  # fmt: skip
    return found


def _cpu() -> dict[str, Any]:
    """Architecture, model, the vector instructions that torch uses, and threads."""
    return {
        "machine": platform.machine(),
        "model": _model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
