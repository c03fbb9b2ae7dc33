"""Attention contexts: which rows of a packed batch belong to which sequence, and where their keys and values are.

A program's attention nodes say how to attend; the context, made anew for each call, says to what. In training the
keys are those of the same call (:class:`PackedContext`); in a rollout they are read from a paged cache
(:class:`precgraph.runtime.cache.PagedContext`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Attended:
    """One sequence of a call: query rows ``start:stop`` are its positions ``position ..``; keys from position 0.

    ``keys, values [S, Hkv, D]`` with ``S >= position + stop - start``.
    """

    start: int
    stop: int
    position: int
    keys: Tensor
    values: Tensor


class AttentionContext(Protocol):
    """What an attention kernel needs to know beyond its operands."""

    def sequences(self, layer: int, k: Tensor, v: Tensor) -> Iterator[Attended]:
        """The call's sequences for one layer; ``k, v [1, T, Hkv, D]`` are the call's own keys and values."""
        ...


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Whole sequences back to back: ``bounds`` are their cumulative starts ``0, ..., T``."""

    bounds: Sequence[int]

    def sequences(self, layer: int, k: Tensor, v: Tensor) -> Iterator[Attended]:
        for start, stop in pairwise(self.bounds):
            yield Attended(start, stop, 0, k[0, start:stop], v[0, start:stop])
