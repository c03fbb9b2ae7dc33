"""``precgraph doctor``: the machine, the backends, the switches, and row invariance."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from precgraph import NumericsStateError, machine, selftest
from precgraph.cli.model import BACKENDS
from precgraph.errors import LoweringError
from precgraph.lowering import registry
from tests.test_cli import assert_error, run


def test_doctor_json() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert list(data) == ["schema", "ok", "facts", "backends", "flags", "exact"]
    assert data["facts"]["torch"] == torch.__version__
    backends = {b["name"]: b for b in data["backends"]}
    assert backends["reference"]["ok"]
    assert list(backends) == [*registry.BACKENDS, "flash_attention_4", "flash_attention", "cuda", "vllm"]
    assert backends["cuda"]["detail"].endswith("(part of deep_gemm)")
    assert {"auto", *registry.BACKENDS} == {*BACKENDS}  # what --help lists
    for backend in backends.values():
        assert backend["ok"] or (backend["detail"] and backend["remedy"])
    assert data["exact"] is None


def test_doctor_tables() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for word in ("torch", "nvcc", "deep_gemm", "fp32 matmuls on CUDA", "doctor --exact"):
        assert word in result.stdout


def test_doctor_and_check_name_the_cause_on_a_cpu_and_no_remedy_of_a_gpu(
    config_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No package makes a CPU a Hopper GPU; and who types --backend is told so in those words."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = {status.name: status for status in machine.backends()}
    assert rows["deep_gemm"].detail == "FP8 GEMMs need compute capability 9.0 (H100, H200), not a CPU"
    assert rows["deep_gemm"].remedy == rows["cuda"].remedy == registry.TAKE_REFERENCE
    refused = run("check", config_folder("llama"), "--backend", "deep_gemm")
    assert_error(refused, rows["deep_gemm"].detail, "take the backend reference (--backend reference; in Python ")


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU without FP8 tensor cores, as far as anybody asks for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    registry.unavailable.cache_clear()
    yield
    registry.unavailable.cache_clear()


def test_a_gpu_without_fp8_is_told_what_is_needed(a100: None) -> None:
    """By doctor and by a build, with a remedy that is one there: a bf16 recipe needs kernels for Hopper, too."""
    rows = {status.name: status for status in machine.backends()}
    for name in ("deep_gemm", "flash_attention", "cuda"):
        assert "compute capability 9.0" in rows[name].detail and rows[name].remedy == registry.TAKE_REFERENCE
    words = r"^FP8 GEMMs need compute capability 9\.0 \(H100, H200\), not 8\.0; take the backend reference"
    with pytest.raises(LoweringError, match=words):
        registry.backends("deep_gemm", torch.device("cuda"))


def test_doctor_notices_a_switch_that_changes_bits() -> None:
    torch.set_float32_matmul_precision("medium")  # the tests that follow need the default again
    try:
        result = run("doctor", "--json")
        with pytest.raises(NumericsStateError):
            next(selftest.row_invariance())
        assert_error(run("doctor", "--exact"), "float32 matmul precision is")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert result.exit_code == 1
    flags = {f["name"]: f for f in json.loads(result.stdout)["flags"]}
    assert not flags["fp32 matmuls on CUDA"]["ok"]
    assert flags["fp32 matmuls on the CPU"]["detail"] == "bf16"
    assert flags["fp32 matmuls on the CPU"]["remedy"] == "torch.set_float32_matmul_precision('highest')"


@pytest.mark.parametrize(
    ("version", "ok", "words"),
    [("0.25.1", False, "outside the range"), ("0.34.0", False, "outside the range"), ("0.33.0+cpu", True, "can run")],
)
def test_doctor_knows_which_vllm_fits(version: str, ok: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precgraph.runtime.vllm.versions.installed", lambda: version)
    status = machine.backends()[-1]
    assert (status.name, status.ok) == ("vllm", ok)
    assert words in status.detail
    assert ok or "pip install" in status.remedy


def test_doctor_knows_whose_deep_gemm_vllm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is fine for precgraph, its own FP8 models are not."""
    version = importlib.metadata.version
    monkeypatch.setattr("precgraph.runtime.vllm.versions.installed", lambda: "0.33.0+cpu")
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.1.5" if n == "sgl-deep-gemm" else version(n))
    vllm, own = machine.backends()[-2:]
    assert (vllm.name, vllm.ok) == ("vllm", True)
    assert (own.name, own.ok) == ("vllm's own FP8 models", False)
    assert "sgl-deep-gemm 0.1.5" in own.detail and "pip uninstall" in own.remedy


def test_doctor_exact_passes_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def exact() -> selftest.Probe:
        return selftest.Probe("doubling", "id.1", "8", lambda a, b: (torch.arange(a, b) * 2,))

    def by_position_in_the_batch() -> selftest.Probe:
        return selftest.Probe("counting", "id.2", "8", lambda a, b: (torch.arange(b - a),))

    monkeypatch.setattr(selftest, "PROBES", (exact,))
    result = run("doctor", "--exact")
    assert result.exit_code == 0
    assert "reference kernels on the CPU: no row depends on another" in " ".join(result.stdout.split())
    assert "exact:" not in result.stdout  # what a GPU would run was not tested
    monkeypatch.setattr(selftest, "PROBES", (exact, by_position_in_the_batch))
    result = run("doctor", "--exact", "--json")
    assert result.exit_code == 1
    outcomes = json.loads(result.stdout)["exact"]
    assert [o["ok"] for o in outcomes] == [True, True, False, False]  # one and several threads each
    assert outcomes[2]["failure"] == "rows 37-37 alone differ from 300 rows at once in 1 numbers"
    assert "not fine" in run("doctor", "--exact").stdout


@pytest.mark.parametrize("make", selftest.PROBES)
def test_reference_kernels_are_row_invariant(
    make: Callable[[], selftest.Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "PROBES", (make,))
    monkeypatch.setattr(selftest, "SIZES", (2, 3, 16, 17, 129))
    for outcome in selftest.row_invariance(threads=(1, 2)):
        assert outcome.ok, outcome.failure
