# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Quantisers: activations and gradients in groups along rows, along tokens, or both in one read; weights in blocks.

Bits are those of :func:`precgraph.formats.quantize`; layouts are those of
:mod:`precgraph.lowering.triton.layouts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError
from precgraph.formats import Format, QTensor
from precgraph.lowering.triton.layouts import flatten, new_rows, new_tokens, pairs
from precgraph.lowering.triton.primitives import (
    EXACT,
    GROUP,
    ceil_div,
    magnitude,
    pack_pair,
    ratio,
    require,
    rule,
    scale_of,
    source,
    store_rows,
    store_tokens,
    tile_of,
)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_ROWS = 32  # of a tile that is only quantised along rows


def quantize_rows(x: Tensor, fmt: Format) -> QTensor:
    """``x [..., K]`` (bf16, fp16, fp32) in groups 1×128."""
    rows, _ = _quantize(x, fmt, None)
    assert rows is not None
    return rows


def quantize_tokens(x: Tensor, fmt: Format) -> QTensor:
    """``x [..., K]`` in groups of 128 tokens (128×1), stored transposed."""
    _, tokens = _quantize(x, None, fmt)
    assert tokens is not None
    return tokens


def quantize_both(x: Tensor, rows_fmt: Format, tokens_fmt: Format) -> tuple[QTensor, QTensor]:
    """:func:`quantize_rows` and :func:`quantize_tokens` in one read of ``x``."""
    rows, tokens = _quantize(x, rows_fmt, tokens_fmt)
    assert rows is not None and tokens is not None
    return rows, tokens


def _quantize(x: Tensor, rows_fmt: Format | None, tokens_fmt: Format | None) -> tuple[QTensor | None, QTensor | None]:
    require(x)
    if x.dtype not in _FLOATS or x.ndim == 0:
        raise InputError(f"cannot quantise a {x.ndim}-d {x.dtype} tensor", remedy="pass bf16, fp16 or fp32")
    rows_rule, tokens_rule = rule(rows_fmt, "1x128"), rule(tokens_fmt, "128x1")
    flat = flatten(x)
    T, K = flat.shape
    rows = new_rows(x.shape, rows_fmt, x.device)[0] if rows_fmt is not None else None
    tokens = new_tokens(x.shape, tokens_fmt, x.device)[0] if tokens_fmt is not None else None
    height = GROUP if tokens is not None else _ROWS
    tiles = ceil_div(T, height) * ceil_div(K, GROUP)
    _quantize_kernel[(tiles,)](
        flat,
        rows and rows.codes,
        rows and rows.scales,
        pairs(tokens),
        tokens and tokens.scales,
        T,
        flat.stride(0),
        K,
        height,
        source(rows_fmt, tokens_fmt),
        rows_rule,
        tokens_rule,
        num_warps=4 if tokens is None else 8,
        maxnreg=None if tokens is None else 128,
        **EXACT,
    )
    return rows, tokens


@triton.jit(do_not_specialize=["T"])
def _quantize_kernel(
    x,
    rows_codes,
    rows_scales,
    tokens_codes,
    tokens_scales,
    T,
    stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SOURCE: tl.constexpr,
    ROWS_RULE: tl.constexpr,
    TOKENS_RULE: tl.constexpr,
):
    """One tile ``[ROWS, 128]``: read once, written in each layout that is asked for."""
    columns: tl.constexpr = (K + 127) // 128
    EVEN: tl.constexpr = K % 128 == 0
    if TOKENS_RULE is None:
        line, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    else:
        line, column = tile_of(tl.program_id(0), tl.cdiv(T, 128), columns)
    col = column * 128
    cols = col + tl.arange(0, 128)
    if TOKENS_RULE is None:
        rows = line * ROWS + tl.arange(0, ROWS)
        value = _load(x, rows, cols, T, stride, K, EVEN, SOURCE)
        store_rows(value, rows_codes, rows_scales, rows, col, T, columns * 128, ROWS_RULE)
    else:
        rows = line * 128 + 2 * tl.arange(0, 64)
        even = _load(x, rows, cols, T, stride, K, EVEN, SOURCE)
        odd = _load(x, rows + 1, cols, T, stride, K, EVEN, SOURCE)
        if ROWS_RULE is not None:
            store_rows(even, rows_codes, rows_scales, rows, col, T, columns * 128, ROWS_RULE)
            store_rows(odd, rows_codes, rows_scales, rows + 1, col, T, columns * 128, ROWS_RULE)
        store_tokens(even, odd, tokens_codes, tokens_scales, line, cols, T, K, K, TOKENS_RULE, EVEN)


@triton.jit
def _load(x, rows, cols, T, stride, K: tl.constexpr, EVEN: tl.constexpr, SOURCE: tl.constexpr):
    """A tile in its source dtype, zero outside."""
    inside = rows[:, None] < T
    if not EVEN:
        inside = inside & (cols[None, :] < K)
    return tl.load(x + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=inside, other=0.0).to(SOURCE)


# -------------------------------------------------------------------------------------------- weights


def new_weight(shape: torch.Size, fmt: Format, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty ``codes [pad(N), pad(K)]``, ``scales [N/128, K/128]`` and both transposed, for :func:`quantize_weight`."""
    rows, columns = (ceil_div(n, GROUP) for n in shape)
    codes = torch.empty(rows * GROUP, columns * GROUP, dtype=fmt.torch_dtype, device=device)
    scales = torch.empty(rows, columns, dtype=torch.float32, device=device)
    return codes, scales, codes.new_empty(columns * GROUP, rows * GROUP), scales.new_empty(columns, rows)


def quantize_weight(
    master: Tensor, fmt: Format, codes: Tensor, scales: Tensor, codes_t: Tensor | None, scales_t: Tensor | None
) -> None:
    """Quantise ``master [N, K]`` in blocks 128×128 into buffers that exist, in one read; a CUDA graph can hold it.

    ``codes [pad(N), pad(K)]``, ``scales [N/128, K/128]``; ``codes_t``, ``scales_t`` (None: not wanted) are the
    transposed copies that DGrad reads, whose rows may be slices of longer rows. The others are contiguous. All are
    filled completely, padding included.
    """
    require(master, codes, scales, codes_t, scales_t)
    N, K = master.shape
    shapes = [t.shape for t in new_weight(master.shape, fmt, torch.device("meta"))]
    for tensor, shape in zip((codes, scales, codes_t, scales_t), shapes, strict=True):
        if tensor is None:
            continue
        dense = tensor.stride(1) == 1 if tensor is codes_t or tensor is scales_t else tensor.is_contiguous()
        if tensor.shape != shape or not dense:
            raise InputError(f"a buffer of a {N}×{K} weight is {list(tensor.shape)}, not a contiguous {list(shape)}")
    if (codes_t is None) != (scales_t is None):
        raise InputError("the transposed codes and scales come together")
    flat = master if master.stride(1) == 1 else master.contiguous()
    _weight_kernel[(ceil_div(N, GROUP) * ceil_div(K, GROUP),)](
        flat,
        codes,
        scales,
        None if codes_t is None else codes_t.view(torch.int16),
        scales_t,
        flat.stride(0),
        0 if codes_t is None else codes_t.stride(0),
        0 if scales_t is None else scales_t.stride(0),
        N,
        K,
        source(fmt),
        rule(fmt, "128x128"),
        num_warps=16,
        **EXACT,
    )


@triton.jit
def _weight_kernel(
    x,
    codes,
    scales,
    codes_t,
    scales_t,
    stride,
    codes_step,
    scales_step,
    N: tl.constexpr,
    K: tl.constexpr,
    SOURCE: tl.constexpr,
    RULE: tl.constexpr,
):
    """One block: amax of 128×128 values, its codes and its transposed codes."""
    columns: tl.constexpr = (K + 127) // 128
    EVEN: tl.constexpr = K % 128 == 0
    line, column = tile_of(tl.program_id(0), (N + 127) // 128, columns)
    rows = line * 128 + 2 * tl.arange(0, 64)
    cols = column * 128 + tl.arange(0, 128)
    even = _load(x, rows, cols, N, stride, K, EVEN, SOURCE).to(tl.float32)
    odd = _load(x, rows + 1, cols, N, stride, K, EVEN, SOURCE).to(tl.float32)
    amax = tl.max(tl.max(tl.maximum(magnitude(even), magnitude(odd)), 1), 0)
    scale, inverse = scale_of(amax, RULE)
    even = ratio(even, scale, inverse, RULE)
    odd = ratio(odd, scale, inverse, RULE)
    at = codes + rows[:, None].to(tl.int64) * (columns * 128) + cols[None, :]
    tl.store(at, even.to(codes.dtype.element_ty))
    tl.store(at + columns * 128, odd.to(codes.dtype.element_ty))
    tl.store(scales + line * columns + column, scale)
    if codes_t is not None:
        at = codes_t + cols[:, None].to(tl.int64) * (codes_step // 2) + line * 64 + tl.arange(0, 64)[None, :]
        tl.store(at, tl.trans(pack_pair(even, odd, RULE)))
        tl.store(scales_t + column * scales_step + line, scale)
