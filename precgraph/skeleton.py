"""A model without weights: all that its program depends on, made from its config alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


def skeleton(config: Any) -> PreTrainedModel:
    """The causal language model of a config as ``from_pretrained(..., dtype=torch.bfloat16)`` makes it: with real
    buffers and constants, which are part of the program, and its parameters on the meta device.

    Buffers such as RoPE's frequencies are made on the CPU by the model's own constructor, as a trainer's are.
    """
    with torch.device("cpu"), _parameters_on_meta():
        # from_config, unlike model.to(bfloat16), leaves the RoPE frequencies in fp32.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    _widen(model)
    model.train(False)
    return model


@contextmanager
def allocated(model: nn.Module) -> Iterator[None]:
    """While it lasts, a skeleton's parameters are on the CPU as its buffers are; other models are left as they are.

    They are never written, which costs address space only: tracing does not read them.
    """
    found = [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None and p.is_meta]
    if any(b.is_meta for b in model.buffers()):  # all of it is on the meta device
        found = []
    made: dict[int, nn.Parameter] = {}  # tied parameters stay one
    try:
        for module, name, p in found:
            if id(p) not in made:
                made[id(p)] = nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=p.requires_grad)
            module._parameters[name] = made[id(p)]
        yield
    finally:
        for module, name, p in found:
            module._parameters[name] = p


def _widen(model: PreTrainedModel) -> None:
    """Make fp32 what the class keeps so whatever dtype is asked for: from_pretrained does, from_config does not."""
    kept = model._get_dtype_plan(torch.bfloat16)
    if not kept:
        return
    pattern = build_glob_alternation(list(kept))[0]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if pattern.search(name):
            tensor.data = tensor.data.float()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register inside have no storage, so initialising them costs nothing."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
