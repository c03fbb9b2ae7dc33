# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Keys and values of a step into the pages of a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precgraph.errors import InputError
from precgraph.lowering.triton.primitives import OVERLAPPING, await_inputs, power_of_two, require


def store_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Copy rows of ``keys, values [T, Hkv, D]`` to ``key_pages, value_pages [B, P, Hkv, D]``, as they are.

    Row ``t`` goes to place ``slots[t] % P`` of page ``slots[t] // P``; ``slots`` are int64, of the first rows, and a
    negative one keeps its row out. The two caches are laid out alike, rows too but for the distance of tokens.
    """
    require(keys, values, key_pages, value_pages, slots)
    _, H, D = keys.shape
    page = key_pages.shape[1]
    alike = keys.dtype == values.dtype == key_pages.dtype == value_pages.dtype
    if not alike or values.shape != keys.shape or key_pages.shape[2:] != (H, D) or len(slots) > len(keys):
        raise InputError(
            f"keys are {keys.dtype} {list(keys.shape)}, values {values.dtype} {list(values.shape)}, their pages "
            f"{key_pages.dtype} {list(key_pages.shape)} and {value_pages.dtype}, slots {list(slots.shape)}"
        )
    if keys.stride()[1:] != (D, 1) or values.stride()[1:] != (D, 1):
        raise InputError(f"heads of a row are not side by side: strides {keys.stride()} and {values.stride()}")
    if key_pages.stride() != value_pages.stride() or key_pages.stride(3) != 1:
        raise InputError(f"pages have the strides {key_pages.stride()} and {value_pages.stride()}")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise InputError(f"slots are {slots.dtype} of strides {slots.stride()}, not int64 side by side")
    _pages_kernel[(len(slots),)](
        keys,
        values,
        key_pages,
        value_pages,
        slots,
        keys.stride(0),
        values.stride(0),
        *key_pages.stride()[:3],
        page,
        H,
        D,
        power_of_two(H),
        power_of_two(D),
        num_warps=4,
        **OVERLAPPING,
    )


@triton.jit
def _pages_kernel(
    keys,
    values,
    key_pages,
    value_pages,
    slots,
    key_stride,
    value_stride,
    page_stride,
    place_stride,
    head_stride,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row."""
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    inside = (head < H) & (lane < D) & (slot >= 0)
    key = tl.load(keys + row * key_stride + head * D + lane, mask=inside)
    value = tl.load(values + row * value_stride + head * D + lane, mask=inside)
    to = slot // PAGE * page_stride + slot % PAGE * place_stride + head.to(tl.int64) * head_stride + lane
    tl.store(key_pages + to, key, mask=inside)
    tl.store(value_pages + to, value, mask=inside)
