"""The demo of examples/: what it may remove, and what it must leave."""

from __future__ import annotations

import fcntl
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.cli import guarded
from trainer.config import load

PATH = Path(__file__).parents[2] / "examples" / "train_demo.py"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, in an empty working directory, and unable to teach: what it may remove it has removed by then."""
    pytest.importorskip("reasoning_gym")
    spec = importlib.util.spec_from_file_location("train_demo", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def lessons(*_: Any, **__: Any) -> None:
        raise OSError("starts to teach")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "lessons", lessons)
    return module


def start(demo: Any, monkeypatch: pytest.MonkeyPatch, *settings: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *(w for s in settings for w in ("--set", s))])
    return guarded(demo.main)


def test_what_is_no_run_of_the_demo_stays(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "runs" / "demo"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    other.mkdir(parents=True)
    load(demo.CONFIG).save(other / "config.toml")  # precgraph-train run examples/configs/demo.toml
    for directory in (mine, other, mine / "thesis.tex"):
        assert start(demo, monkeypatch, f"run.dir={directory}") == 2
        assert f"{directory}: holds no run of this demo" in capsys.readouterr().err
    assert start(demo, monkeypatch, f"model.path={mine}") == 2 and "exists already" in capsys.readouterr().err
    assert start(demo, monkeypatch) == 2 and "starts to teach" in capsys.readouterr().err
    assert (mine / "thesis.tex").exists() and (other / "config.toml").exists()


def test_its_own_last_run_makes_room(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ([], [f"run.dir={tmp_path / 'elsewhere'}"]):
        config = load(demo.CONFIG, [f"run.name={demo.NAME}", *settings])
        config.directory.mkdir(parents=True)
        config.save(config.directory / "config.toml")
        with (config.directory / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as another process that trains there
            assert start(demo, monkeypatch, *settings) == 2 and (config.directory / "config.toml").exists()
        start(demo, monkeypatch, *settings)
        assert not config.directory.exists()
