"""Attention contexts: which rows of a packed batch belong to which sequence, and where their keys and values are.

A program's attention nodes say how to attend; the context, made anew for each call, says to what. In training the
keys are those of the same call (:class:`PackedContext`); in a rollout they are read from a paged cache
(:class:`precgraph.runtime.cache.PagedContext`), or a :class:`OwnAttention` attends over a cache of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from precgraph.ops import AttentionSpec


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


class OwnAttention(ABC):
    """A context that runs attention itself, over a cache that only an engine's own kernel reads."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [1, T, H, D]``, ``k, v [1, T, Hkv, D]`` to ``[1, T, H·D]``, bit for bit what the layer's kernel gives."""


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Whole sequences back to back: ``bounds`` are their cumulative starts ``0, ..., T``."""

    bounds: Sequence[int]

    def sequences(self, layer: int, k: Tensor, v: Tensor) -> Iterator[Attended]:
        for start, stop in pairwise(self.bounds):
            yield Attended(start, stop, 0, k[0, start:stop], v[0, start:stop])

    def varlen(self, layer: int, k: Tensor, v: Tensor) -> Varlen:
        bounds, longest = device_bounds(tuple(self.bounds), k.device)
        return Varlen(bounds, bounds, longest, longest, k[0], v[0])


@dataclass(frozen=True, slots=True)
class Varlen:
    """All sequences of a call as one variable-length kernel reads them.

    Query rows ``query_bounds[i] : query_bounds[i + 1]`` are the last positions of a sequence whose keys and values are
    rows ``key_bounds[i] : key_bounds[i + 1]`` of ``keys, values [S, Hkv, D]``. Bounds are int32 ``[B + 1]`` on the
    device; ``longest_query`` and ``longest_keys`` are the largest steps.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_keys: int
    keys: Tensor
    values: Tensor


def varlen(context: AttentionContext, layer: int, k: Tensor, v: Tensor) -> Varlen:
    """The sequences of ``context`` for one layer, their keys back to back; packed ones are not copied.

    A context whose keys lie in one piece says so itself, by a method of this name.
    """
    own: Callable[[int, Tensor, Tensor], Varlen] | None = getattr(context, "varlen", None)
    if own is not None:
        return own(layer, k, v)
    calls = list(context.sequences(layer, k, v))
    queries, longest_query = device_bounds(cumulative([s.stop - s.start for s in calls]), k.device)
    seen = [s.position + s.stop - s.start for s in calls]
    keys, longest_keys = device_bounds(cumulative(seen), k.device)
    return Varlen(
        queries, keys, longest_query, longest_keys,
        torch.cat([s.keys[:n] for s, n in zip(calls, seen, strict=True)]),
        torch.cat([s.values[:n] for s, n in zip(calls, seen, strict=True)]),
    )  # fmt: skip


def attend(
    forward: Callable[[Tensor, Varlen, AttentionSpec], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor,
    spec: AttentionSpec, context: AttentionContext | OwnAttention,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A variable-length kernel as the operator: ``q [1, T, H, D]``, ``k, v [1, T, Hkv, D]`` to ``[1, T, H·D]`` and
    log-sum-exp ``[T, H]`` fp32.

    ``forward`` maps ``q [T, H, D]`` to ``[T, H, D]`` and ``[H, T]``. A context that attends by itself gives no
    log-sum-exp: nothing in a rollout reads it.
    """
    if isinstance(context, OwnAttention):
        return context.attend(spec.layer, q, k, v), None
    out, lse = forward(q[0], varlen(context, spec.layer, k, v), spec)
    return out.flatten(1).unsqueeze(0), lse.t()


def cumulative(lengths: Sequence[int]) -> tuple[int, ...]:
    """``0``, then the running sum."""
    return (0, *accumulate(lengths))


@lru_cache(maxsize=256)
def device_bounds(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Bounds as int32 on the device, made once for the many layers of a call, and the longest step."""
    longest = max((b - a for a, b in pairwise(bounds)), default=0)
    return torch.tensor(bounds, dtype=torch.int32, device=device), longest
