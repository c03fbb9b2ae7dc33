"""Device functions against torch, over every input that they can get."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from precgraph.errors import LoweringError  # noqa: E402
from precgraph.lowering.reference import elementwise  # noqa: E402
from precgraph.lowering.triton import logprobs  # noqa: E402
from precgraph.lowering.triton import primitives as p  # noqa: E402
from tests.gpu.device import DEVICE, INTERPRETED, KERNELS, gpu_only, sizes  # noqa: E402
from tests.gpu.same import ROWS, RULES  # noqa: E402

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
def _divide(x, scale, out, RULE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    value = tl.load(x + at)
    if RULE is None:
        value = logprobs.tempered(value, scale, at)
    else:
        divisor = tl.load(scale + at)
        value = p.ratio(value, divisor, p.reciprocal(divisor), RULE)
    tl.store(out + at, value)


@pytest.fixture(params=sizes(["the GPU's"], ["below", "above"]))
def rough(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reciprocal that an exact one is refined from; in the interpreter, that next to the exact one on each side."""
    if INTERPRETED:
        from tests.gpu import interpreter

        side = {"below": -math.inf, "above": math.inf}[request.param]
        monkeypatch.setitem(interpreter.PTX, interpreter.RECIPROCAL, interpreter.rough_reciprocal(side))


def apply(x: Tensor, name: str, part: int = 0) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _apply[(x.numel() // 1024,)](x, out, name, part, **p.EXACT)
    return out


def bits_from(start: int) -> Tensor:
    """The fp32 values of 2**26 bit patterns in a row; in the interpreter 4096 of them, of every low bit."""
    count, step = sizes((1 << 26, 1), (1 << 12, (1 << 14) - 1))
    return (start + step * torch.arange(count, dtype=torch.int32, device=DEVICE)).view(torch.float32)


def mantissas() -> Tensor:
    """All those of fp32; in the interpreter every 1023rd, and that of all ones."""
    some = torch.arange(0, 1 << 23, sizes(1, 1023), dtype=torch.int32, device=DEVICE)[: sizes(1 << 23, 1 << 13)]
    some[-1] = (1 << 23) - 1
    return some


def divided(x: Tensor, scales: Tensor, rule: str | None) -> Tensor:
    """By scales of a rule of quantisation; of None, by temperatures."""
    out = torch.empty_like(x)
    fmt = None if rule is None else replace(ROWS, **RULES[rule])
    _divide[(x.numel() // 1024,)](x, scales, out, p.rule(fmt, "1x128"), **p.EXACT)
    return out


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


@pytest.mark.usefixtures("rough")
def test_reciprocal_is_ieee_division_in_its_range() -> None:
    for exponent in sizes(range(1, 253), (1, 2, 127, 200, 252)):  # 2**-126 .. 2**126
        x = (mantissas() | (exponent << 23)).view(torch.float32)
        assert different(apply(x, "reciprocal"), torch.ones_like(x) / x) == 0, exponent


@pytest.mark.usefixtures("rough")
def test_refined_quotient_is_ieee_division_for_every_fp16_mantissa_and_scale() -> None:
    """Those of bf16 are among them."""
    scales = (mantissas() | (127 << 23)).view(torch.float32)
    for mantissa in range(0, 1024, sizes(1, 93)):
        x = torch.full_like(scales, 1 + mantissa / 1024)
        assert different(divided(x, scales, "default"), x / scales) == 0, mantissa


@pytest.mark.usefixtures("rough")
@pytest.mark.parametrize("low_bits", [24, 25])
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("rule", ["fp32", None])
def test_refined_quotient_is_ieee_division_where_rounding_is_hardest(
    rule: str | None, side: int, low_bits: int
) -> None:
    """Of every odd fp32 mantissa, as a divisor, the dividend whose quotient is nearest to a tie between two mantissas.

    A tie is an odd number of 25 bits; tie * divisor is one off a dividend with ``low_bits`` zeros behind it.
    """
    divisors = (mantissas() | 1 | (1 << 23)).long()
    inverse = divisors.clone()
    for _ in range(5):  # Newton's, modulo 2**64
        inverse *= 2 - divisors * inverse
    ties = (side * inverse) % (1 << low_bits) | (1 << 24)
    dividends = (ties * divisors - side) >> low_bits
    hard = ((dividends << low_bits) == ties * divisors - side) & (dividends >> 23 == 1)
    assert hard.float().mean() > 0.25
    x, scales = torch.where(hard, dividends, divisors).float(), divisors.float()
    assert different(divided(x, scales, rule), x / scales) == 0


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


def assert_of_every_bf16(activation: str, part: int, rounded: torch.dtype = torch.float32) -> None:
    """The kernels make of it what the reference does."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=DEVICE).view(torch.bfloat16).float()
    right = elementwise._ACTIVATIONS[activation](x)[part].to(rounded).float()
    mine = apply(x, activation, part).to(rounded).float()
    finite = x.isfinite()
    assert different(mine[finite], right[finite]) == 0
    assert not mine[~finite & ~right.isfinite()].isfinite().any(), "an infinite input is not hidden"


def test_every_bf16_silu_rounds_to_the_references() -> None:
    """It is not refined, and the bound of the approximation's error is not enough: of 5.9375, and where a half of a
    subnormal is a tie, the value above would round otherwise. So a GPU shows it of itself alone."""
    assert_of_every_bf16("silu", 0, rounded=torch.bfloat16)


@pytest.mark.usefixtures("rough")
@pytest.mark.parametrize(
    ("activation", "part"), [("silu", 1), ("gelu", 0), ("gelu", 1), ("gelu_tanh", 0), ("gelu_tanh", 1)]
)
def test_every_bf16_activation_and_slope_equals_the_reference(activation: str, part: int) -> None:
    assert_of_every_bf16(activation, part)


def test_a_triton_with_another_gluon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "precgraph.lowering.triton.gluon_tiles"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    with pytest.raises(LoweringError, match=f"Triton {triton.__version__} has another.*install the triton"):
        importlib.import_module(name)
