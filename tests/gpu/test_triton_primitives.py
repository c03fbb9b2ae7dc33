"""Device functions against torch, over every input that they can get."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from precgraph.errors import LoweringError  # noqa: E402
from precgraph.lowering.reference import elementwise  # noqa: E402
from precgraph.lowering.triton import primitives as p  # noqa: E402
from tests.gpu.device import DEVICE, KERNELS, gpu_only, sizes  # noqa: E402

pytestmark = KERNELS


@triton.jit
def _apply(x, out, NAME: tl.constexpr, PART: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    value = tl.load(x + at).to(tl.float32)
    if NAME == "exp":
        value = p.exp(value)
    elif NAME == "log":
        value = p.log(value)
    elif NAME == "erf":
        value = p.erf(value)
    elif NAME == "reciprocal":
        value = p.reciprocal(value)
    elif NAME == "sqrt":
        value = tl.sqrt_rn(value)
    elif NAME == "negative":
        value = p.negative(value)
    elif PART == 0:
        value = p.activation_value(value, NAME)
    else:
        value = p.activation_slope(value, NAME)
    tl.store(out + at, value)


@triton.jit
def _convert(x, y, wide, narrow, product):
    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    value = tl.load(x + at)
    tl.store(wide + at, p.widen(value))
    tl.store(narrow + at, p.narrow(tl.load(y + at)))
    tl.store(product + at, p.times(value, p.narrow(tl.load(y + at))))


@triton.jit
def _divide(x, scale, out):
    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    divisor = tl.load(scale + at)
    value = tl.load(x + at)
    inverse = p.reciprocal(divisor)
    tl.store(out + at, p.refine(value * inverse, value, divisor, inverse))


def apply(x: Tensor, name: str, part: int = 0) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _apply[(x.numel() // 1024,)](x, out, name, part, **p.EXACT)
    return out


def bits_from(start: int) -> Tensor:
    """The fp32 values of 2**26 bit patterns in a row; in the interpreter 4096 of them, of every low bit."""
    count, step = sizes((1 << 26, 1), (1 << 12, (1 << 14) - 1))
    return (start + step * torch.arange(count, dtype=torch.int32, device=DEVICE)).view(torch.float32)


def mantissas() -> Tensor:
    """All those of fp32; in the interpreter every 1023rd."""
    return torch.arange(0, 1 << 23, sizes(1, 1023), dtype=torch.int32, device=DEVICE)[: sizes(1 << 23, 1 << 13)]


def different(a: Tensor, b: Tensor) -> int:
    """How many values differ in their bits; all NaN are alike."""
    return int(((a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())).sum())


@pytest.mark.parametrize(
    ("what", "torch_function"),
    [
        *(
            pytest.param(name, function, marks=gpu_only("this function is torch's there, on both sides"))
            for name, function in (("exp", torch.exp), ("log", torch.log), ("erf", torch.erf), ("sqrt", torch.sqrt))
        ),
        ("negative", torch.neg),
    ],
)
def test_every_float_gives_torchs_bits(what: str, torch_function: object) -> None:
    for start in range(-(1 << 31), 1 << 31, 1 << 26):
        x = bits_from(start)
        assert different(apply(x, what), torch_function(x)) == 0, f"bits {start:#x}"  # type: ignore[operator]


def test_reciprocal_is_ieee_division_in_its_range() -> None:
    for exponent in sizes(range(1, 253), (1, 2, 127, 200, 252)):  # 2**-126 .. 2**126
        x = (mantissas() | (exponent << 23)).view(torch.float32)
        assert different(apply(x, "reciprocal"), torch.ones_like(x) / x) == 0, exponent


def test_refined_quotient_is_ieee_division_for_every_fp16_mantissa_and_scale() -> None:
    """Those of bf16 are among them."""
    scales = (mantissas() | (127 << 23)).view(torch.float32)
    for mantissa in range(0, 1024, sizes(1, 93)):
        x = torch.full_like(scales, 1 + mantissa / 1024)
        out = torch.empty_like(x)
        _divide[(x.numel() // 1024,)](x, scales, out, **p.EXACT)
        assert different(out, x / scales) == 0, mantissa


def test_conversions_and_products_of_pairs_are_torchs() -> None:
    """Every bf16 widened, every fp32 rounded to bf16, and the products of all pairs of bf16 but a few.

    The low half of each fp32 value numbers the bf16 that it is multiplied with, and its high half is the bf16 that it
    is rounded to, or the one before: so each bf16 meets nearly every other, subnormal ones too.
    """
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    for start in range(-(1 << 31), 1 << 31, 1 << 26):
        y = bits_from(start)
        x = every[:: sizes(1, 16)].repeat(sizes(1 << 10, 1))
        wide, narrow, product = torch.empty_like(y), torch.empty_like(x), torch.empty_like(x)
        _convert[(y.numel() // 1024,)](x, y, wide, narrow, product, **p.EXACT)
        assert different(wide, x.float()) == 0
        assert different(narrow.float(), y.bfloat16().float()) == 0, f"bits {start:#x}"
        assert different(product.float(), (x.float() * y.bfloat16().float()).bfloat16().float()) == 0, (
            f"bits {start:#x}"
        )


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("part", [0, 1])
def test_every_bf16_activation_and_slope_equals_the_reference(activation: str, part: int) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=DEVICE).view(torch.bfloat16).float()
    right = elementwise._ACTIVATIONS[activation](x)[part]
    mine = apply(x, activation, part)
    if (activation, part) == ("silu", 0):  # only ever rounded
        right, mine = right.bfloat16().float(), mine.bfloat16().float()
    finite = x.isfinite()
    assert different(mine[finite], right[finite]) == 0
    assert not mine[~finite & ~right.isfinite()].isfinite().any(), "an infinite input is not hidden"


def test_a_triton_with_another_gluon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "precgraph.lowering.triton.gluon_tiles"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    with pytest.raises(LoweringError, match=f"Triton {triton.__version__} has another.*install the triton"):
        importlib.import_module(name)
