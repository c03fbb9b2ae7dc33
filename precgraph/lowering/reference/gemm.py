"""Reference GEMMs: row-invariant by construction.

FP8: the products of one group of 128 E4M3 pairs, at most 43 bits apart, add up exactly in float64 in any order. The
exact sum is rounded once to fp32, multiplied by the two scales' fp32 product, and added to the fp32 accumulator, group
after group along the contracted dimension. That is what DeepGEMM's two-level accumulation approximates (its tensor
cores keep fewer bits within a group), so the numerics ids differ.

bf16 operands have no exact sum: tiles of :data:`ROWS` rows go through fp32 matrix products of one shape, in which a
row does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.quantizer import QTensor, quantize

ROWS = 16


@dataclass(eq=False)
class Float64Weight:
    """A quantised weight with its codes as float64: ``values [pad(N), pad(K)]``, ready for exact products."""

    quantized: QTensor
    values: Tensor

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        if fmt is None:
            raise LoweringError("a quantised GEMM needs a weight format")
        quantized = quantize(master, fmt)
        return cls(quantized, quantized.codes.double())

    def update(self, master: Tensor) -> None:
        new = quantize(master, self.quantized.format)
        self.quantized.codes.copy_(new.codes)
        self.quantized.scales.copy_(new.scales)
        self.refill()

    def refill(self) -> None:
        """Remake ``values`` after codes were written into :meth:`tensors`."""
        self.values.copy_(self.quantized.codes)

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.quantized.codes, "scales": self.quantized.scales}


@dataclass(eq=False)
class Float32Weight:
    """A weight that stays in its dtype, widened once to fp32 ``[N, K]`` for the tiles."""

    values: Tensor

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        return cls(master.float())

    def update(self, master: Tensor) -> None:
        self.values.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}


# --------------------------------------------------------------------------------------------- FP8


def fp8_linear(x: QTensor, weight: Float64Weight, bias: Tensor | None) -> Tensor:
    """FProp: ``x [..., K]`` in groups along K, ``weight [N, K]`` in blocks; bf16 ``[..., N]``, then bf16 bias."""
    rows = weight.quantized.shape[0]
    group = x.format.block[1]
    left = x.codes.double().unflatten(1, (-1, group)).transpose(0, 1)  # [K/128, M, 128]
    right = weight.values.unflatten(1, (-1, group)).permute(1, 2, 0)  # [K/128, 128, N]
    scales = _rows(weight.quantized, 0).t()  # [K/128, N]
    y = _accumulate(left, right, x.scales.t(), scales)[:, :rows].to(torch.bfloat16)
    return _with_bias(y, bias).view(*x.shape[:-1], rows)


def fp8_dgrad(dys: Sequence[QTensor], weights: Sequence[Float64Weight]) -> Tensor:
    """DGrad: ``Σ dy_i [..., N_i] @ weight_i [N_i, K]``, parts in order in one fp32 accumulator; bf16 ``[..., K]``."""
    total: Tensor | None = None
    columns = weights[0].quantized.shape[1]
    for dy, weight in zip(dys, weights, strict=True):
        group = dy.format.block[1]
        left = dy.codes.double().unflatten(1, (-1, group)).transpose(0, 1)  # [N/128, M, 128]
        right = weight.values[: left.shape[0] * group].unflatten(0, (-1, group))  # [N/128, 128, K]
        scales = weight.quantized.scales.repeat_interleave(weight.quantized.format.block[1], 1)  # [N/128, K]
        total = _accumulate(left, right, dy.scales.t(), scales, total)
    assert total is not None
    return total[:, :columns].to(torch.bfloat16).view(*dys[0].shape[:-1], columns)


def fp8_wgrad(dy: QTensor, x: QTensor) -> Tensor:
    """WGrad: ``dyᵀ @ x``, both in groups along tokens, x's of one column or more; bf16 of the fp32 sums ``[N, K]``."""
    return fp8_wgrad_sums(dy, x).to(torch.bfloat16)


def fp8_wgrad_sums(dy: QTensor, x: QTensor) -> Tensor:
    """The fp32 sums of :func:`fp8_wgrad`."""
    group = dy.format.block[0]
    left = dy.codes.double().unflatten(0, (-1, group)).transpose(1, 2)  # [T/128, N, 128]
    right = x.codes.double().unflatten(0, (-1, group))  # [T/128, 128, K]
    columns = x.scales.repeat_interleave(x.format.block[1], 1)
    return _accumulate(left, right, dy.scales, columns)[:, : x.shape[-1]]


def _accumulate(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor, total: Tensor | None = None) -> Tensor:
    """``Σ_g fp32(left[g] @ right[g]) * (rows[g, :, None] * columns[g])`` in fp32, ``g`` in order.

    ``left [G, M, 128]``, ``right [G, 128, N]`` float64; ``rows [G, M]``, ``columns [G, N]`` fp32 scales.
    """
    if total is None:
        total = torch.zeros(left.shape[1], right.shape[2], dtype=torch.float32, device=left.device)
    # The sums are exact either way; one call for all groups is faster, but holds all their products.
    few = left.shape[1] <= ROWS
    products = (
        torch.bmm(left, right).float() if few else (torch.mm(a, b).float() for a, b in zip(left, right, strict=True))
    )
    for product, row, column in zip(products, rows, columns, strict=True):
        total = total + product * (row[:, None] * column)
    return total


def _rows(weight: QTensor, axis: int) -> Tensor:
    """The scales of a weight for each of its padded rows: ``[pad(N), K/128]``."""
    return weight.scales.repeat_interleave(weight.format.block[axis], axis)


# -------------------------------------------------------------------------------------------- bf16


def tiled_linear(x: Tensor, weight: Float32Weight, bias: Tensor | None) -> Tensor:
    """bf16 operands, fp32 products and sums, bf16 ``[..., N]``, then bf16 bias."""
    return _with_bias(_tiles(x, weight).to(x.dtype), bias)


def tiled_logits(x: Tensor, weight: Float32Weight, bias: Tensor | None) -> Tensor:
    """lm_head: bf16 operands, fp32 logits ``[..., V]``."""
    logits = _tiles(x, weight)
    return logits if bias is None else logits + bias.float()


def plain_dgrad(dys: Sequence[Tensor], weights: Sequence[Float32Weight]) -> Tensor:
    """``dy @ weight``, bf16 operands and result, fp32 sums."""
    (dy,), (weight,) = dys, weights
    return (dy.float() @ weight.values).to(dy.dtype)


def plain_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """``dyᵀ @ x`` over tokens, bf16 operands and result, fp32 sums."""
    return plain_wgrad_sums(dy, x).to(dy.dtype)


def plain_wgrad_sums(dy: Tensor, x: Tensor) -> Tensor:
    """The fp32 sums of :func:`plain_wgrad`."""
    return dy.flatten(0, -2).float().t() @ x.flatten(0, -2).float()


def bias_grad(dy: Tensor) -> Tensor:
    """``dy`` summed over tokens in fp32, rounded once."""
    return dy.flatten(0, -2).sum(0, dtype=torch.float32).to(dy.dtype)


def _tiles(x: Tensor, weight: Float32Weight) -> Tensor:
    flat = x.flatten(0, -2)
    count = flat.shape[0]
    padded = F.pad(flat, (0, 0, 0, -count % ROWS)).float()
    tiles = [F.linear(tile, weight.values) for tile in padded.split(ROWS)]
    return torch.cat(tiles)[:count].view(*x.shape[:-1], -1)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias
