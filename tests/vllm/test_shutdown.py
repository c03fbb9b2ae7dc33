"""Engines of one process that are shut down: what they, and the others there, answer afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precgraph
from precgraph.errors import DigestError, PrecGraphError, StaleWeightsError
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
    for llm in (first, second):  # no engine was built, or its end would have been theirs
        assert largest_difference(actor, llm.generate(prompts[:3], PARAMS), 0.7) == 0.0
    second.shutdown()
    refuses_everything(first, actor, weights, "another engine of this process was shut down")
    refuses_everything(second, actor, weights, "the engine was shut down")
    third = start(path)
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
