"""A trainer and an engine in one process: the engine's loader takes the trainer's store instead of reading files."""

from __future__ import annotations

import secrets
import weakref
from typing import Any

from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from precgraph.errors import InputError
from precgraph.runtime.compiled import Compiled
from precgraph.runtime.vllm.model import PrecGraphForCausalLM

LOAD_FORMAT = "precgraph_shared"

_OFFERED: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()


def offer(trainer: Compiled) -> str:
    """A token by which the loader finds ``trainer`` in this process, for as long as it lives."""
    token = secrets.token_hex(8)
    _OFFERED[token] = trainer
    return token


@register_model_loader(LOAD_FORMAT)
class SharedLoader(BaseModelLoader):  # type: ignore[misc]
    """``load_format="precgraph_shared"`` with ``model_loader_extra_config={"trainer": token}``."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        token = (self.load_config.model_loader_extra_config or {}).get("trainer", "")
        trainer = _OFFERED.get(token)
        if trainer is None:
            raise InputError(
                "the trainer whose weights the engine was to share is not in this process",
                remedy="use precgraph.vllm.LLM(model, actor=actor)",
            )
        assert isinstance(model, PrecGraphForCausalLM)
        model.share(trainer)
