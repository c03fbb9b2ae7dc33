"""vLLM's GPU worker with precgraph's calls, and with graphs of steps that hold prompts."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu_worker import Worker

from precgraph.runtime.vllm.worker import ExactWorker


class ExactGPUWorker(ExactWorker, Worker):  # type: ignore[misc]
    """Named by the configuration hook on NVIDIA GPUs."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
            capture_prompts(self.model_runner.cudagraph_dispatcher)


def capture_prompts(dispatcher: Any) -> None:
    """Let V1's dispatcher have graphs of steps that hold prompts, at each captured size, beside those of decoding.

    None of vLLM's modes has both: ``FULL`` replays one graph for either, whose attention masks what a decoding step has
    nothing of, and the others leave prompts to its compiler.
    """
    initialize, seqs = dispatcher.initialize_cudagraph_keys, dispatcher.vllm_config.scheduler_config.max_num_seqs

    def with_prompts(mode: CUDAGraphMode, *args: Any, **kwargs: Any) -> None:
        initialize(mode, *args, **kwargs)
        if mode == CUDAGraphMode.FULL_DECODE_ONLY:
            for size in dispatcher.compilation_config.cudagraph_capture_sizes:
                dispatcher.add_cudagraph_key(CUDAGraphMode.FULL, BatchDescriptor(size, min(size, seqs)))

    dispatcher.initialize_cudagraph_keys = with_prompts
