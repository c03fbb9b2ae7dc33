# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Attention to a window of keys, bitwise independent of packing, chunks and decoding.

FlashAttention-3 cuts the keys of a tile of queries from where the tile's window begins, so that a row's sums depend on
where its call does. Here tiles of keys begin at multiples of their size from the sequence's first key, and are visited
upwards. Where a tile of queries begins does not matter then: a tile of keys that is hidden from a row as a whole leaves
the row's numbers as they are, bit for bit, and a row of the tensor core's products does not depend on the others.

Numerics: scores q·k in fp32, times ``scale · log2(e)``; online softmax to the base 2 in fp32; P rounded to bf16 for
P·V, its sum taken before that rounding; fp32 accumulation. Non-finite values are not contained, as in the reference.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError
from precgraph.lowering.triton.primitives import EXACT, ceil_div, load_tile, log, power_of_two, require
from precgraph.ops import AttentionSpec
from precgraph.runtime.contexts import AttentionContext, OwnAttention, Varlen, attend

_ROWS = 64  # of a tile of queries: the heads of a group one after the other, query by query
_KEYS = 64  # of a tile of keys
# Warps, and tiles of keys and values in shared memory at a time, by padded width: what an H100's registers, and its 227
# KiB of shared memory, hold.
_LAUNCH = {64: (4, 3), 128: (4, 3), 256: (8, 2)}
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_LN2 = tl.constexpr(math.log(2))


def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, context: AttentionContext | OwnAttention
) -> tuple[Tensor, Tensor | None]:
    """``q [1, T, H, D]``, ``k, v [1, T, Hkv, D]`` bf16 to ``[1, T, H·D]`` and log-sum-exp ``[T, H]`` fp32."""
    return attend(forward, q, k, v, spec, context)


def forward(q: Tensor, call: Varlen, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """``q [T, H, D]`` on the sequences of ``call``: ``out [T, H, D]``, log-sum-exp ``[H, T]``. ``spec`` has a window.

    Strides are any, but for values of a head, which are side by side.
    """
    k, v = call.keys, call.values
    require(q, k, v)
    if any(t.dtype != torch.bfloat16 or t.stride(2) != 1 for t in (q, k, v)):
        found = ", ".join(f"{t.dtype} of strides {t.stride()}" for t in (q, k, v))
        raise InputError(f"attention takes bf16 q, k and v whose heads are in one piece, not {found}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(spec.heads, len(q), dtype=torch.float32, device=q.device)
    group, width = spec.heads // spec.kv_heads, power_of_two(spec.head_dim)
    warps, stages = _LAUNCH[width]
    tiles = ceil_div(call.longest_query * group, _ROWS)
    _window_kernel[(tiles * spec.kv_heads * (len(call.query_bounds) - 1),)](
        q, k, v, out, lse, call.query_bounds, call.key_bounds, tiles, len(q), spec.scale * math.log2(math.e),
        spec.window, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], spec.kv_heads, group, spec.head_dim, width,
        _ROWS, _KEYS, num_warps=warps, num_stages=stages, **EXACT,
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["tiles", "T", "window"])
def _window_kernel(
    q, k, v, out, lse, query_bounds, key_bounds, tiles, T, scale, window, q_row, q_head, k_row, k_head, v_row, v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one sequence, for the heads that share a head of keys."""
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(0) // tiles % KV_HEADS
    sequence = tl.program_id(0) // tiles // KV_HEADS
    first_query = tl.load(query_bounds + sequence)
    first_key = tl.load(key_bounds + sequence)
    queries = tl.load(query_bounds + sequence + 1) - first_query
    count = tl.load(key_bounds + sequence + 1) - first_key
    before = count - queries  # the position of the first query
    if tile * ROWS >= queries * GROUP:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + row % GROUP
    token = first_query.to(tl.int64) + row // GROUP
    position = before + row // GROUP
    lane = tl.arange(0, WIDTH)
    mine = (row < queries * GROUP)[:, None] & (lane < D)[None, :]
    query = tl.load(q + (token * q_row + head * q_head)[:, None] + lane[None, :], mask=mine, other=0.0)
    keys = k + first_key.to(tl.int64) * k_row + kv_head * k_head
    values = v + first_key.to(tl.int64) * v_row + kv_head * v_head

    top = tl.full([ROWS], _LOWEST, tl.float32)  # finite: a hidden tile's p is exp2(-inf) = 0, its factor exp2(0) = 1
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    visible = tl.maximum(before + tile * ROWS // GROUP - window + 1, 0)
    last = tl.minimum(tile * ROWS + ROWS, queries * GROUP) - 1
    for start in range(visible // KEYS * KEYS, before + last // GROUP + 1, KEYS):
        at = start + tl.arange(0, KEYS)
        there = (at < count)[:, None] & (lane < D)[None, :]
        scores = tl.dot(query, tl.trans(load_tile(keys, at, lane, k_row, there))) * scale
        behind = position[:, None] - at[None, :]
        scores = tl.where((behind >= 0) & (behind < window), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(p, 1)
        sums = tl.dot(p.to(tl.bfloat16), load_tile(values, at, lane, v_row, there), sums * factor[:, None])
        top = new_top

    place = (token * (KV_HEADS * GROUP) + head) * D
    tl.store(out + place[:, None] + lane[None, :], tl.div_rn(sums, total[:, None]).to(tl.bfloat16), mask=mine)
    tl.store(lse + head.to(tl.int64) * T + token, top * _LN2 + log(total), mask=row < queries * GROUP)
