# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Gated units, ``act(gate) * up``, fused with the quantisers of what they make; forward and backward.

Bits are those of :mod:`precgraph.lowering.reference.elementwise` followed by :func:`precgraph.formats.quantize`.
``gate`` and ``up`` may be column slices of one projection's output. Operands and results are bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError, LoweringError
from precgraph.formats import Format, QTensor
from precgraph.lowering.triton.layouts import flatten, new_rows, new_tokens, pairs, require_bf16
from precgraph.lowering.triton.primitives import (
    EXACT,
    GROUP,
    activation_slope,
    activation_value,
    bf16,
    ceil_div,
    require,
    rule,
    source,
    store_rows,
    store_tokens,
    tile_of,
)

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
    the gradient of a fused gate-and-up projection whose parts are padded to 128 each.
    """

    dgate: Tensor | None
    dup: Tensor | None
    rows: tuple[QTensor, ...] | None
    tokens: tuple[QTensor, ...] | None


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
    shape, height, (rows_rule, tokens_rule) = _prepare((gate, up), activation, rows_fmt, tokens_fmt)
    value = torch.empty(shape, dtype=gate.dtype, device=gate.device) if want_value else None
    rows = new_rows(shape, rows_fmt, gate.device)[0] if rows_fmt is not None else None
    tokens = new_tokens(shape, tokens_fmt, gate.device)[0] if tokens_fmt is not None else None
    left, right = flatten(gate), flatten(up)
    T, width = left.shape
    tiles = ceil_div(T, height) * ceil_div(width, GROUP)
    _gated_kernel[(tiles,)](
        left,
        right,
        value,
        rows and rows.codes,
        rows and rows.scales,
        pairs(tokens),
        tokens and tokens.scales,
        T,
        left.stride(0),
        right.stride(0),
        width,
        height,
        activation,
        source(rows_fmt, tokens_fmt),
        rows_rule,
        tokens_rule,
        num_warps=4 if tokens is None else 8,
        maxnreg=None if tokens is None else 128,
        **EXACT,
    )
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
    want_value: bool = False,
) -> GatedGrads:
    """:func:`gated_backward`, its value optional, both gradients quantised for DGrad and WGrad in one read."""
    shape, height, (rows_rule, tokens_rule) = _prepare((dy, gate, up), activation, rows_fmt, tokens_fmt)
    if tokens_fmt is not None and shape[-1] % GROUP:
        raise LoweringError(
            f"gradients of a gated unit {shape[-1]} wide are not whole blocks of {GROUP}",
            remedy="quantise the value of gated_backward instead",
        )
    dgate = torch.empty(shape, dtype=dy.dtype, device=dy.device) if want_value else None
    dup = torch.empty_like(dgate) if dgate is not None else None
    rows = new_rows(shape, rows_fmt, dy.device, parts=2) if rows_fmt is not None else None
    tokens = new_tokens(shape, tokens_fmt, dy.device, parts=2) if tokens_fmt is not None else None
    grad, left, right = flatten(dy), flatten(gate), flatten(up)
    T, width = left.shape
    tiles = ceil_div(T, height) * ceil_div(width, GROUP)
    _gated_backward_kernel[(tiles,)](
        grad,
        left,
        right,
        dgate,
        dup,
        rows and rows[-1].codes,
        rows and rows[-1].scales,
        pairs(tokens[-1] if tokens is not None else None),
        tokens and tokens[-1].scales,
        T,
        grad.stride(0),
        left.stride(0),
        right.stride(0),
        width,
        height,
        activation,
        source(rows_fmt, tokens_fmt),
        rows_rule,
        tokens_rule,
        num_warps=4 if tokens is None else 8,
        **EXACT,
    )
    return GatedGrads(dgate, dup, rows, tokens)


def _prepare(
    operands: tuple[Tensor, ...], activation: str, rows_fmt: Format | None, tokens_fmt: Format | None
) -> tuple[torch.Size, int, tuple[object, object]]:
    """Check a call; the shape, the height of a tile and the compiled formats."""
    require(*operands)
    require_bf16(**dict(zip(("up", "gate", "dy"), reversed(operands), strict=False)))
    if len({t.shape for t in operands}) != 1:
        raise InputError(f"operands of a gated unit differ in shape: {[list(t.shape) for t in operands]}")
    if activation not in _ACTIVATIONS:
        raise LoweringError(f"no Triton kernel computes {activation!r}", remedy=f"known: {', '.join(_ACTIVATIONS)}")
    height = GROUP if tokens_fmt is not None else _ROWS
    return operands[0].shape, height, (rule(rows_fmt, "1x128"), rule(tokens_fmt, "128x1"))


@triton.jit
def _load(x, rows, cols, stride, inside):
    return tl.load(x + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _inside(rows, cols, T, WIDTH: tl.constexpr):
    return rows[:, None] < T if WIDTH % 128 == 0 else (rows[:, None] < T) & (cols[None, :] < WIDTH)


@triton.jit
def _value(gate, up, value, rows, cols, T, gate_stride, up_stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """``act(gate) * up`` of a tile, bf16, stored if asked for."""
    inside = _inside(rows, cols, T, WIDTH)
    activated = activation_value(_load(gate, rows, cols, gate_stride, inside), ACTIVATION)
    y = (bf16(activated) * _load(up, rows, cols, up_stride, inside)).to(tl.bfloat16)
    if value is not None:
        tl.store(value + rows[:, None].to(tl.int64) * WIDTH + cols[None, :], y, mask=inside)
    return y


@triton.jit(do_not_specialize=["T"])
def _gated_kernel(
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
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SOURCE: tl.constexpr,
    ROWS_RULE: tl.constexpr,
    TOKENS_RULE: tl.constexpr,
):
    """One tile ``[ROWS, 128]``; for groups of tokens as even and odd rows."""
    columns: tl.constexpr = (WIDTH + 127) // 128
    EVEN: tl.constexpr = WIDTH % 128 == 0
    if TOKENS_RULE is None:
        line, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    else:
        line, column = tile_of(tl.program_id(0), tl.cdiv(T, 128), columns)
    col = column * 128
    cols = col + tl.arange(0, 128)
    if TOKENS_RULE is None:
        rows = line * ROWS + tl.arange(0, ROWS)
        y = _value(gate, up, value, rows, cols, T, gate_stride, up_stride, WIDTH, ACTIVATION)
        if ROWS_RULE is not None:
            store_rows(y.to(SOURCE), rows_codes, rows_scales, rows, col, T, columns * 128, ROWS_RULE)
    else:
        rows = line * 128 + 2 * tl.arange(0, 64)
        even = _value(gate, up, value, rows, cols, T, gate_stride, up_stride, WIDTH, ACTIVATION).to(SOURCE)
        odd = _value(gate, up, value, rows + 1, cols, T, gate_stride, up_stride, WIDTH, ACTIVATION).to(SOURCE)
        if ROWS_RULE is not None:
            store_rows(even, rows_codes, rows_scales, rows, col, T, columns * 128, ROWS_RULE)
            store_rows(odd, rows_codes, rows_scales, rows + 1, col, T, columns * 128, ROWS_RULE)
        store_tokens(even, odd, tokens_codes, tokens_scales, line, cols, T, WIDTH, WIDTH, TOKENS_RULE, EVEN)


@triton.jit
def _grads(
    dy, gate, up, dgate, dup, rows, cols, T, dy_stride, gate_stride, up_stride,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``(dgate, dup)`` of a tile, bf16, stored if asked for."""
    inside = _inside(rows, cols, T, WIDTH)
    g = _load(dy, rows, cols, dy_stride, inside)
    x = _load(gate, rows, cols, gate_stride, inside)
    into_gate = bf16(g * _load(up, rows, cols, up_stride, inside)) * activation_slope(x, ACTIVATION)
    into_gate = into_gate.to(tl.bfloat16)
    into_up = (g * bf16(activation_value(x, ACTIVATION))).to(tl.bfloat16)
    if dgate is not None:
        at = rows[:, None].to(tl.int64) * WIDTH + cols[None, :]
        tl.store(dgate + at, into_gate, mask=inside)
        tl.store(dup + at, into_up, mask=inside)
    return into_gate, into_up


@triton.jit(do_not_specialize=["T"])
def _gated_backward_kernel(
    dy,
    gate,
    up,
    dgate,
    dup,
    rows_codes,
    rows_scales,
    tokens_codes,
    tokens_scales,
    T,
    dy_stride,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SOURCE: tl.constexpr,
    ROWS_RULE: tl.constexpr,
    TOKENS_RULE: tl.constexpr,
):
    """One tile ``[ROWS, 128]`` of both gradients; dup's part of the joint buffers starts ``columns`` blocks later."""
    columns: tl.constexpr = (WIDTH + 127) // 128
    EVEN: tl.constexpr = WIDTH % 128 == 0
    if TOKENS_RULE is None:
        line, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    else:
        line, column = tile_of(tl.program_id(0), tl.cdiv(T, 128), columns)
    col = column * 128
    cols = col + tl.arange(0, 128)
    to = columns * 128 + col
    if TOKENS_RULE is None:
        rows = line * ROWS + tl.arange(0, ROWS)
        into_gate, into_up = _grads(
            dy, gate, up, dgate, dup, rows, cols, T, dy_stride, gate_stride, up_stride, WIDTH, ACTIVATION
        )
        if ROWS_RULE is not None:
            store_rows(into_gate.to(SOURCE), rows_codes, rows_scales, rows, col, T, columns * 256, ROWS_RULE)
            store_rows(into_up.to(SOURCE), rows_codes, rows_scales, rows, to, T, columns * 256, ROWS_RULE)
    else:
        K: tl.constexpr = 2 * WIDTH
        rows = line * 128 + 2 * tl.arange(0, 64)
        gate_even, up_even = _grads(
            dy, gate, up, dgate, dup, rows, cols, T, dy_stride, gate_stride, up_stride, WIDTH, ACTIVATION
        )
        gate_odd, up_odd = _grads(
            dy, gate, up, dgate, dup, rows + 1, cols, T, dy_stride, gate_stride, up_stride, WIDTH, ACTIVATION
        )
        gate_even, gate_odd = gate_even.to(SOURCE), gate_odd.to(SOURCE)
        up_even, up_odd = up_even.to(SOURCE), up_odd.to(SOURCE)
        if ROWS_RULE is not None:
            store_rows(gate_even, rows_codes, rows_scales, rows, col, T, columns * 256, ROWS_RULE)
            store_rows(gate_odd, rows_codes, rows_scales, rows + 1, col, T, columns * 256, ROWS_RULE)
            store_rows(up_even, rows_codes, rows_scales, rows, to, T, columns * 256, ROWS_RULE)
            store_rows(up_odd, rows_codes, rows_scales, rows + 1, to, T, columns * 256, ROWS_RULE)
        store_tokens(gate_even, gate_odd, tokens_codes, tokens_scales, line, cols, T, K, K, TOKENS_RULE, EVEN)
        store_tokens(up_even, up_odd, tokens_codes, tokens_scales, line, WIDTH + cols, T, K, K, TOKENS_RULE, EVEN)
