# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""RMSNorm, with the residual sum before it and the quantisers after it.

Bits are those of :mod:`precgraph.lowering.reference.elementwise`, whose sums have a fixed order (pieces of 512 added
in order, then halves). A row lives in the registers of one program. Operands and results are bf16, sums fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError, LoweringError
from precgraph.format import Format
from precgraph.lowering.reference.reductions import PIECE
from precgraph.lowering.registry import TAKE_REFERENCE
from precgraph.lowering.triton.layouts import matrix, new_like, new_rows, new_tokens, pairs, require_bf16
from precgraph.lowering.triton.primitives import (
    EXACT,
    GROUP,
    OVERLAPPING,
    await_inputs,
    ceil_div,
    inside_tile,
    load_tile,
    magnitude,
    meaning,
    pack_pair,
    power_of_two,
    quantise_rows,
    ratio,
    scale_of,
    store_in_place,
    store_rows,
)
from precgraph.lowering.triton.reductions import halving_sum, reciprocal_root, weighted
from precgraph.quantizer import QTensor

_MAX_WIDTH = 16384  # a row has to fit the registers of one program


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """What :func:`fused_norm` made of ``x [..., C]``; None where it was not asked for.

    ``sum`` is ``x + residual`` in bf16 (None without a residual); ``normed``, ``rows`` and ``tokens`` are the norm's
    value and its quantised forms.
    """

    sum: Tensor | None
    normed: Tensor | None
    rows: QTensor | None
    tokens: QTensor | None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * bf16(x / sqrt(mean(x²) + eps))`` of ``x [..., C]``."""
    normed = fused_norm(x, None, weight, eps).normed
    assert normed is not None
    return normed


def fused_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    rows_fmt: Format | None = None,
    tokens_fmt: Format | None = None,
    want_normed: bool = True,
) -> Normed:
    """``rms_norm(x + residual)``, its value optional, quantised along rows, tokens or both.

    One kernel, unless tokens are asked for: their groups span 128 rows, so a second kernel normalises the sum again and
    quantises it both ways, last rows first, which the first kernel has just written.
    """
    require_bf16(x=x, residual=residual, weight=weight)
    check_width(x, weight)
    rounded, rows_rule, _ = meaning(rows_fmt, tokens_fmt)
    if residual is not None and residual.shape != x.shape:
        raise InputError(f"x is {list(x.shape)}, its residual {list(residual.shape)}")
    flat, step = matrix(x)
    other, other_step = (None, 0) if residual is None else matrix(residual)
    T, C = x.shape[:-1].numel(), x.shape[-1]
    total = new_like(x) if residual is not None else None
    normed = new_like(x) if want_normed else None
    rows = new_rows(x.shape, rows_fmt, x.device) if rows_fmt is not None else None
    tokens = new_tokens(x.shape, tokens_fmt, x.device) if tokens_fmt is not None else None
    scale = torch.empty(T, dtype=torch.float32, device=x.device) if tokens is not None else None
    _rows_kernel[(T,)](
        flat,
        other,
        weight,
        total,
        normed,
        scale,
        rows.codes if rows is not None and tokens is None else None,
        rows.scales if rows is not None and tokens is None else None,
        T,
        step,
        other_step,
        eps,
        C,
        piece_of(C),
        rounded,
        rows_rule if tokens is None else None,
        num_warps=4,
        **OVERLAPPING,
    )
    if tokens is not None:
        assert scale is not None
        quantise_normed(x if total is None else total, weight, scale, rows, tokens)
    return Normed(total, normed, rows, tokens)


def quantise_normed(x: Tensor, weight: Tensor, root: Tensor, rows: QTensor | None, tokens: QTensor) -> None:
    """Fill ``rows`` and ``tokens`` with the norm of ``x [..., C]``, given its reciprocal roots (fp32, one a row)."""
    flat, step = matrix(x)
    T, C = x.shape[:-1].numel(), x.shape[-1]
    _tiles_kernel[(ceil_div(T, GROUP) * ceil_div(C, GROUP),)](
        flat,
        weight,
        root,
        rows and rows.codes,
        rows and rows.scales,
        pairs(tokens),
        tokens.scales,
        T,
        step,
        C,
        *meaning(rows and rows.format, tokens.format),
        num_warps=8,
        maxnreg=128,
        **EXACT,
    )


def check_width(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise InputError(f"the weight of a norm over {x.shape[-1]} channels is {list(weight.shape)}")
    if x.shape[-1] > _MAX_WIDTH:
        raise LoweringError(
            f"a norm over {x.shape[-1]} channels does not fit one program; the kernel takes {_MAX_WIDTH}",
            remedy=TAKE_REFERENCE,
        )


def piece_of(C: int) -> int:
    """Width of a piece of the ordered sum, never narrower than a quantiser's group: zeros do not change a sum."""
    return max(GROUP, min(PIECE, power_of_two(C)))


@triton.jit(do_not_specialize=["T"])
def _rows_kernel(
    x,
    residual,
    weight,
    total,
    normed,
    scale,
    codes,
    scales,
    T,
    x_stride,
    residual_stride,
    eps,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    SOURCE: tl.constexpr,
    RULE: tl.constexpr,
):
    """One whole row: the sum, then what is made of it, without reading it again."""
    await_inputs()
    pieces: tl.constexpr = (C + PIECE - 1) // PIECE
    EVICT: tl.constexpr = "evict_first" if residual is None and scale is None else ""
    row = tl.program_id(0)
    at = row.to(tl.int64) * C
    lane = tl.arange(0, PIECE)[None, :]
    values = load_row(x, row, x_stride, T, C, PIECE, EVICT)
    if residual is not None:
        others = load_row(residual, row, residual_stride, T, C, PIECE, EVICT)
        summed = ()
        for p in tl.static_range(pieces):
            summed = summed + (values[p] + others[p],)  # noqa: RUF005 - a tuple of the kernel language
            tl.store(total + at + p * PIECE + lane, summed[p], mask=p * PIECE + lane < C)
        values = summed
    root = root_of(values, eps, C)
    if scale is not None:
        tl.store(scale + row + tl.arange(0, 1), root)
    if normed is not None or RULE is not None:
        for p in tl.static_range(pieces):
            cols = p * PIECE + lane
            y = weighted(values[p], root[:, None], gain(weight, cols, C))
            if normed is not None:
                tl.store(normed + at + cols, y, mask=cols < C)
            if RULE is not None:
                _store_piece(y.to(SOURCE), codes, scales, row, cols, p * (PIECE // 128), T, C, RULE)


@triton.jit
def load_row(x, row, stride, T, C: tl.constexpr, PIECE: tl.constexpr, EVICT: tl.constexpr):
    """A row as its pieces ``[1, PIECE]``, zero beyond its end and beyond the last row."""
    values = ()
    for p in tl.static_range((C + PIECE - 1) // PIECE):
        cols = p * PIECE + tl.arange(0, PIECE)[None, :]
        inside = (row < T) & (cols < C)
        value = tl.load(x + row.to(tl.int64) * stride + cols, mask=inside, other=0.0, eviction_policy=EVICT)
        values = values + (value,)  # noqa: RUF005
    return values


@triton.jit
def gain(weight, cols, C: tl.constexpr):
    """A piece of the weight, which every row reads again."""
    return tl.load(weight + cols, mask=cols < C, other=0.0, eviction_policy="evict_last")


@triton.jit
def root_of(values, eps, C: tl.constexpr):
    """The reciprocal root ``[1]`` of a row."""
    squares = tl.zeros(values[0].shape, tl.float32)
    for p in tl.static_range(len(values)):
        wide = values[p].to(tl.float32)
        squares = squares + wide * wide
    return reciprocal_root(halving_sum(squares), eps, C)


@triton.jit
def _store_piece(y, codes, scales, row, cols, group, T, C: tl.constexpr, RULE: tl.constexpr):
    """Quantise a piece ``[1, P]`` of a row, its groups from ``group`` on."""
    G: tl.constexpr = y.shape[1] // 128
    groups: tl.constexpr = (C + 127) // 128
    quantised, scale = quantise_rows(tl.reshape(y, [1, G, 128]), 2, RULE, codes.dtype.element_ty)
    at = codes + row.to(tl.int64) * (groups * 128) + cols
    tl.store(at, tl.reshape(quantised, [1, G * 128]), mask=cols < groups * 128)
    which = group + tl.arange(0, G)[None, :]
    aligned = ((T + 3) // 4) * 4
    store_in_place(scales + which.to(tl.int64) * aligned + row, scale, which < groups)


@triton.jit(do_not_specialize=["T"])
def _tiles_kernel(
    x,
    weight,
    scale,
    rows_codes,
    rows_scales,
    tokens_codes,
    tokens_scales,
    T,
    stride,
    C: tl.constexpr,
    SOURCE: tl.constexpr,
    ROWS_RULE: tl.constexpr,
    TOKENS_RULE: tl.constexpr,
):
    """One tile ``[128, 128]`` of the normalised rows, last tile first."""
    columns: tl.constexpr = (C + 127) // 128
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    line = tile // columns
    col = tile % columns * 128
    rows = line * 128 + 2 * tl.arange(0, 64)
    cols = col + tl.arange(0, 128)
    even = _normed_tile(x, weight, scale, rows, cols, T, stride, C).to(SOURCE)
    odd = _normed_tile(x, weight, scale, rows + 1, cols, T, stride, C).to(SOURCE)
    if ROWS_RULE is not None:
        store_rows(even, rows_codes, rows_scales, rows, col, T, columns * 128, ROWS_RULE)
        store_rows(odd, rows_codes, rows_scales, rows + 1, col, T, columns * 128, ROWS_RULE)
    _store_tokens(even, odd, tokens_codes, tokens_scales, line, cols, T, C, TOKENS_RULE)


@triton.jit
def _normed_tile(x, weight, scale, rows, cols, T, stride, C: tl.constexpr):
    """The norm's value of a tile, bf16; zero outside."""
    value = load_tile(x, rows, cols, stride, inside_tile(rows, cols, T, C))
    root = tl.load(scale + rows, mask=rows < T, other=0.0)
    return weighted(value, root[:, None], tl.load(weight + cols, mask=cols < C, other=0.0)[None, :])


@triton.jit
def _store_tokens(even, odd, codes, scales, block, cols, T, C: tl.constexpr, RULE: tl.constexpr):
    """Quantise a tile of 128 tokens, its even and odd rows ``[64, 128]``, in groups along tokens.

    ``codes [C, (T up to 128)/2]`` are pairs of bytes of neighbouring tokens, which shared memory transposes at its full
    width; ``scales [T/128, C]``.
    """
    first, second = even.to(tl.float32), odd.to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.maximum(magnitude(first), magnitude(second)), 0), RULE)
    first = ratio(first, scale[None, :], inverse[None, :], RULE)
    second = ratio(second, scale[None, :], inverse[None, :], RULE)
    pairs = tl.trans(pack_pair(first, second, RULE))
    padded = ((T + 127) // 128) * 64
    at = codes + cols[:, None].to(tl.int64) * padded + block * 64 + tl.arange(0, 64)[None, :]
    to = scales + block.to(tl.int64) * C + cols
    if C % 128 == 0:
        tl.store(at, pairs)
        tl.store(to, scale)
    else:
        tl.store(at, pairs, mask=cols[:, None] < C)
        tl.store(to, scale, mask=cols < C)
