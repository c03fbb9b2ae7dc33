# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""Log-probabilities of chosen tokens from fp32 logits, over the full vocabulary; forward and backward.

The rule ``blocks4096``: logits are divided by the temperature (a true division). The vocabulary is cut into blocks of
4096; each has a maximum and an ordered sum of ``exp(z - maximum)`` (pieces of 512 in order, then halves); the blocks'
sums, times ``exp(their maximum - the row's)``, are summed by the same order. ``log p = (z - maximum) - log(sum)``. A
row's bits depend on that row alone. One read of the logits forward, one backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError, LoweringError
from precgraph.lowering.reference.reductions import PIECE
from precgraph.lowering.triton.primitives import (
    EXACT,
    ceil_div,
    exp,
    log,
    negative,
    power_of_two,
    reciprocal,
    refine,
    require,
)
from precgraph.lowering.triton.reductions import VOCABULARY_BLOCK, finite, halving_sum

_MAX_BLOCKS = 512  # two million tokens
_LOWEST = tl.constexpr(-(2.0**100))  # in place of minus infinity: its exponential is 0 too, and so is their product


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """``chosen [N]`` and ``entropy [N]`` (nats; None where not asked for), fp32.

    ``normalizer [2, N]`` fp32: the maximum and the logarithm of the sum, which the backward needs.
    """

    chosen: Tensor
    entropy: Tensor | None
    normalizer: Tensor


def block_sums(logits: Tensor, temperature: Tensor, *, entropy: bool = False) -> Tensor:
    """What one read of ``logits [N, V]`` gives of each block: fp32 ``[2, N, blocks]``, its maximum and its sum.

    With ``entropy`` there is a third plane, the sum that entropies need.
    """
    _check(logits, temperature)
    N, V = logits.shape
    blocks = ceil_div(V, VOCABULARY_BLOCK)
    partial = torch.empty(3 if entropy else 2, N, blocks, dtype=torch.float32, device=logits.device)
    _blocks_kernel[(N * blocks,)](
        logits,
        temperature,
        partial,
        logits.stride(0),
        N,
        V,
        blocks,
        VOCABULARY_BLOCK,
        PIECE,
        entropy,
        num_warps=1,
        **EXACT,
    )
    return partial


def logprobs(
    logits: Tensor, ids: Tensor, temperature: Tensor, *, entropy: bool = False, sums: Tensor | None = None
) -> LogProbs:
    """``log_softmax(logits / temperature)`` at ``ids``: ``logits [N, V]`` fp32, ``ids [N]`` int64.

    ``temperature [N]`` fp32, from 2**-26 to 2**90. Finite logits other than 0 lie between 2**-100 and 2**100 in
    magnitude: further quotients may be rounded otherwise. An id that is no token's gives NaN. ``sums`` are the logits'
    :func:`block_sums`, if they are at hand.
    """
    _check(logits, temperature, ids)
    N, V = logits.shape
    blocks = ceil_div(V, VOCABULARY_BLOCK)
    partial = block_sums(logits, temperature, entropy=entropy) if sums is None else sums
    out = torch.empty(4 if entropy else 3, N, dtype=torch.float32, device=logits.device)
    _rows_kernel[(N,)](
        logits,
        ids,
        temperature,
        partial,
        out,
        logits.stride(0),
        N,
        V,
        blocks,
        power_of_two(blocks),
        entropy,
        num_warps=1,
        **EXACT,
    )
    return LogProbs(out[2], out[3] if entropy else None, out[:2])


def logprobs_backward(
    grad: Tensor,
    logits: Tensor,
    ids: Tensor,
    normalizer: Tensor,
    temperature: Tensor,
    *,
    entropy: Tensor | None = None,
    entropy_grad: Tensor | None = None,
) -> Tensor:
    """``dlogits [N, V]`` bf16 from ``grad [N]`` of the chosen log-probabilities, and of the entropies if given.

    ``(grad * (chosen - p) - entropy_grad * (p * (log p + entropy))) / temperature`` in fp32, rounded once.
    """
    _check(logits, temperature, ids)
    if (entropy is None) != (entropy_grad is None):
        raise InputError("the gradient of the entropies needs the entropies")
    N, V = logits.shape
    out = torch.empty(N, V, dtype=torch.bfloat16, device=logits.device)
    _backward_kernel[(N * ceil_div(V, VOCABULARY_BLOCK),)](
        grad.contiguous(),
        logits,
        ids,
        temperature,
        normalizer,
        entropy,
        None if entropy_grad is None else entropy_grad.contiguous(),
        out,
        logits.stride(0),
        N,
        V,
        ceil_div(V, VOCABULARY_BLOCK),
        VOCABULARY_BLOCK,
        num_warps=8,
        **EXACT,
    )
    return out


def _check(logits: Tensor, temperature: Tensor, ids: Tensor | None = None) -> None:
    require(logits, temperature, ids)
    rows = logits.shape[:1]
    if logits.dtype != torch.float32 or logits.ndim != 2 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise InputError(f"log-probabilities are computed from fp32 logits [N, V], not {logits.dtype}")
    if ids is not None and (ids.shape != rows or ids.dtype != torch.int64 or not ids.is_contiguous()):
        raise InputError(f"{rows[0]} rows of logits need as many int64 ids, not {ids.dtype} {list(ids.shape)}")
    if temperature.shape != rows or temperature.dtype != torch.float32 or not temperature.is_contiguous():
        raise InputError(
            f"{rows[0]} rows of logits need as many fp32 temperatures, not {temperature.dtype} "
            f"{list(temperature.shape)}"
        )
    if logits.shape[1] > VOCABULARY_BLOCK * _MAX_BLOCKS:
        raise LoweringError(
            f"a vocabulary of {logits.shape[1]} is larger than {VOCABULARY_BLOCK * _MAX_BLOCKS}",
            remedy="score on the CPU, where torch's kernel has no such limit",
        )


@triton.jit
def _quotient(z, temperature):
    """IEEE ``z / temperature`` of a z between 2**-100 and 2**100 in magnitude; 0, of either sign, gives +0.

    The reciprocal and what its rounding lost give a quotient at most one unit off; its remainder gives the exact one.
    """
    inverse = reciprocal(temperature)
    lost = negative(tl.fma(temperature, inverse, -1.0)) * inverse
    return refine(tl.fma(z, inverse, z * lost), z, temperature, inverse)


@triton.jit
def tempered(z, divisor, row):
    """:func:`_quotient`, of zeros and infinities too, which stay what they are."""
    return tl.where(z + z == z, z, _quotient(z, tl.load(divisor + row)))


@triton.jit(do_not_specialize=["N"])
def _blocks_kernel(
    logits,
    divisor,
    partial,
    stride,
    N,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One block of one row: its maximum, its sum, and the sum weighted by the shifted logits."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    lane = tl.arange(0, PIECE)[None, :]
    values = ()
    largest = tl.full([1, PIECE], float("-inf"), tl.float32)
    for p in tl.static_range(BLOCK // PIECE):
        cols = block * BLOCK + p * PIECE + lane
        at = logits + row * stride + cols
        z = tl.load(at, mask=cols < V, other=float("-inf"), eviction_policy="evict_first")
        values = values + (z,)  # noqa: RUF005 - a tuple of the kernel language
        largest = tl.maximum(largest, z)
    maximum = tempered(tl.max(tl.max(largest, 1), 0), divisor, row)  # division keeps the order
    shift = finite(maximum)
    total = tl.zeros([1, PIECE], tl.float32)
    weighted = tl.zeros([1, PIECE], tl.float32)
    for p in tl.static_range(BLOCK // PIECE):
        z = tl.maximum(values[p], _LOWEST, propagate_nan=tl.PropagateNan.ALL)
        z = _quotient(z, tl.load(divisor + row)) - shift
        e = exp(z)
        total = total + e
        if ENTROPY:
            weighted = weighted + e * z
    at = partial + row * BLOCKS + block
    size = N.to(tl.int64) * BLOCKS
    tl.store(at, maximum)
    tl.store(at + size + tl.arange(0, 1), halving_sum(total))
    if ENTROPY:
        tl.store(at + 2 * size + tl.arange(0, 1), halving_sum(weighted))


@triton.jit(do_not_specialize=["N"])
def _rows_kernel(
    logits,
    ids,
    divisor,
    partial,
    out,
    stride,
    N,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One row: its blocks together, and the chosen token."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)[None, :]
    at = partial + row * BLOCKS + lane
    size = N.to(tl.int64) * BLOCKS
    maxima = tl.load(at, mask=lane < BLOCKS, other=float("-inf"))
    sums = tl.load(at + size, mask=lane < BLOCKS, other=0.0)
    maximum = tl.max(tl.max(maxima, 1), 0)
    factor = exp(maxima - finite(maximum))
    total = halving_sum(sums * factor)
    log_total = log(total)
    one = row + tl.arange(0, 1)
    token = tl.load(ids + one)
    z = tl.load(logits + one * stride + token, mask=(token >= 0) & (token < V), other=float("nan"))
    chosen = tempered(z, divisor, row) - maximum - log_total
    tl.store(out + one, tl.zeros([1], tl.float32) + maximum)
    tl.store(out + N + one, log_total)
    tl.store(out + 2 * N + one, chosen)
    if ENTROPY:
        weighted = tl.load(at + 2 * size, mask=lane < BLOCKS, other=0.0)
        offset = tl.where(sums == 0.0, 0.0, sums * (maxima - finite(maximum)))
        mean = tl.div_rn(halving_sum(factor * (weighted + offset)), total)
        tl.store(out + 3 * N + one, log_total - mean)


@triton.jit(do_not_specialize=["N"])
def _backward_kernel(
    grad,
    logits,
    ids,
    divisor,
    normalizer,
    entropy,
    entropy_grad,
    out,
    stride,
    N,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    cols = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < V
    z = tempered(tl.load(logits + row * stride + cols, mask=inside, other=0.0), divisor, row)
    logp = z - tl.load(normalizer + row) - tl.load(normalizer + N + row)
    p = exp(logp)
    chosen = tl.where(cols == tl.load(ids + row), 1.0, 0.0)
    into = tl.load(grad + row) * (chosen - p)
    if entropy is not None:
        spread = tl.where(p == 0.0, 0.0, p * (logp + tl.load(entropy + row)))
        into = into - tl.load(entropy_grad + row) * spread
    tl.store(out + row * V + cols, tempered(into, divisor, row).to(tl.bfloat16), mask=inside)
