"""What only vLLM's V2 runner has; ``make test-vllm`` runs the tests of rollouts and syncs on it besides."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import precgraph
from precgraph.errors import InputError
from precgraph.runtime.sampling import SamplingParams
from precgraph.runtime.vllm import RUNNER
from tests.vllm.conftest import largest_difference, train_step

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(os.environ.get(RUNNER) != "1", reason="runs on vLLM's V2 runner; see the target test-vllm"),
]


def test_what_comes_past_the_front_end_is_refused(checkpoint: Callable[..., Any], start: Callable[..., Any]) -> None:
    """Nothing is, while vLLM warms up: it asks for everything then."""
    from vllm import SamplingParams as VllmParams
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    llm = start(checkpoint("llama")[1])
    config = llm.engine.llm_engine.vllm_config
    runner = llm.engine.llm_engine.model_executor.driver_worker.worker.model_runner
    assert config.use_v2_model_runner and isinstance(runner, GPUModelRunner)
    sampler, state = runner.sampler, np.random.get_state()[1].tolist()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert np.random.get_state()[1].tolist() == state  # from which vLLM would take a seed
    assert sampler.serving
    with pytest.raises(InputError, match=r"min_p = 0\.5 is refused"):
        sampler.add_request(0, VllmParams(min_p=0.5))
    sampler.serving = False
    sampler.add_request(0, VllmParams.for_sampler_warmup())


@pytest.mark.slow
def test_an_engine_of_its_own_process(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]], tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Which takes the runner that this process asked for."""
    from precgraph.vllm import save_weights

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    model, path = checkpoint("llama")
    actor = precgraph.compile(model, "train")
    llm, params = start(path), SamplingParams(max_tokens=10, temperature=0.7, top_p=0.9)
    assert largest_difference(actor, llm.generate(prompts, params), 0.7) == 0.0
    train_step(actor, 1)
    actor.sync()
    save_weights(actor, tmp_path / "w.safetensors")
    assert llm.sync(tmp_path / "w.safetensors") == 2
    samples = llm.generate(prompts, params)
    assert largest_difference(actor, samples, 0.7) == 0.0 and samples[0].kept_mass[0] < 1.0
