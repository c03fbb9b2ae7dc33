"""torch.export follows each language model once: most of the time of a compilation, and the same in every test."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# What no forward reads: of a config, and of a model that was loaded.
_NOT_READ = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
_OF_LOADING = ("name_or_path", "generation_config", "_weight_conversions")


def exported_once(export: Callable[..., Any]) -> Callable[..., Any]:
    """``precgraph.trace._export`` that gives a language model like one before the program of that one.

    What makes a graph of it reads the model's own parameters and buffers, so that all that is ours runs every time.
    """
    programs: dict[Hashable, Any] = {}

    def once(model: nn.Module, language_model: bool, example_inputs: Sequence[Tensor] | None) -> Any:
        if not (language_model and isinstance(model, PreTrainedModel)):
            return export(model, language_model, example_inputs)
        key = seen_by_export(model)
        if key not in programs:
            programs[key] = export(model, language_model, example_inputs)
            programs[key].state_dict.clear()  # or each program would keep its model's weights
        return programs[key]

    return once


def seen_by_export(model: PreTrainedModel) -> Hashable:
    """All that torch.export could make another program of: code, settings, hooks, shapes and what shares memory."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_READ}
    modules = [
        (path, type(module), type(module).forward, type(module).__call__, *map(_frozen, sorted(_settings(module))))
        for path, module in model.named_modules()
    ]
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = [
        (name, first.setdefault(id(t), name), type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in named
    ]
    return repr(config), tuple(modules), tuple(tensors), torch.is_grad_enabled(), torch.get_default_dtype()


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    apart = ("_parameters", "_buffers", "_modules", "config", *_OF_LOADING)
    settings = {"_use_kernels": False} | vars(module)  # which loading sets, and is False by default
    return [(name, value) for name, value in sorted(settings.items(), key=itemgetter(0)) if name not in apart]


def _frozen(setting: tuple[str, Any]) -> Hashable:
    """A setting as a part of a key. What is another object each time gives a model a program of its own."""
    name, value = setting
    if isinstance(value, partial):
        return name, value.func, repr((value.args, value.keywords))
    if isinstance(value, dict) and name.endswith("hooks"):
        return name, tuple(value.values())
    return name, value if isinstance(value, Hashable) else repr(value)
