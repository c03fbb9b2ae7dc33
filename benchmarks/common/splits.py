"""What exactness costs in attention: precgraph's engine with vLLM's own schedule of splits and tiles."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from precgraph.runtime.vllm import config
from precgraph.runtime.vllm.attention_gpu import OneSplitBackend
from precgraph.runtime.vllm.worker_gpu import ExactGPUWorker


class OwnScheduleWorker(ExactGPUWorker):
    """The worker, with vLLM's builder of attention metadata as it comes: fast, and not exact."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        OneSplitBackend.get_builder_cls = staticmethod(lambda: FlashAttentionMetadataBuilder)
        super().load_model(*args, **kwargs)


def use_own_schedule() -> None:
    """Engines that this process starts from now on have that worker."""
    config.WORKERS["cuda"] = f"{__name__}.{OwnScheduleWorker.__name__}"
