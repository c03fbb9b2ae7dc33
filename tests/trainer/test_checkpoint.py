"""Checkpoints: whole or not there; what goes wrong leaves the last good one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainer import checkpoint
from trainer.checkpoint import State
from trainer.errors import CheckpointError


def state(step: int) -> State:
    return State(
        step, 3 * step, step + 1, step, "digest", {"mismatch/mean": [0.5]}, {"w": torch.full((4, 4), float(step))},
        {"master.w": torch.arange(4.0), "state.step.w": torch.tensor(float(step))}, checkpoint.random_state(),
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


def draws() -> list[float]:
    """Of all generators; the second normal number of a pair is kept from the first."""
    return [
        *torch.rand(2).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
    ]


def test_random_states_return(tmp_path: Path) -> None:
    checkpoint.seed(2**62 + 3)
    for _ in range(2):  # with a normal number that is kept, and without
        checkpoint.save(tmp_path, state(1))
        saved, first = checkpoint.load(tmp_path).random, draws()
        draws()
        checkpoint.set_random_state(saved)
        assert draws() == first
        shutil.rmtree(tmp_path / "checkpoints")
    checkpoint.seed(2**62 + 3)
    again = draws()
    checkpoint.seed(4)
    assert all(a != b for a, b in zip(draws(), again, strict=True))


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
    with pytest.raises(CheckpointError, match=r"weights.safetensors is damaged.*no checkpoint is older"):
        checkpoint.load(tmp_path, 1)
    (folder / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path, 1)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": 1}, {"step": "2"}, {"position": -5}, {"weights_version": "a"}, {"optimizer_steps": None},
        {"sha256": []}, {"sha256": {}}, {"trends": []}, {"trends": {"mismatch/mean": ["x"]}}, {"format": None},
    ],
)  # fmt: skip
def test_a_state_that_save_does_not_write_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = checkpoint.save(tmp_path, state(2)) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [{"position": 10**6}, {"weights_version": 77}, {"optimizer_steps": 77}, {"digest": "x"}, {"trends": {"a": [1.5]}}],
)  # fmt: skip
def test_a_state_with_another_value_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    """Which save may well write, of another run: its data, or its learning rate, would silently be others."""
    path = checkpoint.save(tmp_path, state(2)) / "state.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain))  # laid out otherwise
    assert checkpoint.load(tmp_path).step == 2
    path.write_text(json.dumps(plain | damage))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000, "{}"])
def test_a_state_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (checkpoint.save(tmp_path, state(2)) / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", ["weights", "optimizer", "random"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    """In the last byte, of a tensor: the file can be read."""
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, state(step)) / f"{name}.safetensors"
    checkpoint.load(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"step-000003: {name}.safetensors is damaged.*--step 2 --into NEW"):
        checkpoint.load(tmp_path)


def test_a_random_state_of_another_size_is_refused(tmp_path: Path) -> None:
    saved = state(1)
    saved.random["cpu"] = saved.random["cpu"][:-8]
    checkpoint.save(tmp_path, saved)
    with pytest.raises(CheckpointError, match=r"random.safetensors holds a state of cpu that this version does not"):
        checkpoint.load(tmp_path)
    del saved.random["numpy"]
    shutil.rmtree(tmp_path / "checkpoints")
    saved.random["cpu"] = torch.get_rng_state()
    checkpoint.save(tmp_path, saved)
    with pytest.raises(CheckpointError, match="cannot be read: no 'numpy'"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("left", [(), ("weights.safetensors",)])
def test_what_is_no_checkpoint_does_not_keep_its_name(tmp_path: Path, left: tuple[str, ...]) -> None:
    folder = checkpoint.path_of(tmp_path, 2)
    folder.mkdir(parents=True)
    for name in left:
        save_file({"w": torch.zeros(2)}, folder / name)
    assert checkpoint.steps(tmp_path) == []
    checkpoint.save(tmp_path, state(2))
    assert checkpoint.load(tmp_path, 2).weights["w"][0, 0] == 2.0
