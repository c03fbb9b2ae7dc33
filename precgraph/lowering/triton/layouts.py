"""Buffers of quantised tensors, in the layouts that DeepGEMM reads without a transposing kernel.

The logical tensor of a :class:`~precgraph.quantizer.QTensor` does not change with these: only strides do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from precgraph.errors import InputError
from precgraph.format import Format
from precgraph.lowering.triton.primitives import GROUP, ceil_div
from precgraph.quantizer import QTensor


def flatten(x: Tensor) -> Tensor:
    """``[..., K] -> [T, K]`` with unit stride along K: a view, unless the strides allow none."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def require_bf16(**tensors: Tensor | None) -> None:
    """`InputError` for an operand of another dtype: the fused kernels' cast points are those of bf16 models."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.bfloat16:
            raise InputError(f"{name} is {tensor.dtype}", remedy="the fused Triton kernels take bf16")


def new_rows(shape: torch.Size, fmt: Format, device: torch.device, parts: int = 1) -> tuple[QTensor, ...]:
    """Empty 1×128 buffers: codes ``[T, pad(K)]``, scales ``[T, K/128]`` with strides ``(1, T up to 4)``.

    With several ``parts`` of one shape, followed by their joint tensor ``[..., parts * pad(K)]``, whose column slices
    they are.
    """
    tokens, groups = math.prod(shape[:-1]), ceil_div(shape[-1], GROUP)
    width = groups * GROUP
    codes = torch.empty(tokens, parts * width, dtype=fmt.torch_dtype, device=device)
    rows = ceil_div(tokens, 4) * 4
    scales = torch.empty(parts * groups, rows, dtype=torch.float32, device=device)[:, :tokens].t()
    joint = QTensor(codes, scales, torch.Size((*shape[:-1], parts * width)), fmt)
    if parts == 1:
        return (QTensor(codes, scales, shape, fmt),)
    return (
        *(
            QTensor(codes[:, i * width :][:, :width], scales[:, i * groups :][:, :groups], shape, fmt)
            for i in range(parts)
        ),
        joint,
    )


def new_tokens(shape: torch.Size, fmt: Format, device: torch.device, parts: int = 1) -> tuple[QTensor, ...]:
    """Empty 128×1 buffers: codes ``[pad(T), K]``, the transposed view of ``[K, pad(T)]``; scales ``[T/128, K]``.

    With several ``parts``, followed by their joint tensor ``[..., parts * K]``, whose column slices they are.
    """
    blocks, width = ceil_div(math.prod(shape[:-1]), GROUP), shape[-1]
    codes = torch.empty(parts * width, blocks * GROUP, dtype=fmt.torch_dtype, device=device).t()
    scales = torch.empty(blocks, parts * width, dtype=torch.float32, device=device)
    joint = QTensor(codes, scales, torch.Size((*shape[:-1], parts * width)), fmt)
    if parts == 1:
        return (joint,)
    return (
        *(
            QTensor(codes[:, i * width :][:, :width], scales[:, i * width :][:, :width], shape, fmt)
            for i in range(parts)
        ),
        joint,
    )


def pairs(q: QTensor) -> Tensor:
    """The codes of a 128×1 tensor as its kernels write them: ``[K, pad(T)/2]`` int16, two tokens each."""
    return q.codes.t().view(torch.int16)


def words(q: QTensor) -> Tensor:
    """The same as ``[K, pad(T)/4]`` int32, four tokens each."""
    return q.codes.t().view(torch.int32)
