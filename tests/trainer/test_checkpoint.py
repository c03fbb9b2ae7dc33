"""Checkpoints: whole or not there; what goes wrong leaves the last good one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from trainer import checkpoint
from trainer.checkpoint import State
from trainer.errors import CheckpointError


def state(step: int) -> State:
    return State(
        step, 3 * step, step + 1, step, "digest", {"mismatch/mean": [0.5]}, {"w": torch.full((4, 4), float(step))},
        {"master.w": torch.arange(4.0), "state.step.w": torch.tensor(float(step))}, {"cpu": torch.get_rng_state()},
    )  # fmt: skip


def test_round_trip_and_keep(tmp_path: Path) -> None:
    for step in range(5):
        checkpoint.save(tmp_path, state(step), keep=2)
    assert checkpoint.steps(tmp_path) == [3, 4]
    got, wanted = checkpoint.load(tmp_path), state(4)
    for name in ("step", "position", "weights_version", "optimizer_steps", "digest", "trends"):
        assert getattr(got, name) == getattr(wanted, name)
    for name in ("weights", "optimizer", "random"):
        mine, theirs = getattr(got, name), getattr(wanted, name)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert checkpoint.load(tmp_path, 3).step == 3
    assert not any(p.suffix in (".pt", ".bin", ".pkl") for p in tmp_path.rglob("*"))


def test_random_states_return() -> None:
    torch.manual_seed(3)
    saved, first = checkpoint.random_state(), torch.rand(4)
    torch.rand(10)
    checkpoint.set_random_state(saved)
    assert torch.equal(torch.rand(4), first)


@pytest.mark.parametrize(
    "error", [kind("No space left on device (os error 28)") for kind in (OSError, RuntimeError, SafetensorError)]
)
def test_a_full_disk_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    checkpoint.save(tmp_path, state(1))
    real = checkpoint.save_file

    def fail_on_the_second(tensors: Any, path: Path) -> None:
        if path.name.startswith("optimizer"):
            path.write_bytes(b"half")
            raise error
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", fail_on_the_second)
    with pytest.raises(CheckpointError, match="(?i)step 2.*no space left.*step 1 is untouched"):
        checkpoint.save(tmp_path, state(2))
    assert checkpoint.steps(tmp_path) == [1] and checkpoint.load(tmp_path).step == 1
    assert os.listdir(checkpoint.root(tmp_path)) == ["step-000001"]


def test_a_killed_save_loses_nothing(tmp_path: Path) -> None:
    """A process that is killed (SIGKILL) in the middle of saving step 2, again and again."""
    checkpoint.save(tmp_path, state(1))
    script = (
        "import sys, torch\nfrom pathlib import Path\nfrom trainer import checkpoint\n"
        "s = checkpoint.load(Path(sys.argv[1]), 1)\ns.step = 2\n"
        "s.weights = {str(i): torch.zeros(1 << 20) for i in range(64)}\nprint('saving', flush=True)\n"
        "checkpoint.save(Path(sys.argv[1]), s)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    deadline = time.monotonic() + 20
    while not list(checkpoint.root(tmp_path).glob(".step-000002*/weights*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert checkpoint.steps(tmp_path) in ([1], [1, 2])
    assert checkpoint.load(tmp_path, 1).weights["w"][0, 0] == 1.0
    checkpoint.save(tmp_path, state(3))  # clears what the killed one left
    assert not list(checkpoint.root(tmp_path).glob(".*"))


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path)
    folder = checkpoint.save(tmp_path, state(1))
    checkpoint.save(tmp_path, state(2))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7.*\[1, 2\].*set run.keep = 0 to keep all"):
        checkpoint.load(tmp_path, 7)
    (folder / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="weights.safetensors is not whole"):
        checkpoint.load(tmp_path, 1)
    (folder / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path, 1)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": 1}, {"step": "2"}, {"position": -5}, {"weights_version": "a"}, {"optimizer_steps": None},
        {"sizes": []}, {"sizes": {}}, {"trends": []}, {"trends": {"mismatch/mean": ["x"]}}, {"format": None},
    ],
)  # fmt: skip
def test_a_state_that_save_does_not_write_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = checkpoint.save(tmp_path, state(2)) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000, "{}"])
def test_a_state_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (checkpoint.save(tmp_path, state(2)) / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path)


def test_a_damaged_file_names_the_steps_that_are_left(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1))
    path = checkpoint.save(tmp_path, state(2)) / "weights.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"X" + data[9:])  # as long as it was, and no header
    with pytest.raises(CheckpointError, match=r"cannot be read.*\[1\].*--into"):
        checkpoint.load(tmp_path)
