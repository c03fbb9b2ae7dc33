"""Attention on the GPU: vLLM's FlashAttention-3 over its paged cache, with one split and one tile at every step size.

Exactness hangs on two numbers that vLLM chooses step by step: how many splits a sum over keys is cut into, and the tile
that FA3 picks from the longest query. The engine's own setting (``flash_attn_max_num_splits_for_cuda_graph``) holds for
captured steps only; the builder here fixes both for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

from precgraph.lowering.flash_attention import QUERY_BOUND


class OneSplitBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """One split, and a bound on the longest query under which FA3 keeps the trainer's tile."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.aot_schedule = False  # a schedule made ahead chooses splits of its own

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        # Cascade attention computes a common prefix apart and merges: another order of sums.
        metadata = super().build(0, common_attn_metadata, fast_build)
        metadata.max_num_splits = 1
        metadata.max_query_len = max(metadata.max_query_len, QUERY_BOUND)
        metadata.scheduler_metadata = None
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class OneSplitBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's FlashAttention backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return OneSplitBuilder


@dataclass(frozen=True, slots=True)
class FlashContext:
    """The attention context of a step on the GPU: vLLM's own layers write the cache and attend, in one call."""

    layers: Mapping[int, Any]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [1, T, H, D]``, ``k, v [1, T, Hkv, D]`` bf16 to ``[1, T, H·D]``."""
        out: Tensor = self.layers[layer](q[0].flatten(1), k[0].flatten(1), v[0].flatten(1))
        return out.unsqueeze(0)
