"""vLLM's GPU worker with precgraph's calls."""

from vllm.v1.worker.gpu_worker import Worker

from precgraph.runtime.vllm.worker import ExactWorker


class ExactGPUWorker(ExactWorker, Worker):  # type: ignore[misc]
    """Named by the configuration hook on NVIDIA GPUs."""
