"""Gluon for Triton's interpreter, which knows Triton alone: a layout says where a number lies, not what it is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

Array = np.ndarray[Any, Any]


def tile(data: Array, dtype: tl.dtype) -> tl.tensor:
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


class Shared:
    """Gluon's shared memory, and views of it."""

    def __init__(self, data: Array, dtype: tl.dtype) -> None:
        self.data, self.dtype = data, dtype

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        stop = int(start) + int(length)
        assert stop <= self.data.shape[dim]
        return Shared(np.moveaxis(np.moveaxis(self.data, dim, 0)[int(start) : stop], 0, dim), self.dtype)

    def reinterpret(self, dtype: tl.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.data.view(_get_np_dtype(dtype)).reshape(shape), dtype)

    def store(self, value: tl.tensor) -> None:
        assert value.dtype == self.dtype
        self.data[...] = value.handle.data

    def load(self, layout: Any) -> tl.tensor:
        return tile(self.data.copy(), self.dtype)


def _allocate(dtype: tl.dtype, shape: list[int], layout: Any) -> Shared:
    """Full of ones' bits, NaN in every type."""
    kind = _get_np_dtype(dtype)
    return Shared(np.full((*shape, kind.itemsize), 0xFF, np.uint8).view(kind)[..., 0], dtype)


def _reduce(x: tl.tensor, axis: int, combine: Callable[[tl.tensor, tl.tensor], tl.tensor]) -> tl.tensor:
    """By halves, whole tiles at a time; for what may be combined in any order."""
    data = np.moveaxis(x.handle.data, axis, 0)
    while len(data) > 1:
        data = combine(*(tile(half, x.dtype) for half in np.split(data, 2))).handle.data
    return tile(data[0], x.dtype)


def gluon_in_triton(language: Any) -> SimpleNamespace:
    """``language``, Gluon's, in the words of Triton's."""
    alike = (
        "bfloat16 cdiv constexpr float32 inline_asm_elementwise int32 int64 max permute program_id reshape split "
        "static_range store"
    )
    return SimpleNamespace(
        **{name: getattr(tl, name) for name in alike.split()},
        **{name: getattr(language, name) for name in ("BlockedLayout", "PaddedSharedLayout", "SliceLayout")},
        allocate_shared_memory=_allocate,
        arange=lambda start, end, layout: tl.arange(start, end),
        convert_layout=lambda x, layout: x,
        reduce=_reduce,
        shared_memory_descriptor=Shared,
    )
