"""Operands of one GEMM that lie side by side are one operand, without a copy."""

from __future__ import annotations

import torch

from precgraph.format import Format
from precgraph.lowering.packs import adjacent
from precgraph.quantizer import QTensor, dequantize, quantize

TOKENS = Format("float8_e4m3fn", "128x1")


def columns(whole: QTensor, start: int, stop: int) -> QTensor:
    shape = torch.Size((*whole.shape[:-1], stop - start))
    return QTensor(whole.codes[:, start:stop], whole.scales[:, start:stop], shape, whole.format)


def test_adjacent_columns_are_the_tensor_they_are_cut_from() -> None:
    whole = quantize(torch.randn(1, 256, 96, generator=torch.Generator().manual_seed(0)).bfloat16(), TOKENS)
    parts = [columns(whole, 0, 64), columns(whole, 64, 80), columns(whole, 80, 96)]
    joint = adjacent(parts)
    assert joint is not None and joint.shape == whole.shape
    assert joint.codes.data_ptr() == whole.codes.data_ptr() and torch.equal(dequantize(joint), dequantize(whole))
    assert adjacent([parts[1], parts[0], parts[2]]) is None
    assert adjacent([parts[0], quantize(torch.ones(1, 256, 16).bfloat16(), TOKENS)]) is None
