"""The demo of examples/: where its run goes, and that nothing which is there is touched."""

from __future__ import annotations

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
    """The module, in an empty working directory, and unable to teach: where its run goes is settled by then."""
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


def test_what_is_there_stays(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that was named is refused; beside a run of the demo's own name another one is made."""
    mine, runs = tmp_path / "mine", tmp_path / "runs"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for directory in (mine, mine / "thesis.tex"):
        assert start(demo, monkeypatch, f"run.dir={directory}") == 2
        assert f"{directory}: exists already; name another directory" in capsys.readouterr().err
    assert start(demo, monkeypatch, f"model.path={mine}") == 2
    assert f"{mine}: exists already; name a model.path" in capsys.readouterr().err
    for number, place in enumerate(("train-demo", "train-demo-2", "train-demo-3"), 1):
        assert demo.free_place(load(demo.CONFIG, [f"run.name={demo.NAME}"])).directory == Path("runs") / place
        assert start(demo, monkeypatch) == 2
        said = capsys.readouterr().err
        assert "starts to teach" in said and (f"this run goes to runs/{place}" in said) == (number > 1)
        (runs / place).mkdir(parents=True)
        (runs / place / "config.toml").write_text(str(number))
    assert [(p / "config.toml").read_text() for p in sorted(runs.iterdir())] == ["1", "2", "3"]
    assert (mine / "thesis.tex").exists()


def test_an_empty_directory_is_free(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert start(demo, monkeypatch, f"run.dir={tmp_path / 'empty'}") == 2
    assert "starts to teach" in capsys.readouterr().err
