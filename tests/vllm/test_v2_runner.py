"""What only vLLM's V2 runner has; ``make test-vllm`` runs the tests marked ``runner`` on it besides."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from precgraph.errors import InputError
from precgraph.runtime.sampling import SamplingParams
from precgraph.runtime.vllm import RUNNER

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.runner,
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
