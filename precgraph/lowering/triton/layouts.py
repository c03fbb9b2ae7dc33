"""Buffers of quantised tensors, in the layouts that DeepGEMM reads without a transposing kernel.

The logical tensor of a :class:`~precgraph.quantizer.QTensor` does not change with these: only strides do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precgraph.errors import InputError
from precgraph.format import Format
from precgraph.lowering.packs import padded
from precgraph.lowering.triton.primitives import GROUP, ceil_div, require
from precgraph.quantizer import QTensor


def matrix(x: Tensor) -> tuple[Tensor, int]:
    """``x [..., K]`` as a kernel reads ``[T, K]``: a tensor that begins where the matrix does, and the step between
    rows. Nothing is copied, unless the strides allow no matrix with unit stride along K."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.shape[:-2].numel() > 1 or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1])
        x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(-2)


def new_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor; half the host's time of a `torch.empty` that is given a shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def require_bf16(**tensors: Tensor | None) -> None:
    """What :func:`~precgraph.lowering.triton.primitives.require` asks, and `InputError` for an operand of another
    dtype: the fused kernels' cast points are those of bf16 models."""
    require(*tensors.values())
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.bfloat16:
            raise InputError(f"{name} is {tensor.dtype}", remedy="the fused Triton kernels take bf16")


def new_rows(shape: torch.Size, fmt: Format, device: torch.device) -> QTensor:
    """Empty 1×128 buffers: codes ``[T, pad(K)]``, scales ``[T, K/128]`` with strides ``(1, T up to 4)``.

    The last column of scales is padded too: DeepGEMM's TMA reads every column to the end of its padding.
    """
    tokens, groups = shape[:-1].numel(), ceil_div(shape[-1], GROUP)
    codes = torch.empty(tokens, groups * GROUP, dtype=fmt.torch_dtype, device=device)
    scales = torch.empty(groups, ceil_div(tokens, 4) * 4, dtype=torch.float32, device=device)
    return QTensor(codes, scales.as_strided((tokens, groups), (1, scales.stride(0))), shape, fmt)


def new_tokens(shape: torch.Size, fmt: Format, device: torch.device) -> QTensor:
    """Empty 128×1 buffers: codes ``[pad(T), K]``, the transposed view of ``[K, pad(T)]``; scales ``[T/128, K]``."""
    blocks, width = ceil_div(shape[:-1].numel(), GROUP), shape[-1]
    codes = torch.empty(width, blocks * GROUP, dtype=fmt.torch_dtype, device=device).t()
    return QTensor(codes, torch.empty(blocks, width, dtype=torch.float32, device=device), shape, fmt)


def apart(q: QTensor | None, parts: Sequence[Tensor]) -> list[QTensor]:
    """The columns of ``q`` that hold each of ``parts``, which are padded to whole blocks."""
    if q is None or len(parts) == 1:
        return [] if q is None else [q]
    step, start, found = q.format.block[1], 0, []
    for part in parts:
        stop = start + padded(part.shape[-1], step)
        scales = q.scales[:, start // step : stop // step]
        found.append(QTensor(q.codes[:, start:stop], scales, part.shape, q.format))
        start += padded(part.shape[-1])
    return found


def pairs(q: QTensor) -> Tensor:
    """The codes of a 128×1 tensor as its kernels write them: ``[K, pad(T)/2]`` int16, two tokens each."""
    return q.codes.t().view(torch.int16)


def words(q: QTensor) -> Tensor:
    """The same as ``[K, pad(T)/4]`` int32, four tokens each."""
    return q.codes.t().view(torch.int32)
