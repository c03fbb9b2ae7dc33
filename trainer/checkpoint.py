"""Checkpoints: everything that a run needs to go on bit for bit, written whole or not at all.

A checkpoint is a directory ``checkpoints/step-NNNNNN`` with safetensors for tensors (weights, optimiser, random states)
and JSON for the rest, the sha256 of each file among it. It is written beside its final place, flushed to disk and
renamed: a save that is killed, or meets a full disk, leaves the last good one as it was. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from precgraph.checkpoint.whole import placed
from precgraph.strict_json import sound
from trainer.errors import CheckpointError, ConfigError

FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})")
_STATE = "state.json"
_TENSORS = ("weights", "optimizer", "random")
_FILES = tuple(f"{name}.safetensors" for name in _TENSORS)
_PLAIN = {
    "step": int, "position": int, "weights_version": int, "optimizer_steps": int, "digest": str, "trends": dict,
}  # fmt: skip


@dataclass
class State:
    """A run between two steps. ``step`` counts the steps that are done; ``position`` is the data stream's;
    ``weights_version`` the store's; ``trends`` what the alarms remember."""

    step: int
    position: int
    weights_version: int
    optimizer_steps: int
    digest: str
    trends: dict[str, list[float]]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: dict[str, Tensor]


def seed(value: int) -> None:
    """Seed every generator that a process has one of: torch's, Python's and numpy's, from which a reward may draw."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed([value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF])  # of any sign


def random_state() -> dict[str, Tensor]:
    """The states of what :func:`seed` seeds; of torch's, CPU and current CUDA device. (Requests' seeds and data order
    follow from the configuration.)

    Python's and numpy's are int64: the words of the Mersenne twister and their place, whether a normal number is kept
    for the next draw, and its bits.
    """
    _, words, kept = random.getstate()
    numpy: Any = np.random.get_state(legacy=True)
    _, keys, place, has_normal, normal = numpy
    out = {
        "cpu": torch.get_rng_state().clone(),
        "python": torch.tensor([*words, kept is not None, _bits(kept or 0.0)]),
        "numpy": torch.tensor([*keys.tolist(), place, has_normal, _bits(normal)]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["cuda"] = torch.cuda.get_rng_state().clone()
    return out


def set_random_state(state: dict[str, Tensor]) -> None:
    """Inverse of :func:`random_state`."""
    torch.set_rng_state(state["cpu"])
    *words, has_normal, normal = state["python"].tolist()
    random.setstate((3, tuple(words), _float(normal) if has_normal else None))
    *keys, place, has_normal, normal = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_normal, _float(normal)))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def root(directory: Path) -> Path:
    """Where a run directory keeps its checkpoints."""
    return directory / "checkpoints"


def steps(directory: Path) -> list[int]:
    """Steps that have a whole checkpoint, ascending."""
    found = []
    for path in root(directory).glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / _STATE).is_file():
            found.append(int(match[1]))
    return sorted(found)


def path_of(directory: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return root(directory) / f"step-{step:06d}"


def save(directory: Path, state: State, *, keep: int = 0) -> Path:
    """Write a checkpoint and then remove all but the last ``keep`` (0: none is removed). CheckpointError if that fails.

    A step's checkpoint is never written twice: there is one state after a step. What has its name and is none is
    replaced.
    """
    final = path_of(directory, state.step)
    if (final / _STATE).is_file():
        return final
    try:
        if final.exists():
            shutil.rmtree(final)
        for stale in root(directory).glob(".step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        with placed(final) as temporary:
            for name, tensors in zip(_FILES, (state.weights, state.optimizer, state.random), strict=True):
                save_file({k: v.detach().contiguous() for k, v in tensors.items()}, temporary / name)
            sums = {name: _sha256(temporary / name) for name in _FILES}
            plain = {name: getattr(state, name) for name in _PLAIN}
            sums[_STATE] = _sha256_of(plain)
            text = json.dumps(plain | {"format": FORMAT, "sha256": sums}, indent=1)
            (temporary / _STATE).write_text(text, encoding="utf-8")
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is one or another, by the version
        raise CheckpointError(
            f"could not save step {state.step}: {error}", path=str(final), remedy=_remedy(directory)
        ) from error
    for old in steps(directory)[: -keep or None] if keep else []:
        shutil.rmtree(path_of(directory, old), ignore_errors=True)
    return final


def require_free(directory: Path) -> None:
    """ConfigError if a run of that directory has made a step: it would be lost under a new one."""
    records = directory / "metrics.jsonl"
    if steps(directory)[-1:] not in ([], [0]) or (records.is_file() and records.stat().st_size):
        raise ConfigError(
            "already holds a run", path=str(directory),
            remedy=f"precgraph-train resume {directory}, or choose another run.name",
        )  # fmt: skip


def find(directory: Path, step: int | None = None) -> int:
    """``step``, or that of the last checkpoint. CheckpointError, which says what there is, without one."""
    available = steps(directory)
    if not available:
        raise CheckpointError("there is no checkpoint", path=str(directory), remedy="start it with precgraph-train run")
    step = available[-1] if step is None else step
    if step not in available:
        raise CheckpointError(
            f"no checkpoint of step {step}", path=str(directory),
            remedy=f"there are {available}; a run keeps its last run.keep, set run.keep = 0 to keep all",
        )  # fmt: skip
    return step


def load(directory: Path, step: int | None = None) -> State:
    """Read the checkpoint of ``step``, or the last one. CheckpointError for one that is not, byte for byte, what was
    saved; it names the file and the checkpoint before."""
    step = find(directory, step)
    folder = path_of(directory, step)
    older = [s for s in steps(directory) if s < step]
    go_back = f"go back: precgraph-train resume {directory} --step {older[-1]} --into NEW_DIRECTORY" if older else ""
    remedy = go_back or "no checkpoint is older: start the run again"
    try:
        plain = _plain(folder, step)
        for name in _FILES:
            if _sha256(folder / name) != plain["sha256"][name]:
                raise CheckpointError(f"{name} is damaged, or not whole", path=str(folder), remedy=remedy)
        weights, optimizer, states = (load_file(folder / name) for name in _FILES)
        for name, now in random_state().items():
            if name != "cuda" and (states[name].shape, states[name].dtype) != (now.shape, now.dtype):
                raise ValueError(f"random.safetensors holds a state of {name} that this version does not have")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        words = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"cannot be read: {words}", path=str(folder), remedy=remedy) from error
    return State(**{name: plain[name] for name in _PLAIN}, weights=weights, optimizer=optimizer, random=states)


def _plain(folder: Path, step: int) -> dict[str, Any]:
    """What ``state.json`` of that step holds. ValueError or KeyError if it is not what :func:`save` writes."""
    plain = sound(json.loads, (folder / _STATE).read_text(encoding="utf-8"))
    if not isinstance(plain, dict):
        raise ValueError("state.json holds no table")
    if plain["format"] != FORMAT:
        raise CheckpointError(
            f"has format {plain['format']!r}, this version reads {FORMAT}", path=str(folder),
            remedy="resume it with the precgraph that wrote it",
        )  # fmt: skip
    for name, kind in (*_PLAIN.items(), ("sha256", dict)):
        if type(plain[name]) is not kind or (kind is int and plain[name] < 0):
            raise ValueError(f"state.json has {name} = {plain[name]!r}")
    if plain["step"] != step:
        raise ValueError(f"state.json is of step {plain['step']}")
    if not all(isinstance(v, list) and all(isinstance(x, int | float) for x in v) for v in plain["trends"].values()):
        raise ValueError("state.json has trends that are no numbers")
    own = _sha256_of(plain)
    if plain["sha256"].get(_STATE, own) != own:  # the first checkpoints of this format have none of it
        raise ValueError("state.json is damaged")
    return plain


def _sha256_of(plain: dict[str, Any]) -> str:
    """Of what ``state.json`` says of a run, however it is laid out."""
    return hashlib.sha256(json.dumps([plain[name] for name in _PLAIN]).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remedy(directory: Path) -> str:
    good = steps(directory)
    kept = f"step {good[-1]} is untouched" if good else "no checkpoint was written before"
    return f"{kept}; make room and resume"
