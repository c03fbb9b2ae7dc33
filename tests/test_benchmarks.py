"""Benchmarks refuse wrong options and machines without a card before any work, and say which parts failed."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import engines, options


def fake_parts(module: str, arguments: list[str], **_: Any) -> Iterator[dict[str, Any]]:
    yield {"speed": 2.0}
    if arguments[-1] == "bad":
        yield {"problem": "ended with 1"}


def driven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(engines, "parts", fake_parts)
    monkeypatch.setattr(engines, "append", lambda *_: None)
    given = argparse.Namespace(commit=None, logs=tmp_path / "logs", limit=1.0, results=tmp_path / "results.csv")
    return engines.drive("rollout", ["good", "bad", "fine"], given, lambda name, found: [])


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_what_is_no_number_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        options.above_zero(text)


def test_a_driver_that_is_ended_ends_its_part(tmp_path: Path) -> None:
    """A part has a session of its own, which no signal to the driver reaches."""
    (tmp_path / "waits.py").write_text("import time\nprint(flush=True)\ntime.sleep(60)\n")
    source = (
        "import argparse, pathlib, sys, torch; torch.cuda.is_available = lambda: True\n"
        "from benchmarks.common import engines\n"
        "run = engines.parts\n"
        "engines.parts = lambda module, arguments, **more: run('waits', arguments, **more)\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "options = argparse.Namespace(commit=None, logs=folder, limit=50.0, results=folder / 'results.csv')\n"
        "engines.drive('any', ['one'], options, lambda name, found: [])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(engines.ROOT)])}
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "== one\n"
        until = time.monotonic() + 30
        while not (tmp_path / "any-one.log").exists() or not (tmp_path / "any-one.log").read_text():
            assert time.monotonic() < until, "the part did not start"
            time.sleep(0.05)
        driver.terminate()
        assert driver.wait(10) == 143
    deadline = time.monotonic() + 10
    while str(tmp_path) in running():
        assert time.monotonic() < deadline, "the part runs on"
        time.sleep(0.05)


def running() -> str:
    """Environments of this user's processes, of which a part's names its folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


def test_a_driver_names_the_parts_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert driven(monkeypatch, tmp_path) == ["bad"]


def test_a_driver_starts_nothing_without_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="^needs a CUDA GPU$"):
        driven(monkeypatch, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "good", "bad"), [
    (options.positive, ["1", "36", "010"], ["0", "-1", "1.5", "", "x", "1_0", " 1"]),
    (options.rows_by_length, ["4x2048", "1x1"], ["junk", "0x2048", "4x0", "4x", "x8", "4x8x2", "4 x 8", "4X8"]),
])  # fmt: skip
def test_types_of_options(kind: Callable[[str], object], good: list[str], bad: list[str]) -> None:
    for text in good:
        kind(text)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_a_file_of_results_must_be_writable_and_is_not_made_yet(tmp_path: Path) -> None:
    new, old = tmp_path / "new.csv", tmp_path / "old.csv"
    old.write_text("kept")
    assert options.writable(str(new)) == new and not new.exists()
    assert options.writable(str(old)) == old and old.read_text() == "kept"
    for bad in (tmp_path, tmp_path / "none" / "new.csv"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            options.writable(str(bad))
