"""RoPE, alone and after the norm of queries and keys, against the reference on the same device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from precgraph import ops
from precgraph.errors import InputError
from precgraph.lowering.reference import elementwise
from precgraph.lowering.triton import rope
from tests.gpu.device import DEVICE, KERNELS, sizes
from tests.gpu.same import extreme, same_bits

pytestmark = KERNELS

EPS = 1e-6
COUNTS = sizes((1, 7, 129, 1000, 8192), (1, 17))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN alike; a zero's sign in a gradient is that of autograd's sums (see ``triton/kernels.py``)."""
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def inputs(count: int, head: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x and dy [1, T, 6, D], both column slices; weight; cos and sin of real positions."""
    x, dy = (torch.randn(1, count, 10 * head, device=DEVICE).bfloat16() for _ in range(2))
    heads = [ops.split_heads(t[..., 2 * head : 8 * head], head) for t in (x, dy)]
    weight = 1 + 0.1 * torch.randn(head, device=DEVICE).bfloat16()
    inv_freq = 1.0 / 10000 ** (torch.arange(0, head, 2, device=DEVICE) / head)
    cos, sin = ops.rope_table(torch.arange(count, device=DEVICE)[None], inv_freq, 1.0, dtype)
    return heads[0], heads[1], weight, cos, sin


@pytest.mark.parametrize("head", sizes([64, 80, 96, 128, 256], [64, 80, 128]))
def test_forward(head: int) -> None:
    for count in COUNTS:
        x, _, weight, cos, sin = inputs(count, head)
        assert same_bits(rope.rope(x, cos, sin), ops.rope(x, cos, sin))
        assert same_bits(rope.rope(x, cos, sin, wide=True), elementwise.wide_rope(x, cos, sin))
        normed = elementwise.rms_norm(x, weight, EPS)
        assert same_bits(rope.norm_rope(x, weight, EPS, cos, sin), ops.rope(normed, cos, sin))


@pytest.mark.parametrize("head", sizes([64, 80, 128, 256], [64, 80]))
def test_backward(head: int) -> None:
    for count in COUNTS:
        x, dy, weight, cos, sin = inputs(count, head)
        grad = ops.rope_backward(dy, cos, sin)
        assert torch.equal(rope.rope_backward(dy, cos, sin), grad)
        wide = elementwise.wide_rope_backward(dy, cos, sin)
        assert same_bits(rope.rope_backward(dy, cos, sin, wide=True), wide)
        dx, dweight = rope.norm_rope_backward(dy, x, weight, EPS, cos, sin)
        right, _ = elementwise.rms_norm_backward(grad, x, weight, EPS)
        assert torch.equal(dx, right)
        terms = grad.double() * elementwise._normed(x, EPS)[0].bfloat16().double()
        error = (dweight.double() - terms.sum((0, 1, 2))).abs()
        assert bool((error <= 2.0**-8 * terms.sum((0, 1, 2)).abs() + 1e-6 * terms.abs().sum((0, 1, 2))).all())
        assert same_bits(dweight, rope.norm_rope_backward(dy, x, weight, EPS, cos, sin)[1])


@pytest.mark.parametrize("head", [64, 80, 128])
@pytest.mark.parametrize("heads", sizes([1, 5, 32], [1, 5]))
def test_extreme_values(head: int, heads: int) -> None:
    for count in COUNTS[:3]:
        _, _, weight, cos, sin = inputs(count, head)
        x, dy = (extreme(1, count, heads, head, seed=seed + count) for seed in (1, 2))
        assert same_bits(rope.rope(x, cos, sin), ops.rope(x, cos, sin))
        assert same_bits(rope.rope(x, cos, sin, wide=True), elementwise.wide_rope(x, cos, sin))
        normed = elementwise.rms_norm(x, weight, EPS)
        assert same_bits(rope.norm_rope(x, weight, EPS, cos, sin), ops.rope(normed, cos, sin))
        assert same_bits(rope.norm_rope(x, weight, EPS, cos, sin, wide=True), elementwise.wide_rope(normed, cos, sin))
        grad = rope.rope_backward(dy, cos, sin)
        assert same_values(grad, ops.rope_backward(dy, cos, sin))
        wide = rope.rope_backward(dy, cos, sin, wide=True)
        assert same_bits(wide, elementwise.wide_rope_backward(dy, cos, sin))
        for turned, is_wide in ((grad, False), (wide, True)):
            dx, _ = rope.norm_rope_backward(dy, x, weight, EPS, cos, sin, wide=is_wide)
            assert same_values(dx, elementwise.rms_norm_backward(turned, x, weight, EPS)[0])


def test_wide_rope_with_fp32_tables() -> None:
    x, dy, _, cos, sin = inputs(50, 128, torch.float32)
    assert same_bits(rope.rope(x, cos, sin, wide=True), elementwise.wide_rope(x, cos, sin))
    assert same_bits(rope.rope_backward(dy, cos, sin, wide=True), elementwise.wide_rope_backward(dy, cos, sin))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("head", [64, 80, 128])
@pytest.mark.parametrize("heads", sizes([(32, 8), (9, 3), (4, 1), (1, 2)], [(4, 1), (1, 2)]))
def test_q_and_k_in_one_launch(heads: tuple[int, int], head: int, wide: bool) -> None:
    """The bits of two launches and of the reference; q and k are slices of one projection or have other strides."""
    H, H_K = heads
    turn = elementwise.wide_rope if wide else ops.rope
    for count in sizes((*range(1, 20), 64, 129, 300), (1, 9)):
        _, _, weight, cos, sin = inputs(count, head)
        weights = [weight, weight.flip(0) + 0.5]
        joint = extreme(1, count, (H + 2 * H_K) * head, seed=count)
        slices = joint[..., : H * head], joint[..., H * head : (H + H_K) * head]
        q, k = (ops.split_heads(part, head) for part in slices)
        spread = k.repeat_interleave(2, dim=2)[:, :, ::2]
        for pair in ([q, k], [q.contiguous(), k], [q, spread]):
            plain = rope.rotate(pair, [], 0.0, cos, sin, wide)
            normed = rope.rotate(pair, weights, EPS, cos, sin, wide)
            assert len(plain) == len(normed) == 2
            for x, gain, turned, after_norm in zip(pair, weights, plain, normed, strict=True):
                assert same_bits(turned, rope.rope(x, cos, sin, wide=wide))
                assert same_bits(turned, turn(x, cos, sin))
                assert same_bits(after_norm, rope.norm_rope(x, gain, EPS, cos, sin, wide=wide))
                assert same_bits(after_norm, turn(elementwise.rms_norm(x, gain, EPS), cos, sin))


def test_q_and_k_of_different_shapes_are_refused() -> None:
    q, _, _, cos, sin = inputs(5, 64)
    with pytest.raises(InputError, match="cos and sin"):
        rope.rotate([q, q[:, :4]], [], 0.0, cos, sin, False)
