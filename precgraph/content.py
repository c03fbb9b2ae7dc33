"""Values that are part of a program: buffers and constants, by the hash of their bytes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def content(model: nn.Module, path: str, value: Tensor) -> str:
    """sha256 over dtype, shape and bytes of a buffer or constant.

    On the meta device only RoPE's frequencies can be known: transformers computes them from the config, here on the
    CPU as a rollout does, so that a graph made from a config alone has the frequencies of the real model. Other
    values are empty there.
    """
    if value.is_meta:
        made = _frequencies(model, path)
        if made is None:
            return ""
        value = made
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    head = f"{value.dtype}{tuple(value.shape)}".encode()
    return hashlib.sha256(head + raw).hexdigest()


def _frequencies(model: nn.Module, path: str) -> Tensor | None:
    """The buffer of a rotary module made again from its config, if ``path`` is one."""
    parent, _, name = path.rpartition(".")
    rotary = model.get_submodule(parent) if name.endswith("inv_freq") else None
    config = getattr(rotary, "config", None)
    if rotary is None or config is None:
        return None
    with torch.device("cpu"):
        again = type(rotary)(config=config)
    return again.get_buffer(name)
