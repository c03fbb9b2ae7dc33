"""Attention on the GPU: vLLM's FlashAttention-3 over its paged cache, one split and one tile of keys at every step.

The program's own kernel is FlashAttention-3 too (:mod:`precgraph.lowering.flash_attention`), in one environment the
same binary: here vLLM calls it, so that its cache, its slots and its CUDA graphs are its own affair. The trainer's
bits hang on numbers that vLLM chooses step by step; the builder fixes them for all steps, captured or not (the
engine's setting ``flash_attn_max_num_splits_for_cuda_graph`` holds for captured ones only):

- ``max_num_splits = 1``: with several splits the order of a sum over keys depends on the batch.
- ``max_query_len``: FA3 picks its tile of keys from it, for some head widths.
- a schedule made ahead, once for all layers, only where it is one of one split and of the lengths that are passed; no
  cascade, which sums a common prefix apart.

FA3 captures whole (``AttentionCGSupport.ALWAYS``): what a step reads is in buffers that keep their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

from precgraph.errors import UnsupportedModelError
from precgraph.lowering.flash_attention import PAGED_QUERY_BOUND
from precgraph.ops import AttentionSpec
from precgraph.runtime.contexts import OwnAttention


def require_exact(spec: AttentionSpec) -> None:
    """UnsupportedModelError for attention that vLLM's cache would not serve with the trainer's bits."""
    version = get_flash_attn_version(head_size=spec.head_dim)
    if version != 3:
        raise UnsupportedModelError(
            f"vLLM would attend with FlashAttention {version}, the trainer does with 3",
            remedy="use a Hopper GPU, and leave attention_config.flash_attn_version unset",
        )
    if spec.head_dim not in PAGED_QUERY_BOUND:
        raise UnsupportedModelError(
            f"heads of width {spec.head_dim}: FlashAttention-3 has other tiles for a paged cache than for whole keys",
            remedy=f"widths {', '.join(map(str, PAGED_QUERY_BOUND))} are exact; the embedded engine serves the others",
        )
    if spec.window:
        raise UnsupportedModelError(
            f"a window of {spec.window} keys: over pages, FlashAttention-3 cuts keys into tiles from where a window "
            "begins, not from the first key",
            remedy="the embedded engine serves it",
        )


class OneSplitBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """One split, and a bound on the longest query under which FA3 keeps the trainer's tile of keys."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.max_num_splits = 1
        # What a schedule is made for: vLLM 0.26 takes it from the model's config, later ones from the layers.
        self.headdim, self.num_heads_kv = kv_cache_spec.head_size, kv_cache_spec.num_kv_heads
        self.query_bound = PAGED_QUERY_BOUND[self.headdim]
        self.aot_schedule &= self.query_bound == 1

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(0, common_attn_metadata, fast_build)
        if metadata.max_num_splits != 1:  # vLLM bounds the splits of captured sizes only, those of its schedule too
            metadata.max_num_splits, metadata.scheduler_metadata = 1, None
        metadata.max_query_len = max(metadata.max_query_len, self.query_bound)
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class OneSplitBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's FlashAttention backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return OneSplitBuilder


@dataclass(frozen=True, slots=True)
class FlashContext(OwnAttention):
    """The attention context of a step on the GPU: vLLM's own layers write the cache and attend, in one call.

    A call may have more rows than the step has tokens: vLLM writes and attends for its tokens only, and what the
    other rows get is undefined.
    """

    layers: Mapping[int, Any]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.layers[layer](q[0].flatten(1), k[0].flatten(1), v[0].flatten(1))
        return out.unsqueeze(0)
