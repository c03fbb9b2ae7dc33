"""Attention on the GPU: vLLM's FlashAttention-3 over its paged cache, one split and one tile of keys at every step.

The program's own kernel, for the layers without windows that are served here, is FlashAttention-3 too
(:mod:`precgraph.lowering.flash_attention`), in one environment the same binary: over pages vLLM calls it, so that its
slots and its CUDA graphs are its own affair. The trainer's bits hang on numbers that vLLM chooses step by step; the
builder fixes them for all steps, captured or not (the engine's setting ``flash_attn_max_num_splits_for_cuda_graph``
holds for captured ones only):

- ``max_num_splits = 1``: with several splits the order of a sum over keys depends on the batch.
- ``max_query_len``: FA3 picks its tiles from it, and for some head widths that of keys, which must not change.
- a schedule made ahead, once for all layers, only where it is one of one split and of the lengths that are passed; no
  cascade, which sums a common prefix apart.

The size of a page is the user's: where whole tiles of keys in one piece fit into it, FA3 may read it in these, which
at the widths of ``WHOLE_TILE`` are not the trainer's. Such pages are refused.

Prompts of which nothing is in the cache yet (``fresh``) attend as the trainer does, to the step's own keys in one
piece: over small pages FA3 fetches keys row by row.

FA3 captures whole (``AttentionCGSupport.ALWAYS``): what a step reads is in buffers that keep their places. One graph of
a size serves every step of at most so many tokens, whether its requests decode or bring prompts: its call over pages is
of all of them, and has one bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from precgraph.errors import UnsupportedModelError
from precgraph.lowering import flash_attention
from precgraph.lowering.flash_attention import PAGED_QUERY_BOUND, WHOLE_TILE
from precgraph.ops import AttentionSpec
from precgraph.runtime.contexts import OwnAttention, Varlen

SEVERAL = 2  # the least bound under which FA3 has the causal mask for all head widths: one query has nothing to mask


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
            f"heads of width {spec.head_dim}: the trainer does not attend with FlashAttention 3, vLLM would",
            remedy=f"widths {', '.join(map(str, PAGED_QUERY_BOUND))} are exact; the embedded engine serves the others",
        )
    if spec.window:
        raise UnsupportedModelError(
            f"a window of {spec.window} keys: vLLM would attend with FlashAttention-3, which cuts keys into tiles from "
            "where a window begins; the trainer's kernel does from the first key",
            remedy="the embedded engine serves it",
        )


def require_exact_pages(width: int, page: int) -> None:
    """UnsupportedModelError for pages of so many tokens that give heads of this width other bits than the trainer's."""
    tile = WHOLE_TILE.get(width)
    if tile and page % tile == 0:
        raise UnsupportedModelError(
            f"pages of {page} tokens: for heads of width {width}, FlashAttention-3 may read them in tiles of {tile} "
            "keys, which are not the trainer's",
            remedy=f"set block_size to 16 or 128, to no multiple of {tile}",
        )


@dataclass(frozen=True, slots=True)
class Fresh:
    """The last requests of a step, of which nothing is in the cache: their tokens are ``start:stop``.

    ``bounds`` are where they begin, from ``start`` on, int32 ``[B + 1]`` on the device; ``longest`` is the longest.
    """

    start: int
    stop: int
    bounds: Tensor
    longest: int


@dataclass
class OneSplitMetadata(FlashAttentionMetadata):  # type: ignore[misc]
    """vLLM's, of the requests before the fresh ones."""

    fresh: Fresh | None = None


class OneSplitBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """One split, and a bound on the longest query under which FA3 keeps the trainer's tile of keys."""

    supports_update_block_table = False  # it would give the paged part the table of the whole step

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        compilation = vllm_config.compilation_config
        self.max_num_splits = 1
        # What a schedule is made for: vLLM 0.26 takes it from the model's config, later ones from the layers.
        self.headdim, self.num_heads_kv = kv_cache_spec.head_size, kv_cache_spec.num_kv_heads
        require_exact_pages(self.headdim, kv_cache_spec.block_size)  # here it is what FA3 reads
        self.query_bound = PAGED_QUERY_BOUND[self.headdim]
        self.aot_schedule &= self.query_bound == 1
        self.captured = (compilation.cudagraph_mode and compilation.max_cudagraph_capture_size) or 0

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        captured = common_attn_metadata.num_actual_tokens <= self.captured
        paged, fresh = (self._whole if captured else without_fresh)(common_attn_metadata)
        nothing_paged = fresh is not None and not fresh.start
        metadata = super().build(0, paged, fast_build or nothing_paged)  # fast: without a schedule
        if metadata.max_num_splits != 1:  # vLLM bounds the splits of captured sizes only, those of its schedule too
            metadata.max_num_splits, metadata.scheduler_metadata = 1, None
        metadata.max_query_len = max(metadata.max_query_len, self.query_bound)
        return OneSplitMetadata(**vars(metadata), fresh=fresh)

    def _whole(self, step: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, None]:
        """A step that is captured: its graph serves any requests of so many tokens, under one bound.

        The schedule is made anew for each step, from the lengths on the device, and for the bound's tiles.
        """
        longest = self.vllm_config.model_config.max_model_len
        if step.max_query_len > longest:  # no request: vLLM captures one as long as the step, whatever pages there are
            step.seq_lens.clamp_(max=longest)
        return replace(step, max_query_len=max(self.query_bound, SEVERAL)), None

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


def without_fresh(step: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, Fresh | None]:
    """The requests of a step up to the last one that has keys in the cache, and the fresh ones after it.

    A step of one token a request stays whole: a fresh one has one key. Where all are fresh, nothing reads the first
    part.
    """
    if step.max_query_len == 1:
        return step, None
    starts = step.query_start_loc_cpu[: step.num_reqs + 1].tolist()
    keys = step.seq_lens_cpu_upper_bound[: step.num_reqs].tolist()  # exact for prompts
    lengths = [b - a for a, b in pairwise(starts)]
    before = next((i + 1 for i in reversed(range(step.num_reqs)) if keys[i] > lengths[i]), 0)
    start, stop = starts[before], starts[-1]
    if start == stop:
        return step, None
    bounds = step.query_start_loc[before : step.num_reqs + 1] - start
    paged = replace(step.unpadded(start, before), max_query_len=max(lengths[:before])) if before else step
    return paged, Fresh(start, stop, bounds, max(lengths[before:]))


class OneSplitImpl(FlashAttentionImpl):  # type: ignore[misc]
    """vLLM's call over pages, and the trainer's for fresh requests; the cache is written by a kernel of ours."""

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """``query [T, H, D]``, ``key, value [T, Hkv, D]`` into ``output``; without metadata vLLM measures memory."""
        fresh = attn_metadata.fresh if attn_metadata is not None else None
        if fresh is None or fresh.start:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if fresh is not None:
            own = slice(fresh.start, fresh.stop)
            bounds = (fresh.bounds, fresh.bounds, fresh.longest, fresh.longest)
            call = Varlen(*bounds, key[own], value[own])
            spec = AttentionSpec(
                self.scale, 0, self.logits_soft_cap, 0, self.num_heads, self.num_kv_heads, self.head_size
            )
            flash_attention.forward(query[own], call, spec, out=output[own])
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:  # fmt: skip
        """The same bytes as vLLM's kernel writes, by one that starts while the kernel before it ends."""
        from precgraph.lowering.triton.pages import store_pages  # Triton is on GPUs only

        key_pages, value_pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        store_pages(key, value, key_pages, value_pages, slot_mapping)


class OneSplitBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's FlashAttention backend with these."""

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return OneSplitBuilder

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return OneSplitImpl


@dataclass(frozen=True, slots=True)
class FlashContext(OwnAttention):
    """The attention context of a step on the GPU: vLLM's own layers, with the implementation above, write the cache and
    attend, in one call.

    A call may have more rows than the step has tokens: they write and attend for its tokens only, and what the other
    rows get is undefined.
    """

    layers: Mapping[int, Any]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.layers[layer](q[0].flatten(1), k[0].flatten(1), v[0].flatten(1))
        return out.unsqueeze(0)
