# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
# ruff: noqa: RET505 - the kernel compiler drops an untaken branch, not what follows a return
"""Sums whose order is part of their definition, and what norms and softmaxes make of them.

Bits are those of :mod:`precgraph.lowering.reference.reductions`: a kernel adds the pieces of a row in order, and
:func:`halving_sum` their halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.lowering.triton.primitives import EXACT, ceil_div, reciprocal, rough_reciprocal

VOCABULARY_BLOCK = 4096
"""Logits that are summed together before the blocks of a row are."""


@triton.jit
def halving_sum(x):
    """``[R, N] -> [R]``: the halves of each row are added until one number is left (N a power of two).

    Every step adds exactly two numbers, so the order does not depend on how a tile lies in registers.
    """
    R: tl.constexpr = x.shape[0]
    if x.shape[1] == 1:
        return tl.reshape(x, [R])
    else:
        return halving_sum(tl.sum(tl.reshape(x, [R, 2, x.shape[1] // 2]), 1))


@triton.jit
def finite(maximum):
    """What is subtracted from logits whose maximum this is: nothing where all are -inf."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def mean(total, N: tl.constexpr):
    """``total / N``; where N is a power of two, the product with its reciprocal is the quotient."""
    if N & (N - 1) == 0:
        return total * (1.0 / N)
    else:
        return tl.div_rn(total, tl.full(total.shape, N, tl.float32))


@triton.jit
def reciprocal_root(squares, eps, N: tl.constexpr):
    """``1 / sqrt(squares / N + eps)``, each operation rounded; a root is never subnormal."""
    root = tl.sqrt_rn(mean(squares, N) + eps)
    inverse = reciprocal(root)  # NaN for 0 and infinity, which leave no remainder
    return tl.where(inverse == inverse, inverse, rough_reciprocal(root))  # noqa: PLR0124


@triton.jit
def weighted(value, root, weight):
    """``weight * bf16(value * root)``: bf16's own product is fp32's, rounded."""
    return (value.to(tl.float32) * root).to(tl.bfloat16) * weight


def sum_rows(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``[R, C] -> [C]``, in an order that depends on R and C alone, then rounded."""
    R, C = partial.shape
    out = torch.empty(C, dtype=dtype, device=partial.device)
    _sum_rows_kernel[(ceil_div(C, 8),)](partial, out, R, C, num_warps=4, **EXACT)
    return out


@triton.jit(do_not_specialize=["R"])
def _sum_rows_kernel(x, out, R, C: tl.constexpr):
    """8 columns: 128 rows at a time, in order, then those 128 sums by halves; four such loads are on their way."""
    cols = tl.program_id(0) * 8 + tl.arange(0, 8)
    total = tl.zeros([128, 8], tl.float32)
    for start in range(0, R, 512):
        parts = ()
        for i in tl.static_range(4):
            rows = start + i * 128 + tl.arange(0, 128)[:, None]
            inside = (rows < R) & (cols[None, :] < C)
            parts = parts + (tl.load(x + rows.to(tl.int64) * C + cols[None, :], mask=inside, other=0.0),)  # noqa: RUF005
        for i in tl.static_range(4):
            total += parts[i]
    tl.store(out + cols, halving_sum(tl.trans(total)).to(out.dtype.element_ty), mask=cols < C)
