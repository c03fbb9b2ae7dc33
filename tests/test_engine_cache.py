"""The engine's cache: prefixes that are shared and forgotten, blocks that run out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import precgraph
from precgraph.errors import InputError, StaleWeightsError
from precgraph.runtime import engine as engine_module
from precgraph.runtime.cache import ROOT, BlockPool, PagedCache, PagedContext, Span
from precgraph.runtime.contexts import varlen
from precgraph.runtime.engine import Engine
from precgraph.runtime.sampling import SamplingParams
from tests.rollouts import compiled_pair, mixed_params, outputs, pair, prompts_of, worst_difference


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by the number of tokens of every call of the program."""
    counts: list[int] = []
    run = engine_module.run_paged

    def counting(compiled: Any, cache: Any, parts: Any) -> Tensor:
        counts.append(sum(stop - start for _, _, start, stop in parts))
        return run(compiled, cache, parts)

    monkeypatch.setattr(engine_module, "run_paged", counting)
    yield counts


def test_a_group_computes_its_prompt_once(computed: list[int]) -> None:
    _, rollout = pair("llama")
    prompt = prompts_of((129,))[0]
    engine = Engine(rollout, max_batch_tokens=50, self_check=False)
    group = engine.generate([prompt] * 6, mixed_params(6, max_tokens=3))
    assert [c.cached_tokens for c in group] == [0] + [128] * 5
    assert sum(computed) == 129 + 5 + 6 * 2
    again = engine.generate([prompt], SamplingParams(max_tokens=3, seed=100, temperature=0.7))
    assert again[0].cached_tokens == 128
    assert outputs(again) == outputs(group[:1])


def test_new_weights_drop_the_cache() -> None:
    actor, rollout = compiled_pair("llama", num_hidden_layers=1)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    prompts, params = prompts_of((70, 70)), [SamplingParams(max_tokens=5, seed=1)] * 2
    prompts[1] = prompts[0]
    engine = Engine(rollout)
    old = engine.generate(prompts, params)
    assert worst_difference(actor, old, params, "packed") == 0.0

    precgraph.token_logprobs(actor, torch.tensor(prompts)).sum().backward()
    optimizer.step()
    with pytest.raises(StaleWeightsError, match="sync"):
        engine.generate(prompts, params)

    version = actor.sync()
    new = engine.generate(prompts, params)
    assert [c.weights_version for c in (*old, *new)] == [version - 1] * 2 + [version] * 2
    assert new[0].cached_tokens == 0 and new[1].cached_tokens == 64
    assert worst_difference(actor, new, params, "left") == 0.0
    assert outputs(new) == outputs(Engine(rollout, prefix_caching=False).generate(prompts, params))

    # The control: had the old keys and values been used, the comparison would have noticed.
    precgraph.token_logprobs(actor, torch.tensor(prompts)).sum().backward()
    optimizer.step()
    engine.cache.pool.version = actor.sync()
    assert worst_difference(actor, engine.generate(prompts, params), params, "left") > 0.0


def test_weights_that_change_during_a_call_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, rollout = compiled_pair("llama", num_hidden_layers=1)
    engine = Engine(rollout)
    run = engine_module.run_paged

    def syncing(*args: Any) -> Tensor:
        actor.sync()
        return run(*args)

    monkeypatch.setattr(engine_module, "run_paged", syncing)
    with pytest.raises(StaleWeightsError, match="during generate"):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))


def test_a_failed_call_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rollout = pair("llama")
    prompt = prompts_of((64,))
    engine = Engine(rollout, max_batch_tokens=20, self_check=False)
    run = engine_module.run_paged
    with monkeypatch.context() as patch:
        calls: list[int] = []

        def failing(*args: Any) -> Tensor:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return run(*args)

        patch.setattr(engine_module, "run_paged", failing)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt, SamplingParams(max_tokens=2, seed=0))
    done = engine.generate(prompt, SamplingParams(max_tokens=2, seed=0))
    assert done[0].cached_tokens == 0
    assert outputs(done) == outputs(Engine(rollout).generate(prompt, SamplingParams(max_tokens=2, seed=0)))


def test_keys_of_a_call_are_those_of_each_sequence() -> None:
    """Whole, chunked, decoding, with a shared page and pages out of order: one gather gives each sequence its own."""
    compiled = pair("llama")[1].precgraph
    cache = PagedCache(compiled.graph, torch.device("cpu"), 12, 4, reuse=False)
    layer, (keys, values) = next(iter(cache.layers.items()))
    for t in (keys, values):
        t.copy_(torch.randn(t.shape))
    calls = [([7, 2, 9], 0, 9), ([2, 5], 6, 7), ([11], 3, 4), ([3, 0, 1, 8], 5, 16)]  # blocks, start, stop
    spans, slots, count = [], [], 0
    for blocks, start, stop in calls:
        spans.append(Span(count, count + stop - start, start, blocks))
        slots += cache.slots(blocks, start, stop)
        count += stop - start
    k, v = (torch.randn(1, count, *keys.shape[2:]).bfloat16() for _ in range(2))
    context = PagedContext(cache, torch.tensor(slots), spans)
    flat = varlen(context, layer, k, v)
    assert flat.query_bounds.tolist() == [0, 9, 10, 11, 22] and flat.key_bounds.tolist() == [0, 9, 16, 20, 36]
    assert (flat.longest_query, flat.longest_keys) == (11, 16) and flat.query_bounds.dtype == torch.int32
    first = 0
    for (blocks, start, stop), attended in zip(calls, context.sequences(layer, k, v), strict=True):
        own = torch.stack([keys[blocks[p // 4], p % 4] for p in range(stop)])
        assert torch.equal(attended.keys, own) and torch.equal(flat.keys[first : first + stop], own)
        assert torch.equal(own[start:], k[0, attended.start : attended.stop]) and attended.position == start
        assert torch.equal(attended.values, flat.values[first : first + stop])
        first += stop
    assert first == len(flat.keys) == len(flat.values)


def test_pool_finds_only_equal_tokens_after_an_equal_prefix() -> None:
    pool = BlockPool(8, 2)
    blocks = pool.allocate(3)
    first = pool.publish(ROOT, (5, 6), blocks[0])
    pool.publish(first, (7, 8), blocks[1])
    assert pool.acquire([5, 6, 7, 8, 9], 2)[0] == blocks[:2]
    assert pool.acquire([5, 6, 7, 8], 1)[0] == blocks[:1]
    assert pool.acquire([7, 8, 5, 6], 2)[0] == []
    collision = 5 + 2**61 - 1  # Python's hash of an integer is taken modulo this prime
    assert hash((collision, 6)) == hash((5, 6))
    assert pool.acquire([collision, 6], 1)[0] == []


def test_pool_evicts_the_least_recently_used_and_ends_before_beginnings() -> None:
    pool = BlockPool(4, 1)
    chain = pool.allocate(3)
    prefix = ROOT
    for token, block in enumerate(chain):
        prefix = pool.publish(prefix, (token,), block)
    pool.release(chain)
    assert pool.available == 4
    pool.allocate(2)  # the free block, and one of the chain
    held, _ = pool.acquire([0, 1, 2], 3)
    assert held == chain[:2]
    assert pool.available == 0
    pool.release(held)
    pool.serve(2)
    assert pool.acquire([0], 1)[0] == [] and pool.available == 4


# ------------------------------------------------------------------------------------- blocks run out


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests_go_on_with_what_they_sampled(computed: list[int], prefix_caching: bool) -> None:
    actor, rollout = pair("llama")
    prompts = prompts_of((20, 20, 20, 20))
    params = mixed_params(4, max_tokens=30)
    expected = outputs(Engine(rollout, self_check=False).generate(prompts, params))
    roomy = sum(computed)
    computed.clear()
    tight = Engine(rollout, block_size=4, cache_blocks=26, prefix_caching=prefix_caching, self_check=False)
    completions = tight.generate(prompts, params)
    assert outputs(completions) == expected
    assert sum(computed) > roomy  # something was computed twice, so something was preempted
    assert worst_difference(actor, completions, params, "packed") == 0.0
    assert tight.cache.pool.available == 26


def test_what_can_never_fit_is_an_error() -> None:
    _, rollout = pair("llama")
    engine = Engine(rollout, block_size=4, cache_blocks=5, self_check=False)
    assert len(engine.generate([[3] * 10], SamplingParams(max_tokens=11, seed=0))[0].token_ids) == 11
    with pytest.raises(InputError, match="need 6 cache blocks of 4 tokens, more than all 5; .*cache_blocks=6"):
        engine.generate([[3] * 10], SamplingParams(max_tokens=12))


@pytest.mark.parametrize("blocks", [2**50, 2**62])  # beyond every memory, and beyond what 64 bits count
def test_a_cache_that_no_memory_holds_is_an_error(blocks: int) -> None:
    _, rollout = pair("llama")
    with pytest.raises(InputError, match=rf"a cache of {blocks} blocks takes [0-9.]+ GB, .*; lower cache_blocks"):
        Engine(rollout, cache_blocks=blocks, self_check=False)
