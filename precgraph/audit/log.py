"""Reading a log of log-probabilities: names of several trainers, and errors that name the line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precgraph import strict_json
from precgraph.errors import InputError

Array = NDArray[np.float64]
NAMES: dict[str, tuple[str, ...]] = {
    "token_ids": ("token_ids", "completion_ids", "responses", "response_ids"),
    "rollout": ("rollout_logprobs", "rollout_log_probs", "sampling_per_token_logps", "generation_logprobs"),
    "trainer": ("trainer_logprobs", "old_log_probs", "old_per_token_logps", "prev_logprobs"),
    "scored_ids": ("trainer_token_ids", "scored_token_ids"),
    "entropy": ("entropy", "entropies"),
    "kept_mass": ("kept_mass",),
    "mask": ("mask", "response_mask", "completion_mask"),
    "version": ("version", "rollout_version", "weight_version"),
    "trainer_version": ("trainer_version",),
    "temperature": ("temperature",),
    "top_p": ("top_p",), "top_k": ("top_k",), "min_p": ("min_p",), "id": ("id", "uid", "serial"),
}  # fmt: skip

_ROUNDING = 1e-3  # how far a value may lie beyond its range
_LARGEST = 3.4028234663852886e38  # of fp32, in which trainers compute: sums of such values stay finite here

# What a number must be: in words, and as a condition on finite ones.
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number above 0", lambda v: v > 0),
    "top_p": ("a number above 0 and at most 1", lambda v: 0 < v <= 1),
    "top_k": ("a whole number from -1", lambda v: v >= -1 and v == int(v)),
    "min_p": ("a number from 0 to 1", lambda v: 0 <= v <= 1),
}


@dataclass(frozen=True, slots=True)
class Logged:
    """One line of the log; token-wise arrays have one length, unless the trainer's differs."""

    name: str
    token_ids: list[int]
    rollout: Array
    trainer: Array
    entropy: Array | None
    kept_mass: Array | None
    mask: NDArray[np.bool_]
    scored_ids: list[int] | None
    version: float | None
    trainer_version: float | None
    temperature: float | None
    truncates: bool


def read(path: Path) -> Iterator[Logged]:
    """The sequences of a log, in order."""
    if path.is_dir():
        raise InputError("is a directory", path=str(path), remedy=f"name the files in it: {path / '*.jsonl'}")
    try:
        lines = strict_json.lines(path)
    except OSError as error:
        raise InputError(f"cannot be read: {error}", path=str(path), remedy="name a .jsonl file") from None
    for number, line in lines:
        if line.strip():
            yield _sequence(line, f"{path}:{number}", number)


def _sequence(line: bytes, where: str, number: int) -> Logged:
    try:
        data = strict_json.parse(line.decode())
    except ValueError as error:
        remedy = "write one object a line, and null for a token without a value"
        raise InputError(f"is not JSON: {error}", path=where, remedy=remedy) from None
    if not isinstance(data, dict):
        raise InputError("is not an object", path=where, remedy="write one object a line")
    rollout, trainer = (_array(data, key, where) for key in ("rollout", "trainer"))
    ids = _get(data, "token_ids")
    if rollout is None or trainer is None or not isinstance(ids, list):
        raise InputError("lacks token_ids, rollout_logprobs or trainer_logprobs", path=where, remedy="log all three")
    if len(ids) != len(rollout):
        raise InputError(
            f"has {len(ids)} token_ids and {len(rollout)} rollout_logprobs", path=where, remedy="log alike"
        )
    for name, values in (("rollout", rollout), ("trainer", trainer)):
        if (values > _ROUNDING).any():
            raise InputError(
                f"{name} has a positive log-probability", path=where, remedy="log natural log-probabilities"
            )
    extra = {key: _array(data, key, where) for key in ("entropy", "kept_mass", "mask")}
    for key, value in extra.items():
        if value is not None and len(value) != len(rollout):
            raise InputError(f"has {len(value)} {key} for {len(rollout)} tokens", path=where, remedy="log one a token")
    for key, most in (("kept_mass", 1.0), ("entropy", math.inf)):
        value = extra[key]
        if value is not None and ((value < -_ROUNDING) | (value > most + _ROUNDING)).any():
            words = f"from 0 to {most:g}" if most < math.inf else "of 0 or more"
            raise InputError(
                f"{key} has a value that is not {words}", path=where, remedy="log null where it is unknown"
            )
    mask = np.ones(len(rollout), bool) if extra["mask"] is None else extra["mask"] > 0
    numbers = {key: _number(data, key, where) for key in (*_RANGES, "version", "trainer_version")}
    top_p, top_k, min_p = (numbers[key] for key in ("top_p", "top_k", "min_p"))
    scored = _get(data, "scored_ids")
    if not isinstance(scored, list | None):
        raise InputError("trainer_token_ids is not a list", path=where, remedy="log the ids that were scored")
    return Logged(
        str(_get(data, "id") if _get(data, "id") is not None else number), ids, rollout, trainer, extra["entropy"],
        extra["kept_mass"], mask, scored, numbers["version"], numbers["trainer_version"], numbers["temperature"],
        (top_p or 1.0) < 1 or (top_k or 0) > 0 or (min_p or 0.0) > 0,
    )  # fmt: skip


def _get(data: Mapping[str, Any], key: str) -> Any:
    return next((data[name] for name in NAMES[key] if name in data), None)


def _number(data: Mapping[str, Any], key: str, where: str) -> float | None:
    """The number of that key, in its range; None if it is not there or null."""
    value = _get(data, key)
    if value is None:
        return None
    words, holds = _RANGES.get(key, ("a finite number", lambda _: True))
    if type(value) not in (int, float) or not _is_finite(value) or not holds(value):
        raise InputError(f"{key} = {value!r} is not {words}", path=where, remedy="leave it out where it is not used")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _array(data: Mapping[str, Any], key: str, where: str) -> Array | None:
    """A list of numbers; None in it becomes NaN, a token without a value."""
    value = _get(data, key)
    if value is None:
        return None
    is_list = isinstance(value, list)
    if not is_list or not all(isinstance(v, int | float) and abs(v) <= _LARGEST for v in value if v is not None):
        raise InputError(f"{key} is not a list of numbers", path=where, remedy="log one finite number a token, or null")
    return np.array([math.nan if v is None else float(v) for v in value], dtype=np.float64)
