"""One engine for each family, and configs that vLLM holds otherwise than transformers: rescored to the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

import precgraph
from precgraph.cli import app
from precgraph.loading import load_model
from precgraph.runtime.sampling import SamplingParams
from tests.families import CAUSAL_LMS, MORE_LMS, causal_lm
from tests.vllm.conftest import largest_difference
from tests.vllm.test_rollout import MAIN

pytestmark = pytest.mark.vllm
OTHERS = [f for f in (*CAUSAL_LMS, *MORE_LMS) if f not in MAIN]
# A runner sees the key cache alone: layers of two kinds, and latents.
SEEN_BY_RUNNER = ("gemma3", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shared"),
    [
        *(pytest.param(f, False, marks=pytest.mark.runner if f in SEEN_BY_RUNNER else ()) for f in OTHERS),
        *((f, True) for f in ("gemma3", "qwen3_moe")),
    ],
)
def test_every_other_family(
    family: str, shared: bool, checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]]
) -> None:
    """No code is a family's own: windows in some layers only, capped scores, stacked experts, latent attention.

    Each is loaded from its checkpoint; a trainer's store has no part that is a family's, but for experts, windows here
    and the router's bias below.
    """
    model, path = checkpoint(family)
    actor = precgraph.compile(model, "train")
    llm = start(path, actor=actor if shared else None)
    for _ in range(2):
        samples = llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0.7))
        assert largest_difference(actor, samples, 0.7) == 0.0
    if not family.startswith("deepseek"):  # vLLM caches no prefixes of what it takes for its own latent attention
        assert sum(s.cached_tokens for s in samples) > 0
    llm.shutdown()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_routers_bias_is_a_weight(
    family: str,
    exported_anew: None,
    checkpoint: Callable[..., Any],
    start: Callable[..., Any],
    prompts: list[list[int]],
) -> None:
    """Trainer, engine and command line have one digest whatever it is, and it reaches the engine on every route."""
    _, path = checkpoint(family)
    digest = CliRunner().invoke(app, ["digest", path], catch_exceptions=False).stdout.strip()
    params = SamplingParams(max_tokens=8, temperature=0.7)
    for shared in (False, True):
        actor = precgraph.compile(load_model(path), "train")
        bias = actor.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
        assert bias.dtype == torch.float32 and bool(bias.any())
        llm = start(path, digest=digest, actor=actor if shared else None)
        assert llm.digest == actor.precgraph.digest == digest
        before = llm.generate(prompts[:5], params)
        assert largest_difference(actor, before, 0.7) == 0.0
        bias.copy_(bias.flip(0))  # as balancing the load of experts does
        actor.sync()
        if not shared:
            assert largest_difference(actor, before, 0.7) > 0.0
            llm.sync(actor)
        assert largest_difference(actor, llm.generate(prompts[:5], params), 0.7) == 0.0
        llm.shutdown()


def test_a_window_of_no_tokens(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]]
) -> None:
    """transformers writes ``sliding_window: 0`` for Qwen2-MoE, which vLLM makes null in the config that it holds."""
    model, path = checkpoint("qwen2_moe")
    assert json.loads((Path(path) / "config.json").read_text())["sliding_window"] == 0
    actor = precgraph.compile(model, "train")
    llm = start(path, digest=actor.precgraph.digest)
    assert largest_difference(actor, llm.generate(prompts, SamplingParams(max_tokens=8)), 1.0) == 0.0
    llm.shutdown()


def test_overrides_of_the_config_are_the_programs(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]]
) -> None:
    changes = {"rms_norm_eps": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}
    _, path = checkpoint("qwen3")
    actor = precgraph.compile(causal_lm("qwen3", **changes), "train")
    llm = start(path, hf_overrides=changes, digest=actor.precgraph.digest)
    assert largest_difference(actor, llm.generate(prompts[:5], SamplingParams(max_tokens=8)), 1.0) == 0.0
    llm.shutdown()


@pytest.mark.parametrize("function", [False, True])
def test_the_programs_config_is_the_checkpoints(function: bool, checkpoint: Callable[..., Any]) -> None:
    """With the user's changes, which vLLM takes as a function too, and none of vLLM's."""
    from vllm.engine.arg_utils import EngineArgs

    from precgraph.runtime.vllm.model import _own_config

    model, path = checkpoint("qwen2_moe")
    ours = {"architectures": ["PrecGraphForCausalLM"], "precgraph": "jet_rl", "quantization_config": None}

    def override(config: Any) -> Any:
        config.update({"rms_norm_eps": 0.5, **ours})
        return config

    arguments = {"model": path, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    overrides = override if function else {"rms_norm_eps": 0.5, **ours}
    held = EngineArgs(**arguments, hf_overrides=overrides).create_engine_config().model_config
    assert held.hf_config.sliding_window is None
    assert _own_config(held).to_dict() == {
        **AutoConfig.from_pretrained(path).to_dict(), "rms_norm_eps": 0.5, "architectures": [type(model).__name__]
    }  # fmt: skip
