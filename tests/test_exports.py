"""What torch.export made of one model stands for another only where nothing can tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from precgraph.trace import trace
from tests.exports import exported_once, seen_by_export
from tests.families import CAUSAL_LMS, causal_lm, meta_lm

CHANGES: dict[str, Callable[[Any], Any]] = {
    "setting": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5),
    "config": lambda m: setattr(m.config, "rms_norm_eps", 0.5),
    "attention": lambda m: setattr(m.config, "_attn_implementation", "eager"),
    "experts": lambda m: setattr(m.config, "_experts_implementation", "grouped_mm"),
    "config of a module": lambda m: vars(_with_own_config(m.model.layers[1].self_attn)).update(rms_norm_eps=0.5),
    "attention of a module": lambda m: setattr(
        _with_own_config(m.model.layers[1].self_attn), "_attn_implementation", "eager"
    ),
    "mode": lambda m: m.train(),
    "module": lambda m: setattr(m.model.layers[0], "mlp", nn.Identity()),
    "forward": lambda m: setattr(m.model, "forward", MethodType(lambda self, x: x, m.model)),
    "hook": lambda m: m.model.norm.register_forward_hook(lambda *_: None),
    "frozen": lambda m: m.model.norm.weight.requires_grad_(False),
    "dtype": lambda m: m.model.norm.float(),
    "tie": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.clone())),
    "checkpointing": lambda m: m.gradient_checkpointing_enable(),
}
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "forward": lambda: patch.object(modeling_llama.LlamaMLP, "forward", lambda self, x: x),
    "method": lambda: patch.object(PreTrainedModel, "get_input_embeddings", lambda self: None),
    "function": lambda: patch.object(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k)),
    "grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "device": lambda: torch.device("meta"),
}


def _with_own_config(module: Any) -> Any:
    module.config = deepcopy(module.config)
    return module.config


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    model, other = meta_lm("llama"), meta_lm("llama")
    assert seen_by_export(model) == seen_by_export(other)
    CHANGES[change](other)
    assert seen_by_export(model) != seen_by_export(other)


@pytest.mark.parametrize("change", AROUND)
def test_a_change_around_the_model_is_seen(change: str) -> None:
    model = meta_lm("llama")
    before = seen_by_export(model)
    with AROUND[change]():
        assert seen_by_export(model) != before
    assert seen_by_export(model) == before


def test_the_dtype_of_autocast_is_seen() -> None:
    model = meta_lm("llama")
    keys = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(seen_by_export(model))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("family", CAUSAL_LMS)
def test_a_shared_program_is_the_models_own(
    family: str, exported: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own tensors, and nothing of the model that was followed."""
    followed: list[PreTrainedModel] = []

    def export(model: Any, *rest: Any) -> Any:
        followed.append(model)
        return exported(model, *rest)

    monkeypatch.setattr("precgraph.trace._export", exported_once(export))
    first, second = causal_lm(family, 0), causal_lm(family, 1)
    traces = [trace(first), trace(second)]
    assert followed == [first]
    assert traces[0].graph.digest() == traces[1].graph.digest()
    own = {**dict(second.named_parameters()), **dict(second.named_buffers())}
    assert all(tensor is own[path] for path, tensor in traces[1].tensors.items())
