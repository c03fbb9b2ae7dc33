"""The paged KV cache of a rollout: tensors per layer, a pool of blocks with prefix reuse, and the attention context."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import sub

import numpy as np
import torch
from torch import Tensor

from precgraph import ops
from precgraph.errors import InputError, UnsupportedModelError
from precgraph.graph import PrecisionGraph, tensor
from precgraph.runtime.contexts import Attended, Varlen, cumulative

ROOT = 0  # the empty prefix


class BlockPool:
    """Which blocks are in use, which hold prefixes that a later request may reuse, which are free.

    A *published* block holds the keys and values of ``block_size`` tokens that follow one exact prefix, for one version
    of the weights. Prefixes have serial numbers that are never given twice; a block is found by its prefix's number and
    its tokens, so a match has compared every token of the chain. Blocks are counted per user. A published block that
    nobody uses stays until its space is needed, least recently used first.
    """

    def __init__(self, count: int, block_size: int, *, reuse: bool = True) -> None:
        self.count = count
        self.block_size = block_size
        self.reuse = reuse
        self.version: int | None = None
        self._serial = ROOT
        self.reset()

    def reset(self) -> None:
        """Free every block and forget every prefix."""
        self._free = list(range(self.count - 1, -1, -1))
        self._users = [0] * self.count
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (prefix, tokens) -> (block, its serial)
        self._published: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def serve(self, version: int) -> None:
        """Forget what other weights than those of ``version`` have computed."""
        if version != self.version:
            self.reset()
            self.version = version

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can give."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """``count <= available`` blocks with undefined contents, each with one user."""
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._found[self._published.pop(block)]
        return block

    def acquire(self, tokens: Sequence[int], limit: int) -> tuple[list[int], int]:
        """Become a user of the longest published chain over ``tokens``, at most ``limit`` blocks.

        Returns the blocks and the serial number of the prefix that they make.
        """
        blocks: list[int] = []
        prefix, size = ROOT, self.block_size
        while len(blocks) < limit:
            start = len(blocks) * size
            entry = self._found.get((prefix, tuple(tokens[start : start + size])))
            if entry is None:
                break
            block, prefix = entry
            self._users[block] += 1
            self._idle.pop(block, None)
            blocks.append(block)
        return blocks, prefix

    def publish(self, prefix: int, tokens: tuple[int, ...], block: int) -> int:
        """Offer a full block of ours that follows ``prefix``; returns the serial number of the longer prefix.

        Where another block already holds the same, ours stays private.
        """
        if not self.reuse:
            return ROOT
        entry = self._found.get((prefix, tokens))
        if entry is not None:
            return entry[1]
        self._serial += 1
        self._found[prefix, tokens] = block, self._serial
        self._published[block] = prefix, tokens
        return self._serial

    def release(self, blocks: Sequence[int]) -> None:
        """Stop using a chain. Its last block becomes the oldest: a prefix is of no use without what comes before it."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._published:
                self._idle[block] = None
            else:
                self._free.append(block)


class PagedCache:
    """Keys and values per attention layer, ``[blocks + 1, block_size, Hkv, D]`` in the graph's dtype, and their pool.

    The last block is no request's: rows that only fill a call up write there.
    """

    def __init__(
        self, graph: PrecisionGraph, device: torch.device, blocks: int, block_size: int, *, reuse: bool = True
    ) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            for spec, dtype in _attention_layers(graph):
                shape = blocks + 1, block_size, spec.kv_heads, spec.head_dim
                keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
                self.layers[spec.layer] = keys, values
        except RuntimeError as error:  # of a GPU's memory, of the machine's, or a size beyond 64 bits
            size = (blocks + 1) * block_size * self.bytes_per_token(graph)
            raise InputError(
                f"a cache of {blocks} blocks takes {size / 1e9:.1f} GB, which {device} does not have",
                remedy="lower cache_blocks, or the memory that others take",
            ) from error
        self.pool = BlockPool(blocks, block_size, reuse=reuse)

    @staticmethod
    def bytes_per_token(graph: PrecisionGraph) -> int:
        """Bytes that one token takes in all layers."""
        return sum(2 * spec.kv_heads * spec.head_dim * dtype.itemsize for spec, dtype in _attention_layers(graph))

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Rows of the flattened cache that hold positions ``start .. stop - 1`` of a sequence with these ``blocks``."""
        size = self.pool.block_size
        return [blocks[p // size] * size + p % size for p in range(start, stop)]

    def rows(self, sequences: Sequence[tuple[Sequence[int], int]]) -> Tensor:
        """Rows of the flattened cache that hold the first positions of each ``(blocks, positions)``, back to back."""
        size = self.pool.block_size
        counts = [self.pool.blocks_for(length) for _, length in sequences]
        pages = np.fromiter(
            chain.from_iterable(blocks[:count] for (blocks, _), count in zip(sequences, counts, strict=True)), np.int64
        )
        kept = np.ones(len(pages) * size, dtype=bool)
        end = 0
        for (_, length), count in zip(sequences, counts, strict=True):
            end += count * size
            kept[end - count * size + length : end] = False
        rows = (pages[:, None] * size + np.arange(size)).reshape(-1)[kept]
        return torch.from_numpy(rows)


def _attention_layers(graph: PrecisionGraph) -> list[tuple[ops.AttentionSpec, torch.dtype]]:
    """Spec, and dtype of the keys, of every attention node."""
    found: list[tuple[ops.AttentionSpec, torch.dtype]] = []
    for node in graph:
        if node.target is ops.attention:
            key, spec = node.args[1], node.args[3]
            assert isinstance(key, torch.fx.Node) and isinstance(spec, ops.AttentionSpec)
            found.append((spec, getattr(torch, tensor(key).dtype)))
    layers = [spec.layer for spec, _ in found]
    if len(set(layers)) != len(layers):
        raise UnsupportedModelError("two attention modules have one layer_idx, so they would share a cache")
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``start:stop`` of a call: positions ``position ..`` of a sequence whose pages are ``blocks``."""

    start: int
    stop: int
    position: int
    blocks: Sequence[int]

    @property
    def seen(self) -> int:
        """Positions of the sequence up to this call's last one."""
        return self.position + self.stop - self.start


@dataclass(frozen=True)
class PagedContext:
    """A call on the cache: row ``i`` of its keys and values goes to row ``slots[i]`` of the flattened cache.

    All rows are written before the first sequence is read: sequences of one call may share blocks that it fills. What
    the layers have in common, where each sequence's keys are, is made once.
    """

    cache: PagedCache
    slots: Tensor
    spans: Sequence[Span]

    def sequences(self, layer: int, k: Tensor, v: Tensor) -> Iterator[Attended]:
        keys, values = self._gather(layer, k, v)
        first = 0
        for span in self.spans:
            last = first + span.seen
            yield Attended(span.start, span.stop, span.position, keys[first:last], values[first:last])
            first = last

    def varlen(self, layer: int, k: Tensor, v: Tensor) -> Varlen:
        keys, values = self._gather(layer, k, v)
        return Varlen(*self._bounds, keys, values)

    def _gather(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the call's keys and values; then those of all sequences, back to back, ``[S, Hkv, D]``."""
        keys, values = (t.flatten(0, 1) for t in self.cache.layers[layer])
        keys.index_copy_(0, self.slots, k[0])
        values.index_copy_(0, self.slots, v[0])
        return keys.index_select(0, self._rows), values.index_select(0, self._rows)

    @cached_property
    def _rows(self) -> Tensor:
        return self.cache.rows([(span.blocks, span.seen) for span in self.spans]).to(self.slots.device)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Where each sequence's queries and keys begin, and the most that one has of each."""
        queries = cumulative([span.stop - span.start for span in self.spans])
        keys = cumulative([span.seen for span in self.spans])
        starts = torch.tensor([queries, keys], dtype=torch.int32).to(self.slots.device)
        return starts[0], starts[1], max(map(sub, queries[1:], queries)), max(map(sub, keys[1:], keys))
