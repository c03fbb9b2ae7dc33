"""What the tests of GPU kernels share: equality of bits, and values that break kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precgraph.format import Format
from precgraph.quantizer import QTensor, quantize
from tests.gpu.device import DEVICE

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
ROWS, TOKENS = Format("float8_e4m3fn", "1x128"), Format("float8_e4m3fn", "128x1")
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "ue8m0": {"scale_dtype": "ue8m0"},
    "vllm": {"scale_rule": "amax*(1/max)", "amax_floor": 1e-10},
    "deepgemm": {"divide": "reciprocal", "amax_floor": 1e-4},
    "e5m2": {"dtype": "float8_e5m2"},
    "fp32": {"source": "float32"},
    "fp16": {"source": "float16"},
}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits, except that any NaN equals any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype not in BITS:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    equal = a.contiguous().view(BITS[a.dtype]) == b.contiguous().view(BITS[b.dtype])
    return bool((equal | (a.isnan() & b.isnan())).all())


def assert_quantized(q: QTensor, x: Tensor, fmt: Format) -> None:
    """``q`` is what the reference makes of ``x``, bit for bit; codes of non-finite blocks are not compared."""
    right = quantize(x, fmt)
    assert q.shape == right.shape and q.format == fmt
    assert q.codes.shape == right.codes.shape and q.scales.shape == right.scales.shape
    assert same_bits(q.scales, right.scales), "scales"
    rows, cols = fmt.block
    finite = right.scales.isfinite().repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    differ = (q.codes.contiguous().view(torch.uint8) != right.codes.view(torch.uint8)) & finite
    assert not differ.any(), f"{int(differ.sum())} codes differ, first at {differ.nonzero()[0].tolist()}"


def awkward(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random values of every magnitude, with zeros of both signs, subnormals, whole zero rows and one large value."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=DEVICE)
    magnitudes = torch.randint(-30, 30, (*shape[:-1], 1), generator=generator, device=DEVICE)
    choice = torch.rand((*shape[:-1], 1), generator=generator, device=DEVICE)
    x = torch.where(choice < 0.3, x * torch.exp2(magnitudes.float()), x)
    x = torch.where(choice > 0.95, x * 1e-39, x)
    x = torch.where((choice > 0.9) & (choice < 0.95), x * 0.0, x)
    spots = torch.rand(shape, generator=generator, device=DEVICE)
    x = torch.where(spots < 0.02, -0.0, x)
    return torch.where(spots > 0.9995, 3e4 * x, x).to(dtype)


def extreme(*shape: int, seed: int = 0) -> Tensor:
    """:func:`awkward` in bf16, where a third of the rows have infinities, NaN, the largest and the least values."""
    x = awkward(*shape, seed=seed)
    generator = torch.Generator(DEVICE).manual_seed(seed + 1000)
    ends = [float("inf"), float("-inf"), float("nan"), 3.3e38, -3.3e38, 1.1e-38, 9.2e-41, -9.2e-41]
    chosen = torch.randint(len(ends), shape, generator=generator, device=DEVICE)
    rows = torch.rand((*shape[:-1], 1), generator=generator, device=DEVICE) < 1 / 3
    spots = torch.rand(shape, generator=generator, device=DEVICE) < 2 / shape[-1]
    return torch.where(rows & spots, torch.tensor(ends, device=DEVICE).bfloat16()[chosen], x)
