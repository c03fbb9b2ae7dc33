# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""The backward of RMSNorm, with the residual's gradient after it and the norm made again along tokens beside it.

Bits of dx are those of :mod:`precgraph.lowering.reference.elementwise`. Operands and results are bf16, sums fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.format import Format
from precgraph.lowering.triton.layouts import matrix, new_like, new_tokens, require_bf16
from precgraph.lowering.triton.norm import check_width, gain, load_row, piece_of, quantise_normed, root_of
from precgraph.lowering.triton.primitives import EXACT, bf16, ceil_div
from precgraph.lowering.triton.reductions import halving_sum, mean, sum_rows
from precgraph.quantizer import QTensor

_ROWS_A_PROGRAM = 32  # how many rows one partial sum of dweight covers


@dataclass(frozen=True, slots=True, eq=False)
class NormGrads:
    """What :func:`fused_norm_backward` made of ``x [..., C]``: ``dx [..., C]`` bf16, ``dweight [C]`` in the weight's
    dtype, and ``tokens``, the norm's value quantised along tokens, or None.
    """

    dx: Tensor
    dweight: Tensor
    tokens: QTensor | None


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` of :func:`~precgraph.lowering.triton.norm.rms_norm`."""
    grads = fused_norm_backward(dy, x, weight, eps)
    return grads.dx, grads.dweight


def fused_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual_grad: Tensor | None = None,
    *,
    tokens_fmt: Format | None = None,
) -> NormGrads:
    """Of ``dy, x, residual_grad [..., C]`` and ``weight [C]``, bf16; the root mean square is recomputed from ``x``.

    ``residual_grad``, the gradient that reaches the norm's input beside the norm, is added to the rounded dx. dweight
    is summed over tokens in fp32, 32 rows at a time and then those sums in order: the same bits in every run, not those
    of torch's own sum. With ``tokens_fmt`` a second kernel recomputes the norm from those roots, along tokens.
    InputError or LoweringError for operands that do not fit a program.
    """
    require_bf16(dy=dy, x=x, weight=weight, residual_grad=residual_grad)
    check_width(x, weight)
    (grad, grad_step), (flat, step) = matrix(dy), matrix(x)
    other, other_step = (None, 0) if residual_grad is None else matrix(residual_grad)
    T, C = x.shape[:-1].numel(), x.shape[-1]
    dx = new_like(x)
    programs = ceil_div(T, _ROWS_A_PROGRAM)
    partial = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    tokens = new_tokens(x.shape, tokens_fmt, x.device) if tokens_fmt is not None else None
    roots = torch.empty(T, dtype=torch.float32, device=x.device) if tokens is not None else None
    _backward_kernel[(programs,)](
        grad,
        flat,
        other,
        weight,
        dx,
        partial,
        roots,
        T,
        grad_step,
        step,
        other_step,
        eps,
        C,
        piece_of(C),
        _ROWS_A_PROGRAM,
        num_warps=8,
        **EXACT,
    )
    if tokens is not None:
        assert roots is not None
        quantise_normed(x, weight, roots, None, tokens)
    return NormGrads(dx, sum_rows(partial, weight.dtype), tokens)


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dy,
    x,
    residual,
    weight,
    dx,
    partial,
    roots,
    T,
    dy_stride,
    x_stride,
    residual_stride,
    eps,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``ROWS`` rows, one at a time while the next one is on its way, and their sum of ``dy * x̂``.

    Where their roots are kept, another kernel reads x again.
    """
    pieces: tl.constexpr = (C + PIECE - 1) // PIECE
    EVICT: tl.constexpr = "evict_first" if roots is None else ""
    lane = tl.arange(0, PIECE)[None, :]
    sums = ()
    for _ in tl.static_range(pieces):
        sums = sums + (tl.zeros([1, PIECE], tl.float32),)  # noqa: RUF005
    first = tl.program_id(0) * ROWS
    end = tl.minimum(first + ROWS, T)
    values = load_row(x, first, x_stride, end, C, PIECE, EVICT)
    grads = load_row(dy, first, dy_stride, end, C, PIECE, "evict_first")
    for row in tl.range(first, end, num_stages=1):
        next_values = load_row(x, row + 1, x_stride, end, C, PIECE, EVICT)
        next_grads = load_row(dy, row + 1, dy_stride, end, C, PIECE, "evict_first")
        if residual is not None:
            others = load_row(residual, row, residual_stride, end, C, PIECE, "evict_first")
        root = root_of(values, eps, C)
        if roots is not None:
            tl.store(roots + row + tl.arange(0, 1), root)
        root = root[:, None]
        products = tl.zeros([1, PIECE], tl.float32)
        next_sums = ()
        weighed = ()
        for p in tl.static_range(pieces):
            normed = values[p].to(tl.float32) * root
            next_sums = next_sums + (tl.fma(grads[p].to(tl.float32), bf16(normed), sums[p]),)  # noqa: RUF005
            weighed = weighed + (grads[p] * gain(weight, p * PIECE + lane, C),)  # noqa: RUF005
            products = products + weighed[p].to(tl.float32) * normed
        sums = next_sums
        average = mean(halving_sum(products), C)[:, None]
        for p in tl.static_range(pieces):
            cols = p * PIECE + lane
            normed = values[p].to(tl.float32) * root
            into = (root * (weighed[p].to(tl.float32) - normed * average)).to(tl.bfloat16)
            if residual is not None:
                into = into + others[p]
            tl.store(dx + row.to(tl.int64) * C + cols, into, mask=cols < C)
        values = next_values
        grads = next_grads
    for p in tl.static_range(pieces):
        cols = p * PIECE + lane
        tl.store(partial + tl.program_id(0).to(tl.int64) * C + cols, sums[p], mask=cols < C)
