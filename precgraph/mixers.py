"""In which modules of a language model tokens meet: programs serve those that do so in attention alone.

A rollout goes on from keys and values. The state of a recurrence, the last tokens of a convolution or an index of keys
is not among them, and none of those has an exact kernel.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from precgraph.errors import UnsupportedModelError

# transformers' names of what else a layer does (ALLOWED_LAYER_TYPES in configuration_utils.py of 5.19).
_LAYER_TYPES = {
    "linear_attention": "a recurrence over tokens (linear attention or a state-space model)",
    "conv": "a convolution over tokens",
    "hybrid": "a recurrence over tokens beside attention",
    "hybrid_sliding": "a recurrence over tokens beside attention",
    "indexed_attention": "attention to keys that an indexer picks",
    "minimax_m3_sparse": "attention to keys that an indexer picks",
    "compressed_sparse_attention": "attention to compressed keys",
    "heavily_compressed_attention": "attention to compressed keys",
}


_IN_A_LAYER = re.compile(r"[^.]+\.layers\.\d+\.")  # not in a tower for images or sound, which no program runs


def require_attention(model: PreTrainedModel) -> None:
    """UnsupportedModelError, naming the first module in which tokens meet otherwise than in attention to all keys or to
    those of a window."""
    modules = dict(model.named_modules())
    kinds = getattr(model.config, "layer_types", None) or ()
    at = next((i for i, kind in enumerate(kinds) if kind in _LAYER_TYPES), None)
    found = next(((path, kind) for path, m in modules.items() if _IN_A_LAYER.match(path) and (kind := _kind(m))), None)
    if found is not None:
        path, kind = found
    elif at is not None:
        path, kind = _mixer(modules, at), _LAYER_TYPES[kinds[at]]
    elif type(model)._is_stateful and not kinds:  # transformers' word for a class with a state beside keys and values
        path, kind = "", "a state beside keys and values"
    else:
        return
    name = type(modules[path]).__name__
    raise UnsupportedModelError(
        f"{name} is {kind}, which has no exact kernel" if path else f"{name} has {kind}, which no rollout keeps",
        path=path or None,
        remedy="models are served whose tokens meet in attention alone, to all keys or to those of a window",
    )


def _kind(module: nn.Module) -> str | None:
    """What a module is that itself holds the decay of a recurrence, or a convolution over tokens."""
    if "A_log" in module._parameters:
        return "a recurrence over tokens"
    convolutions = (m for m in module._modules.values() if isinstance(m, nn.Conv1d))
    return "a convolution over tokens" if any(m.kernel_size[0] > 1 for m in convolutions) else None


def _mixer(modules: dict[str, nn.Module], index: int) -> str:
    """Path of what makes tokens meet in a layer: its first module that knows the layer's index, or the layer."""
    layer = next((path for path in modules if path.endswith(f"layers.{index}")), "")
    inner: Any = (path for path, m in modules.items() if path.startswith(f"{layer}.") and hasattr(m, "layer_idx"))
    return str(next(inner, layer))
