"""Operands of one GEMM that lie side by side are one operand, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from precgraph.format import Format
from precgraph.lowering.gemm_nodes import joint_wgrads
from precgraph.lowering.packs import adjacent
from precgraph.lowering.reference import gemm
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


def test_a_groups_wgrad_is_one_call_where_gradients_lie_side_by_side() -> None:
    """And each member's own bits, in the order of the members, in any case."""
    generator, calls = torch.Generator().manual_seed(0), list[int]()

    def run(dy: QTensor, x: QTensor) -> Tensor:
        calls.append(dy.shape[-1])
        return gemm.fp8_wgrad(dy, x)

    for tokens in (50, 300):
        whole, x = (quantize(torch.randn(1, tokens, n, generator=generator).bfloat16(), TOKENS) for n in (96, 32))
        members = [columns(whole, a, b) for a, b in ((0, 64), (64, 80), (80, 96))]
        for dys, called in ((members, [96]), (members[::-1], [16, 16, 64])):
            found = joint_wgrads(run, dys, x)
            assert calls == called and all(map(torch.equal, found, [gemm.fp8_wgrad(d, x) for d in dys]))
            calls.clear()
