"""From samples to packed micro-batches, whose numerics do not depend on how many there are.

Sequences fill *cells* in order; each cell is padded to a multiple of 128 tokens by a sequence of its own, so that
WGrad's groups of 128 tokens begin anew with every cell. A micro-batch is some whole number of cells, on a GPU filled up
with more padding to one of a few sizes: groups of 128 tokens whose gradients are all 0 add nothing.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precgraph.runtime.sizes import filled
from trainer.errors import AlignmentError
from trainer.validation import BLOCK

MIN_CELL = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as it was sampled; ids and log-probabilities come from the engine and are never made from text.

    ``serial`` names the sample in the run, ``group`` its prompt's occurrence: both travel with it. ``logprobs`` are
    over the full vocabulary after temperature, NaN where the engine gave none; ``fingerprint`` is of prompt and
    response.
    """

    serial: str
    group: int
    item: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept_mass: tuple[float, ...]
    truncated: bool
    version: int
    fingerprint: int

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


def fingerprint(*ids: Sequence[int]) -> int:
    """crc32 over token ids, in order."""
    value = 0
    for part in ids:
        value = zlib.crc32(array("q", part).tobytes(), value)
    return value


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed tokens and where the responses are in them.

    ``ids [1, T]``, ``bounds`` cumulative starts ``[sequences + 1]``; per response token ``rows`` (the position that
    predicts it), ``sequence`` (index into the step's samples) and ``place`` (its position in the response), all
    ``[n]``.
    """

    ids: Tensor
    bounds: Tensor
    rows: Tensor
    sequence: Tensor
    place: Tensor

    def verify(self, samples: Sequence[Sample]) -> None:
        """AlignmentError if the ids are not, byte for byte, those that were sampled."""
        flat, starts = self.ids[0].tolist(), self.bounds.tolist()
        found = iter(self.sequence.unique_consecutive().tolist())
        padding = self.padding
        for start, stop in itertools.pairwise(starts):
            if (start, stop) in padding:
                continue
            sample = samples[next(found)]
            if fingerprint(flat[start:stop]) != sample.fingerprint:
                raise AlignmentError(
                    f"sample {sample.serial}: the token ids to be scored are not those that were sampled",
                    remedy="score the engine's own ids; never tokenise decoded text again",
                )

    @property
    def padding(self) -> set[tuple[int, int]]:
        """Bounds of the sequences that only fill cells: those that predict no response token."""
        starts = self.bounds.tolist()
        used = set((torch.bucketize(self.rows, self.bounds, right=True) - 1).unique().tolist())
        return {(a, b) for i, (a, b) in enumerate(itertools.pairwise(starts)) if i not in used}


def cells(samples: Sequence[Sample], order: Sequence[int], cell_tokens: int) -> list[list[int]]:
    """Indices of samples, cell by cell, in ``order``; samples without a response are left out.

    ``cell_tokens`` 0 means as the longest sequence needs, at least 1024.
    """
    capacity = cell_tokens or max([MIN_CELL, *(_padded(s.length) for s in samples)])
    filled: list[list[int]] = []
    used = 0
    for index in order:
        sample = samples[index]
        if not sample.tokens:
            continue
        if not filled or used + sample.length > capacity:
            filled.append([])
            used = 0
        filled[-1].append(index)
        used += sample.length
    return filled


def micro_batches(
    samples: Sequence[Sample], order: Sequence[int], cell_tokens: int, micro_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Micro-batches of at most ``micro_tokens`` packed tokens (more only where a single cell is larger)."""
    pending: list[list[int]] = []
    used = 0
    for cell in cells(samples, order, cell_tokens):
        size = _padded(sum(samples[i].length for i in cell))
        if pending and used + size > micro_tokens:
            yield _micro_batch(samples, pending, device)
            pending, used = [], 0
        pending.append(cell)
        used += size
    if pending:
        yield _micro_batch(samples, pending, device)


def _padded(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def _micro_batch(samples: Sequence[Sample], parts: Sequence[Sequence[int]], device: torch.device) -> MicroBatch:
    ids: list[int] = []
    bounds = [0]
    rows: list[int] = []
    sequence: list[int] = []
    place: list[int] = []
    for cell in parts:
        for index in cell:
            sample = samples[index]
            first = len(ids) + len(sample.prompt) - 1
            count = len(sample.tokens)
            ids += [*sample.prompt, *sample.tokens]
            bounds.append(len(ids))
            rows += range(first, first + count)
            sequence += [index] * count
            place += range(count)
        if len(ids) % BLOCK:
            ids += [0] * (-len(ids) % BLOCK)
            bounds.append(len(ids))
    for _ in range(len(ids), filled(len(ids), device), BLOCK):
        ids += [0] * BLOCK
        bounds.append(len(ids))
    tensors = (torch.tensor(v, device=device) for v in ([ids], bounds, rows, sequence, place))
    return MicroBatch(*tensors)
