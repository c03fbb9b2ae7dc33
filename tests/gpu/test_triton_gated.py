"""Gated units against the reference on the same device, for every bf16 gate, and their quantisers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from precgraph.lowering.reference import elementwise
from precgraph.lowering.triton import gated
from tests.gpu.device import DEVICE, KERNELS, sizes
from tests.gpu.same import ROWS, RULES, TOKENS, assert_quantized, awkward, same_bits

pytestmark = KERNELS

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
COUNTS = sizes((1, 7, 129, 1000), (1, 129))


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
        grads = gated.fused_gated_backward(up, gate, up, "silu", rows_fmt=ROWS)
        assert grads.rows is not None
        for i, grad in enumerate(elementwise.gated_backward(up, gate, up, "silu")):
            assert_quantized(grads.rows[i], grad, ROWS)


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
    for i, grad in enumerate(right):
        assert_quantized(grads.rows[i], grad, rows_fmt)
        assert_quantized(grads.tokens[i], grad, tokens_fmt)
