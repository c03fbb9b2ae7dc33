"""RMSNorm kernels against the reference on the same device, and their quantisers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from precgraph.lowering.reference import elementwise
from precgraph.lowering.triton import norm, norm_backward
from precgraph.lowering.triton.reductions import sum_rows
from tests.gpu.device import DEVICE, KERNELS, sizes
from tests.gpu.same import ROWS, TOKENS, assert_quantized, awkward, extreme, same_bits

pytestmark = KERNELS

EPS = 1e-6
COUNTS = sizes((1, 7, 64, 129, 1000, 8192), (1, 35))


@pytest.mark.parametrize("width", sizes([64, 576, 1000, 4096, 5120, 12288], [64, 576, 1000]))
def test_forward(width: int) -> None:
    weight = awkward(1, width, seed=9)[0]
    for count in COUNTS:
        x, residual = extreme(1, count, width, seed=count), extreme(1, count, width, seed=count + 1)
        for eps in (EPS, 0.0):
            assert same_bits(norm.rms_norm(x, weight, eps), elementwise.rms_norm(x, weight, eps))
        made = norm.fused_norm(x, residual, weight, EPS)
        assert made.sum is not None and same_bits(made.sum, x + residual)
        assert made.normed is not None and same_bits(made.normed, elementwise.rms_norm(x + residual, weight, EPS))


@pytest.mark.parametrize("width", sizes([576, 4096], [576, 256]))
def test_fused_with_the_residual_and_the_quantisers(width: int) -> None:
    weight = 1 + 0.1 * torch.randn(width, device=DEVICE).bfloat16()
    for count in sizes(COUNTS, (1, 129)):
        x, residual = awkward(1, count, width, seed=1), awkward(1, count, width, seed=2)
        summed = x + residual
        right = elementwise.rms_norm(summed, weight, EPS)
        for tokens_fmt in (None, TOKENS):
            made = norm.fused_norm(x, residual, weight, EPS, rows_fmt=ROWS, tokens_fmt=tokens_fmt)
            assert made.sum is not None and same_bits(made.sum, summed)
            assert made.normed is not None and same_bits(made.normed, right)
            assert made.rows is not None
            assert_quantized(made.rows, right, ROWS)
            if tokens_fmt is not None:
                assert made.tokens is not None
                assert_quantized(made.tokens, right, TOKENS)
        for rows_fmt in (ROWS, None):
            made = norm.fused_norm(x, None, weight, EPS, rows_fmt=rows_fmt, tokens_fmt=TOKENS, want_normed=False)
            assert made.sum is None and made.normed is None and made.tokens is not None
            assert (made.rows is None) == (rows_fmt is None)
            assert_quantized(made.tokens, elementwise.rms_norm(x, weight, EPS), TOKENS)


@pytest.mark.parametrize("width", sizes([576, 4096, 8192], [576, 256]))
def test_backward(width: int) -> None:
    weight = 1 + 0.1 * torch.randn(width, device=DEVICE).bfloat16()
    for count in COUNTS:
        x, dy, other = (torch.randn(1, count, width, device=DEVICE).bfloat16() for _ in range(3))
        dx, _ = elementwise.rms_norm_backward(dy, x, weight, EPS)
        mine, dweight = norm_backward.rms_norm_backward(dy, x, weight, EPS)
        assert same_bits(mine, dx)
        added = norm_backward.fused_norm_backward(dy, x, weight, EPS, other)
        assert same_bits(added.dx, dx + other) and added.tokens is None
        assert same_bits(dweight, added.dweight)
        normed = elementwise._normed(x, EPS)[0].bfloat16()
        terms = dy.double() * normed.double()
        error = (dweight.double() - terms.sum((0, 1))).abs()
        assert bool((error <= 2.0**-8 * terms.sum((0, 1)).abs() + 1e-6 * terms.abs().sum((0, 1))).all())


@pytest.mark.parametrize("width", sizes([64, 576, 4096, 12288], [64, 1000]))
def test_backward_of_extreme_values(width: int) -> None:
    weight = awkward(1, width, seed=9)[0]
    for count in COUNTS:
        x, dy, other = (extreme(1, count, width, seed=seed + count) for seed in range(3))
        right, _ = elementwise.rms_norm_backward(dy, x, weight, EPS)
        assert same_bits(norm_backward.fused_norm_backward(dy, x, weight, EPS, other).dx, right + other)


@pytest.mark.parametrize("width", sizes([576, 1000, 4096], [256, 300]))
def test_the_norm_made_again_with_its_gradients(width: int) -> None:
    """The bits of the kernels that make one of the two, on slices of rows too."""
    weight = 1 + 0.1 * torch.randn(width, device=DEVICE).bfloat16()
    for count in sizes((1, 64, 129, 1000), (1, 129)):
        wide, dy, other = (awkward(1, count, n, seed=seed) for seed, n in enumerate((2 * width, width, width)))
        for x, residual in ((wide[..., :width], None), (extreme(1, count, width, seed=count), other)):
            both = norm_backward.fused_norm_backward(dy, x, weight, EPS, residual, tokens_fmt=TOKENS)
            grads = norm_backward.fused_norm_backward(dy, x, weight, EPS, residual)
            normed = norm.fused_norm(x, None, weight, EPS, tokens_fmt=TOKENS, want_normed=False).tokens
            assert both.tokens is not None and normed is not None
            assert same_bits(both.dx, grads.dx) and same_bits(both.dweight, grads.dweight)
            assert same_bits(both.tokens.codes, normed.codes) and same_bits(both.tokens.scales, normed.scales)
            assert_quantized(both.tokens, elementwise.rms_norm(x, weight, EPS), TOKENS)


def test_strided_rows() -> None:
    wide = awkward(1, 100, 2048)
    x, weight = wide[..., 512:1088], awkward(1, 576, seed=3)[0]
    assert same_bits(norm.rms_norm(x, weight, EPS), elementwise.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("count", [1, 128, 513, 1300])
def test_rows_are_summed_in_their_order(count: int) -> None:
    """128 at a time, then those sums by halves."""
    partial = torch.randn(count, 20, device=DEVICE)
    total = torch.zeros(128, 20, device=DEVICE)
    for rows in F.pad(partial, (0, 0, 0, -count % 128)).split(128):
        total = total + rows
    while total.shape[0] > 1:
        low, high = total.chunk(2)
        total = low + high
    assert same_bits(sum_rows(partial, torch.float32), total[0])
