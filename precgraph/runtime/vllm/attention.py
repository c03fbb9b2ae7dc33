"""Attention over vLLM's paged cache: the program's own kernel, told by a context where vLLM keeps keys and values.

Each attention node of the program has an ``Attention`` layer of vLLM, which makes vLLM plan and allocate its cache and
build its metadata; the layer's own forward is never called. The context writes the call's keys and values into the
cache, as vLLM's slots say, and hands the kernel each sequence's keys from position 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from precgraph.errors import LoweringError
from precgraph.runtime.contexts import Attended
from precgraph.runtime.vllm.versions import key_value_views


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """One step of vLLM: rows ``bounds[i] : bounds[i + 1]`` are the last tokens of a sequence of ``lengths[i]``.

    ``blocks [B, max blocks]`` int32 are each sequence's pages; ``slots [T]`` the cache rows of the step's tokens, -1
    for padding; ``num_actual_tokens`` is what vLLM asks of any metadata.
    """

    bounds: tuple[int, ...]
    lengths: tuple[int, ...]
    blocks: Tensor
    slots: Tensor
    num_actual_tokens: int


class PagedMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Keeps of vLLM's metadata what the context reads."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        m = common_attn_metadata
        bounds = tuple(m.query_start_loc[: m.num_reqs + 1].tolist())
        lengths = tuple(m.seq_lens[: m.num_reqs].tolist())
        return PagedMetadata(bounds, lengths, m.block_table_tensor, m.slot_mapping, m.num_actual_tokens)


class _NoImpl(AttentionImpl):  # type: ignore[misc]
    """The implementation that vLLM wants a layer to have; the program's kernel does the work."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: Any = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = "decoder", kv_sharing_target_layer_name: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise LoweringError("attention of a precgraph program runs inside the program, not through vLLM's layer")


class ReferenceBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend with our metadata; its name and cache layout stay."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]  # the context reads pages of any size

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return _NoImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return PagedMetadataBuilder


@dataclass(frozen=True, slots=True)
class VllmContext:
    """The attention context of a step inside vLLM; ``layers`` are vLLM's attention layers by the program's index."""

    layers: Mapping[int, Any]

    def sequences(self, layer: int, k: Tensor, v: Tensor) -> Iterator[Attended]:
        owner = self.layers[layer]
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory with tokens of no request
            yield Attended(0, k.shape[1], 0, k[0], v[0])
            return
        step: PagedMetadata = metadata[owner.layer_name]
        keys, values = key_value_views(owner.kv_cache, k.shape[-1])
        size = keys.shape[1]
        slots = step.slots[: step.num_actual_tokens].long()
        # All rows are written before the first sequence is read: sequences of one step may share blocks that it fills.
        keys[slots // size, slots % size] = k[0, : slots.shape[0]]
        values[slots // size, slots % size] = v[0, : slots.shape[0]]
        for row, length in enumerate(step.lengths):
            start, stop = step.bounds[row], step.bounds[row + 1]
            if stop > start:
                pages = step.blocks[row, : -(-length // size)].long()
                yield Attended(
                    start, stop, length - (stop - start),
                    keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length],
                )  # fmt: skip
