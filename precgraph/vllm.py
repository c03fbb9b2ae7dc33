"""vLLM as the rollout engine: ``precgraph.vllm.LLM``. Importing it needs vLLM (``pip install 'precgraph[vllm]'``)."""

from precgraph.errors import DigestError, SyncError
from precgraph.runtime.vllm.http import SampleFields
from precgraph.runtime.vllm.llm import LLM, Sample
from precgraph.runtime.vllm.sync import Manifest, save_weights

__all__ = ["LLM", "DigestError", "Manifest", "Sample", "SampleFields", "SyncError", "save_weights"]
