"""What FlashAttention-3 is asked for, without a GPU: the bound on queries, and the window that sets a tile of keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precgraph import ops
from precgraph.lowering import flash_attention, registry
from precgraph.lowering.attention_nodes import WIDTHS, spec_of
from precgraph.lowering.flash_attention import PAGED_QUERY_BOUND, QUERY_BOUND
from precgraph.ops import AttentionSpec
from precgraph.passes.pipeline import build
from precgraph.passes.rewrite import is_call
from precgraph.recipe import Recipe
from precgraph.runtime.contexts import PackedContext
from precgraph.trace import trace
from tests.families import meta_lm

VLLM, FA3_FWD = ("vllm.vllm_flash_attn", "vllm 0.26.0"), ("fa3_fwd_interface", "fa3-fwd 0.0.3")
INT32 = 2**31 - 1


@pytest.fixture(params=[VLLM, FA3_FWD], ids=["vllm", "fa3-fwd"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build that is found; its attention only keeps what it was asked for."""
    asked: list[tuple[int, ...]] = []

    def varlen(q: Any, k: Any, v: Any, *, max_seqlen_q: int, max_seqlen_k: int, window_size: Any, **rest: Any) -> Any:
        assert rest["causal"] and rest["num_splits"] == 1 and rest["fa_version"] == 3
        asked.append((max_seqlen_q, max_seqlen_k, *window_size))
        return q, q

    def operator(*given: Any) -> Any:
        causal, *window = given[24:27]
        assert causal is True and given[31] == 1  # one split
        asked.append((*given[12:14], *window))
        return given[0], given[0]

    module = SimpleNamespace(flash_attn_varlen_func=varlen, fa3_fwd_cuda=SimpleNamespace(fwd=operator))
    monkeypatch.setattr(flash_attention, "library", lambda: request.param)
    monkeypatch.setattr(flash_attention, "_module", lambda: module)

    def call(width: int, longest: int = 300) -> tuple[int, ...]:
        """``(longest query, longest keys, left, right)`` for sequences of ``longest`` and 5 tokens."""
        spec = AttentionSpec(width**-0.5, 0, 0.0, 0, 2, 1, width)
        q, k = (torch.zeros(1, longest + 5, heads, width) for heads in (2, 1))
        flash_attention.forward(q[0], PackedContext((0, longest, longest + 5)).varlen(0, k, k), spec)
        return asked.pop()

    return SimpleNamespace(name=request.param[1], call=call)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_window_that_no_sequence_reaches_where_only_windows_have_the_tile_of_pages(library: Any, width: int) -> None:
    """FA3 forgets a window of ``left >= longest keys - 1``, and adds ``left`` to positions in int32."""
    queries, keys, left, right = library.call(width)
    assert queries == 300
    if library.name.startswith("vllm") and width in (80, 96):
        assert 100_000_000 < left < keys - 1 and left + 100_000_000 < INT32 and keys <= INT32 and right == 0
    else:
        assert (keys, left, right) == (300, -1, -1)


@pytest.mark.parametrize("window", [0, 100])
def test_a_layer_with_a_window_is_served_backwards_alone(window: int) -> None:
    """Where a chunk begins decides its tiles of keys, and only the forward meets chunks."""
    graph = build(trace(meta_lm("mistral")).graph, "train", Recipe.jet_rl())
    for op, served in ((ops.attention, not window), (ops.attention_backward, True)):
        node = next(n for n in graph if is_call(n, op))
        node.args = (*node.args[:-1], replace(spec_of(node), head_dim=128, window=window))
        (kernel,) = registry._KERNELS[op.__name__, "flash_attention"]
        assert kernel.serves(node) is served


@pytest.mark.parametrize("width", WIDTHS)
def test_few_queries_have_the_bound_of_many(library: Any, width: int) -> None:
    assert library.call(width, longest=7)[0] == QUERY_BOUND


def test_the_record_says_what_tiles_there_are(library: Any) -> None:
    """The two builds do not differ in their names alone."""
    fixed = "one split, queries >= 128, as unpaged"
    windowed = ", 80 and 96 wide as windowed" if library.name.startswith("vllm") else ""
    assert flash_attention._numerics() == f"{library.name}: {fixed}{windowed}"


def test_pages_are_exact_at_every_width_that_is_served() -> None:
    assert tuple(PAGED_QUERY_BOUND) == WIDTHS
