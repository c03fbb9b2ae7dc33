"""Our own WGrad kernel: DeepGEMM's bits, whatever the shape, and the same ones in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from precgraph.formats import Format, QTensor, dequantize, quantize
from precgraph.lowering import deep_gemm

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")
from precgraph.lowering.cuda import wgrad
from precgraph.lowering.triton.quantize import quantize_tokens

pytestmark = pytest.mark.gpu

TOKENS = Format("float8_e4m3fn", "128x1")
SHAPES = [(6144, 4096), (4096, 12288), (1024, 4096), (576, 192), (192, 576), (264, 136), (300, 72)]


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


@pytest.mark.parametrize("shape", [(8, 8), (4, 16)], ids=str)
def test_shapes_below_a_tile(shape: tuple[int, int]) -> None:
    """Smaller than DeepGEMM takes: within bf16's rounding of float64, and fp32 sums of 128 exact products."""
    dy, x = operand(300, shape[0], seed=1), operand(300, shape[1], seed=2)
    right = product(dy, x)
    assert float((wgrad.fp8_wgrad(dy, x).double() - right).norm() / right.norm()) < 2**-9 * 1.1


def test_operands_in_the_reference_layout() -> None:
    """Codes along tokens and scales of another stride are copied, not misread."""
    x, dy = torch.randn(1, 333, 1024, device="cuda").bfloat16(), torch.randn(1, 333, 512, device="cuda").bfloat16()
    fast = wgrad.fp8_wgrad(quantize_tokens(dy, TOKENS), quantize_tokens(x, TOKENS))
    assert torch.equal(wgrad.fp8_wgrad(quantize(dy, TOKENS), quantize(x, TOKENS)), fast)


def test_a_group_is_its_members() -> None:
    dys = [operand(1000, n, seed=n) for n in (4096, 1024, 1024)]
    x = operand(1000, 4096, seed=9)
    for dw, dy in zip(wgrad.fp8_wgrads(dys, x), dys, strict=True):
        assert torch.equal(dw, wgrad.fp8_wgrad(dy, x))
