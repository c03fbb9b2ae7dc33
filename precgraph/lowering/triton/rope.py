# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
# ruff: noqa: RET505 - the kernel compiler drops an untaken branch, not what follows a return
"""Rotary position embedding, with the norm of queries and keys before it; forward, of both in one launch, and backward.

Bits are those of :func:`precgraph.ops.rope` (bf16 products and sums, as Hugging Face computes them), or with ``wide``
of :func:`precgraph.lowering.reference.elementwise.wide_rope` (fp32, rounded once), after ``rms_norm`` of
:mod:`precgraph.lowering.reference.elementwise`. ``x [1, T, H, D]`` may be a slice of a fused projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError, LoweringError
from precgraph.lowering.registry import TAKE_REFERENCE
from precgraph.lowering.triton.layouts import new_like
from precgraph.lowering.triton.primitives import (
    EXACT,
    OVERLAPPING,
    await_inputs,
    bf16,
    ceil_div,
    negative,
    power_of_two,
    require,
)
from precgraph.lowering.triton.reductions import halving_sum, mean, reciprocal_root, sum_rows, weighted

_HEADS = 2  # heads whose loads are on their way together


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, wide: bool = False) -> Tensor:
    """Rotate ``x [1, T, H, D]`` by halves; ``cos, sin [1, T, D]`` bf16 (fp32 too, if ``wide``); contiguous bf16."""
    return rotate([x], [], 0.0, cos, sin, wide)[0]


def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, wide: bool = False) -> Tensor:
    """``rope(rms_norm(x, weight, eps), cos, sin)``, the norm over D of each head."""
    return rotate([x], [weight], eps, cos, sin, wide)[0]


def rope_backward(dy: Tensor, cos: Tensor, sin: Tensor, *, wide: bool = False) -> Tensor:
    """``dx`` of :func:`rope`."""
    return rotate([dy], [], 0.0, cos, sin, wide, back=True)[0]


def rotate(
    xs: Sequence[Tensor], weights: Sequence[Tensor], eps: float, cos: Tensor, sin: Tensor, wide: bool, *,
    back: bool = False,
) -> list[Tensor]:  # fmt: skip
    """:func:`norm_rope` of each of ``xs``, or :func:`rope` if there are no ``weights``, in one launch.

    ``xs`` are q and k, ``[1, T, H, D]`` with any numbers of heads, or one of them; ``back`` turns as a gradient is.
    """
    gains: Sequence[Tensor | None] = weights or [None] * len(xs)
    _check(xs, gains, cos, sin, wide)
    outs = [new_like(x) for x in xs]
    operands = [(x, gain, out, *x.stride()[1:3]) for x, gain, out in zip(xs, gains, outs, strict=True)]
    first, second = (*operands, (None, None, None, 0, 0))[:2]
    _, T, H, D = xs[0].shape
    H_2 = xs[1].shape[2] if len(xs) > 1 else 0
    P, tokens = _tile(D)
    _rotate_kernel[(ceil_div(T, tokens) * (ceil_div(H, _HEADS) + ceil_div(H_2, _HEADS)),)](
        *first,
        *second,
        cos,
        sin,
        T,
        cos.stride(1),
        eps,
        H,
        H_2,
        D,
        P,
        tokens,
        _HEADS,
        wide,
        back,
        num_warps=2,
        **OVERLAPPING,
    )
    return outs


def norm_rope_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` of :func:`norm_rope`.

    dweight is summed in fp32: over the heads of a token, a few tokens, then those sums in order.
    """
    _check((dy, x), (weight, weight), cos, sin, wide)
    _, T, H, D = dy.shape
    dx = new_like(dy)
    P, tokens = _tile(D)
    programs = ceil_div(T, tokens)
    partial = torch.empty(programs, D, dtype=torch.float32, device=dy.device)
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
        x.stride(1),
        x.stride(2),
        cos.stride(1),
        eps,
        H,
        D,
        P,
        tokens,
        _HEADS,
        wide,
        num_warps=2,
        **EXACT,
    )
    return dx, sum_rows(partial, weight.dtype)


def _tile(D: int) -> tuple[int, int]:
    """The power of two from D/2 on, and the tokens of a tile of 512 halves of heads, so wide."""
    P = power_of_two(D // 2)
    return P, max(1, 512 // P)


def _check(xs: Sequence[Tensor], weights: Sequence[Tensor | None], cos: Tensor, sin: Tensor, wide: bool) -> None:
    require(*xs, *weights, cos, sin)
    tables = torch.float32 if wide and cos.dtype == torch.float32 else torch.bfloat16
    alike = sin.shape == cos.shape and sin.dtype == cos.dtype and sin.stride() == cos.stride()
    for x, weight in zip(xs, weights, strict=True):
        D = x.shape[-1]
        if x.ndim != 4 or x.shape[0] != 1 or x.stride(3) != 1 or x.dtype != torch.bfloat16:
            raise InputError(
                f"rope takes bf16 [1, T, H, D] with unit stride along D, not {x.dtype} {list(x.shape)}",
                remedy="pass heads as split_heads makes them",
            )
        fits = cos.shape == (1, x.shape[1], D) and cos.dtype == tables
        if not fits or not alike:
            wrong = sin if fits else cos
            raise InputError(f"cos and sin of {list(x.shape)} are {wrong.dtype} {list(wrong.shape)}")
        if cos.stride(2) != 1 or D % 2 or D > 512:
            raise LoweringError(
                f"no Triton kernel rotates heads of {D} by tables of strides {cos.stride()}",
                remedy=TAKE_REFERENCE,
            )
        if weight is not None and (weight.shape != (D,) or weight.dtype != x.dtype or not weight.is_contiguous()):
            raise InputError(f"the weight of a norm over heads of {D} is {weight.dtype} {list(weight.shape)}")


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


@triton.jit
def _root_of(low, high, eps, D: tl.constexpr):
    """The reciprocal roots ``[R, 1]`` of heads."""
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    return reciprocal_root(_head_sum(low * low, high * high, D), eps, D)[:, None]


@triton.jit
def _halves(at, half, inside):
    return tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)


@triton.jit
def _heads(x, head, stride, half, inside, H, HEADS: tl.constexpr):
    """The halves of ``HEADS`` heads from ``head`` on: all loads before anything is computed."""
    lows = ()
    highs = ()
    for h in tl.static_range(HEADS):
        low, high = _halves(x + (head + h) * stride, half, inside & (head + h < H))
        lows = lows + (low,)  # noqa: RUF005 - a tuple of the kernel language
        highs = highs + (high,)  # noqa: RUF005
    return lows, highs


@triton.jit
def _tables(cos, sin, at, half, inside, BACK: tl.constexpr):
    """cos and sin of a rotation, or of the one back, which takes the low half to the high one and the other sign."""
    cos_low, cos_high = _halves(cos + at, half, inside)
    sin_low, sin_high = _halves(sin + at, half, inside)
    if BACK:
        return cos_low, cos_high, negative(sin_high), negative(sin_low)
    else:
        return cos_low, cos_high, sin_low, sin_high


@triton.jit
def _rotated(low, high, tables, WIDE: tl.constexpr):
    """bf16 halves, rotated: with bf16's own products and sums, or in fp32, rounded once."""
    cos_low, cos_high, sin_low, sin_high = tables
    if WIDE:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        first = low * cos_low.to(tl.float32) - high * sin_low.to(tl.float32)
        second = high * cos_high.to(tl.float32) + low * sin_high.to(tl.float32)
        return first.to(tl.bfloat16), second.to(tl.bfloat16)
    else:
        return low * cos_low - high * sin_low, high * cos_high + low * sin_high


@triton.jit(do_not_specialize=["T"])
def _rotate_kernel(
    x,
    weight,
    out,
    token_stride,
    head_stride,
    x_2,
    weight_2,
    out_2,
    token_stride_2,
    head_stride_2,
    cos,
    sin,
    T,
    table_stride,
    eps,
    H: tl.constexpr,
    H_2: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    BACK: tl.constexpr,
):
    """``HEADS`` heads of ``TOKENS`` tokens, each head as two halves ``[TOKENS, P]``, which share cos and sin.

    Of the programs of those tokens, the ones after ``x``'s are ``x_2``'s, where there is one.
    """
    await_inputs()
    half: tl.constexpr = D // 2
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    all_groups: tl.constexpr = groups + (H_2 + HEADS - 1) // HEADS
    token = (tl.program_id(0) // all_groups).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(0) % all_groups
    count = H
    if x_2 is not None:
        other = group >= groups
        group = tl.where(other, group - groups, group)
        count = tl.where(other, H_2, H)
        x = tl.where(other, x_2, x)
        out = tl.where(other, out_2, out)
        token_stride = tl.where(other, token_stride_2, token_stride)
        head_stride = tl.where(other, head_stride_2, head_stride)
        if weight is not None:
            weight = tl.where(other, weight_2, weight)
    head = group * HEADS
    lane = tl.broadcast_to(tl.arange(0, P)[None, :], [TOKENS, P])
    inside = (token[:, None] < T) & (lane < half)
    lows, highs = _heads(x + (token * token_stride)[:, None] + lane, head, head_stride, half, inside, count, HEADS)
    tables = _tables(cos, sin, (token * table_stride)[:, None] + lane, half, inside, BACK)
    if weight is not None:
        gain_low, gain_high = _halves(weight + lane, half, lane < half)
    for h in tl.static_range(HEADS):
        low = lows[h]
        high = highs[h]
        if weight is not None:
            root = _root_of(low, high, eps, D)
            low = weighted(low, root, gain_low)
            high = weighted(high, root, gain_high)
        first, second = _rotated(low, high, tables, WIDE)
        to = out + ((token * count + head + h) * D)[:, None] + lane
        there = inside & (head + h < count)
        tl.store(to, first, mask=there)
        tl.store(to + half, second, mask=there)


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
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """All heads of ``TOKENS`` tokens, ``HEADS`` at a time, and their sum of the norm's ``dy * x̂``."""
    half: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.broadcast_to(tl.arange(0, P)[None, :], [TOKENS, P])
    inside = (token[:, None] < T) & (lane < half)
    tables = _tables(cos, sin, (token * table_stride)[:, None] + lane, half, inside, True)
    gain_low, gain_high = _halves(weight + lane, half, lane < half)
    sum_low = tl.zeros([TOKENS, P], tl.float32)
    sum_high = tl.zeros([TOKENS, P], tl.float32)
    from_dy = dy + (token * dy_token_stride)[:, None] + lane
    from_x = x + (token * token_stride)[:, None] + lane
    for head in tl.range(0, H, HEADS, num_stages=1):
        lows, highs = _heads(from_dy, head, dy_head_stride, half, inside, H, HEADS)
        x_lows, x_highs = _heads(from_x, head, head_stride, half, inside, H, HEADS)
        for h in tl.static_range(HEADS):
            g_low, g_high = _rotated(lows[h], highs[h], tables, WIDE)
            root = _root_of(x_lows[h], x_highs[h], eps, D)
            n_low = x_lows[h].to(tl.float32) * root
            n_high = x_highs[h].to(tl.float32) * root
            sum_low = tl.fma(g_low.to(tl.float32), bf16(n_low), sum_low)
            sum_high = tl.fma(g_high.to(tl.float32), bf16(n_high), sum_high)
            w_low = (g_low * gain_low).to(tl.float32)
            w_high = (g_high * gain_high).to(tl.float32)
            average = mean(_head_sum(w_low * n_low, w_high * n_high, D), D)[:, None]
            to = dx + ((token * H + head + h) * D)[:, None] + lane
            there = inside & (head + h < H)
            tl.store(to, (root * (w_low - n_low * average)).to(tl.bfloat16), mask=there)
            tl.store(to + half, (root * (w_high - n_high * average)).to(tl.bfloat16), mask=there)
    to = partial + tl.program_id(0).to(tl.int64) * D + tl.arange(0, P)
    tl.store(to, halving_sum(tl.trans(sum_low)), mask=tl.arange(0, P) < half)
    tl.store(to + half, halving_sum(tl.trans(sum_high)), mask=tl.arange(0, P) < half)
