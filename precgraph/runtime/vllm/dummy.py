"""``load_format="dummy"``: random weights, for measuring. vLLM's own loader sees parameters, a program has none."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from precgraph.runtime.vllm.config import DUMMY
from precgraph.runtime.vllm.model import PrecGraphForCausalLM


@register_model_loader(DUMMY)
class RandomLoader(BaseModelLoader):  # type: ignore[misc]
    """What the configuration hook turns ``load_format="dummy"`` into."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        assert isinstance(model, PrecGraphForCausalLM)
        model.load_random_weights(model_config.seed or 0)
