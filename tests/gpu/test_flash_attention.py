"""FlashAttention-3 on the card: a query's bits do not depend on packing, chunks or decoding; gradients."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Protocol

import pytest
import torch
from torch import Tensor

from precgraph.lowering import flash_attention
from precgraph.ops import AttentionSpec
from precgraph.runtime.contexts import Attended, AttentionContext, PackedContext, cumulative
from tests.gpu.device import DEVICE, sizes

pytestmark = pytest.mark.gpu

LENGTHS = (700, 33, 1, 129, 1024, 300)
SHAPES = [(128, 32, 8), (128, 16, 16), (64, 9, 3), (64, 32, 8), (80, 32, 32), (96, 32, 32), (96, 24, 8), (256, 8, 4)]


class Attention(Protocol):
    """A kernel that serves any context, but for its way to take one that attends by itself."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Parts:
    """A call on parts of sequences: ``(sequence, first position, one past the last)``, as a cache serves them."""

    keys: list[Tensor]
    values: list[Tensor]
    parts: list[tuple[int, int, int]]

    def sequences(self, layer: int, k: Tensor, v: Tensor) -> Iterator[Attended]:
        row = 0
        for index, start, stop in self.parts:
            yield Attended(row, row + stop - start, start, self.keys[index][:stop], self.values[index][:stop])
            row += stop - start


def operands(spec: AttentionSpec, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    q, k, v = (
        torch.randn(1, sum(lengths), h, spec.head_dim, generator=generator, device=DEVICE).bfloat16() for h in heads
    )
    return q, k, v


def spec_of(shape: tuple[int, int, int], window: int = 0) -> AttentionSpec:
    width, heads, kv_heads = shape
    return AttentionSpec(width**-0.5, window, 0.0, 0, heads, kv_heads, width)


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="only vLLM's build has pages")


def float64(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """One sequence ``[N, H, D]`` in float64: its output, and log-sum-exp ``[N, H]``."""
    group = spec.heads // spec.kv_heads
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
    mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
    if spec.window:
        mask = mask.triu(1 - spec.window)
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1).t()


def assert_bits_do_not_depend_on_the_call(attention: Attention, spec: AttentionSpec, lengths: Sequence[int]) -> None:
    """Rows of whole sequences packed, against those of each alone, of chunks, and of single tokens beside chunks."""
    bounds = cumulative(lengths)
    q, k, v = operands(spec, lengths)
    whole, lse = attention(q, k, v, spec, context=PackedContext(bounds))
    assert lse is not None
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    keys, values = [k[0, p] for p in parts], [v[0, p] for p in parts]

    def same(calls: list[tuple[int, int, int]]) -> bool:
        rows = torch.cat([torch.arange(bounds[i] + a, bounds[i] + b, device=DEVICE) for i, a, b in calls])
        context = Parts(keys, values, calls)
        out, again = attention(q[:, rows], k[:, rows], v[:, rows], spec, context=context)
        return again is not None and torch.equal(out, whole[:, rows]) and torch.equal(again, lse[rows])

    assert same([(i, 0, n) for i, n in enumerate(lengths)])
    assert all(same([(i, 0, n)]) for i, n in enumerate(lengths))
    for size in sizes((1024, 100, 17, 9), (100, 17)):
        for start in range(0, max(lengths), size * 3):
            assert same([(i, start, min(start + size, n)) for i, n in enumerate(lengths) if start < n]), size
    draw = random.Random(0)
    for _ in range(sizes(20, 1)):
        assert same([(i, p, p + 1) for i, n in enumerate(lengths) for p in [draw.randrange(n)]]), "decode"
        starts = [(i, draw.randrange(n), n) for i, n in enumerate(lengths)]
        assert same([(i, p, min(n, p + draw.choice((1, 1, 5, 70)))) for i, p, n in starts]), "chunks beside decode"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_call(shape: tuple[int, int, int]) -> None:
    assert_bits_do_not_depend_on_the_call(flash_attention.attention, spec_of(shape), LENGTHS)


def steps_over_pages(shape: tuple[int, int, int], page: int, sizes: list[int]) -> Iterator[bool]:
    """Whether the last so many tokens of sequences that end anywhere have the bits of whole keys, for each size.

    Under the least bound on queries that the engine may pass.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    spec, bounds = spec_of(shape), cumulative(LENGTHS)
    q, k, v = operands(spec)
    whole = flash_attention.attention(q, k, v, spec, context=PackedContext(bounds))[0][0].view(-1, *q.shape[2:])
    cache = [torch.zeros(6 * -(-1024 // page), page, *t.shape[2:], device="cuda", dtype=t.dtype) for t in (k, v)]
    pages = torch.randperm(cache[0].shape[0], generator=torch.Generator().manual_seed(0)).view(6, -1).to("cuda")
    for row, (a, b) in enumerate(pairwise(bounds)):
        at = torch.arange(b - a, device="cuda")
        for held, t in zip(cache, (k, v), strict=True):
            held[pages[row, at // page], at % page] = t[0, a:b]
    draw = random.Random(0)
    for size in sizes:
        stops = [draw.randrange(1, n + 1) for n in LENGTHS]
        starts = [max(0, n - size) for n in stops]
        rows = torch.cat(
            [torch.arange(a + i, a + j, device="cuda") for a, i, j in zip(bounds, starts, stops, strict=False)]
        )
        counts = [j - i for i, j in zip(starts, stops, strict=True)]
        out = flash_attn_varlen_func(
            q[0, rows], *cache, cu_seqlens_q=torch.tensor(cumulative(counts), device="cuda", dtype=torch.int32),
            seqused_k=torch.tensor(stops, device="cuda", dtype=torch.int32), block_table=pages.int(),
            max_seqlen_q=max(*counts, flash_attention.PAGED_QUERY_BOUND[spec.head_dim]),
            max_seqlen_k=max(stops), softmax_scale=spec.scale, causal=True, num_splits=1, fa_version=3,
        )  # fmt: skip
        yield torch.equal(out, whole[rows])


@needs_vllm
@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_give_the_bits_of_whole_keys(shape: tuple[int, int, int], page: int) -> None:
    """Steps of one token, of a few, and of chunks, the last so large that FA3 may fetch pages as it does whole keys."""
    sizes = [1] * 20 + [2, 5, 15, 16, 17, 33, 100, 300]
    equal = list(steps_over_pages(shape, page, sizes))
    assert all(equal), [size for size, same in zip(sizes, equal, strict=True) if not same]


@needs_vllm
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] in flash_attention.WHOLE_TILE], ids=str)
def test_pages_of_whole_tiles_do_not(shape: tuple[int, int, int]) -> None:
    """Why the engine refuses them: under a large bound on queries FA3 cuts them as it does whole keys."""
    assert list(steps_over_pages(shape, flash_attention.WHOLE_TILE[shape[0]], [1, 300])) == [True, False]


def test_into_a_part_of_a_buffer() -> None:
    """As a rollout's prompts are: rows of a step's output, values a slice of a projection."""
    spec = spec_of((128, 8, 2))
    q, k, v = operands(spec)
    sliced = torch.cat((v, k), -1)[..., : spec.head_dim]
    call = PackedContext(cumulative(LENGTHS)).varlen(0, k, sliced)
    right, lse = flash_attention.forward(q[0], call, spec)
    buffer = torch.full((5 + len(right) + 3, *right.shape[1:]), 7.0, device="cuda").bfloat16()
    _, same = flash_attention.forward(q[0], call, spec, out=buffer[5:-3])
    assert torch.equal(buffer[5:-3], right) and torch.equal(same, lse)
    assert bool((buffer[:5] == 7).all() and (buffer[-3:] == 7).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int, int]) -> None:
    """out within 1 % and gradients within 2 % of float64 in norm (P and dS are rounded to bf16); the same twice."""
    spec, bounds = spec_of(shape), cumulative(LENGTHS)
    inputs = operands(spec)
    context = PackedContext(bounds)
    out, lse = flash_attention.attention(*inputs, spec, context=context)
    dy = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    wide = [t.double().requires_grad_() for t in inputs]
    right = torch.cat([float64(*(t[0, a:b] for t in wide), spec)[0] for a, b in pairwise(bounds)]).flatten(1)  # type: ignore[call-arg]
    right.backward(dy[0].double())
    assert error(out[0], right.detach()) < 0.01
    grads = flash_attention.flash_backward(dy, *inputs, out, lse, spec, context=context)
    for grad, value in zip(grads, wide, strict=True):
        assert value.grad is not None and error(grad, value.grad) < 0.02
    again = flash_attention.flash_backward(dy, *inputs, out, lse, spec, context=context)
    assert all(map(torch.equal, grads, again))


def error(y: Tensor, right: Tensor) -> float:
    return float((y.double() - right).norm() / right.norm())


def test_backward_of_equal_lengths() -> None:
    """cuDNN's agrees with the flash backward; torch's switch chooses the one that repeats its bits."""
    spec = spec_of((128, 32, 8))
    q, k, v = (t[:, :2048] for t in operands(spec))
    context = PackedContext((0, 512, 1024, 1536, 2048))
    out, lse = flash_attention.attention(q, k, v, spec, context=context)
    dy = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    fast = flash_attention.backward(dy, q, k, v, out, lse, spec, context=context)
    flash = flash_attention.flash_backward(dy, q, k, v, out, lse, spec, context=context)
    for grad, other in zip(fast, flash, strict=True):
        assert 0 < error(grad, other.double()) < 0.02
    with flash_attention.deterministic():
        fixed = flash_attention.backward(dy, q, k, v, out, lse, spec, context=context)
    assert all(map(torch.equal, fixed, flash))
