# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""One token a row from logits, at a given quantile of ``softmax(logits / temperature)``; nothing waits.

A row picks one of the vocabulary's blocks of 4096 by the running sums of what the log-probability's own read of the
logits gave (:func:`~precgraph.lowering.triton.logprobs.block_sums`), and in that block alone its token. What a row
draws depends on that row and its quantile. Tokens of probability below about 2^-149 of the likeliest in their block
are never drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.lowering.triton.logprobs import tempered
from precgraph.lowering.triton.primitives import EXACT, exp, power_of_two
from precgraph.lowering.triton.reductions import VOCABULARY_BLOCK, finite


def draw(logits: Tensor, temperature: Tensor, quantiles: Tensor, sums: Tensor) -> Tensor:
    """``logits [N, V]`` fp32, rows of any step; ``temperature [N]`` fp32, ``quantiles [N]`` fp64 in [0, 1).

    ``sums`` are the logits' :func:`~precgraph.lowering.triton.logprobs.block_sums`. Returns ``[N]`` int64: the first
    token whose running sum of probabilities exceeds the quantile. A row that holds NaN gives some token of the
    vocabulary, whose log-probability is NaN.
    """
    N, V = logits.shape
    blocks = sums.shape[2]
    ids = torch.empty(N, dtype=torch.int64, device=logits.device)
    _draw_kernel[(N,)](
        logits, temperature, quantiles, sums.contiguous(), ids, logits.stride(0), N, V, blocks,
        power_of_two(blocks), VOCABULARY_BLOCK, num_warps=8, **EXACT,
    )  # fmt: skip
    return ids


def ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """``[N]`` int64: how many logits of a row of ``logits [N, V]`` are at least that of its token ``ids [N]`` int64."""
    N, V = logits.shape
    out = torch.empty(N, dtype=torch.int64, device=logits.device)
    _ranks_kernel[(N,)](logits, ids, out, logits.stride(0), V, 2 * VOCABULARY_BLOCK, num_warps=8, **EXACT)
    return out


@triton.jit
def _ranks_kernel(logits, ids, out, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(logits + row * stride + tl.load(ids + row))
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + cols, mask=cols < V, other=float("nan"))
        count += (z >= chosen).to(tl.int32)
    tl.store(out + row, tl.sum(count, 0).to(tl.int64))


@triton.jit
def _pick(lanes, running, weights, target, END: tl.constexpr):
    """The first lane of some weight whose running sum exceeds the target; where rounding leaves none, the last."""
    first = tl.min(tl.where((running > target) & (weights > 0), lanes, END), 0)
    last = tl.max(tl.where(weights > 0, lanes, 0), 0)
    return tl.where(first < END, first, last)


@triton.jit(do_not_specialize=["N"])
def _draw_kernel(
    logits, divisor, quantiles, partial, ids, stride, N,
    V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    at = partial + row * BLOCKS + lanes
    tops = tl.load(at, mask=lanes < BLOCKS, other=float("-inf"))
    shares = tl.load(at + N.to(tl.int64) * BLOCKS, mask=lanes < BLOCKS, other=0.0)
    factors = exp(tops - finite(tl.max(tops, 0))).to(tl.float64)
    weights = shares.to(tl.float64) * factors
    running = tl.cumsum(weights, 0)
    target = tl.load(quantiles + row) * tl.max(running, 0)
    block = _pick(lanes, running, weights, target, WIDTH)
    rest = target - tl.sum(tl.where(lanes == block - 1, running, 0.0), 0)
    share = tl.sum(tl.where(lanes == block, weights, 0.0), 0)
    top = tl.sum(tl.where(lanes == block, finite(tops), 0.0), 0)
    places = tl.arange(0, BLOCK)
    cols = block * BLOCK + places
    z = tl.load(logits + row * stride + cols, mask=cols < V, other=float("-inf"))
    inside = exp(tempered(z, divisor, row) - top).to(tl.float64)
    sums = tl.cumsum(inside, 0)
    # The block's share is an fp32 sum of the same numbers: what rounding took or gave is spread over all of them.
    place = _pick(places, sums * (share / tl.max(sums, 0)), inside, rest, BLOCK)
    tl.store(ids + row, tl.minimum(block * BLOCK + place, V - 1).to(tl.int64))
