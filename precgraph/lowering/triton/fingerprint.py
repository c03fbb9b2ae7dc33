# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The fingerprints of a weight update, in one launch and one pass over the bytes.

The formula is that of :func:`precgraph.runtime.vllm.sync.fingerprint`: a sum of words of 64 bits, weighted by their
place. A program takes the same place of every block of one tensor, so that the keys of its words are computed once, and
adds its part to the tensor's sum by an atomic operation: integers modulo 2**64 give the same sum in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096  # of a block, that one program takes


def weighted_sums(words: Sequence[Tensor], block: int, golden: int) -> Tensor:
    """``[len(words)]`` int64: of each of ``words``, contiguous int64 on the current device, the weighted sum.

    ``block`` words, a multiple of 4096, have one key; ``golden`` is what keys are made from.
    """
    device = words[0].device
    table = torch.tensor([[w.data_ptr() for w in words], [w.numel() for w in words]], dtype=torch.int64).to(device)
    sums = torch.zeros(len(words), dtype=torch.int64, device=device)
    parts = block // _WORDS
    _sums_kernel[(len(words) * parts,)](table, sums, block, golden, parts, _WORDS, num_warps=8)
    return sums


@triton.jit
def _mixed(words):
    """``x ^ (x >> 29)`` of words without sign."""
    return words ^ ((words >> 29) & ((1 << 35) - 1))


@triton.jit
def _key(n, GOLDEN: tl.constexpr):
    return _mixed(_mixed((n + 1) * GOLDEN) * GOLDEN) | 1


@triton.jit
def _sums_kernel(
    table, sums, BLOCK: tl.constexpr, GOLDEN: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """The same 4096 words of every block of one tensor; ``table`` holds addresses, then counts of words."""
    tl.static_assert(PARTS * WORDS == BLOCK)
    tensor = tl.program_id(0) // PARTS
    start = (tl.program_id(0) % PARTS).to(tl.int64) * WORDS
    place = start + tl.arange(0, WORDS)
    words = tl.load(table + tensor).to(tl.pointer_type(tl.int64))
    count = tl.load(table + tl.num_programs(0) // PARTS + tensor)
    if start < count:
        total = tl.zeros([WORDS], tl.int64)
        for block in range((count - start + BLOCK - 1) // BLOCK):
            at = block * BLOCK + place
            # Words outside are 0, and so is what they add.
            word = tl.load(words + at, mask=at < count, other=0, eviction_policy="evict_first")
            total += _mixed(word) * _key(block, GOLDEN)
        tl.atomic_add(sums + tensor, tl.sum(total * _key(place, GOLDEN), 0), sem="relaxed")
