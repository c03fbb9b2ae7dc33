# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""One token a row from logits, at a given quantile of ``softmax(logits / temperature)``; nothing waits.

The vocabulary is cut into blocks of 4096. One pass over the logits gives each block's maximum and its sum of
``exp(z - maximum)``, in fp64; then a row picks its block by the running sums, and in that block alone its token. What
a row draws depends on that row and its quantile. Tokens of probability below about 2^-149 of the likeliest in their
block are never drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.lowering.triton.primitives import EXACT, ceil_div
from precgraph.lowering.triton.reductions import VOCABULARY_BLOCK, finite


def draw(logits: Tensor, temperature: Tensor, quantiles: Tensor) -> Tensor:
    """``logits [N, V]``, read as fp32, rows of any step; ``temperature [N]`` fp32, ``quantiles [N]`` fp64 in [0, 1).

    Returns ``[N]`` int64: the first token whose running sum of probabilities exceeds the quantile. A row that holds NaN
    gives some token of the vocabulary, whose log-probability is NaN.
    """
    N, V = logits.shape
    blocks = ceil_div(V, VOCABULARY_BLOCK)
    maxima = torch.empty(N, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(N, blocks, dtype=torch.float64, device=logits.device)
    ids = torch.empty(N, dtype=torch.int64, device=logits.device)
    sizes = (logits.stride(0), V, blocks)
    _sums_kernel[(N * blocks,)](logits, temperature, maxima, sums, *sizes, VOCABULARY_BLOCK, num_warps=8, **EXACT)
    width = triton.next_power_of_2(blocks)
    _draw_kernel[(N,)](
        logits, temperature, quantiles, maxima, sums, ids, *sizes, width, VOCABULARY_BLOCK, num_warps=8, **EXACT
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
def _tempered(logits, temperature, row, cols, stride, V):
    """``logits / temperature`` of some columns, -inf outside the vocabulary."""
    z = tl.load(logits + row * stride + cols, mask=cols < V, other=float("-inf"))
    return tl.div_rn(z.to(tl.float32), tl.load(temperature + row))


@triton.jit
def _sums_kernel(logits, temperature, maxima, sums, stride, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one row."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    cols = block * BLOCK + tl.arange(0, BLOCK)
    z = _tempered(logits, temperature, row, cols, stride, V)
    maximum = tl.max(z, 0)
    weights = tl.exp(z - finite(maximum))
    tl.store(maxima + row * BLOCKS + block, maximum)
    tl.store(sums + row * BLOCKS + block, tl.sum(weights.to(tl.float64), 0))


@triton.jit
def _pick(lanes, running, weights, target, END: tl.constexpr):
    """The first lane of some weight whose running sum exceeds the target; where rounding leaves none, the last."""
    first = tl.min(tl.where((running > target) & (weights > 0), lanes, END), 0)
    last = tl.max(tl.where(weights > 0, lanes, 0), 0)
    return tl.where(first < END, first, last)


@triton.jit
def _draw_kernel(
    logits, temperature, quantiles, maxima, sums, ids, stride,
    V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    tops = tl.load(maxima + row * BLOCKS + lanes, mask=lanes < BLOCKS, other=float("-inf"))
    shares = tl.load(sums + row * BLOCKS + lanes, mask=lanes < BLOCKS, other=0.0)
    factors = tl.exp(tops - finite(tl.max(tops, 0))).to(tl.float64)
    weights = shares * factors
    running = tl.cumsum(weights, 0)
    target = tl.load(quantiles + row) * tl.max(running, 0)
    block = _pick(lanes, running, weights, target, WIDTH)
    rest = target - tl.sum(tl.where(lanes == block - 1, running, 0.0), 0)
    factor = tl.sum(tl.where(lanes == block, factors, 0.0), 0)
    top = tl.sum(tl.where(lanes == block, finite(tops), 0.0), 0)
    places = tl.arange(0, BLOCK)
    z = _tempered(logits, temperature, row, block * BLOCK + places, stride, V)
    inside = tl.exp(z - top).to(tl.float64)
    place = _pick(places, tl.cumsum(inside, 0) * factor, inside, rest, BLOCK)
    tl.store(ids + row, tl.minimum(block * BLOCK + place, V - 1).to(tl.int64))
