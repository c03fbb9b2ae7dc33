"""Models and tokenizers from a path, and the device that they go to."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from precgraph.errors import InputError
from precgraph.loading import Source, find, load_config_model, load_model
from trainer.config import ModelTable
from trainer.errors import ConfigError


def device_of(name: str) -> torch.device:
    """``auto`` is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device = {name!r} is no device for a run", remedy="write auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        sees = f"{count} CUDA devices, from cuda:0" if count else "no CUDA device"
        raise ConfigError(f"model.device = {name!r}, but torch sees {sees}", remedy='write "auto" or "cpu"')
    return device


def limit_memory(device: torch.device, share: float) -> None:
    """Let torch take at most ``share`` of a GPU's memory: beyond it, it gives back what it only keeps, then fails."""
    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device.index)


def load_policy(table: ModelTable) -> PreTrainedModel:
    """The model of ``table.path`` in bf16, cut to its first ``layers`` if that is set."""
    _find(table)
    model = load_model(table.path)
    if table.layers:
        cut(model, table.layers)
    return model


def load_description(table: ModelTable) -> Any:
    """The model's config, without its weights; what is rounded is said by :func:`load_policy`."""
    _find(table)
    return load_config_model(table.path, warn=False).config


def cut(model: Any, layers: int) -> None:
    """Keep the first ``layers`` decoder layers."""
    have = len(model.model.layers)
    if layers > have:
        raise ConfigError(f"model.layers = {layers}, but the model has {have}")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]


def load_tokenizer(table: ModelTable) -> Any:
    """The tokenizer that comes with the model of ``table.path``."""
    source = _find(table)
    options = {"gguf_file": source.config.name} if source.gguf else {}
    try:
        return AutoTokenizer.from_pretrained(source.weights, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"has no tokenizer: {str(error).splitlines()[0]}", path=table.path, remedy="save one beside the model"
        ) from error


def _find(table: ModelTable) -> Source:
    """Where the model is; ConfigError with ``table.origin`` as the remedy if it is not there."""
    if not table.path:
        raise ConfigError("model.path is not set", remedy=table.origin or "name a directory, a .gguf or a hub id")
    try:
        return find(table.path)
    except InputError as error:
        if not table.origin:
            raise
        raise ConfigError(f"{error.message} (model.path)", path=error.path, remedy=table.origin) from error
