# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"
"""GEMMs in Triton, for machines without DeepGEMM: FP8 in groups of 128, and bf16.

One tile for every call, so that a row's result does not depend on the others. Sums are those of the tensor core within
a group of 128 and fp32 across groups, like DeepGEMM's, but with other rounding inside the tensor core: another numerics
id. Slower than DeepGEMM; meant to be right everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.lowering.packs import Fp8Weight, MasterWeight, is_whole_stack, joined_columns
from precgraph.lowering.triton.primitives import EXACT, ceil_div
from precgraph.quantizer import QTensor

_TILE = 128  # rows and columns of a tile
_DEPTH = 64  # of one step of a bf16 tile


def fp8_linear(x: QTensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """FProp: ``x [..., K]`` 1x128, ``weight [N, K]`` 128x128 to bf16 ``[..., N]``; then the bf16 bias."""
    y = _fp8(x.codes, x.scales, weight.codes, weight.scales, 128, torch.bfloat16)[:, : weight.shape[0]]
    y = y.view(*x.shape[:-1], y.shape[1])
    return y if bias is None else y + bias


def fp8_dgrad(dys: Sequence[QTensor], weights: Sequence[Fp8Weight]) -> Tensor:
    """DGrad: ``Σ dy_i [..., N_i] @ weight_i [N_i, K]`` in one fp32 accumulator; bf16 ``[..., K]``."""
    codes, scales = joined_columns([d.codes for d in dys]), joined_columns([d.scales for d in dys])
    if is_whole_stack(weights):
        right, right_scales = weights[0].stack.transposed()
    else:
        parts = [w.transposed() for w in weights]
        right, right_scales = joined_columns([c for c, _ in parts]), joined_columns([s for _, s in parts])
    y = _fp8(codes, scales, right, right_scales, 128, torch.bfloat16)[:, : weights[0].shape[1]]
    return y.view(*dys[0].shape[:-1], y.shape[1])


def fp8_wgrad(dy: QTensor, x: QTensor) -> Tensor:
    """WGrad: ``dyᵀ @ x``, both 128x1 along tokens; fp32 sums, rounded to bf16 ``[N, K]``."""
    return _fp8(dy.codes.t(), dy.scales.t(), x.codes.t(), x.scales.t(), 1, torch.bfloat16)


def bf16_linear(x: Tensor, weight: MasterWeight, bias: Tensor | None) -> Tensor:
    """``x [..., K] @ weight [N, K].T`` in bf16, summed in fp32, then the bf16 bias."""
    y = _bf16(x.flatten(0, -2), weight.values, torch.bfloat16).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def bf16_logits(x: Tensor, weight: MasterWeight, bias: Tensor | None) -> Tensor:
    """lm_head: bf16 operands, fp32 logits ``[..., V]``."""
    logits = _bf16(x.flatten(0, -2), weight.values, torch.float32).view(*x.shape[:-1], -1)
    return logits if bias is None else logits + bias.float()


def bf16_dgrad(dys: Sequence[Tensor], weights: Sequence[MasterWeight]) -> Tensor:
    """``dy [..., N] @ weight [N, K]``, bf16 operands and result, fp32 sums."""
    (dy,), (weight,) = dys, weights
    return _bf16(dy.flatten(0, -2), weight.values.t(), torch.bfloat16).view(*dy.shape[:-1], -1)


def bf16_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """``dyᵀ @ x`` over tokens, bf16 operands and result, fp32 sums."""
    return _bf16(dy.flatten(0, -2).t(), x.flatten(0, -2).t(), torch.bfloat16)


def _fp8(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, rows: int, out: torch.dtype) -> Tensor:
    """``a [M, K] @ b [N, K].T``; scales ``[M, K / 128]`` and, one for ``rows`` rows, ``[N / rows, K / 128]``."""
    M, K, N = a.shape[0], a.shape[1], b.shape[0]
    d = torch.empty(M, N, dtype=out, device=a.device)
    _fp8_kernel[(ceil_div(M, _TILE) * ceil_div(N, _TILE),)](
        a, a_scales, b, b_scales, d, M, N, K, a.stride(0), a.stride(1), a_scales.stride(0), a_scales.stride(1),
        b.stride(0), b.stride(1), b_scales.stride(0), b_scales.stride(1), rows, _TILE, num_warps=8, num_stages=3,
        **EXACT,
    )  # fmt: skip
    return d


def _bf16(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """``a [M, K] @ b [N, K].T``; either may be a transposed view."""
    M, K, N = a.shape[0], a.shape[1], b.shape[0]
    d = torch.empty(M, N, dtype=out, device=a.device)
    _bf16_kernel[(ceil_div(M, _TILE) * ceil_div(N, _TILE),)](
        a, b, d, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), _TILE, _DEPTH, num_warps=8, num_stages=3,
        **EXACT,
    )  # fmt: skip
    return d


@triton.jit(do_not_specialize=["M"])
def _fp8_kernel(
    a,
    a_scales,
    b,
    b_scales,
    d,
    M,
    N,
    K,
    a_row,
    a_col,
    as_row,
    as_col,
    b_row,
    b_col,
    bs_row,
    bs_col,
    B_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile; programs of one column of tiles follow each other, so that they share its part of ``b``."""
    lines = (M + TILE - 1) // TILE
    rows = (tl.program_id(0) % lines).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = (tl.program_id(0) // lines).to(tl.int64) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, 128)
    total = tl.zeros((TILE, TILE), tl.float32)
    for group in range(K // 128):
        at = (group * 128 + inner).to(tl.int64)
        left = tl.load(a + rows[:, None] * a_row + at[None, :] * a_col, mask=rows[:, None] < M, other=0.0)
        right = tl.load(b + cols[None, :] * b_row + at[:, None] * b_col, mask=cols[None, :] < N, other=0.0)
        left_scale = tl.load(a_scales + rows * as_row + group * as_col, mask=rows < M, other=0.0)
        right_scale = tl.load(b_scales + (cols // B_ROWS) * bs_row + group * bs_col, mask=cols < N, other=0.0)
        total += tl.dot(left, right) * (left_scale[:, None] * right_scale[None, :])
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(d + rows[:, None] * N + cols[None, :], total.to(d.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "K"])
def _bf16_kernel(
    a,
    b,
    d,
    M,
    N,
    K,
    a_row,
    a_col,
    b_row,
    b_col,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    lines = (M + TILE - 1) // TILE
    rows = (tl.program_id(0) % lines).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = (tl.program_id(0) // lines).to(tl.int64) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, DEPTH)
    total = tl.zeros((TILE, TILE), tl.float32)
    for step in range(tl.cdiv(K, DEPTH)):
        at = (step * DEPTH + inner).to(tl.int64)
        left = tl.load(
            a + rows[:, None] * a_row + at[None, :] * a_col, mask=(rows[:, None] < M) & (at[None, :] < K), other=0.0
        )
        right = tl.load(
            b + cols[None, :] * b_row + at[:, None] * b_col, mask=(cols[None, :] < N) & (at[:, None] < K), other=0.0
        )
        total = tl.dot(left, right, total)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(d + rows[:, None] * N + cols[None, :], total.to(d.dtype.element_ty), mask=inside)
