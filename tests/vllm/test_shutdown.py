"""Engines of one process that are shut down: what they, and the others there, answer afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

import precgraph
from precgraph.errors import DigestError, InputError, PrecGraphError, StaleWeightsError, SyncError
from precgraph.runtime.sampling import SamplingParams
from tests.vllm.conftest import largest_difference

pytestmark = pytest.mark.vllm
PARAMS = SamplingParams(max_tokens=6, temperature=0.7)


def refuses_everything(llm: Any, actor: Any, weights: Path, message: str) -> None:
    """Every method, again and again: no call makes another reason of it."""
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([[1, 2]], PARAMS), llm.sync, lambda: llm.sync(actor), lambda: llm.sync(weights),
        llm.state, llm.sleep, llm.wake,
    ]  # fmt: skip
    for call in [*calls, *calls]:
        with pytest.raises(StaleWeightsError, match=f"^{message}.*; start a new engine"):
            call()


def test_the_end_of_one_engine_is_the_end_of_all_in_its_process(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    from precgraph.vllm import save_weights

    model, path = checkpoint("llama")
    actor = precgraph.compile(model, "train")
    weights = tmp_path / "w.safetensors"
    save_weights(actor, weights)
    first, second = start(path, actor=actor), start(path)
    for digest in ("", "…", 7, "00", "0" * 63 + "g"):
        with pytest.raises(DigestError, match="is no program's digest; pass all of what precgraph digest prints"):
            start(path, digest=digest)
    with pytest.raises(DigestError, match="not the actor's"):
        start(path, actor=actor, digest="0" * 64)
    for llm in (first, second):  # no engine was built, or its end would have been theirs
        assert largest_difference(actor, llm.generate(prompts[:3], PARAMS), 0.7) == 0.0
    second.shutdown()
    refuses_everything(first, actor, weights, "another engine of this process was shut down")
    refuses_everything(second, actor, weights, "the engine was shut down")
    third = start(path)
    refuses_everything(first, actor, weights, "another engine of this process was shut down")
    second.shutdown()  # does nothing: an engine ends once
    assert largest_difference(actor, third.generate(prompts[:3], PARAMS), 0.7) == 0.0
    first.shutdown()
    refuses_everything(first, actor, weights, "the engine was shut down")
    with pytest.raises(DigestError, match="the engine runs program"):
        start(path, digest="0" * 64)
    refuses_everything(third, actor, weights, "another engine of this process was shut down")


def test_a_step_that_fails_again_and_again(checkpoint: Callable[..., Any], start: Callable[..., Any]) -> None:
    """Ending its requests takes a step too: then the engine is of no use, and says why."""
    llm = start(checkpoint("llama")[1])
    model = llm.engine.apply_model(lambda m: m)[0]

    def fails(*args: Any) -> None:
        raise PrecGraphError("no such kernel")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "compute_logits", fails)
        with pytest.raises(PrecGraphError, match="^no such kernel$"):
            llm.generate([[1, 2]], PARAMS)
    message = r"^generate\(\) broke off with PrecGraphError: no such kernel, and then .*; start a new engine$"
    for call in (lambda: llm.generate([[1, 2]], PARAMS), llm.state, llm.sync):
        with pytest.raises(StaleWeightsError, match=message):
            call()


def test_a_shutdown_that_breaks_off_can_be_called_again(
    checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(checkpoint("llama")[1])
    core, calls = llm.engine.llm_engine.engine_core, []
    end = core.shutdown

    def broken_off() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt
        end()

    monkeypatch.setattr(core, "shutdown", broken_off)
    with pytest.raises(KeyboardInterrupt):
        llm.shutdown()
    llm.shutdown()
    llm.shutdown()
    assert calls == [0, 1]


def test_the_cache_is_given_back_although_the_model_is_held(
    checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by vLLM 0.26's V2 runner, which forgets the attention layers and leaves them their part of it."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.setattr(
        CPUWorker, "shutdown", lambda worker: worker.vllm_config.compilation_config.static_forward_context.clear()
    )
    llm = start(checkpoint("llama")[1])
    layers = llm.engine.apply_model(lambda m: list(m.layers.values()))[0]
    assert layers and all(layer.kv_cache.numel() for layer in layers)
    llm.shutdown()
    assert not any(layer.kv_cache.numel() for layer in layers)


def test_a_sync_that_breaks_off_leaves_no_engine_that_mixes_weights(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the worker has taken the weights, before the keys of the old ones are dropped."""
    model, path = checkpoint("llama")
    actor = precgraph.compile(model, "train")
    llm = start(path)
    llm.sync(actor)
    llm.generate(prompts[:3], PARAMS)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "reset_prefix_cache", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.sync(actor)
    monkeypatch.undo()
    with pytest.raises(StaleWeightsError, match="broke off with KeyboardInterrupt"):
        llm.generate(prompts[:3], PARAMS)


def test_an_engine_that_sleeps_and_what_it_serves_when_it_has_woken(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU worker forgets nothing in its sleep: here it loses what a GPU's loses, and NaN would show."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    model, path = checkpoint("llama")
    actor, llm = precgraph.compile(model, "train"), start(path)
    store = llm.engine.apply_model(lambda m: m.compiled.store)[0]
    weights = [t for t in store.masters.values() if not t.is_meta]
    weights += [t for pack in store.packs.values() for t in pack.tensors().values()]

    def forgets(worker: Any, level: int = 1) -> None:
        caches = [layer.kv_cache for layer in worker.vllm_config.compilation_config.static_forward_context.values()]
        for memory in [*caches, *(weights if level == 2 else ())]:
            memory.view(torch.uint8).fill_(0xFF)  # NaN in every format

    monkeypatch.setattr(CPUWorker, "sleep", forgets)
    params = [SamplingParams(max_tokens=6, temperature=0.7, seed=i) for i in range(9)]
    before = llm.generate(prompts, params)
    assert sum(s.cached_tokens for s in llm.generate(prompts, params)) > 500
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(StaleWeightsError, match="the engine sleeps; call wake"):  # or it would wait for ever
            llm.generate(prompts[:1], PARAMS)
        for call in (llm.state, lambda: llm.sync(actor)):  # on a GPU the memory is not mapped
            with pytest.raises(SyncError, match="the engine sleeps, and its weights are not in memory; wake it"):
                call()
        llm.wake()
        if level == 2:
            with pytest.raises(StaleWeightsError, match="weights are not complete; sync the weights"):
                llm.generate(prompts[:1], PARAMS)
            llm.sync(actor)
        after = llm.generate(prompts, params)
        assert [s.cached_tokens for s in after[:7]] == [0] * 7
        assert largest_difference(actor, after, 0.7) == 0.0
        assert [(s.token_ids, s.logprobs) for s in after] == [(s.token_ids, s.logprobs) for s in before]


def test_one_thread_at_a_time(
    checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one is refused; a shutdown ends the call of another thread, with the engine's end for a reason."""
    llm = start(checkpoint("llama")[1])
    front, inside, go, ends = llm.engine.llm_engine, Event(), Event(), []
    step = front.step

    def waits() -> Any:
        inside.set()
        assert go.wait(60)
        return step()

    def other() -> None:
        try:
            llm.generate([[1, 2, 3]], PARAMS)
        except Exception as error:
            ends.append(error)

    monkeypatch.setattr(front, "step", waits)
    thread = Thread(target=other)
    thread.start()
    assert inside.wait(60)
    for call in (lambda: llm.generate([[1]], PARAMS), llm.sync):
        with pytest.raises(InputError, match="while another thread is in generate"):
            call()
    llm.shutdown()
    go.set()
    thread.join(60)
    assert [type(e) for e in ends] == [StaleWeightsError] and "the engine was shut down" in str(ends[0])
