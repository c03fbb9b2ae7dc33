# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
# ruff: noqa: RET505 - the kernel compiler drops an untaken branch, not what follows a return
"""Tiles of 128 tokens x 128 columns that are quantised along tokens, perhaps along rows too, in Gluon.

Gluon is the layer of Triton in which a kernel says how its tiles lie in threads and in shared memory. Here a thread
reads 32 bytes of a row and quantises it; the tile is staged in shared memory as the values to be quantised, and each
thread takes 16 tokens of two columns from there, which it writes as words of four tokens. Left to itself, Triton
transposes in shared memory what it has quantised, byte by byte.

Gluon is not stable between releases: these kernels compile with Triton 3.6.0, 3.7.1 (which torch 2.13 brings), 3.8.0
and 3.9.0. The numerics are those of :mod:`~precgraph.lowering.triton.primitives`.
"""

from __future__ import annotations

import triton

from precgraph.errors import LoweringError
from precgraph.lowering.registry import TAKE_REFERENCE
from precgraph.lowering.triton.primitives import (
    inside_tile,
    load_tile,
    magnitude,
    pack_four,
    ratio,
    scale_of,
    tile_of,
    widen,
)

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    _LANES = gl.BlockedLayout
    _PADDED = gl.PaddedSharedLayout.with_identity_for
    _PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
except (ImportError, AttributeError) as error:
    raise LoweringError(
        f"the kernels that quantise along tokens are written in Gluon as Triton 3.6 to 3.9 have it; Triton "
        f"{triton.__version__} has another: {error}",
        remedy=f"install the triton that torch brings (3.6.0 to 3.9.0 compile these kernels), or {TAKE_REFERENCE}",
    ) from error

__all__ = ["CHUNK", "CHUNKS", "WARPS", "fetch", "gl", "gluon", "place", "put", "stage", "store_staged"]

WARPS = 8  # of a program: the layouts below are made for it
CHUNK = gl.constexpr(32)  # rows that a program reads at once
CHUNKS = gl.constexpr(4)
_ROWS = gl.constexpr(_LANES([1, 16], [4, 8], [WARPS, 1], [1, 0]))
_TOKENS = gl.constexpr(_LANES([16, 1], [8, 4], [1, WARPS], [0, 1]))
_WORDS = gl.constexpr(_LANES([4, 1], [8, 4], [1, WARPS], [0, 1]))
# 16 bytes of padding after the 16 rows of a thread: no two of the 8 threads of a column meet in a bank.
_STAGED = gl.constexpr(_PADDED([[128 * 16, 8]], [128, 128], [1, 0]))
_PAIRS = gl.constexpr(_PADDED([[64 * 16, 4]], [128, 64], [1, 0]))


@gluon.jit
def place(T, COLUMNS: gl.constexpr):
    """Of a program's tile: its line and column, the rows of its first chunk and the columns within it."""
    line, column = tile_of(gl.program_id(0), gl.cdiv(T, 128), COLUMNS)
    rows = line * 128 + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, _ROWS))
    return line, column, rows, gl.arange(0, 128, layout=gl.SliceLayout(0, _ROWS))


@gluon.jit
def stage(dtype: gl.constexpr):
    """Shared memory for a tile."""
    return gl.allocate_shared_memory(dtype, [128, 128], _STAGED)


@gluon.jit
def fetch(ahead, n: gl.constexpr, sources, strides, rows, cols, T, WIDTH: gl.constexpr):
    """``ahead``, the chunks that are under way, and chunk ``n`` of each source, where a tile has one."""
    if n < CHUNKS:
        at = rows + n * CHUNK
        inside = inside_tile(at, cols, T, WIDTH)
        chunk = ()
        for i in gl.static_range(len(sources)):
            chunk = chunk + (load_tile(sources[i], at, cols, strides[i], inside),)  # noqa: RUF005
        ahead = ahead + (chunk,)  # noqa: RUF005 - a tuple of the kernel language
    return ahead


@gluon.jit
def put(y, staged, n: gl.constexpr):
    """Stage chunk ``n`` of a tile."""
    staged.slice(n * CHUNK, CHUNK).store(y)


@gluon.jit
def store_staged(staged, codes, scales, line, col, T, K: gl.constexpr, EVEN: gl.constexpr, RULE: gl.constexpr):
    """Quantise a staged tile from column ``col`` along tokens.

    ``codes [K, (T up to 128)/4]`` are words of four tokens; ``scales [T/128, K]``. bf16 is read as pairs of columns.
    """
    PACK: gl.constexpr = 2 if staged.dtype == gl.bfloat16 else 1
    WIDTH: gl.constexpr = 32  # columns, or pairs of them, that a program reads at once
    tile = _pairs(staged) if PACK == 2 else staged
    for n in gl.static_range(128 // (PACK * WIDTH)):
        y = tile.slice(n * WIDTH, WIDTH, dim=1).load(_TOKENS)
        largest = gl.reduce(y & 0x7FFF7FFF, 0, _larger_halves) if PACK == 2 else gl.max(magnitude(widen(y)), 0)
        for part in gl.static_range(PACK):
            at = col + n * (PACK * WIDTH) + part
            if PACK == 2:
                scale, inverse = scale_of(_half(largest, part), RULE)
                x = _half(y, part).to(gl.float32, bitcast=True)
            else:
                scale, inverse = scale_of(largest, RULE)
                x = widen(y)
            words = _words(ratio(x, scale[None, :], inverse[None, :], RULE), RULE)
            cols = at + PACK * gl.arange(0, WIDTH, layout=gl.SliceLayout(0, _WORDS))
            word = line * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, _WORDS))
            to = codes + cols[None, :].to(gl.int64) * (((T + 127) // 128) * 32) + word[:, None]
            which = at + PACK * gl.arange(0, WIDTH, layout=gl.SliceLayout(0, _TOKENS))
            if EVEN:
                gl.store(to, words)
                gl.store(scales + line.to(gl.int64) * K + which, scale)
            else:
                gl.store(to, words, mask=cols[None, :] < K)
                gl.store(scales + line.to(gl.int64) * K + which, scale, mask=which < K)


@gluon.jit
def _pairs(staged):
    """A staged bf16 tile as pairs of columns; Triton 3.9 gave the method its name."""
    if _PUBLIC:
        return staged.reinterpret(gl.int32, [128, 64], _PAIRS)
    else:
        return staged._reinterpret(gl.int32, [128, 64], _PAIRS)


@gluon.jit
def _words(x, RULE: gl.constexpr):
    """``[128, C]`` of quotients as codes, four rows a word: ``[32, C]``."""
    x = gl.permute(gl.reshape(x, [32, 2, 2, x.shape[1]]), (0, 3, 1, 2))
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.convert_layout(pack_four(first, second, third, fourth, RULE), _WORDS)


@gluon.jit
def _half(pairs, HIGH: gl.constexpr):
    """Bits of one bf16 of each pair, widened."""
    if HIGH:
        return pairs & -65536
    else:
        return pairs << 16


@gluon.jit
def _larger_halves(a, b):
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1)
