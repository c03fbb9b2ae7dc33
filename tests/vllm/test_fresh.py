"""What of a step attends over pages, and what to the step's own keys, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from precgraph.errors import UnsupportedModelError
from precgraph.ops import AttentionSpec

pytestmark = pytest.mark.vllm


def step_of(requests: list[tuple[int, int]]) -> Any:
    """A step of requests of so many ``(tokens, keys)``, as vLLM's runners describe it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths = [n for n, _ in requests]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    keys = torch.tensor([k for _, k in requests], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=keys, seq_lens_cpu_upper_bound=keys.clone(),
        num_reqs=len(requests), num_actual_tokens=sum(lengths), max_query_len=max(lengths), max_seq_len=max(keys),
        block_table_tensor=torch.zeros(len(requests), 8, dtype=torch.int32),
        slot_mapping=torch.arange(sum(lengths)),
    )  # fmt: skip


def split(requests: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]] | None]:
    """``(tokens, keys)`` of each request of a step, to those that attend over pages, and rows of the fresh ones."""
    from precgraph.runtime.vllm.attention_gpu import without_fresh

    step, lengths = step_of(requests), [n for n, _ in requests]
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
        ([(1, 1), (1, 8), (1, 1)], [(1, 1), (1, 8), (1, 1)], None),  # one token each
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
        assert (spec.scale, spec.window, spec.softcap) == (0.5, 0, 0)
        assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 8)
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


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours for steps of up to 200 tokens captured, over a builder of vLLM's that passes on what it is given."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder

    from precgraph.runtime.vllm.attention_gpu import OneSplitBuilder

    def passed_on(self: Any, prefix: int, step: Any, fast_build: bool = False) -> Any:
        assert prefix == 0
        made = FlashAttentionMetadata.__new__(FlashAttentionMetadata)
        fields = dict.fromkeys(FlashAttentionMetadata.__dataclass_fields__)
        given = {k: getattr(step, k) for k in ("num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens")}
        vars(made).update(fields | given | {"max_num_splits": 1, "scheduler_metadata": not fast_build})
        return made

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", passed_on)
    made = OneSplitBuilder.__new__(OneSplitBuilder)
    made.captured, made.query_bound = 200, 1
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=300))
    return made


@pytest.mark.parametrize(
    "requests",
    [[(1, 70), (1, 9)], [(1, 70), (150, 150), (30, 130)], [(1, 1)], [(200, 200)]],
    ids=["decoding", "a prompt joins", "one token", "one prompt"],
)
@pytest.mark.parametrize(("width", "bound"), [(1, 2), (128, 128)])
def test_steps_of_a_captured_size_differ_in_nothing_that_a_graph_holds(
    builder: Any, requests: list[tuple[int, int]], width: int, bound: int
) -> None:
    """What the host passes to FA3 is one bound, for all requests at once; the lengths are on the device."""
    builder.query_bound = width
    step = step_of(requests)
    made = builder.build(0, step)
    assert (made.max_query_len, made.num_actual_tokens, made.fresh) == (bound, step.num_actual_tokens, None)
    assert made.query_start_loc is step.query_start_loc and made.seq_lens is step.seq_lens
    assert made.scheduler_metadata and step.seq_lens.tolist() == [keys for _, keys in requests]


@pytest.mark.parametrize(("captured", "fresh"), [(200, False), (100, True), (0, True)])
def test_a_larger_step_is_split(builder: Any, captured: int, fresh: bool) -> None:
    builder.captured = captured
    made = builder.build(0, step_of([(1, 70), (150, 150)]))
    assert (made.fresh is not None) == fresh
    assert made.max_query_len == (1 if fresh else 2) and made.num_actual_tokens == (1 if fresh else 151)


def test_no_capture_reads_pages_beyond_the_longest_request(builder: Any) -> None:
    """vLLM captures requests as long as the step, for which a block table of a shorter model has no columns."""
    builder.captured = 512
    step = step_of([(4, 512), (508, 512), (0, 0)])
    builder.build(0, step)
    assert step.seq_lens.tolist() == [300, 300, 0]


@pytest.mark.parametrize(("width", "bound"), [(64, 128), (80, 1), (96, 1), (128, 1), (256, 1)])
def test_a_builder_fixes_what_its_width_needs(width: int, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split always; a schedule made ahead only where the length of queries that vLLM makes it for is passed too."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    from precgraph.runtime.vllm.attention_gpu import OneSplitBuilder

    def vllms(self: Any, *args: Any) -> None:
        self.max_num_splits, self.aot_schedule, self.headdim = 32, True, 1

    def made(page: int) -> Any:
        spec = SimpleNamespace(head_size=width, num_kv_heads=2, block_size=page)
        return OneSplitBuilder(spec, [], SimpleNamespace(compilation_config=compilation), torch.device("cpu"))

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", vllms)
    compilation = SimpleNamespace(cudagraph_mode=1, max_cudagraph_capture_size=512)
    for page in (16, 48, 128, 256):
        builder = made(page)
        assert (builder.headdim, builder.query_bound, builder.captured) == (width, bound, 512)
        assert builder.max_num_splits == 1 and builder.aot_schedule == (bound == 1)
    for page in (144, 432):
        if width in (80, 96):
            with pytest.raises(UnsupportedModelError, match=f"pages of {page} tokens: for heads of width {width}"):
                made(page)
        else:
            made(page)


@pytest.mark.parametrize(
    ("width", "window", "version", "words"),
    [
        (80, 0, 3, None), (96, 0, 3, None), (128, 0, 3, None),
        (80, 64, 3, "a window of 64 keys"), (128, 4096, 3, "a window of 4096 keys"),
        (72, 0, 3, "heads of width 72"), (192, 0, 3, "heads of width 192"),
        (96, 0, 2, "FlashAttention 2, the trainer does with 3"), (96, 0, None, "FlashAttention None"),
    ],
)  # fmt: skip
def test_attention_that_pages_would_change_is_refused(
    width: int, window: int, version: int | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precgraph.runtime.vllm import attention_gpu

    monkeypatch.setattr(attention_gpu, "get_flash_attn_version", lambda head_size: version)
    spec = AttentionSpec(1.0, window, 0.0, 0, 4, 2, width)
    with nullcontext() if words is None else pytest.raises(UnsupportedModelError, match=words):
        attention_gpu.require_exact(spec)


@pytest.mark.parametrize("seqs", [1, 3, 16, 64, 256, 1000])
@pytest.mark.parametrize("tokens", [5, 100, 2048, 8192])
def test_captured_sizes(seqs: int, tokens: int) -> None:
    """As many as vLLM has for decoding, 8 and then 16 apart; above them a fifth of a step is padding at most."""
    from precgraph.runtime.vllm.sizes import LARGEST, Sizes, captured_sizes

    sizes = captured_sizes(seqs, tokens)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(tokens, LARGEST)
    for decoding in range(1, min(seqs, tokens, 512) + 1):
        assert Sizes(tuple(sizes)).fit(decoding) - decoding < (8 if decoding <= 248 else 16)
    assert all(b - a - 1 <= max(15, b / 5) for a, b in pairwise(sizes))
