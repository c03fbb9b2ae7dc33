"""Our own WGrad kernel: DeepGEMM's bits, whatever the shape, and the same ones in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from precgraph.format import Format
from precgraph.lowering import deep_gemm
from precgraph.lowering.gemm_nodes import joint_wgrads
from precgraph.quantizer import QTensor, dequantize, quantize

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")
from precgraph.lowering.cuda import wgrad
from precgraph.lowering.triton.quantize import quantize_tokens

pytestmark = pytest.mark.gpu

TOKENS = Format("float8_e4m3fn", "128x1")
SHAPES = [(6144, 4096), (4096, 12288), (1024, 4096), (576, 192), (192, 576), (272, 144)]


def operand(tokens: int, width: int, seed: int, scale: float = 1.0) -> QTensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(1, tokens, width, generator=generator, device="cuda") * scale
    x[:, ::3, : width // 2] = 0
    x[..., -1] *= 2.0**-40
    return quantize_tokens(x.bfloat16(), TOKENS)


def product(dy: QTensor, x: QTensor) -> Tensor:
    return dequantize(dy).double().flatten(0, -2).t() @ dequantize(x).double().flatten(0, -2)


@pytest.mark.parametrize("tokens", [1, 100, 129, 1000, 8192])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_deep_gemms(shape: tuple[int, int], tokens: int) -> None:
    dy, x = operand(tokens, shape[0], seed=1), operand(tokens, shape[1], seed=2, scale=30.0)
    dw = wgrad.fp8_wgrad(dy, x)
    assert torch.equal(dw, deep_gemm.fp8_wgrad(dy, x))
    assert torch.equal(dw, wgrad.fp8_wgrad(dy, x))
    assert torch.equal(wgrad.fp8_wgrad(dy, x, torch.float32), deep_gemm.fp8_wgrad_sums(dy, x))


@pytest.mark.parametrize("shape", [(16, 16), (32, 48), (576, 192)], ids=str)
def test_values(shape: tuple[int, int]) -> None:
    """bf16's own rounding, and in fp32 what 128 products lose in the tensor core: 2^-13 of the largest."""
    dy, x = operand(300, shape[0], seed=1), operand(300, shape[1], seed=2)
    right = product(dy, x)
    for dtype, bound in ((torch.bfloat16, 2**-9 * 1.1), (torch.float32, 2**-12)):
        dw = wgrad.fp8_wgrad(dy, x, dtype)
        assert dw.dtype == dtype and float((dw.double() - right).norm() / right.norm()) < bound


def test_operands_in_the_reference_layout() -> None:
    """Codes along tokens and scales of another stride are copied, not misread."""
    x, dy = torch.randn(1, 333, 1024, device="cuda").bfloat16(), torch.randn(1, 333, 512, device="cuda").bfloat16()
    fast = wgrad.fp8_wgrad(quantize_tokens(dy, TOKENS), quantize_tokens(x, TOKENS))
    assert torch.equal(wgrad.fp8_wgrad(quantize(dy, TOKENS), quantize(x, TOKENS)), fast)


@pytest.mark.parametrize("tokens", [50, 900])
def test_a_group_is_its_members(tokens: int) -> None:
    """Side by side, where one call makes all, and apart, where each is a call."""
    joint, x = operand(tokens, 6144, seed=3), operand(tokens, 4096, seed=9)
    whole, bounds = wgrad.fp8_wgrad(joint, x), [(0, 4096), (4096, 5120), (5120, 6144)]
    members = [
        QTensor(joint.codes[:, a:b], joint.scales[:, a:b], torch.Size((1, tokens, b - a)), joint.format)
        for a, b in bounds
    ]  # fmt: skip
    for dys in (members, members[::-1]):
        for dw, dy in zip(joint_wgrads(wgrad.fp8_wgrad, dys, x), dys, strict=True):
            a, b = bounds[next(i for i, m in enumerate(members) if m is dy)]
            assert torch.equal(dw, whole[a:b])


def test_replayed_from_a_graph() -> None:
    dy, x = operand(1000, 1024, seed=1), operand(1000, 576, seed=2)
    right = wgrad.fp8_wgrad(dy, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dw = wgrad.fp8_wgrad(dy, x)
    dw.zero_()
    graph.replay()
    assert torch.equal(dw, right)
