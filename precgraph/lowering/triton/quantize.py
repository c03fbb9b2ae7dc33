# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Quantisers: activations and gradients in groups along rows, along tokens, or both in one read; weights in blocks.

Bits are those of :func:`precgraph.quantizer.quantize`; layouts are those of
:mod:`precgraph.lowering.triton.layouts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError
from precgraph.format import Format
from precgraph.lowering.packs import pad_columns
from precgraph.lowering.triton.gluon_tiles import (
    CHUNK,
    CHUNKS,
    WARPS,
    fetch,
    gl,
    gluon,
    place,
    put,
    stage,
    store_staged,
)
from precgraph.lowering.triton.layouts import apart, matrix, new_rows, new_tokens, words
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
    ratio,
    require,
    rule,
    scale_of,
    source,
    store_groups,
    store_rows,
    tile_of,
    widen,
)
from precgraph.quantizer import QTensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PARTS = 3  # that :func:`quantize_parts` reads side by side

_ROWS = 32  # of a tile that is only quantised along rows
_AHEAD = tl.constexpr(2)  # chunks of a tile that are on their way while one is quantised


def quantize_rows(x: Tensor, fmt: Format) -> QTensor:
    """``x [..., K]`` (bf16, fp16, fp32) in groups 1×128."""
    rows, _ = quantize_parts((x,), fmt, None)
    assert rows is not None
    return rows


def quantize_tokens(x: Tensor, fmt: Format) -> QTensor:
    """``x [..., K]`` in groups of 128 tokens (128×1), stored transposed."""
    _, tokens = quantize_parts((x,), None, fmt)
    assert tokens is not None
    return tokens


def quantize_both(x: Tensor, rows_fmt: Format, tokens_fmt: Format) -> tuple[QTensor, QTensor]:
    """:func:`quantize_rows` and :func:`quantize_tokens` in one read of ``x``."""
    rows, tokens = quantize_parts((x,), rows_fmt, tokens_fmt)
    assert rows is not None and tokens is not None
    return rows, tokens


def side_by_side(parts: Sequence[Tensor]) -> bool:
    """Whether :func:`quantize_parts` can read ``parts`` where they are."""
    if len(parts) == 1:
        return True
    alike = len({(p.dtype, p.device, p.shape[:-1]) for p in parts}) == 1
    return len(parts) <= PARTS and alike and all(p.shape[-1] % GROUP == 0 for p in parts)


def quantize_parts(
    parts: Sequence[Tensor], rows_fmt: Format | None, tokens_fmt: Format | None
) -> tuple[QTensor | None, QTensor | None]:
    """``torch.cat(parts, -1)`` along rows and along tokens, in one read of parts that are :func:`side_by_side`."""
    require(*parts)
    x = parts[0]
    if not side_by_side(parts):
        raise InputError(
            f"the quantiser reads at most {PARTS} tensors of one dtype and as many rows side by side, in whole blocks "
            f"of {GROUP} columns, not {[f'{p.dtype} {list(p.shape)}' for p in parts]}",
            remedy="join them before they are quantised",
        )
    if x.dtype not in _FLOATS or x.ndim == 0:
        raise InputError(f"cannot quantise a {x.ndim}-d {x.dtype} tensor", remedy="pass bf16, fp16 or fp32")
    rounded, rows_rule, tokens_rule = meaning(rows_fmt, tokens_fmt)
    T, ends = x.shape[:-1].numel(), list(accumulate(p.shape[-1] for p in parts))
    shape, width = torch.Size((*x.shape[:-1], ends[-1])), ends[-1]
    rows = new_rows(shape, rows_fmt, x.device) if rows_fmt is not None else None
    tokens = new_tokens(shape, tokens_fmt, x.device) if tokens_fmt is not None else None
    matrices, steps = zip(*map(matrix, parts), strict=True)
    absent = PARTS - len(parts)
    sources = (*matrices, *[None] * absent, *steps, *[0] * absent)
    sizes = (T, *ends, *[width] * absent)
    height = GROUP if tokens is not None else _ROWS
    grid = (ceil_div(T, height) * ceil_div(width, GROUP),)
    operands = (*sources, rows and rows.codes, rows and rows.scales)
    if tokens is None:
        _rows_kernel[grid](*operands, *sizes, rounded, rows_rule, height, num_warps=4, **OVERLAPPING)
    else:
        outputs = (words(tokens), tokens.scales)
        _tiles_kernel[grid](*operands, *outputs, *sizes, rounded, rows_rule, tokens_rule, num_warps=WARPS, **EXACT)
    return rows, tokens


def quantize_apart(
    parts: Sequence[Tensor], rows_fmt: Format | None, tokens_fmt: Format | None
) -> tuple[list[QTensor], list[QTensor]]:
    """Each of ``parts [..., n_i]`` along rows and along tokens, at once: slices of the columns of one tensor.

    They are read where they are, if the kernel can; else they are joined, each padded to whole blocks. A list is empty
    where its format is None.
    """
    whole = parts if len(parts) == 1 else [p.reshape(-1, p.shape[-1]) for p in parts]
    if not side_by_side(whole):
        whole = [torch.cat([pad_columns(p) for p in whole], dim=1)]
    rows, tokens = quantize_parts(whole, rows_fmt, tokens_fmt)
    return apart(rows, parts), apart(tokens, parts)


@triton.jit
def _part(
    first, second, third, first_stride, second_stride, third_stride, col, FIRST: tl.constexpr, SECOND: tl.constexpr
):  # fmt: skip
    """The part that has column ``col`` of all, as a pointer to which the column is added, and its stride."""
    x, stride = first, tl.cast(first_stride, tl.int64)
    if second is not None:  # noqa: SIM102 - one condition of the compiler's, one of the kernel's
        if col >= FIRST:
            x = second - FIRST
            stride = tl.cast(second_stride, tl.int64)
    if third is not None:  # noqa: SIM102
        if col >= SECOND:
            x = third - SECOND
            stride = tl.cast(third_stride, tl.int64)
    return x, stride


@triton.jit(do_not_specialize=["T"])
def _rows_kernel(
    first,
    second,
    third,
    first_stride,
    second_stride,
    third_stride,
    codes,
    scales,
    T,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    K: tl.constexpr,
    SOURCE: tl.constexpr,
    RULE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One tile ``[ROWS, 128]``."""
    await_inputs()
    columns: tl.constexpr = (K + 127) // 128
    col = tl.program_id(0) % columns * 128
    x, stride = _part(first, second, third, first_stride, second_stride, third_stride, col, FIRST, SECOND)
    rows = tl.program_id(0) // columns * ROWS + tl.arange(0, ROWS)
    cols = col + tl.arange(0, 128)
    value = load_tile(x, rows, cols, stride, inside_tile(rows, cols, T, K)).to(SOURCE)
    store_rows(value, codes, scales, rows, col, T, columns * 128, RULE)


@gluon.jit(do_not_specialize=["T"])
def _tiles_kernel(
    first,
    second,
    third,
    first_stride,
    second_stride,
    third_stride,
    rows_codes,
    rows_scales,
    tokens_codes,
    tokens_scales,
    T,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    K: gl.constexpr,
    SOURCE: gl.constexpr,
    ROWS_RULE: gl.constexpr,
    TOKENS_RULE: gl.constexpr,
):
    """One tile ``[128, 128]``: read once, in chunks of rows, written in each layout that is asked for."""
    columns: gl.constexpr = (K + 127) // 128
    line, column, rows, lanes = place(T, columns)
    col = column * 128
    cols = col + lanes
    x, stride = _part(first, second, third, first_stride, second_stride, third_stride, col, FIRST, SECOND)
    staged = stage(SOURCE)
    ahead = ()
    for n in gl.static_range(_AHEAD):
        ahead = fetch(ahead, n, (x,), (stride,), rows, cols, T, K)
    for n in gl.static_range(CHUNKS):
        ahead = fetch(ahead, n + _AHEAD, (x,), (stride,), rows, cols, T, K)
        y = ahead[n][0].to(SOURCE)
        put(y, staged, n)
        if ROWS_RULE is not None:
            at = rows + n * CHUNK
            store_groups(widen(y), rows_codes, rows_scales, at, cols, column, T, columns * 128, ROWS_RULE)
    store_staged(staged, tokens_codes, tokens_scales, line, col, T, K, K % 128 == 0, TOKENS_RULE)


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
    line, column = tile_of(tl.program_id(0), (N + 127) // 128, columns)
    rows = line * 128 + 2 * tl.arange(0, 64)
    cols = column * 128 + tl.arange(0, 128)
    even = load_tile(x, rows, cols, stride, inside_tile(rows, cols, N, K)).to(SOURCE).to(tl.float32)
    odd = load_tile(x, rows + 1, cols, stride, inside_tile(rows + 1, cols, N, K)).to(SOURCE).to(tl.float32)
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
