"""Activation checkpointing of chosen layers, by the flags that Hugging Face's layers have."""

from __future__ import annotations

from typing import Any

import torch

from precgraph.errors import InputError
from precgraph.lowering.program import Program
from precgraph.trace import LAYER

_FLAG = "gradient_checkpointing"  # of modules; gradient_checkpointing_enable() sets it on all that have it


def checkpointed(model: Any, program: Program) -> frozenset[str]:
    """Names of the segments that keep their inputs only, as the modules of ``model`` say at the moment; none without
    gradients.

    A layer follows its own flag. Where there is none to ask (a layer of a class without the flag, the embedding, a
    program in one piece), any module's flag counts. A flag that is no bool is an :class:`InputError`.
    """
    if not torch.is_grad_enabled():
        return frozenset()
    flags = {p: _flag(p, m) for p, m in model.named_modules(remove_duplicate=False) if hasattr(m, _FLAG)}
    some = any(flags.values())
    names = (segment.name for segment in program.segments)
    # What is no layer may have a module's name by chance: the segment "model" is not the module ``model.model``.
    return frozenset(n for n in names if (flags.get(n, some) if LAYER.fullmatch(n) else some))


def _flag(path: str, module: Any) -> bool:
    value = getattr(module, _FLAG)
    if not isinstance(value, bool):  # the truth of "no", or of a tensor on a GPU, is not what was meant
        raise InputError(
            f"the flag {_FLAG} is of type {type(value).__name__}",
            path=path or type(module).__name__,
            remedy="set it to True or False",
        )
    return value
