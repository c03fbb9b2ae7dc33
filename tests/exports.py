"""torch.export follows each language model once: most of the time of a compilation, and the same in every test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

# What no forward reads: of a config, and of a model that was loaded.
_NOT_READ = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
_OF_LOADING = ("name_or_path", "generation_config", "_weight_conversions")


def exported_once(export: Callable[..., Any]) -> Callable[..., Any]:
    """``precgraph.trace._export`` that reuses the exported program of an earlier, indistinguishable model.

    What runs inside torch.export is shared: the model's forward, and in it ``precgraph.attention`` and
    ``precgraph.experts``. What comes before and after runs for every model: what is refused, and the graph, which is
    made of the program and the model's own parameters and buffers.
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
    """What torch.export could make another program of: code, configs, settings, hooks, shapes, what shares memory, and
    torch's modes. Not seen: what is replaced in torch itself or in other modules that a model's code imports.
    """
    configs: dict[int, Hashable] = {}  # by id: most modules hold their model's
    modules = [
        (path, type(module), *((name, _frozen(name, value, configs)) for name, value in _settings(module)))
        for path, module in model.named_modules()
    ]
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = [
        (name, first.setdefault(id(t), name), type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in named
    ]
    return _code({type(module) for module in model.modules()}), tuple(modules), tuple(tensors), _modes()


def _code(types: Iterable[type]) -> Hashable:
    """The methods of classes and the functions that their modules have as globals, any of which a patch replaces."""
    classes = {base for each in types for base in each.__mro__}
    owners = [*classes, *{sys.modules[c.__module__] for c in classes}]
    return frozenset((owner, name, value) for owner in owners for name, value in vars(owner).items() if callable(value))


def _config(config: PreTrainedConfig) -> Hashable:
    """With the implementations of attention and experts, which ``to_dict`` leaves out."""
    values = {"model_type": type(config).model_type} | vars(config)  # which loading sets
    read = [(name, values[name]) for name in sorted(values) if name not in _NOT_READ]
    return type(config), repr([(name, _config(v) if isinstance(v, PreTrainedConfig) else v) for name, v in read])


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    apart = ("_parameters", "_buffers", "_modules", *_OF_LOADING)
    settings = {"_use_kernels": False} | vars(module)  # which loading sets, and is False by default
    return [(name, settings[name]) for name in sorted(settings) if name not in apart]


def _frozen(name: str, value: Any, configs: dict[int, Hashable]) -> Hashable:
    """A setting as a part of a key. What is another object each time gives a model a program of its own."""
    if isinstance(value, PreTrainedConfig):
        if id(value) not in configs:
            configs[id(value)] = _config(value)
        return configs[id(value)]
    if isinstance(value, partial):
        return value.func, repr((value.args, value.keywords))
    if isinstance(value, dict) and name.endswith("hooks"):
        return tuple(value.values())
    return value if isinstance(value, Hashable) else repr(value)


def _modes() -> Hashable:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), autocast
