"""A model in memory, read as a checkpoint is: by the names that its files would have."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precgraph.checkpoint.layout import layout
from precgraph.loading import find, load_model
from precgraph.weight_files import SINGLE, Checkpoint, Entry

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # safetensors' words


class ModelTensors:
    """What of :class:`Checkpoint` a reader of masters needs, for a ``model`` that came from ``folder``.

    ``entries`` has experts one by one and leaves tied tensors out, as files do.
    """

    def __init__(self, model: PreTrainedModel, folder: Path = Path()) -> None:
        self.folder = folder
        self._state, self._parts = model.state_dict(), layout(model)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.entries = {name: self._entry(name) for name in self._parts if name not in tied}

    def _entry(self, name: str) -> Entry:
        tensor = self.read(name)
        return Entry(SINGLE, _NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def read(self, name: str) -> Tensor:
        """The tensor of that name, on the CPU."""
        part = self._parts[name]
        return part.of(self._state[part.path]).detach().cpu()


def open_masters(path: str | Path) -> Checkpoint | ModelTensors:
    """The masters in a directory of safetensors, mapped; those of a .gguf, dequantised to bf16 and all in memory."""
    given = Path(path).expanduser()
    if given.exists() and given.suffix != ".json" and find(path).gguf:
        return ModelTensors(load_model(path), given)
    return Checkpoint(path)
