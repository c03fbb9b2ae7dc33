# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# ruff: noqa: RET505 - the kernel compiler drops an untaken branch, not what follows a return
"""Rotary position embedding, with the norm of queries and keys before it; forward and backward.

Bits are those of :func:`precgraph.ops.rope` (bf16 products and sums, as Hugging Face computes them), or with ``wide``
of :func:`precgraph.lowering.reference.elementwise.wide_rope` (fp32, rounded once), after ``rms_norm`` of
:mod:`precgraph.lowering.reference.elementwise`. ``x [1, T, H, D]`` may be a slice of a fused projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError, LoweringError
from precgraph.lowering.triton.norm import reciprocal_root, sum_rows
from precgraph.lowering.triton.primitives import EXACT, bf16, ceil_div, halving_sum, negative, require

_ROWS = 32  # heads of a tile
_TILES = 8  # of a program of the backward with a norm: one partial sum of dweight


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, wide: bool = False) -> Tensor:
    """Rotate ``x [1, T, H, D]`` by halves; ``cos, sin [1, T, D]`` bf16 (fp32 too, if ``wide``); contiguous bf16."""
    return norm_rope(x, None, 0.0, cos, sin, wide=wide)


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, *, wide: bool = False) -> Tensor:
    """``rope(rms_norm(x, weight, eps), cos, sin)``, the norm over D of each head; without a weight only rope."""
    _check(x, weight, cos, sin, wide)
    _, T, H, D = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _forward_kernel[(ceil_div(T * H, _ROWS),)](
        x,
        weight,
        cos,
        sin,
        out,
        T,
        x.stride(1),
        x.stride(2),
        cos.stride(1),
        eps,
        H,
        D,
        triton.next_power_of_2(D // 2),
        _ROWS,
        wide,
        num_warps=4,
        **EXACT,
    )
    return out


def rope_backward(dy: Tensor, cos: Tensor, sin: Tensor, *, wide: bool = False) -> Tensor:
    """``dx`` of :func:`rope`."""
    dx, _ = _backward(dy, None, None, 0.0, cos, sin, wide)
    return dx


def norm_rope_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` of :func:`norm_rope`; dweight is summed in fp32, 256 heads at a time, then those sums."""
    dx, dweight = _backward(dy, x, weight, eps, cos, sin, wide)
    assert dweight is not None
    return dx, dweight


def _backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, wide: bool
) -> tuple[Tensor, Tensor | None]:
    _check(dy, weight, cos, sin, wide)
    if x is not None:
        _check(x, weight, cos, sin, wide)
    _, T, H, D = dy.shape
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    tiles = _TILES if weight is not None else 1
    programs = ceil_div(T * H, _ROWS * tiles)
    partial = torch.empty(programs, D, dtype=torch.float32, device=dy.device) if weight is not None else None
    _backward_kernel[(programs,)](
        dy,
        x,
        weight,
        cos,
        sin,
        dx,
        partial,
        T,
        dy.stride(1),
        dy.stride(2),
        0 if x is None else x.stride(1),
        0 if x is None else x.stride(2),
        cos.stride(1),
        eps,
        H,
        D,
        triton.next_power_of_2(D // 2),
        _ROWS,
        tiles,
        wide,
        num_warps=4,
        **EXACT,
    )
    return dx, None if partial is None or weight is None else sum_rows(partial, weight.dtype)


def _check(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, wide: bool) -> None:
    require(x, weight, cos, sin)
    D = x.shape[-1]
    if x.ndim != 4 or x.shape[0] != 1 or x.stride(3) != 1 or x.dtype != torch.bfloat16:
        raise InputError(
            f"rope takes bf16 [1, T, H, D] with unit stride along D, not {x.dtype} {list(x.shape)}",
            remedy="pass heads as split_heads makes them",
        )
    tables = torch.float32 if wide and cos.dtype == torch.float32 else torch.bfloat16
    for table in (cos, sin):
        if table.shape != (1, x.shape[1], D) or table.dtype != tables or table.stride() != cos.stride():
            raise InputError(f"cos and sin of {list(x.shape)} are {table.dtype} {list(table.shape)}")
    if cos.stride(2) != 1 or D % 2 or D > 512:
        raise LoweringError(f"no Triton kernel rotates heads of {D} by tables of strides {cos.stride()}")
    if weight is not None and (weight.shape != (D,) or weight.dtype != x.dtype or not weight.is_contiguous()):
        raise InputError(f"the weight of a norm over heads of {D} is {weight.dtype} {list(weight.shape)}")


@triton.jit
def _rounded(x, WIDE: tl.constexpr):
    """A cast point of the bf16 rule; the wide rule rounds at the end only."""
    return x if WIDE else bf16(x)


@triton.jit
def _head_sum(low, high, D: tl.constexpr):
    """Ordered sum over a head of two fp32 halves ``[R, P]``, zero beyond D/2 columns."""
    if low.shape[1] * 2 == D:
        return halving_sum(low + high)
    else:
        # The halves of the sum are not those of the rotation: line all up as one row of the next power of two.
        R: tl.constexpr = low.shape[0]
        N: tl.constexpr = 2 * low.shape[1]
        at = tl.broadcast_to(tl.arange(0, N)[None, :], [R, N])
        both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [R, N])
        half: tl.constexpr = D // 2
        where = tl.where(at < half, at, tl.where(at < D, at - half + N // 2, N - 1))
        return halving_sum(tl.gather(both, where, 1))


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    T,
    token_stride,
    head_stride,
    table_stride,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``ROWS`` heads, each as two halves ``[ROWS, P]``, P the power of two from D/2 on."""
    half: tl.constexpr = D // 2
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = rows // H
    lane = tl.broadcast_to(tl.arange(0, P)[None, :], [ROWS, P])
    inside = (token[:, None] < T) & (lane < half)
    at = x + (token * token_stride + (rows % H) * head_stride)[:, None] + lane
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        root = reciprocal_root(_head_sum(low * low, high * high, D), eps, D)[:, None]
        low = bf16(bf16(low * root) * tl.load(weight + lane, mask=lane < half, other=0.0).to(tl.float32))
        high = bf16(bf16(high * root) * tl.load(weight + half + lane, mask=lane < half, other=0.0).to(tl.float32))
    table = (token * table_stride)[:, None] + lane
    cos_low = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + table + half, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + table + half, mask=inside, other=0.0).to(tl.float32)
    to = out + rows[:, None] * D + lane
    first = _rounded(low * cos_low, WIDE) + _rounded(negative(high) * sin_low, WIDE)
    second = _rounded(high * cos_high, WIDE) + _rounded(low * sin_high, WIDE)
    tl.store(to, first.to(tl.bfloat16), mask=inside)
    tl.store(to + half, second.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dy,
    x,
    weight,
    cos,
    sin,
    dx,
    partial,
    T,
    dy_token_stride,
    dy_head_stride,
    token_stride,
    head_stride,
    table_stride,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``TILES`` tiles of ``ROWS`` heads, and their sum of the norm's ``dy * x̂``."""
    half: tl.constexpr = D // 2
    lane = tl.broadcast_to(tl.arange(0, P)[None, :], [ROWS, P])
    sum_low = tl.zeros([ROWS, P], tl.float32)
    sum_high = tl.zeros([ROWS, P], tl.float32)
    for i in range(TILES):
        rows = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS + tl.arange(0, ROWS)
        token = rows // H
        inside = (token[:, None] < T) & (lane < half)
        at = dy + (token * dy_token_stride + (rows % H) * dy_head_stride)[:, None] + lane
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
        table = (token * table_stride)[:, None] + lane
        cos_low = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + table + half, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + table + half, mask=inside, other=0.0).to(tl.float32)
        # The rotation took -high to the first half and low to the second.
        into_low = (_rounded(low * cos_low, WIDE) + _rounded(high * sin_high, WIDE)).to(tl.bfloat16)
        into_high = (_rounded(high * cos_high, WIDE) + negative(_rounded(low * sin_low, WIDE))).to(tl.bfloat16)
        if weight is not None:
            at = x + (token * token_stride + (rows % H) * head_stride)[:, None] + lane
            x_low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            x_high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
            root = reciprocal_root(_head_sum(x_low * x_low, x_high * x_high, D), eps, D)[:, None]
            x_low = x_low * root
            x_high = x_high * root
            g_low = into_low.to(tl.float32)
            g_high = into_high.to(tl.float32)
            sum_low += g_low * bf16(x_low)
            sum_high += g_high * bf16(x_high)
            g_low = bf16(g_low * tl.load(weight + lane, mask=lane < half, other=0.0).to(tl.float32))
            g_high = bf16(g_high * tl.load(weight + half + lane, mask=lane < half, other=0.0).to(tl.float32))
            mean = _head_sum(g_low * x_low, g_high * x_high, D)
            mean = tl.div_rn(mean, tl.full(mean.shape, D, tl.float32))[:, None]
            into_low = (root * (g_low - x_low * mean)).to(tl.bfloat16)
            into_high = (root * (g_high - x_high * mean)).to(tl.bfloat16)
        to = dx + rows[:, None] * D + lane
        tl.store(to, into_low, mask=inside)
        tl.store(to + half, into_high, mask=inside)
    if weight is not None:
        to = partial + tl.program_id(0).to(tl.int64) * D + tl.arange(0, P)
        tl.store(to, halving_sum(tl.trans(sum_low)), mask=tl.arange(0, P) < half)
        tl.store(to + half, halving_sum(tl.trans(sum_high)), mask=tl.arange(0, P) < half)
