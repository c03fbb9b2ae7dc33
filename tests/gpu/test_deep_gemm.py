"""GEMM backends on the card: rows that do not depend on the batch, the same bits twice, errors against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from precgraph.format import Format
from precgraph.lowering import deep_gemm
from precgraph.lowering.gemm_nodes import joint_wgrads
from precgraph.lowering.packs import Fp8Weight, MasterWeight
from precgraph.quantizer import QTensor, dequantize, quantize

pytest.importorskip("triton")
from precgraph.lowering.triton import gemm as triton_gemm
from precgraph.lowering.triton.quantize import quantize_both, quantize_rows
from tests.gpu.device import DEVICE, KERNELS, gpu_only, sizes

pytestmark = KERNELS

E4M3 = "float8_e4m3fn"
ROWS, TOKENS, BLOCKS = (Format(E4M3, g) for g in ("1x128", "128x1", "128x128"))
COUNTS = sizes((1, 7, 64, 129, 1000), (1, 7, 129))
DEEP_GEMM = gpu_only("DeepGEMM is CUDA")
BACKENDS = pytest.mark.parametrize(
    "backend", [pytest.param(deep_gemm, marks=DEEP_GEMM), triton_gemm], ids=["deep_gemm", "triton"]
)
ROUNDING = 2**-9 * 1.1  # of a relative error in norm: half a bf16 step, and a little for the sums


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()


def activation(*shape: int, seed: int = 0) -> QTensor:
    return quantize_rows(random(1, *shape, seed=seed), ROWS)


def exact(q: QTensor) -> Tensor:
    return dequantize(q).double().flatten(0, -2)


def weight_of(pack: Fp8Weight) -> Tensor:
    return exact(QTensor(pack.codes, pack.scales, pack.shape, pack.format))


def error(y: Tensor, right: Tensor) -> float:
    """Relative error in norm."""
    return float((y.double() - right).norm() / right.norm())


@BACKENDS
@pytest.mark.parametrize("shape", sizes([(6144, 4096), (4096, 12288), (576, 1536), (192, 576)], [(192, 576)]), ids=str)
def test_fp8_forward(backend: ModuleType, shape: tuple[int, int]) -> None:
    weight = Fp8Weight.create(random(*shape) * 0.02, BLOCKS)
    x = random(1, sizes(8192, 300), shape[1], seed=1)
    whole = backend.fp8_linear(quantize_rows(x, ROWS), weight, None)
    assert torch.equal(whole, backend.fp8_linear(quantize_rows(x, ROWS), weight, None))
    for count in COUNTS:
        few = quantize_rows(x[:, :count], ROWS)
        assert torch.equal(backend.fp8_linear(few, weight, None), whole[:, :count]), f"{count} rows"
    assert error(whole[0, :count], exact(few) @ weight_of(weight).t()) < ROUNDING
    bias = random(shape[0], seed=2)
    assert torch.equal(backend.fp8_linear(few, weight, bias), whole[:, :count] + bias)


@DEEP_GEMM
def test_operands_in_the_reference_layout() -> None:
    """Scales row by row and codes along rows, as the torch reference makes them: copied, not misread."""
    x, dy = random(1, 333, 1024, seed=1), random(1, 333, 512, seed=2)
    weight = Fp8Weight.create(random(512, 1024) * 0.02, BLOCKS)
    fast_rows, fast_tokens = quantize_both(x, ROWS, TOKENS)
    fast_dy = quantize_both(dy, ROWS, TOKENS)[1]
    assert torch.equal(
        deep_gemm.fp8_linear(quantize(x, ROWS), weight, None), deep_gemm.fp8_linear(fast_rows, weight, None)
    )
    assert torch.equal(
        deep_gemm.fp8_wgrad(quantize(dy, TOKENS), quantize(x, TOKENS)), deep_gemm.fp8_wgrad(fast_dy, fast_tokens)
    )


@DEEP_GEMM
@pytest.mark.parametrize(
    "rows, columns", [((4096, 1024, 1024), 4096), ((12288, 12288), 4096), ((576, 192, 192), 576)], ids=str
)
def test_a_projection_group_is_its_members(rows: tuple[int, ...], columns: int) -> None:
    """One GEMM for q, k, v or gate, up gives what each alone gives; DGrad sums the members in fp32."""
    masters = [random(n, columns, seed=i) * 0.02 for i, n in enumerate(rows)]
    group = Fp8Weight.create_group(masters, BLOCKS)
    alone = [Fp8Weight.create(m, BLOCKS) for m in masters]
    for count in (64, 1000):
        x, saved = quantize_both(random(1, count, columns, seed=9), ROWS, TOKENS)
        together = deep_gemm.fp8_linears(x, group, [None] * len(rows))
        for y, single in zip(together, alone, strict=True):
            assert torch.equal(y, deep_gemm.fp8_linear(x, single, None))
        dys = [quantize_both(random(1, count, n, seed=10 + n), ROWS, TOKENS) for n in rows]
        dgrad = deep_gemm.fp8_dgrad([d for d, _ in dys], group)
        right = sum(exact(d) @ weight_of(w) for (d, _), w in zip(dys, alone, strict=True))
        assert isinstance(right, Tensor) and error(dgrad[0], right) < ROUNDING
        assert torch.equal(dgrad, deep_gemm.fp8_dgrad([d for d, _ in dys], alone))
        assert error(triton_gemm.fp8_dgrad([d for d, _ in dys], group)[0], right) < ROUNDING
        wgrads = joint_wgrads(deep_gemm.fp8_wgrad, [d for _, d in dys], saved)
        for dw, (_, dy) in zip(wgrads, dys, strict=True):
            assert torch.equal(dw, deep_gemm.fp8_wgrad(dy, saved))


@BACKENDS
def test_updating_a_group_keeps_its_storage(backend: ModuleType) -> None:
    masters = [random(n, 512, seed=n) * 0.02 for n in (384, 200)]
    group = Fp8Weight.create_group(masters, BLOCKS)
    dys = [activation(50, n, seed=n) for n in (384, 200)]
    backend.fp8_dgrad(dys, group)  # makes the transposed copy
    places = [t.data_ptr() for w in group for t in (w.codes, w.scales, *w.transposed())]
    changed = [m * 1.5 + 0.01 for m in masters]
    for pack, master in zip(group, changed, strict=True):
        pack.update(master)
    fresh = Fp8Weight.create_group(changed, BLOCKS)
    assert places == [t.data_ptr() for w in group for t in (w.codes, w.scales, *w.transposed())]
    assert torch.equal(backend.fp8_dgrad(dys, group), backend.fp8_dgrad(dys, fresh))
    x = activation(50, 512)
    for old, new in zip(group, fresh, strict=True):
        assert torch.equal(backend.fp8_linear(x, old, None), backend.fp8_linear(x, new, None))


@BACKENDS
@pytest.mark.parametrize("count", sizes([100, 1000, 8192], [100, 300]))
@pytest.mark.parametrize("shape", sizes([(1024, 4096), (576, 192)], [(576, 192)]), ids=str)
def test_fp8_wgrad(backend: ModuleType, shape: tuple[int, int], count: int) -> None:
    dy = quantize_both(random(1, count, shape[0], seed=1), ROWS, TOKENS)[1]
    x = quantize_both(random(1, count, shape[1], seed=2), ROWS, TOKENS)[1]
    dw = backend.fp8_wgrad(dy, x)
    assert error(dw, exact(dy).t() @ exact(x)) < ROUNDING
    assert torch.equal(dw, backend.fp8_wgrad(dy, x))


@BACKENDS
@pytest.mark.parametrize("vocabulary", sizes([151936, 50257], [997]))
def test_logits(backend: ModuleType, vocabulary: int) -> None:
    """bf16 operands, fp32 logits; its gradients round once. 50257 rows are no multiple of anything."""
    weight = MasterWeight.create(random(vocabulary, sizes(1024, 200)) * 0.05, None)
    x = random(1, sizes(2048, 340), weight.values.shape[1], seed=1)
    whole = backend.bf16_logits(x, weight, None)
    assert whole.dtype == torch.float32
    for count in COUNTS:
        assert torch.equal(backend.bf16_logits(x[:, :count], weight, None), whole[:, :count]), f"{count} rows"
    right = x[0, :100].double() @ weight.values.double().t()
    assert error(whole[0, :100], right) < 1e-5
    dy = random(1, 333, vocabulary, seed=2)
    assert error(backend.bf16_dgrad([dy], [weight])[0], dy[0].double() @ weight.values.double()) < ROUNDING
    dw = backend.bf16_wgrad(dy, x[:, :333])
    assert error(dw[:5000], dy[0, :, :5000].double().t() @ x[0, :333].double()) < ROUNDING
    assert torch.equal(dw, backend.bf16_wgrad(dy, x[:, :333]))
