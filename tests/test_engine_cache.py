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
from precgraph.runtime.cache import ROOT, BlockPool
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
