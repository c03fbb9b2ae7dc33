"""FlashAttention-4's backward on the card: gradients of packed sequences, and equal bits where torch asks for them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from precgraph.lowering import flash_attention_4
from precgraph.lowering.flash_attention import deterministic
from precgraph.machine import installed
from precgraph.runtime.contexts import PackedContext, cumulative
from tests.gpu.test_flash_attention import LENGTHS, error, float64, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(installed(["flash-attn-4"]) is None, reason="needs flash-attn-4"),
]

SHAPES = [(64, 9, 3), (96, 6, 6), (128, 8, 2), (128, 4, 4), (256, 4, 2)]
draw = random.Random(0)
# Sequences that end within a tile and at its edge, shorter than one tile, and so many that the kernel searches in bins.
PACKS = {
    "mixed": LENGTHS,
    "edges": (64, 128, 192, 65),
    "short": (5, 60, 1, 3),
    "many": tuple(draw.randint(1, 40) for _ in range(300)),
}


@pytest.mark.parametrize("window", [0, 16, 600])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: tuple[int, int, int], pack: str, window: int) -> None:
    """Within 1 % of float64 in norm, from its output and log-sum-exp; in a fixed order the same bits each time."""
    spec, context = spec_of(shape, window), PackedContext(cumulative(PACKS[pack]))
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(heads: int) -> Tensor:
        size = (1, sum(PACKS[pack]), heads, spec.head_dim)
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    q, k, v, dy = (randn(h) for h in (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads))
    dy = dy.flatten(2)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    parts = [float64(*(t[0, a:b] for t in wide), spec) for a, b in pairwise(context.bounds)]  # type: ignore[call-arg]
    right, lse = (torch.cat(p) for p in zip(*parts, strict=True))
    right.flatten(1).backward(dy[0].double())
    # lse as FA3 gives it: heads first in memory
    given = right.detach().flatten(1).bfloat16()[None], lse.detach().float().t().contiguous().t()

    def grads() -> tuple[Tensor, Tensor, Tensor]:
        return flash_attention_4.backward(dy, q, k, v, *given, spec, context=context)

    for grad, value in zip(grads(), wide, strict=True):
        assert value.grad is not None and error(grad, value.grad) < 0.01
    with deterministic():
        first = grads()
        assert all(all(map(torch.equal, first, grads())) for _ in range(3))
    for grad, value in zip(first, wide, strict=True):
        assert value.grad is not None and error(grad, value.grad) < 0.01
