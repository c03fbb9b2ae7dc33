"""The experiment's driver: what must not start, and what a second part finds."""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import tiny

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_arms.py"


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, args)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(end.value.code or 0)  # type: ignore[arg-type]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    tiny.model(layers=1).save_pretrained(tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def test_one_folder_is_of_one_model(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    common = ["--runs", runs, "--no-smoke", "--seconds", 1]  # so that nothing is started
    assert call(monkeypatch, "run", "--model", policy, *common) == 2
    assert "no time is left" in capsys.readouterr().out and (runs / "model" / "model.safetensors").exists()
    assert call(monkeypatch, "run", "--model", "another", *common) == 2
    assert f"holds runs of {policy}, not of another" in capsys.readouterr().out


def test_a_run_that_goes_on_keeps_its_settings(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    tiny.settings(runs / "exact-0", optimizer={"lr": 1e-3}).save(_folder(runs / "exact-0") / "config.toml")
    common = ["run", "--model", policy, "--runs", runs, "--no-smoke", "--seconds", 1, "--seeds", 0]
    for more, said in (
        (["--set", "optimizer.lr=2e-3"], "no time is left"),  # without a checkpoint, it is a new run
        (["--set", "optimizer.lr=0.001", "--set", "run.steps=9"], "no time is left"),
        (["--set", "optimizer.lr=2e-3"], "exact-0 was started without optimizer.lr=2e-3: leave it out"),
        (["--set", "optimizer.rate=2e-3"], "did you mean"),
    ):
        assert call(monkeypatch, *common, *more) == 2
        assert said in capsys.readouterr().out, more
        _folder(runs / "exact-0" / "checkpoints" / "step-000001")


@pytest.mark.parametrize(("codes", "whole"), [([0, 0], 0), ([3, 0], 0), ([2, 3], 1), ([1, 0], 1), ([130, 130], 1)])
def test_a_run_that_is_to_be_continued_has_not_failed(
    codes: list[int], whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = runpy.run_path(str(SCRIPT))["run"]
    left = iter(codes)
    for name, stub in (
        ("convert", lambda *_: None), ("last_line", lambda _: "step 1"), ("tail", lambda *_: "its log"),
        ("start", lambda *_: None), ("finish", lambda *_: next(left)), ("watched", nullcontext),
    ):  # fmt: skip
        monkeypatch.setitem(start.__globals__, name, stub)
    options = argparse.Namespace(
        seconds=60, runs=tmp_path, model="m", arms=["exact"], seeds=[0, 1], settings=[], no_smoke=True
    )
    assert start(options) == whole
    assert capsys.readouterr().out.count("see below\nits log") == sum(code not in (0, 3) for code in codes)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_a_conversion_that_breaks_off_is_made_again(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(table: Any) -> Any:
        raise OSError("broke off")  # after the weights and the config

    script = runpy.run_path(str(SCRIPT))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broke off"):
        patch.setattr("trainer.models.load_tokenizer", fail)
        script["convert"](str(policy), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    script["convert"](str(policy), tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_a_report_of_nothing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "report", "--runs", tmp_path / "none", "-o", tmp_path / "page") == 2
    assert "holds no run with a step" in capsys.readouterr().out


def test_a_report_says_what_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _folder(tmp_path / "runs" / "exact-0")
    tiny.settings(run).save(run / "config.toml")
    (run / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    told = ["report", "--runs", run.parent, "-o", tmp_path / "page", "--title", "One arm", "--note", "It is short."]
    assert call(monkeypatch, *told, "--fact", "GPU") == 2 and "'GPU' is not of the form NAME" in capsys.readouterr().out
    assert call(monkeypatch, *told, "--fact", "GPU=none, 2 cores", "--fact", "commit=x=y") == 0
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# One arm\n") and "\nIt is short.\n" in page
    assert "| GPU | none, 2 cores |\n| commit | x=y |\n" in page
    assert [line.split()[2] for line in page.splitlines() if line.startswith("python ")] == ["kernels", "run", "report"]


def test_only_the_card_of_the_runs_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@"\ntouch "$0.done"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with runpy.run_path(str(SCRIPT))["watched"](tmp_path / "gpu.csv"):
        while not (tmp_path / "nvidia-smi.done").exists():
            time.sleep(0.01)
    assert (tmp_path / "gpu.csv").read_text().startswith("-i 3 --query-gpu=utilization.gpu,memory.used ")
