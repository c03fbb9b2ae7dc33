"""Typed errors of the trainer, all of them :class:`precgraph.errors.PrecGraphError`: one line, with a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from precgraph.errors import InputError, PrecGraphError

_FAMILY = 2  # so many members are named


class TrainerError(PrecGraphError):
    """Base of every error that the trainer raises on purpose."""


class ConfigError(TrainerError, ValueError):
    """A configuration is malformed: an unknown key, a value of another type or out of range."""


class TaskError(TrainerError):
    """A task's data cannot be used: no items, no such family, a malformed line."""


class RewardError(TrainerError):
    """A reward function raised, or returned something that is no finite number."""


class RolloutError(TrainerError):
    """The rollout engine died or broke its contract."""


class AlignmentError(TrainerError):
    """Token ids or weights version that are scored are not those that were sampled."""


class InconsistentError(TrainerError):
    """Rollout and trainer are not one policy, and the configuration does not allow that."""


class UpdateError(TrainerError):
    """An update cannot be made: NaN or infinity in the gradient."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read; the last good one is untouched."""


class MetricAssertionError(TrainerError):
    """A measured value broke an assertion of the configuration."""


class InterruptedRunError(TrainerError):
    """The run was interrupted on request; its state is saved."""


def nearest(word: str, words: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest of ``words``, or nothing. What a family's name alone may mean
    (``mismatch`` of ``mismatch/max``) comes before what is spelled alike, and so do initials (``lr``)."""
    words = list(words)
    family = [w for w in words if w.startswith(f"{word}/")][:_FAMILY]
    initials = "".join(part[:1] for part in word.split("_"))
    close = family or [w for w in words if w == initials] or difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


__all__ = [
    "AlignmentError", "CheckpointError", "ConfigError", "InconsistentError", "InputError", "InterruptedRunError",
    "MetricAssertionError", "PrecGraphError", "RewardError", "RolloutError", "TaskError", "TrainerError", "UpdateError",
    "nearest",
]  # fmt: skip
