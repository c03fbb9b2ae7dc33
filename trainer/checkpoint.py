"""Checkpoints: everything that a run needs to go on bit for bit, written whole or not at all.

A checkpoint is a directory ``checkpoints/step-NNNNNN`` with safetensors for tensors (weights, optimiser, random states)
and JSON for the rest. It is written beside its final place, flushed to disk and renamed: a save that is killed, or
meets a full disk, leaves the last good one as it was. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from precgraph.checkpoint.whole import placed
from precgraph.strict_json import sound
from trainer.errors import CheckpointError

FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
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


def random_state() -> dict[str, Tensor]:
    """Torch's random states, CPU and current CUDA device. (Requests' seeds and data order follow from the
    configuration.)"""
    out = {"cpu": torch.get_rng_state().clone()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["cuda"] = torch.cuda.get_rng_state().clone()
    return out


def set_random_state(state: dict[str, Tensor]) -> None:
    """Inverse of :func:`random_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def root(directory: Path) -> Path:
    """Where a run directory keeps its checkpoints."""
    return directory / "checkpoints"


def steps(directory: Path) -> list[int]:
    """Steps that have a whole checkpoint, ascending."""
    found = []
    for path in root(directory).glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / "state.json").is_file():
            found.append(int(match[1]))
    return sorted(found)


def path_of(directory: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return root(directory) / f"step-{step:06d}"


def save(directory: Path, state: State, *, keep: int = 0) -> Path:
    """Write a checkpoint and then remove all but the last ``keep`` (0: none is removed). CheckpointError if that fails.

    A step's checkpoint is never written twice: there is one state after a step.
    """
    final = path_of(directory, state.step)
    if final.exists():
        return final
    try:
        for stale in root(directory).glob(".step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        with placed(final) as temporary:
            for name, tensors in zip(_FILES, (state.weights, state.optimizer, state.random), strict=True):
                save_file({k: v.detach().contiguous() for k, v in tensors.items()}, temporary / name)
            sizes = {name: (temporary / name).stat().st_size for name in _FILES}
            plain = {name: getattr(state, name) for name in _PLAIN} | {"format": FORMAT, "sizes": sizes}
            (temporary / "state.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is one or another, by the version
        raise CheckpointError(
            f"could not save step {state.step}: {error}", path=str(final), remedy=_remedy(directory)
        ) from error
    for old in steps(directory)[: -keep or None] if keep else []:
        shutil.rmtree(path_of(directory, old), ignore_errors=True)
    return final


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
    """Read the checkpoint of ``step``, or the last one. CheckpointError says what there is."""
    step = find(directory, step)
    folder = path_of(directory, step)
    others = [s for s in steps(directory) if s != step]
    remedy = f"resume from one of {others}: --step, --into NEW_DIRECTORY" if others else "start the run again"
    try:
        plain = _plain(folder, step)
        for name in _FILES:
            if (folder / name).stat().st_size != plain["sizes"][name]:
                raise CheckpointError(f"{name} is not whole", path=str(folder), remedy=remedy)
        weights, optimizer, random = (load_file(folder / name) for name in _FILES)
        if "cpu" not in random:
            raise ValueError("random.safetensors holds no random state")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        words = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"cannot be read: {words}", path=str(folder), remedy=remedy) from error
    return State(**{name: plain[name] for name in _PLAIN}, weights=weights, optimizer=optimizer, random=random)


def _plain(folder: Path, step: int) -> dict[str, Any]:
    """What ``state.json`` of that step holds. ValueError or KeyError if it is not what :func:`save` writes."""
    plain = sound(json.loads, (folder / "state.json").read_text(encoding="utf-8"))
    if not isinstance(plain, dict):
        raise ValueError("state.json holds no table")
    if plain["format"] != FORMAT:
        raise CheckpointError("was written by another version", path=str(folder))
    for name, kind in (*_PLAIN.items(), ("sizes", dict)):
        if type(plain[name]) is not kind or (kind is int and plain[name] < 0):
            raise ValueError(f"state.json has {name} = {plain[name]!r}")
    if plain["step"] != step:
        raise ValueError(f"state.json is of step {plain['step']}")
    if not all(isinstance(v, list) and all(isinstance(x, int | float) for x in v) for v in plain["trends"].values()):
        raise ValueError("state.json has trends that are no numbers")
    return plain


def _remedy(directory: Path) -> str:
    good = steps(directory)
    kept = f"step {good[-1]} is untouched" if good else "no checkpoint was written before"
    return f"{kept}; make room and resume"
