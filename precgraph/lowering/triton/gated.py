# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Gated units, ``act(gate) * up``, fused with the quantisers of what they make; forward and backward.

Bits are those of :mod:`precgraph.lowering.reference.elementwise` followed by :func:`precgraph.quantizer.quantize`.
``gate`` and ``up`` may be column slices of one projection's output. Operands and results are bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError, LoweringError
from precgraph.format import Format
from precgraph.lowering.packs import padded
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
from precgraph.lowering.triton.layouts import apart, matrix, new_like, new_rows, new_tokens, require_bf16, words
from precgraph.lowering.triton.primitives import (
    EXACT,
    GROUP,
    OVERLAPPING,
    activation_slope,
    activation_value,
    await_inputs,
    ceil_div,
    inside_tile,
    load_tile,
    meaning,
    narrow,
    store_groups,
    store_rows,
    times,
    widen,
)
from precgraph.quantizer import QTensor

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_ROWS = 32  # of a tile that is not quantised along tokens


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """What :func:`fused_gated` made of ``act(gate) * up [..., I]``; None where it was not asked for."""

    value: Tensor | None
    rows: QTensor | None
    tokens: QTensor | None


@dataclass(frozen=True, slots=True, eq=False)
class GatedGrads:
    """What :func:`fused_gated_backward` made; None where it was not asked for.

    ``rows`` and ``tokens`` are (dgate, dup, both): the parts are column slices of ``both [..., 2·pad(I)]``, which is
    the gradient of a fused gate-and-up projection whose parts are padded to 128 each. ``unit`` is the value of the
    forward, ``act(gate) * up``, quantised along tokens.
    """

    dgate: Tensor | None
    dup: Tensor | None
    rows: tuple[QTensor, ...] | None
    tokens: tuple[QTensor, ...] | None
    unit: QTensor | None


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``bf16(act(gate)) * up``."""
    value = fused_gated(gate, up, activation, want_value=True).value
    assert value is not None
    return value


def fused_gated(
    gate: Tensor,
    up: Tensor,
    activation: str,
    *,
    rows_fmt: Format | None = None,
    tokens_fmt: Format | None = None,
    want_value: bool = False,
) -> Gated:
    """:func:`gated`, its value optional, quantised along rows, tokens or both in one read of ``gate, up [..., I]``."""
    require_bf16(up=up, gate=gate)
    _check((gate, up), activation)
    rounded, rows_rule, tokens_rule = meaning(rows_fmt, tokens_fmt)
    shape, device = gate.shape, gate.device
    value = new_like(gate) if want_value else None
    rows = new_rows(shape, rows_fmt, device) if rows_fmt is not None else None
    tokens = new_tokens(shape, tokens_fmt, device) if tokens_fmt is not None else None
    (left, left_step), (right, right_step) = matrix(gate), matrix(up)
    T, width = shape[:-1].numel(), shape[-1]
    operands = (left, right, value, rows and rows.codes, rows and rows.scales)
    sizes, constants = (T, left_step, right_step, width), (activation, rounded, rows_rule)
    grid = (ceil_div(T, _ROWS if tokens is None else GROUP) * ceil_div(width, GROUP),)
    if tokens is None:
        _gated_kernel[grid](*operands, *sizes, _ROWS, *constants, num_warps=4, **OVERLAPPING)
    else:
        outputs = (words(tokens), tokens.scales)
        _gated_tiles[grid](*operands, *outputs, *sizes, *constants, tokens_rule, num_warps=WARPS, **EXACT)
    return Gated(value, rows, tokens)


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``(dgate, dup)`` of :func:`gated`; ``dy * up`` is rounded before it meets the derivative."""
    grads = fused_gated_backward(dy, gate, up, activation, want_value=True)
    assert grads.dgate is not None and grads.dup is not None
    return grads.dgate, grads.dup


def fused_gated_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    *,
    rows_fmt: Format | None = None,
    tokens_fmt: Format | None = None,
    unit_fmt: Format | None = None,
    want_value: bool = False,
) -> GatedGrads:
    """:func:`gated_backward`, its value optional, both gradients quantised for DGrad and WGrad in one read.

    With ``unit_fmt`` that read also makes :func:`gated` again, along tokens: WGrad's operand of the linear behind it.
    """
    require_bf16(up=up, gate=gate, dy=dy)
    _check((dy, gate, up), activation)
    rounded, rows_rule, tokens_rule = meaning(rows_fmt, tokens_fmt)
    unit_rounded, _, unit_rule = meaning(None, unit_fmt)
    shape, device = dy.shape, dy.device
    dgate = new_like(dy) if want_value else None
    dup = new_like(dy) if want_value else None
    T, width = shape[:-1].numel(), shape[-1]
    both = torch.Size((*shape[:-1], 2 * padded(width)))
    rows = new_rows(both, rows_fmt, device) if rows_fmt is not None else None
    tokens = new_tokens(both, tokens_fmt, device) if tokens_fmt is not None else None
    unit = new_tokens(shape, unit_fmt, device) if unit_fmt is not None else None
    (grad, grad_step), (left, left_step), (right, right_step) = matrix(dy), matrix(gate), matrix(up)
    operands = (grad, left, right, dgate, dup, rows and rows.codes, rows and rows.scales)
    sizes, constants = (T, grad_step, left_step, right_step, width), (activation, rounded, rows_rule)
    along_rows = tokens is None and unit is None
    grid = (ceil_div(T, _ROWS if along_rows else GROUP) * ceil_div(width, GROUP),)
    if along_rows:
        _backward_kernel[grid](*operands, *sizes, _ROWS, *constants, num_warps=4, **EXACT)
    else:
        outputs = [part for q in (tokens, unit) for part in ((words(q), q.scales) if q else (None, None))]
        rules = (tokens_rule, unit_rounded, unit_rule)
        _backward_tiles[grid](*operands, *outputs, *sizes, *constants, *rules, num_warps=WARPS, **EXACT)
    return GatedGrads(dgate, dup, _with_parts(rows, (gate, up)), _with_parts(tokens, (gate, up)), unit)


def _with_parts(both: QTensor | None, parts: Sequence[Tensor]) -> tuple[QTensor, ...] | None:
    return None if both is None else (*apart(both, parts), both)


def _check(operands: Sequence[Tensor], activation: str) -> None:
    shape = operands[0].shape
    if any(t.shape != shape for t in operands):
        raise InputError(f"operands of a gated unit differ in shape: {[list(t.shape) for t in operands]}")
    if activation not in _ACTIVATIONS:
        raise LoweringError(f"no Triton kernel computes {activation!r}", remedy=f"known: {', '.join(_ACTIVATIONS)}")


@triton.jit
def _value(gate, up, ACTIVATION: tl.constexpr):
    """``act(gate) * up``, of bf16 values."""
    return times(narrow(activation_value(widen(gate), ACTIVATION)), up)


@triton.jit
def _grads(dy, gate, up, ACTIVATION: tl.constexpr):
    """``(dgate, dup)``, of bf16 values."""
    x = widen(gate)
    into_up = times(dy, narrow(activation_value(x, ACTIVATION)))
    return narrow(widen(times(dy, up)) * activation_slope(x, ACTIVATION)), into_up


@triton.jit
def _keep(y, out, rows, cols, T, WIDTH: tl.constexpr):
    """Store a tile as it is, where a buffer is given."""
    if out is not None:
        at = out + rows[:, None].to(tl.int64) * WIDTH + cols[None, :]
        tl.store(at, y, mask=inside_tile(rows, cols, T, WIDTH))


# ------------------------------------------------------------------------------------------ without tokens


@triton.jit(do_not_specialize=["T"])
def _gated_kernel(
    gate,
    up,
    value,
    codes,
    scales,
    T,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SOURCE: tl.constexpr,
    RULE: tl.constexpr,
):
    """One tile ``[ROWS, 128]``."""
    await_inputs()
    columns: tl.constexpr = (WIDTH + 127) // 128
    col = tl.program_id(0) % columns * 128
    rows = tl.program_id(0) // columns * ROWS + tl.arange(0, ROWS)
    cols = col + tl.arange(0, 128)
    inside = inside_tile(rows, cols, T, WIDTH)
    left = load_tile(gate, rows, cols, gate_stride, inside)
    right = load_tile(up, rows, cols, up_stride, inside)
    y = _value(left, right, ACTIVATION)
    _keep(y, value, rows, cols, T, WIDTH)
    if RULE is not None:
        store_rows(y.to(SOURCE), codes, scales, rows, col, T, columns * 128, RULE)


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dy,
    gate,
    up,
    dgate,
    dup,
    codes,
    scales,
    T,
    dy_stride,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SOURCE: tl.constexpr,
    RULE: tl.constexpr,
):
    """One tile ``[ROWS, 128]`` of both gradients; dup's part of the joint buffers starts ``columns`` blocks later."""
    columns: tl.constexpr = (WIDTH + 127) // 128
    col = tl.program_id(0) % columns * 128
    rows = tl.program_id(0) // columns * ROWS + tl.arange(0, ROWS)
    cols = col + tl.arange(0, 128)
    inside = inside_tile(rows, cols, T, WIDTH)
    grad = load_tile(dy, rows, cols, dy_stride, inside)
    left = load_tile(gate, rows, cols, gate_stride, inside)
    right = load_tile(up, rows, cols, up_stride, inside)
    into_gate, into_up = _grads(grad, left, right, ACTIVATION)
    _keep(into_gate, dgate, rows, cols, T, WIDTH)
    _keep(into_up, dup, rows, cols, T, WIDTH)
    if RULE is not None:
        store_rows(into_gate.to(SOURCE), codes, scales, rows, col, T, columns * 256, RULE)
        store_rows(into_up.to(SOURCE), codes, scales, rows, columns * 128 + col, T, columns * 256, RULE)


# ------------------------------------------------------------------------------------------ along tokens


@gluon.jit(do_not_specialize=["T"])
def _gated_tiles(
    gate,
    up,
    value,
    rows_codes,
    rows_scales,
    tokens_codes,
    tokens_scales,
    T,
    gate_stride,
    up_stride,
    WIDTH: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SOURCE: gl.constexpr,
    ROWS_RULE: gl.constexpr,
    TOKENS_RULE: gl.constexpr,
):
    """One tile ``[128, 128]`` in chunks of rows, of which the next one is on its way."""
    columns: gl.constexpr = (WIDTH + 127) // 128
    line, column, rows, lanes = place(T, columns)
    cols = column * 128 + lanes
    sources, strides = (gate, up), (gate_stride, up_stride)
    staged = stage(SOURCE)
    ahead = fetch((), 0, sources, strides, rows, cols, T, WIDTH)
    for n in gl.static_range(CHUNKS):
        ahead = fetch(ahead, n + 1, sources, strides, rows, cols, T, WIDTH)
        y = _value(ahead[n][0], ahead[n][1], ACTIVATION)
        at = rows + n * CHUNK
        _keep(y, value, at, cols, T, WIDTH)
        y = y.to(SOURCE)
        put(y, staged, n)
        if ROWS_RULE is not None:
            store_groups(widen(y), rows_codes, rows_scales, at, cols, column, T, columns * 128, ROWS_RULE)
    store_staged(staged, tokens_codes, tokens_scales, line, column * 128, T, WIDTH, WIDTH % 128 == 0, TOKENS_RULE)


@gluon.jit(do_not_specialize=["T"])
def _backward_tiles(
    dy,
    gate,
    up,
    dgate,
    dup,
    rows_codes,
    rows_scales,
    tokens_codes,
    tokens_scales,
    unit_codes,
    unit_scales,
    T,
    dy_stride,
    gate_stride,
    up_stride,
    WIDTH: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SOURCE: gl.constexpr,
    ROWS_RULE: gl.constexpr,
    TOKENS_RULE: gl.constexpr,
    UNIT_SOURCE: gl.constexpr,
    UNIT_RULE: gl.constexpr,
):
    """:func:`_gated_tiles` of both gradients and of the unit, either perhaps not along tokens.

    Three staged tiles leave room for two programs on a processor, two for three of them.
    """
    columns: gl.constexpr = (WIDTH + 127) // 128
    BOTH: gl.constexpr = columns * 256
    line, column, rows, lanes = place(T, columns)
    cols = column * 128 + lanes
    sources, strides = (dy, gate, up), (dy_stride, gate_stride, up_stride)
    if TOKENS_RULE is not None:
        first, second = stage(SOURCE), stage(SOURCE)
    if UNIT_RULE is not None:
        third = stage(UNIT_SOURCE)
    ahead = fetch((), 0, sources, strides, rows, cols, T, WIDTH)
    for n in gl.static_range(CHUNKS):
        ahead = fetch(ahead, n + 1, sources, strides, rows, cols, T, WIDTH)
        into_gate, into_up = _grads(ahead[n][0], ahead[n][1], ahead[n][2], ACTIVATION)
        at = rows + n * CHUNK
        _keep(into_gate, dgate, at, cols, T, WIDTH)
        _keep(into_up, dup, at, cols, T, WIDTH)
        into_gate, into_up = into_gate.to(SOURCE), into_up.to(SOURCE)
        if TOKENS_RULE is not None:
            put(into_gate, first, n)
            put(into_up, second, n)
        if UNIT_RULE is not None:
            put(_value(ahead[n][1], ahead[n][2], ACTIVATION).to(UNIT_SOURCE), third, n)
        if ROWS_RULE is not None:
            to = columns + column
            store_groups(widen(into_gate), rows_codes, rows_scales, at, cols, column, T, BOTH, ROWS_RULE)
            store_groups(widen(into_up), rows_codes, rows_scales, at, columns * 128 + cols, to, T, BOTH, ROWS_RULE)
    if TOKENS_RULE is not None:
        col = (columns + column) * 128
        store_staged(first, tokens_codes, tokens_scales, line, column * 128, T, BOTH, True, TOKENS_RULE)
        store_staged(second, tokens_codes, tokens_scales, line, col, T, BOTH, True, TOKENS_RULE)
    if UNIT_RULE is not None:
        store_staged(third, unit_codes, unit_scales, line, column * 128, T, WIDTH, WIDTH % 128 == 0, UNIT_RULE)
