"""Gated units against the reference on the same device, for every bf16 gate, and their quantisers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from precgraph.format import Format

pytest.importorskip("triton")
from precgraph.lowering.reference import elementwise
from precgraph.lowering.triton import gated
from tests.gpu.device import DEVICE, KERNELS, sizes
from tests.gpu.same import ROWS, RULES, TOKENS, assert_quantized, awkward, same_bits

pytestmark = KERNELS

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
COUNTS = sizes((1, 7, 129, 1000, 8192), (1, 129))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_gate(activation: str) -> None:
    gate = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=DEVICE).view(torch.bfloat16).view(512, 128)
    gate = torch.where(gate.isfinite(), gate, 0.5)
    up, dy = awkward(512, 128, seed=1), awkward(512, 128, seed=2)
    assert same_bits(gated.gated(gate, up, activation), elementwise.gated(gate, up, activation))
    mine, right = gated.gated_backward(dy, gate, up, activation), elementwise.gated_backward(dy, gate, up, activation)
    assert same_bits(mine[0], right[0]) and same_bits(mine[1], right[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", sizes([384, 1408], [384]))
def test_fused_with_the_quantisers_on_column_slices(activation: str, width: int) -> None:
    for count in COUNTS:
        gate, up = torch.randn(1, count, 2 * width, device=DEVICE).bfloat16().split(width, dim=-1)
        dy = torch.randn(1, count, width, device=DEVICE).bfloat16() * 1e-3
        value = elementwise.gated(gate, up, activation)
        made = gated.fused_gated(gate, up, activation, rows_fmt=ROWS)
        assert made.rows is not None and made.value is None
        assert_quantized(made.rows, value, ROWS)
        made = gated.fused_gated(gate, up, activation, rows_fmt=ROWS, tokens_fmt=TOKENS, want_value=True)
        assert made.rows is not None and made.tokens is not None and made.value is not None
        assert same_bits(made.value, value)
        assert_quantized(made.rows, value, ROWS)
        assert_quantized(made.tokens, value, TOKENS)

        right = elementwise.gated_backward(dy, gate, up, activation)
        grads = gated.fused_gated_backward(dy, gate, up, activation, rows_fmt=ROWS, tokens_fmt=TOKENS)
        assert grads.rows is not None and grads.tokens is not None and grads.dgate is None
        for i, grad in enumerate(right):
            assert_quantized(grads.rows[i], grad, ROWS)
            assert_quantized(grads.tokens[i], grad, TOKENS)
        both = torch.cat(right, dim=-1)
        assert_quantized(grads.rows[2], both, ROWS)
        assert_quantized(grads.tokens[2], both, TOKENS)


def test_a_width_that_is_not_whole_blocks() -> None:
    for count, width in ((100, 300), *((count, 576) for count in COUNTS)):
        gate, up = awkward(1, count, width, seed=1), awkward(1, count, width, seed=2)
        value = elementwise.gated(gate, up, "silu")
        made = gated.fused_gated(gate, up, "silu", rows_fmt=ROWS, tokens_fmt=TOKENS, want_value=True)
        assert made.rows is not None and made.tokens is not None and made.value is not None
        assert same_bits(made.value, value)
        assert_quantized(made.rows, value, ROWS)
        assert_quantized(made.tokens, value, TOKENS)
        grads = gated.fused_gated_backward(up, gate, up, "silu", rows_fmt=ROWS, tokens_fmt=TOKENS)
        assert grads.rows is not None and grads.tokens is not None
        for i, grad in enumerate(elementwise.gated_backward(up, gate, up, "silu")):
            assert_quantized(grads.rows[i], grad, ROWS)
            assert_quantized(grads.tokens[i], grad, TOKENS)


@pytest.mark.parametrize("width", [256, 300])
@pytest.mark.parametrize(
    ("activation", "rows_fmt", "tokens_fmt"),
    [("silu", ROWS, TOKENS), ("gelu", ROWS, None), ("gelu_tanh", None, TOKENS), ("silu", None, None)],
)
def test_the_unit_made_again_with_its_gradients(
    activation: str, width: int, rows_fmt: Format | None, tokens_fmt: Format | None
) -> None:
    """The bits of the kernels that make one of the two, whatever else is asked for."""
    for count in COUNTS:
        dy, gate, up = (awkward(count, width, seed=3 * count + i) for i in range(3))
        formats = {"rows_fmt": rows_fmt, "tokens_fmt": tokens_fmt, "want_value": True}
        both = gated.fused_gated_backward(dy, gate, up, activation, unit_fmt=TOKENS, **formats)
        unit = gated.fused_gated(gate, up, activation, tokens_fmt=TOKENS).tokens
        grads = gated.fused_gated_backward(dy, gate, up, activation, **formats)
        assert both.unit is not None and unit is not None and grads.unit is None
        assert_quantized(both.unit, elementwise.gated(gate, up, activation), TOKENS)
        pairs = [(both.unit, unit), *zip(both.rows or (), grads.rows or (), strict=True)]
        pairs += zip(both.tokens or (), grads.tokens or (), strict=True)
        assert len(pairs) == 1 + 3 * (rows_fmt is not None) + 3 * (tokens_fmt is not None)
        for mine, right in pairs:
            assert mine.codes.stride() == right.codes.stride() and mine.scales.stride() == right.scales.stride()
            assert same_bits(mine.codes, right.codes) and same_bits(mine.scales, right.scales)
        for mine, right in ((both.dgate, grads.dgate), (both.dup, grads.dup)):
            assert mine is not None and right is not None and same_bits(mine, right)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_awkward_values_in_every_layout(activation: str) -> None:
    for count in COUNTS:
        dy, gate, up = (awkward(count, 256, seed=3 * count + i) for i in range(3))
        value, right = elementwise.gated(gate, up, activation), elementwise.gated_backward(dy, gate, up, activation)
        for rows_fmt in (None, ROWS):
            formats = {"rows_fmt": rows_fmt, "tokens_fmt": TOKENS, "want_value": True}
            made = gated.fused_gated(gate, up, activation, **formats)
            assert made.value is not None and made.tokens is not None and (made.rows is None) == (rows_fmt is None)
            assert same_bits(made.value, value)
            assert_quantized(made.tokens, value, TOKENS)
            grads = gated.fused_gated_backward(dy, gate, up, activation, **formats)
            assert grads.dgate is not None and grads.dup is not None and grads.tokens is not None
            assert same_bits(grads.dgate, right[0]) and same_bits(grads.dup, right[1])
            for i, grad in enumerate(right):
                assert_quantized(grads.tokens[i], grad, TOKENS)
            if made.rows is not None and grads.rows is not None:
                assert_quantized(made.rows, value, ROWS)
                assert_quantized(grads.rows[2], torch.cat(right, dim=-1), ROWS)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str) -> None:
    rows_fmt, tokens_fmt = replace(ROWS, **RULES[rule]), replace(TOKENS, **RULES[rule])
    dy, gate, up = (awkward(sizes(300, 130), 384, seed=i) for i in range(3))
    value, right = elementwise.gated(gate, up, "silu"), elementwise.gated_backward(dy, gate, up, "silu")
    made = gated.fused_gated(gate, up, "silu", rows_fmt=rows_fmt, tokens_fmt=tokens_fmt)
    grads = gated.fused_gated_backward(dy, gate, up, "silu", rows_fmt=rows_fmt, tokens_fmt=tokens_fmt)
    assert made.rows is not None and made.tokens is not None and grads.rows is not None and grads.tokens is not None
    assert_quantized(made.rows, value, rows_fmt)
    assert_quantized(made.tokens, value, tokens_fmt)
    for unit_fmt in (tokens_fmt, TOKENS):
        again = gated.fused_gated_backward(dy, gate, up, "silu", tokens_fmt=tokens_fmt, unit_fmt=unit_fmt)
        assert again.unit is not None and again.tokens is not None
        assert_quantized(again.unit, value, unit_fmt)
        assert_quantized(again.tokens[0], right[0], tokens_fmt)
    for i, grad in enumerate(right):
        assert_quantized(grads.rows[i], grad, rows_fmt)
        assert_quantized(grads.tokens[i], grad, tokens_fmt)
