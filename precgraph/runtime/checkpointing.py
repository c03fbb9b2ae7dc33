"""Activation checkpointing of chosen layers and of modules in them, by the flag that Hugging Face's layers have."""

from __future__ import annotations

from typing import Any

import torch

from precgraph.errors import InputError
from precgraph.lowering.program import Program
from precgraph.trace import LAYER

_FLAG = "gradient_checkpointing"  # of modules; gradient_checkpointing_enable() sets it on all that have it


def checkpointed(model: Any, program: Program) -> frozenset[str]:
    """What the backward makes again, as the modules of ``model`` say at the moment: names of segments, and paths of
    modules inside a layer; none without gradients.

    A layer follows its own flag, and a module inside it is made again if it has one. Where there is none to ask (a
    layer of a class without the flag, the embedding), the flag of any module counts that is inside no layer; of a
    program in one piece, any. A flag that is no bool is an :class:`InputError`.
    """
    if not torch.is_grad_enabled():
        return frozenset()
    flags = {p: _flag(p, m) for p, m in model.named_modules(remove_duplicate=False) if hasattr(m, _FLAG)}
    # What is no layer may have a module's name by chance: the segment "model" is not the module ``model.model``.
    names = [segment.name for segment in program.segments]
    layers = [name for name in names if LAYER.fullmatch(name)]
    inside = {path: flag for path, flag in flags.items() if path.startswith(tuple(f"{name}." for name in layers))}
    some = any(flag for path, flag in flags.items() if path not in inside)
    chosen = {name: flags.get(name, some) if name in layers else some for name in names}
    return frozenset(path for path, flag in {**chosen, **inside}.items() if flag)


def _flag(path: str, module: Any) -> bool:
    value = getattr(module, _FLAG)
    if not isinstance(value, bool):  # the truth of "no", or of a tensor on a GPU, is not what was meant
        raise InputError(
            f"the flag {_FLAG} is of type {type(value).__name__}",
            path=path or type(module).__name__,
            remedy="set it to True or False",
        )
    return value
