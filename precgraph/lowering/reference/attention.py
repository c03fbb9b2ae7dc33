"""Reference attention: causal, grouped-query, bitwise independent of how the queries are cut into calls.

A token must get the same bits when a trainer scores the whole sequence, when an engine prefills it in chunks
and when it decodes one token at a time. Three rules make that true by construction, not by luck:

* Queries are handled in tiles of ``QUERY_TILE`` positions that start at absolute multiples of it, keys in
  tiles of ``KEY_TILE`` likewise. A tile that a call fills only in part is padded with zero rows, so every
  product has the same shape, the same strides and each query the same row, whatever else the call holds.
* Which key tiles a query tile visits depends on the tile's positions alone, never on the queries present.
* Every other operation is elementwise, or a reduction along a row of fixed length.

All that is asked of the platform is that a row of an fp32 ``bmm`` does not depend on the other rows' values.

Non-finite values are not contained: an inf or NaN in ``v`` also reaches earlier queries that share its key
tile (0 * inf is NaN). The result is then NaN, never a plausible number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from precgraph.errors import InputError

if TYPE_CHECKING:
    from precgraph.ops import AttentionSpec

__all__ = ["KEY_TILE", "QUERY_TILE", "attend", "attend_backward", "attend_packed", "attend_packed_backward"]

KEY_TILE = 128
QUERY_TILE = 8  # small, since decoding fills one row; divides KEY_TILE, so a tile's last key tile is one for all
BACKWARD_QUERIES = 128
BACKWARD_KEYS = 512


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: int,
    spec: AttentionSpec,
    *,
    need_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, query_start: int, spec: AttentionSpec, *, need_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor, k: Tensor, v: Tensor, query_start: int, spec: AttentionSpec, *, need_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the queries at positions ``query_start .. query_start + N - 1`` of ONE sequence.

    ``q [N, H, D]``, ``k, v [S, Hkv, D]``, all bf16 with any strides; row ``j`` of ``k`` and ``v`` is position
    ``j`` and ``S >= query_start + N``: rows after the last query are never read. Query ``i`` sees key ``j``
    if ``j <= i`` and, with a window, ``i - j < window``.

    Numerics: scores q·k in fp32, times ``scale``, then ``softcap * tanh(scores / softcap)`` if set; online
    softmax in fp32 over key tiles; P rounded to bf16 for P·V, its sum taken before that rounding; fp32
    accumulation.

    Returns ``out [N, H, D]`` bf16 and, on request, ``lse [N, H]`` fp32, the natural log of the sum of
    exponentiated scores. Not differentiable: :func:`attend_backward` is the gradient. Raises InputError on
    shapes or dtypes that do not fit.
    """
    _check_operands(q, k, v, spec)
    count, stop = q.shape[0], query_start + q.shape[0]
    if query_start < 0 or k.shape[0] < stop:
        raise InputError(
            f"queries at positions {query_start}..{stop - 1} need as many keys, got {k.shape[0]}",
            remedy="pass the keys of positions 0 up to the last query",
        )
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        first = query_start - query_start % QUERY_TILE
        keys = {
            start: (_tile(k[:stop], start, KEY_TILE, spec), _tile(v[:stop], start, KEY_TILE, spec))
            for start in _key_tiles(first, stop, spec)
        }
        for start in range(first, stop, QUERY_TILE):
            offset = start - query_start
            tile_out, tile_lse = _attend_tile(_tile(q, offset, QUERY_TILE, spec), start, keys, spec)
            low, high = max(offset, 0), min(offset + QUERY_TILE, count)
            out[low:high] = tile_out[low - offset : high - offset]
            lse[low:high] = tile_lse[low - offset : high - offset]
    return (out, lse) if need_lse else out


def attend_packed(q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """:func:`attend` for whole sequences laid end to end: ``q [1, T, H, D]``, ``k, v [1, T, Hkv, D]`` bf16.

    ``bounds`` are the cumulative starts ``0, ..., T``; each sequence's positions count from 0 and none sees
    another. Returns ``out [1, T, H * D]`` bf16 and ``lse [T, H]`` fp32, bitwise those of each sequence alone.
    """
    _check_packed(q, k, v, bounds)
    tokens = q.shape[1]
    out = q.new_empty((1, tokens, spec.heads * spec.head_dim))
    lse = q.new_empty((tokens, spec.heads), dtype=torch.float32)
    for part in _parts(bounds):
        part_out, lse[part] = attend(q[0, part], k[0, part], v[0, part], 0, spec, need_lse=True)
        out[0, part] = part_out.flatten(1)
    return out, lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attend` for one whole sequence: ``dq [S, H, D]``, ``dk, dv [S, Hkv, D]``, bf16.

    ``dout, q, out [S, H, D]``, ``k, v [S, Hkv, D]`` bf16, ``lse [S, H]`` fp32 as the forward returned them. P
    is computed anew from ``lse`` in blocks, so memory grows with S, not S². fp32 throughout (the rounding of
    P counts as the identity); dk and dv accumulate in fp32 over blocks in a fixed order. Formula: Dao et al.,
    FlashAttention (2022), algorithm 4, with the derivative of the soft cap.
    """
    _check_operands(q, k, v, spec)
    if not dout.shape == out.shape == q.shape or lse.shape != q.shape[:2] or k.shape[0] != q.shape[0]:
        raise InputError(
            f"dout {tuple(dout.shape)}, out {tuple(out.shape)}, q {tuple(q.shape)}, lse {tuple(lse.shape)} "
            f"and k {tuple(k.shape)} are not of one whole sequence",
            remedy="pass what attend was given and returned with query_start=0",
        )
    length = q.shape[0]
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        keys, values = _tile(k, 0, length, spec), _tile(v, 0, length, spec)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        dq = q.new_empty(q.shape)
        for start in range(0, length, BACKWARD_QUERIES):
            size = min(BACKWARD_QUERIES, length - start)
            queries, douts, outs, lses = (_tile(x, start, size, spec) for x in (q, dout, out, lse[..., None]))
            delta = (douts * outs).sum(-1, keepdim=True)
            dqueries = torch.zeros_like(queries)
            first = _first_visible(start, spec)
            for low in range(first - first % BACKWARD_KEYS, start + size, BACKWARD_KEYS):
                block = slice(low, min(low + BACKWARD_KEYS, start + size))
                scores = _scores(queries, keys[:, block], start - low, spec)
                p = torch.exp(scores - lses)
                dvalues[:, block] += torch.bmm(p.transpose(1, 2), douts)
                dscores = p * (torch.bmm(douts, values[:, block].transpose(1, 2)) - delta)
                if spec.softcap:  # the clamp gives a masked -inf, whose p is 0, the derivative 0 and not NaN
                    dscores *= 1 - (scores.clamp_min(-spec.softcap) / spec.softcap).square()
                dscores *= spec.scale
                dqueries += torch.bmm(dscores, keys[:, block])
                dkeys[:, block] += torch.bmm(dscores.transpose(1, 2), queries)
            dq[start : start + size] = _untile(dqueries, size)
        dk, dv = (x.transpose(0, 1).to(q.dtype).contiguous() for x in (dkeys, dvalues))
    return dq, dk, dv


def attend_packed_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Sequence[int],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attend_packed`: ``dq [1, T, H, D]``, ``dk, dv [1, T, Hkv, D]``, bf16.

    ``dout, out [1, T, H * D]`` bf16, ``lse [T, H]`` fp32; the rest as in the forward. Each sequence's are
    those that :func:`attend_backward` gives for it alone.
    """
    _check_packed(q, k, v, bounds)
    dout, out = (x.view(q.shape) for x in (dout, out))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    for part in _parts(bounds):
        dq[0, part], dk[0, part], dv[0, part] = attend_backward(
            dout[0, part], q[0, part], k[0, part], v[0, part], out[0, part], lse[part], spec
        )
    return dq, dk, dv


# ------------------------------------------------------------------------------------------------- tiles


def _attend_tile(
    queries: Tensor, query_start: int, keys: dict[int, tuple[Tensor, Tensor]], spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """One query tile ``[Hkv, QUERY_TILE * G, D]`` against the key tiles that it can see.

    Returns out ``[QUERY_TILE, H, D]`` and lse ``[QUERY_TILE, H]``, fp32. The running maximum starts at the
    least finite number, not -inf: in a key tile that lies before some row's window, every p of the row is
    then exp(-inf) = 0 and the rescaling exactly 1, with no inf - inf to guard against.
    """
    acc = torch.zeros_like(queries)
    total = torch.zeros_like(queries[..., :1])
    top = torch.full_like(total, torch.finfo(torch.float32).min)
    for key_start in _key_tiles(query_start, query_start + QUERY_TILE, spec):
        key_tile, value_tile = keys[key_start]
        scores = _scores(queries, key_tile, query_start - key_start, spec)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        p = scores.sub_(new_top).exp_()
        rescale = torch.exp(top - new_top)
        total = total.mul_(rescale).add_(p.sum(-1, keepdim=True))
        acc = acc.mul_(rescale).add_(torch.bmm(p.bfloat16().float(), value_tile))
        top = new_top
    return _untile(acc / total, QUERY_TILE), _untile(top + torch.log(total), QUERY_TILE).squeeze(-1)


def _scores(queries: Tensor, keys: Tensor, distance: int, spec: AttentionSpec) -> Tensor:
    """Scaled, capped and masked scores ``[Hkv, n * G, keys]`` of n query positions against a run of keys.

    The first query lies ``distance`` positions after the first key. A mask that would hide nothing is left
    out, which changes no bit.
    """
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(spec.scale)
    if spec.softcap:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    groups, key_count = spec.heads // spec.kv_heads, keys.shape[1]
    query_count = queries.shape[1] // groups
    if distance < key_count - 1 or (spec.window and distance + query_count > spec.window):
        query = torch.arange(distance, distance + query_count, device=scores.device)
        behind = query[:, None] - torch.arange(key_count, device=scores.device)
        hidden = behind < 0
        if spec.window:
            hidden |= behind >= spec.window
        by_position = scores.view(spec.kv_heads, query_count, groups, key_count)
        by_position.masked_fill_(hidden[:, None], -torch.inf)
    return scores


def _first_visible(query: int, spec: AttentionSpec) -> int:
    return max(0, query - spec.window + 1) if spec.window else 0


def _key_tiles(query_start: int, query_stop: int, spec: AttentionSpec) -> range:
    """Starts of the key tiles that queries ``query_start .. query_stop - 1`` can see."""
    first = _first_visible(query_start, spec)
    return range(first - first % KEY_TILE, query_stop, KEY_TILE)


def _tile(x: Tensor, start: int, size: int, spec: AttentionSpec) -> Tensor:
    """Rows ``start .. start + size - 1`` of ``x [N, h, D]`` as fp32 ``[Hkv, size * h / Hkv, D]``, contiguous.

    Rows outside ``x`` (``start`` may be negative) are zero. Positions are the slower part of the row index.
    """
    count, heads, dim = x.shape
    groups = heads // spec.kv_heads
    low, high = max(start, 0), min(start + size, count)
    tile = x.new_zeros((spec.kv_heads, size, groups, dim), dtype=torch.float32)
    tile[:, low - start : high - start] = x[low:high].view(-1, spec.kv_heads, groups, dim).transpose(0, 1)
    return tile.flatten(1, 2)


def _untile(tile: Tensor, size: int) -> Tensor:
    """The inverse of :func:`_tile`: ``[Hkv, size * G, D]`` to ``[size, H, D]``."""
    kv_heads, rows, dim = tile.shape
    return tile.view(kv_heads, size, rows // size, dim).transpose(0, 1).flatten(1, 2)


# ------------------------------------------------------------------------------------------------- checks


def _parts(bounds: Sequence[int]) -> Iterator[slice]:
    return (slice(low, high) for low, high in pairwise(bounds) if high > low)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
    if any(x.dtype != torch.bfloat16 for x in (q, k, v)):
        raise InputError(
            f"attention takes bfloat16 q, k and v, got {q.dtype}, {k.dtype}, {v.dtype}", remedy="convert them"
        )
    queries, keys = (q.shape[0], spec.heads, spec.head_dim), (k.shape[0], spec.kv_heads, spec.head_dim)
    if q.shape != queries or k.shape != keys or v.shape != keys:
        raise InputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit {spec.heads} heads, "
            f"{spec.kv_heads} KV heads and a head width of {spec.head_dim}",
            remedy="pass [tokens, heads, width], token-major",
        )


def _check_packed(q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int]) -> None:
    tokens = q.shape[1]
    if not all(x.ndim == 4 and x.shape[:2] == (1, tokens) for x in (q, k, v)):
        raise InputError(
            f"packed q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} are not [1, T, heads, width]",
            remedy="pack all sequences into one row",
        )
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or list(bounds) != sorted(bounds):
        raise InputError(
            f"bounds {list(bounds)} do not divide {tokens} tokens",
            remedy=f"pass ascending sequence starts from 0 to {tokens}",
        )
