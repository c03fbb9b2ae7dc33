"""WGrad by cuBLASLt: the sums of its operands, in every run the same bits, in bf16 and in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from precgraph.format import Format
from precgraph.lowering import cublas
from precgraph.quantizer import QTensor, dequantize, quantize

pytest.importorskip("triton")
from precgraph.lowering.triton.quantize import quantize_tokens

pytestmark = pytest.mark.gpu

TOKENS = Format("float8_e4m3fn", "128x1")
SHAPES = [(6144, 4096), (1024, 4096), (576, 192), (192, 576), (272, 144)]


def operand(tokens: int, width: int, seed: int, scale: float = 1.0) -> QTensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(1, tokens, width, generator=generator, device="cuda") * scale
    x[:, ::3, : width // 2] = 0
    x[..., -1] *= 2.0**-40
    return quantize_tokens(x.bfloat16(), TOKENS)


def errors(dw: Tensor, dy: QTensor, x: QTensor) -> float:
    right = dequantize(dy).double().flatten(0, -2).t() @ dequantize(x).double().flatten(0, -2)
    return float((dw.double() - right).norm() / right.norm())


@pytest.mark.parametrize("tokens", [1, 129, 1000, 8192])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int], tokens: int) -> None:
    """bf16's own rounding, and in fp32 what 128 products lose in the tensor core: 2^-13 of the largest."""
    dy, x = operand(tokens, shape[0], seed=1), operand(tokens, shape[1], seed=2, scale=30.0)
    for dtype, bound in ((torch.bfloat16, 2**-9 * 1.1), (torch.float32, 2**-12)):
        dw = cublas.fp8_wgrad(dy, x, dtype)
        assert dw.dtype == dtype and errors(dw, dy, x) < bound
        assert torch.equal(dw, cublas.fp8_wgrad(dy, x, dtype))


def test_operands_in_the_reference_layout() -> None:
    """Codes along tokens and scales of another stride are copied, not misread."""
    x, dy = torch.randn(1, 333, 1024, device="cuda").bfloat16(), torch.randn(1, 333, 512, device="cuda").bfloat16()
    fast = cublas.fp8_wgrad(quantize_tokens(dy, TOKENS), quantize_tokens(x, TOKENS))
    assert torch.equal(cublas.fp8_wgrad(quantize(dy, TOKENS), quantize(x, TOKENS)), fast)


def test_a_group_is_its_members() -> None:
    dys = [operand(1000, n, seed=n) for n in (4096, 1024, 1024)]
    x = operand(1000, 4096, seed=9)
    for dw, dy in zip(cublas.fp8_wgrads(dys, x), dys, strict=True):
        assert torch.equal(dw, cublas.fp8_wgrad(dy, x))


def test_a_slice_of_a_single_group_of_tokens() -> None:
    """The scales' stride along the only group is that of the wider tensor, which torch refuses."""
    joint, x = operand(50, 1152, seed=3), operand(50, 192, seed=4)
    left = QTensor(joint.codes[:, :576], joint.scales[:, :576], torch.Size((1, 50, 576)), joint.format)
    assert torch.equal(cublas.fp8_wgrad(left, x), cublas.fp8_wgrad(joint, x)[:576])
