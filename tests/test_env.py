"""Level env: a planted difference of two machines is found, by the right code, and harmless ones are notes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from precgraph.cli import app
from precgraph.environment import record
from precgraph.errors import InputError
from precgraph.verify.environment import VARIABLES, compare_environments, read

ROOT = Path(__file__).parents[1]
BASE: dict[str, Any] = {
    "kind": "precgraph environment", "schema": 1,
    "versions": {"torch": "2.13.0+cpu", "python": "3.11.9", "vllm": "0.32.0"},
    "cards": [{"name": "NVIDIA H200", "capability": "9.0"}, {"name": "NVIDIA H200", "capability": "9.0"}],
    "cpu": {"machine": "x86_64", "model": "A", "capability": "AVX2", "threads": 2},
    "variables": {}, "flags": {"subnormal numbers": "kept"}, "digests": {"train": "ab"},
}  # fmt: skip


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def put(table: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data[table].__setitem__(name, value)


def judged(change: Callable[[dict[str, Any]], Any], before: Callable[[dict[str, Any]], Any] = lambda _: None) -> Any:
    """(code, name) of violations, notes and what is not proved, once the second machine is changed."""
    first, second = copy.deepcopy(BASE), copy.deepcopy(BASE)
    before(first)
    change(second)
    report = compare_environments(first, second)
    return tuple(
        [(f.code[:5], f.attributes[0]) for f in part] for part in (report.violations, report.notes, report.not_proved)
    )


@pytest.mark.parametrize(("change", "code", "name"), [
    (put("versions", "torch", "2.12.0"), "PG701", "torch"),
    (put("variables", "VLLM_USE_DEEP_GEMM_E8M0", "0"), "PG702", "VLLM_USE_DEEP_GEMM_E8M0"),
    (put("variables", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1"), "PG702", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
    (put("variables", "CUBLAS_WORKSPACE_CONFIG", ":4096:8"), "PG702", "CUBLAS_WORKSPACE_CONFIG"),
    (put("variables", "ATEN_CPU_CAPABILITY", "default"), "PG702", "ATEN_CPU_CAPABILITY"),
    (put("variables", "SOMETHING_NEW", "1"), "PG702", "SOMETHING_NEW"),
    (lambda data: data.update(cards=[{"name": "NVIDIA H100", "capability": "9.0"}]), "PG703", "cards"),
    (lambda data: data.update(cards=[]), "PG703", "cards"),
    (put("cpu", "capability", "AVX512"), "PG704", "capability"),
    (put("cpu", "threads", 8), "PG704", "threads"),
    (put("flags", "subnormal numbers", "flushed to zero"), "PG705", "subnormal numbers"),
    (put("digests", "train", "cd"), "PG706", "train"),
])  # fmt: skip
def test_what_can_change_bits_is_found(change: Any, code: str, name: str) -> None:
    assert judged(change) == ([(code, name)], [], [])


@pytest.mark.parametrize(("change", "name"), [
    (put("versions", "python", "3.12.0"), "python"),
    (put("versions", "sglang", "0.5"), "sglang"),  # the trainer has none
    (put("variables", "VLLM_USE_DEEP_GEMM_E8M0", "1"), "VLLM_USE_DEEP_GEMM_E8M0"),  # its default
    (put("variables", "VLLM_BATCH_INVARIANT", "false"), "VLLM_BATCH_INVARIANT"),
    (put("cpu", "model", "B"), "model"),
    (lambda data: data["cards"].pop(), "number of cards"),
])  # fmt: skip
def test_what_cannot_is_a_note(change: Any, name: str) -> None:
    assert judged(change) == ([], [("PG911", name)], [])


def test_true_is_one_and_a_missing_digest_is_not_proved() -> None:
    assert judged(put("variables", "VLLM_BATCH_INVARIANT", "true"), put("variables", "VLLM_BATCH_INVARIANT", "1")) == (
        [], [("PG911", "VLLM_BATCH_INVARIANT")], [],
    )  # fmt: skip
    assert judged(lambda data: data["digests"].clear()) == ([], [], [("PG912", "train")])


def test_equal_records_are_consistent() -> None:
    report = compare_environments(BASE, copy.deepcopy(BASE))
    assert report.ok
    assert report.compared == 10
    assert not report.notes


def test_the_record_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is what torch says; of the environment, variables of the table and no others."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    data = record({"train": "ab"})
    assert data["versions"]["torch"] == torch.__version__
    assert data["cpu"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert data["cpu"]["threads"] == torch.get_num_threads()
    assert data["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert data["variables"].keys() <= VARIABLES.keys()
    assert data["digests"] == {"train": "ab"}
    text = json.dumps(data)
    assert "secret" not in text
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4


def test_two_processes_that_differ_in_one_variable(tmp_path: Path) -> None:
    """The same machine, once as it is and once with another vector length: that variable and what it does."""
    files = []
    for name, extra in (("a", {}), ("b", {"ATEN_CPU_CAPABILITY": "default"})):
        files.append(tmp_path / f"{name}.json")
        command = [sys.executable, "-m", "precgraph", "env", "-o", str(files[-1])]
        environment = {k: v for k, v in os.environ.items() if k != "ATEN_CPU_CAPABILITY"} | extra
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    found = tmp_path / "out.json"
    result = run("check", files[0], files[1], "--level", "env", "-o", found)
    assert result.exit_code == 1, result.output
    data = json.loads(found.read_text())
    codes = {(f["code"][:5], f["attributes"][0]) for f in data["violations"]}
    assert codes == {("PG702", "ATEN_CPU_CAPABILITY"), ("PG704", "capability")}
    assert data["ok"] is False
    assert run("check", files[0], files[0], "--level", "env").exit_code == 0


@pytest.mark.parametrize(("text", "part"), [
    ("{", "not valid JSON"), ('{"a": 1}', "no record"),
    ('{"kind": "precgraph environment", "schema": 99}', "schema 99"),
    ('{"kind": "precgraph environment", "schema": 1}', "no table"),
    (json.dumps({**BASE, "versions": {}}), "torch's version"),
    (json.dumps({**BASE, "versions": {"torch": None}}), "torch's version"),
    (json.dumps({**BASE, "cards": ["NVIDIA H200"]}), "list of cards"),
    (json.dumps(BASE)[:-1] + ', "versions": {}}', "there twice"),
])  # fmt: skip
def test_a_file_that_is_no_record(tmp_path: Path, text: str, part: str) -> None:
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    bad.write_text(text)
    good.write_text(json.dumps(BASE))
    with pytest.raises(InputError, match=part):
        read(bad)
    result = run("check", good, bad, "--level", "env")
    assert (result.exit_code, result.stdout) == (2, "")
    assert part in result.stderr
    assert run("check", good, "--level", "env").exit_code == 2
    assert run("check", good, tmp_path / "none.json", "--level", "env").exit_code == 2
