"""Attention under windows: against float64; a query's bits do not depend on packing, chunks or decoding; gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from precgraph import ops
from precgraph.errors import InputError
from precgraph.ops import AttentionSpec
from precgraph.runtime.contexts import PackedContext, cumulative

pytest.importorskip("triton")
from precgraph.lowering import flash_attention, flash_attention_4, registry
from precgraph.lowering.triton import attention as windows
from precgraph.machine import installed
from precgraph.passes.pipeline import build
from precgraph.passes.rewrite import is_call
from precgraph.recipe import Recipe
from precgraph.trace import trace
from tests.families import meta_lm
from tests.gpu.device import DEVICE, KERNELS, gpu_only, sizes
from tests.gpu.test_flash_attention import (
    assert_bits_do_not_depend_on_the_call,
    error,
    float64,
    operands,
    spec_of,
)

pytestmark = KERNELS

SHAPES = sizes(
    [(64, 9, 3), (64, 32, 8), (80, 32, 32), (96, 24, 8), (128, 32, 8), (128, 16, 16), (256, 8, 4)],
    [(64, 3, 1), (80, 2, 2), (96, 2, 2), (128, 4, 2), (256, 4, 2)],
)
WINDOWS = (1, 16, 40, 600)
LENGTHS = sizes((1500, 700, 33, 1, 129, 64, 300), (150, 33, 1, 64))  # within tiles of 64 keys, and at their edges


@pytest.mark.parametrize("window", sizes(WINDOWS, (40, 600)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_call(shape: tuple[int, int, int], window: int) -> None:
    assert_bits_do_not_depend_on_the_call(windows.attention, spec_of(shape, window), LENGTHS)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int, int], window: int) -> None:
    """Output within 1 % of float64 in norm (P is rounded to bf16), log-sum-exp as near as fp32 scores are."""
    spec, bounds = spec_of(shape, window), cumulative(LENGTHS)
    inputs = operands(spec, LENGTHS)
    out, lse = windows.attention(*inputs, spec, context=PackedContext(bounds))
    parts = [float64(*(t[0, a:b].double() for t in inputs), spec) for a, b in pairwise(bounds)]  # type: ignore[call-arg]
    right, right_lse = (torch.cat(p) for p in zip(*parts, strict=True))
    assert lse is not None and lse.dtype == torch.float32
    assert error(out[0], right.flatten(1)) < 0.01
    assert float((lse - right_lse).abs().max()) < 1e-4


def test_a_row_that_sees_one_key_has_its_value() -> None:
    """P is 1: every row under a window of one key, and the first of each sequence under any."""
    bounds = cumulative(LENGTHS)
    for window, rows in ((1, slice(None)), (40, list(bounds[:-1]))):
        spec = spec_of((80, 4, 2), window)
        q, k, v = operands(spec, LENGTHS)
        out, lse = windows.attention(q, k, v, spec, context=PackedContext(bounds))
        assert lse is not None and torch.equal(out[0, rows], v[0, rows].repeat_interleave(2, 1).flatten(1))
        score = (q[0].double() * k[0].double().repeat_interleave(2, 1)).sum(-1) * spec.scale
        assert float((lse[rows] - score[rows]).abs().max()) < 1e-5


def test_a_window_that_no_sequence_reaches_hides_nothing() -> None:
    spec, context = spec_of((64, 4, 2), max(LENGTHS)), PackedContext(cumulative(LENGTHS))
    inputs = operands(spec, LENGTHS)
    found = (windows.attention(*inputs, replace(spec, window=w), context=context) for w in (spec.window, 1 << 30))
    assert all(map(torch.equal, *found))


def test_scores_of_any_size() -> None:
    """Scores of thousands of both signs: each row's largest is taken off before anything overflows."""
    spec, bounds = spec_of((64, 2, 1), 40), cumulative(LENGTHS)
    q, k, v = (30 * t for t in operands(spec, LENGTHS))
    out, lse = windows.attention(q, k, v, spec, context=PackedContext(bounds))
    right = torch.cat([float64(*(t[0, a:b].double() for t in (q, k, v)), spec)[0] for a, b in pairwise(bounds)])  # type: ignore[call-arg]
    assert lse is not None and bool(lse.isfinite().all())
    assert error(out[0], right.flatten(1)) < 0.01


def test_nothing_of_another_sequence_is_read() -> None:
    """Whose keys and values are NaN."""
    spec, bounds = spec_of((96, 4, 2), 40), cumulative(LENGTHS)
    q, k, v = operands(spec, LENGTHS)
    right = windows.attention(q, k, v, spec, context=PackedContext(bounds))
    for i, (a, b) in enumerate(pairwise(bounds)):
        holed = [t.clone() for t in (q, k, v)]
        for t in holed:
            t[:, :a], t[:, b:] = math.nan, math.nan
        for mine, whole in zip(windows.attention(*holed, spec, context=PackedContext(bounds)), right, strict=True):
            assert mine is not None and whole is not None
            rows = (slice(None), slice(a, b)) if mine.ndim == 3 else (slice(a, b),)
            assert torch.equal(mine[rows], whole[rows]), i


def test_empty_sequences_are_passed_over() -> None:
    spec, inputs = spec_of((64, 3, 1), 16), operands(spec_of((64, 3, 1)), (50, 20))
    found = (windows.attention(*inputs, spec, context=PackedContext(b)) for b in ((0, 0, 50, 50, 50, 70), (0, 50, 70)))
    assert all(map(torch.equal, *found))


def test_layouts() -> None:
    """Slices of a projection as they are; values of a head that are apart are refused."""
    spec, context = spec_of((80, 6, 2), 40), PackedContext(cumulative(LENGTHS))
    inputs = operands(spec, LENGTHS)
    joined = torch.cat(inputs, 2)
    parts = joined.split([t.shape[2] for t in inputs], 2)
    found = (windows.attention(*given, spec, context=context) for given in (parts, inputs))
    assert all(map(torch.equal, *found))
    q, k, v = inputs
    apart = k.transpose(2, 3).contiguous().transpose(2, 3)
    for bad in ((q.float(), k, v), (q, apart, v)):
        with pytest.raises(InputError, match="attention takes bf16"):
            windows.attention(*bad, spec, context=context)


@pytest.mark.parametrize(("window", "forward"), [(100, "triton"), (0, "flash_attention")])
def test_who_serves_a_window(window: int, forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every library is there: FlashAttention backwards in any case, and forwards what has no window."""
    from precgraph.lowering.triton import kernels

    assert kernels and flash_attention_4  # have registered
    monkeypatch.setattr(registry, "unavailable", lambda name, device: None)
    graph = build(trace(meta_lm("mistral")).graph, "train", Recipe.jet_rl())
    order = [name for name in registry.BACKENDS["deep_gemm"] if "attention" in name or name in ("triton", "reference")]
    for op, served in ((ops.attention, forward), (ops.attention_backward, "flash_attention_4")):
        node = next(n for n in graph if is_call(n, op))
        spec = node.args[-1]
        assert isinstance(spec, AttentionSpec) and spec.window
        node.args = (*node.args[:-1], replace(spec, head_dim=128, window=window))
        assert registry.select(node, order, torch.device("cuda")).backend == served


@gpu_only("the backward is FlashAttention's")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: tuple[int, int, int], window: int) -> None:
    """From this output and log-sum-exp, by every backward: within 2 % of float64 in norm; in fixed order repeated."""
    spec, context = spec_of(shape, window), PackedContext(cumulative(LENGTHS))
    inputs = operands(spec, LENGTHS)
    out, lse = windows.attention(*inputs, spec, context=context)
    assert lse is not None
    dy = torch.randn(out.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).bfloat16()
    wide = [t.double().requires_grad_() for t in inputs]
    right = torch.cat([float64(*(t[0, a:b] for t in wide), spec)[0] for a, b in pairwise(context.bounds)])  # type: ignore[call-arg]
    right.flatten(1).backward(dy[0].double())
    backwards = [flash_attention.flash_backward]
    if installed(["flash-attn-4"]) is not None and shape[0] in flash_attention_4.WIDTHS:
        backwards.append(flash_attention_4.backward)
    for backward in backwards:
        with flash_attention.deterministic():
            grads, again = (backward(dy, *inputs, out, lse, spec, context=context) for _ in range(2))
        assert all(map(torch.equal, grads, again))
        for grad, value in zip(grads, wide, strict=True):
            assert value.grad is not None
            # One key: softmax is constant, and the gradients of queries and keys are zeros but for rounding.
            limit = 0.02 * float(value.grad.norm()) if window > 1 or grad is grads[2] else 0.02 * float(dy.norm())
            assert float((grad.double() - value.grad).norm()) <= limit
