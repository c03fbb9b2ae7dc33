"""Which requests of a step attend to the step's own keys, without a GPU."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.vllm


def split(requests: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]] | None]:
    """``(tokens, keys)`` of each request of a step, to those that attend over pages, and rows of the fresh ones."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from precgraph.runtime.vllm.attention_gpu import without_fresh

    lengths = [n for n, _ in requests]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    keys = torch.tensor([k for _, k in requests], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=keys, seq_lens_cpu_upper_bound=keys,
        num_reqs=len(requests), num_actual_tokens=sum(lengths), max_query_len=max(lengths), max_seq_len=max(keys),
        block_table_tensor=torch.zeros(len(requests), 8, dtype=torch.int32),
        slot_mapping=torch.arange(sum(lengths)),
    )  # fmt: skip
    paged, fresh = without_fresh(step)
    assert paged.num_reqs == len(paged.seq_lens) == len(paged.block_table_tensor) == len(paged.query_start_loc) - 1
    kept = list(zip(paged.query_start_loc.diff().tolist(), paged.seq_lens.tolist(), strict=True))
    if fresh is None:
        assert paged is step
        return kept, None
    if fresh.start:
        assert paged.num_actual_tokens == fresh.start == sum(n for n, _ in kept)
        assert paged.max_query_len == max(n for n, _ in kept)
    assert fresh.bounds.dtype == torch.int32 and fresh.longest == int(fresh.bounds.diff().max())
    assert fresh.start + int(fresh.bounds[-1]) == fresh.stop == sum(lengths)
    bounds = (fresh.start + fresh.bounds).tolist()
    return kept if fresh.start else [], list(pairwise(bounds))


@pytest.mark.parametrize(
    ("requests", "paged", "fresh"),
    [
        ([(1, 70), (1, 9), (100, 100), (30, 30)], [(1, 70), (1, 9)], [(2, 102), (102, 132)]),
        ([(1, 70), (40, 140), (100, 100)], [(1, 70), (40, 140)], [(41, 141)]),  # a chunk, its prompt's end
        ([(100, 100), (1, 5)], [(100, 100), (1, 5)], None),  # none after the last that has keys
        ([(5, 5), (3, 9), (1, 1), (7, 7)], [(5, 5), (3, 9)], [(8, 9), (9, 16)]),
        ([(5, 5), (7, 7)], [], [(0, 5), (5, 12)]),
        ([(1, 1), (1, 8), (1, 1)], [(1, 1), (1, 8), (1, 1)], None),  # a captured step stays whole
        ([(2, 8), (0, 0)], [(2, 8), (0, 0)], None),  # padding is no request
    ],
)
def test_prompts_that_have_nothing_cached(
    requests: list[tuple[int, int]], paged: list[tuple[int, int]], fresh: list[tuple[int, int]] | None
) -> None:
    assert split(requests) == (paged, fresh)


@pytest.mark.parametrize("start", [0, 4])
def test_each_row_is_written_by_its_own_call(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged rows, two fresh sequences, and rows of padding, which nobody writes."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from precgraph.lowering import flash_attention
    from precgraph.runtime.vllm.attention_gpu import Fresh, OneSplitImpl

    rows = start + 6
    query, key, value = (torch.randn(rows + 2, heads, 8) for heads in (4, 2, 2))
    output = torch.full((rows + 2, 4, 8), -1.0)

    def paged(self: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: Any, metadata: Any, out: Tensor) -> Tensor:
        assert start, "there is nothing over pages"
        out[: metadata.num_actual_tokens] = 0
        return out

    def whole(q: Tensor, call: Any, spec: Any, out: Tensor) -> None:
        assert torch.equal(call.keys, key[start:rows]) and torch.equal(call.values, value[start:rows])
        assert torch.equal(q, query[start:rows]) and call.query_bounds is call.key_bounds
        assert (spec.scale, spec.window, spec.softcap, spec.heads, spec.kv_heads) == (0.5, 0, 0, 4, 2)
        for i, (a, b) in enumerate(pairwise(call.query_bounds.tolist())):
            out[a:b] = 1 + i

    monkeypatch.setattr(FlashAttentionImpl, "forward", paged)
    monkeypatch.setattr(flash_attention, "forward", whole)
    impl = OneSplitImpl.__new__(OneSplitImpl)
    impl.scale, impl.logits_soft_cap, impl.num_heads, impl.num_kv_heads, impl.head_size = 0.5, 0, 4, 2, 8
    fresh = Fresh(start, rows, torch.tensor([0, 2, 6], dtype=torch.int32), 4)
    metadata = SimpleNamespace(fresh=fresh, num_actual_tokens=start)
    assert impl.forward(None, query, key, value, None, metadata, output) is output
    assert output[:, 0, 0].tolist() == [0.0] * start + [1.0] * 2 + [2.0] * 4 + [-1.0] * 2
