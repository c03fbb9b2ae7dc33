"""What exactness costs in attention: precgraph's engine with vLLM's own schedule of splits and tiles."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from precgraph.runtime.vllm import config
from precgraph.runtime.vllm.attention_gpu import OneSplitBackend, OneSplitMetadata
from precgraph.runtime.vllm.worker_gpu import ExactGPUWorker


class OwnScheduleBuilder(FlashAttentionMetadataBuilder):
    """vLLM's as it comes: fast, and not exact."""

    def build(self, *args: Any, **kwargs: Any) -> OneSplitMetadata:
        return OneSplitMetadata(**vars(super().build(*args, **kwargs)))


class OwnScheduleWorker(ExactGPUWorker):
    """The worker with that builder, whose graphs are of decoding steps: what it picks for them holds for no others."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        OneSplitBackend.get_builder_cls = staticmethod(lambda: OwnScheduleBuilder)
        self.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        super().load_model(*args, **kwargs)


def use_own_schedule() -> None:
    """Engines that this process starts from now on have that worker."""
    config.WORKERS["cuda"] = f"{__name__}.{OwnScheduleWorker.__name__}"
