"""vLLM's CPU worker with precgraph's calls."""

from vllm.v1.worker.cpu_worker import CPUWorker

from precgraph.runtime.vllm.worker import ExactWorker


class ExactCPUWorker(ExactWorker, CPUWorker):  # type: ignore[misc]
    """Named by the configuration hook on CPUs."""
