"""`quantize` and `dequantize` against an oracle in numpy and ml_dtypes that shares nothing with them."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precgraph.errors import InputError, NonFiniteError, PrecGraphError, RecipeError
from precgraph.format import Format
from precgraph.quantizer import QTensor, dequantize, quantize, saturating_cast_

Array = np.ndarray[Any, Any]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
GRANULARITIES = ["1x128", "128x1", "128x128", "64x32"]
PROFILE = settings(deadline=None, max_examples=150)


# -------------------- the oracle
def oracle(x: Array, fmt: Format) -> tuple[Array, Array]:
    """Codes (as bytes) and scales of a 2-D array, block by block, in numpy fp32 and with ml_dtypes casts."""
    r, c = (int(n) for n in str(fmt.granularity).split("x"))
    largest = np.float32({E4M3: 448, E5M2: 57344}[fmt.dtype])
    x = x.astype(NUMPY[fmt.source]).astype(np.float32)
    rows, cols = math.ceil(x.shape[0] / r), math.ceil(x.shape[1] / c)
    codes = np.zeros((rows * r, cols * c), np.uint8)
    scales = np.empty((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            block = x[i * r : (i + 1) * r, j * c : (j + 1) * c]
            if fmt.scale_rule == "max/amax":
                s, scaled = inverse_scaled(block, fmt, largest)
                code = np.clip(scaled, -largest, largest).astype(NUMPY[fmt.dtype])
                codes[i * r : i * r + block.shape[0], j * c : j * c + block.shape[1]] = code.view(np.uint8)
                scales[i, j] = s
                continue
            amax = max(np.abs(block).max(), np.float32(fmt.amax_floor))
            s = amax / largest if fmt.scale_rule == "amax/max" else amax * (np.float32(1) / largest)
            if fmt.scale_dtype == "ue8m0":
                mantissa, exponent = math.frexp(s)  # s = mantissa * 2**exponent, mantissa in [0.5, 1)
                s = np.float32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))
            scaled = block / s if fmt.divide == "true" else block * (np.float32(1) / s)
            code = np.clip(scaled, -largest, largest).astype(NUMPY[fmt.dtype])
            codes[i * r : i * r + block.shape[0], j * c : j * c + block.shape[1]] = code.view(np.uint8)
            scales[i, j] = s
    return codes, scales


def inverse_scaled(block: Array, fmt: Format, largest: np.float32) -> tuple[np.float32, Array]:
    """The scale and the scaled values where the inverse is what is rounded, with Python's fractions as arithmetic."""
    amax = max(Fraction(float(np.abs(block).max())), Fraction(fmt.amax_floor))
    if amax == 0:
        return np.float32(1), block
    quotient = Fraction(float(largest)) / amax
    limit = Fraction(float(np.finfo(np.float32).max))
    # float() of a Fraction rounds once to fp64, and so do both stacks; then once to fp32
    with np.errstate(over="ignore"):
        inverse = np.float32(float(quotient))
    if quotient > limit and np.isinf(inverse):
        inverse = np.float32(ml_dtypes.finfo(NUMPY[fmt.source]).max)
    if fmt.scale_dtype == "ue8m0":
        inverse = np.float32(2.0 ** (math.frexp(inverse)[1] - 1))
    return np.float32(1) / inverse, block * inverse


def to_torch(x: Array) -> torch.Tensor:
    if x.dtype == NUMPY["bfloat16"]:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def assert_equals_oracle(q: QTensor, x: Array, fmt: Format) -> None:
    codes, scales = oracle(x, fmt)
    assert q.codes.dtype == getattr(torch, fmt.dtype)
    assert q.scales.dtype == torch.float32
    assert q.codes.is_contiguous()
    assert q.scales.is_contiguous()
    assert torch.equal(q.scales, torch.from_numpy(scales))
    assert torch.equal(q.codes.view(torch.uint8), torch.from_numpy(codes))


def bits(q: QTensor) -> tuple[list[Any], list[Any]]:
    return q.codes.view(torch.uint8).tolist(), q.scales.view(torch.int32).tolist()


# -------------------- strategies
@st.composite
def formats(draw: st.DrawFn, granularity: str | None = None, dtypes: tuple[str, ...] = (E4M3, E5M2)) -> Format:
    rule = draw(st.sampled_from(["amax/max", "amax*(1/max)", "max/amax"]))
    inverts = rule == "max/amax"
    return Format(
        dtype=draw(st.sampled_from(dtypes)),
        granularity=granularity or draw(st.sampled_from(GRANULARITIES)),
        scale_dtype=draw(st.sampled_from(["float32", "ue8m0"])),
        scale_rule=rule,
        divide="true" if inverts else draw(st.sampled_from(["true", "reciprocal"])),
        amax_floor=draw(st.sampled_from([1e-12, 1e-10, 1e-4, *([0.0] if inverts else [])])),
        source=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )


@st.composite
def arrays(draw: st.DrawFn, max_side: int = 400, dtype: str | None = None) -> Array:
    """[M, K] of bf16, fp16 or fp32: smooth, wild exponents, subnormals, edge values, zero blocks."""
    side = st.integers(1, max_side) | st.sampled_from([1, 7, 127, 128, 129, 192, max_side])
    m, k = draw(side), draw(side)
    kind = NUMPY[dtype or draw(st.sampled_from(["bfloat16", "float16", "float32"]))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((m, k))
    match draw(st.sampled_from(["smooth", "wild", "subnormal", "edges", "zero"])):
        case "wild":
            x = x * 2.0 ** rng.integers(-24, 13, (m, k))
        case "subnormal":
            x = x * (2.0**-14 if kind == np.float16 else 2.0**-126)
        case "edges":
            edges = [448, 449, 464, 465, 480, 1e3, 6e4, 0.5, 2.0**-9, 2.0**-10, 0.0]
            x = rng.choice(edges, (m, k)) * np.sign(x)
        case "zero":
            x = x * 0.0
    if draw(st.booleans()):  # whole blocks of zeros, and zero rows beside others
        x[: (m + 1) // 2, : (k + 1) // 2] = 0.0
    return x.astype(kind)


# -------------------- codes and scales
@PROFILE
@given(arrays(), formats())
def test_codes_and_scales_equal_the_oracle(x: Array, fmt: Format) -> None:
    given_x = to_torch(x)
    q = quantize(given_x, fmt, checked=True)
    assert_equals_oracle(q, x, fmt)
    assert q.shape == given_x.shape
    assert q.format == fmt
    assert torch.equal(given_x, to_torch(x)), "the input was written to"
    assert bits(quantize(given_x, fmt)) == bits(q), "checked mode changed the result"


@PROFILE
@given(
    st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=40),
    st.integers(1, 4),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    formats(),
)
def test_any_finite_values(values: list[float], columns: int, dtype: str, fmt: Format) -> None:
    padded = values + [0.0] * (-len(values) % columns)
    x = np.array(padded, np.float32).reshape(-1, columns).astype(NUMPY[dtype])
    assert_equals_oracle(quantize(to_torch(x), fmt, checked=True), x, fmt)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (129, 127), (1, 576), (192, 576), (400, 400)])
def test_shapes_around_the_block(shape: tuple[int, int], granularity: str) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(NUMPY["bfloat16"])
    fmt = Format(E4M3, granularity)
    q = quantize(to_torch(x), fmt)
    assert_equals_oracle(q, x, fmt)
    r, c = fmt.block
    assert q.codes.shape == (q.scales.shape[0] * r, q.scales.shape[1] * c)
    assert q.scales.shape == (math.ceil(shape[0] / r), math.ceil(shape[1] / c))
    assert not q.codes.view(torch.uint8)[shape[0] :].any()
    assert not q.codes.view(torch.uint8)[:, shape[1] :].any()


@settings(PROFILE, max_examples=40)
@given(arrays(max_side=200), formats(), st.data())
def test_strides_do_not_matter(x: Array, fmt: Format, data: st.DataObject) -> None:
    whole = to_torch(x)
    start = data.draw(st.integers(0, x.shape[1] - 1))
    step = data.draw(st.integers(1, 3))
    for view, plain in [
        (whole.t(), x.T),
        (whole[:, start::step], x[:, start::step]),
        (whole[::step], x[::step]),
        (whole[0].expand(5, -1), np.tile(x[0], (5, 1))),
        (whole.t().contiguous().t(), x),
    ]:
        assert_equals_oracle(quantize(view, fmt), np.ascontiguousarray(plain), fmt)


@settings(PROFILE, max_examples=25)
@given(
    st.tuples(*[st.integers(1, 5)] * 3, st.integers(1, 150)),
    formats(),
    st.integers(0, 99),
    st.permutations(range(4)),
)
def test_leading_dims_and_permuted_4d_views(shape: tuple[int, ...], fmt: Format, seed: int, order: list[int]) -> None:
    x = np.random.default_rng(seed).standard_normal(shape).astype(NUMPY["bfloat16"])
    view = to_torch(x).permute(order)
    plain = np.ascontiguousarray(x.transpose(order))
    q = quantize(view, fmt)
    assert q.shape == view.shape
    assert_equals_oracle(q, plain.reshape(-1, plain.shape[-1]), fmt)
    back = dequantize(q)
    assert back.shape == view.shape
    assert back.is_contiguous()


def test_vectors_and_empty_tensors() -> None:
    fmt = Format(E4M3, "1x128")
    x = torch.linspace(-3, 3, 300).bfloat16()
    q = quantize(x, fmt)
    assert bits(q) == bits(quantize(x[None], fmt))
    assert dequantize(q).shape == (300,)
    for shape, scales in [((0, 300), (0, 3)), ((2, 0, 5), (0, 1)), ((3, 0), (3, 0))]:
        q = quantize(torch.empty(shape), fmt, checked=True)
        assert q.scales.shape == scales
        assert dequantize(q).shape == shape


# -------------------- single values
def value_of_code(code: int, width: int, bias: int) -> float:
    """The value of a non-negative finite code with ``width`` bits of mantissa, from the definition."""
    exponent, mantissa = code >> width, code % 2**width
    return math.ldexp(mantissa + (2**width if exponent else 0), max(exponent, 1) - bias - width)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_of_every_bf16_value_rounds_to_nearest_even_and_saturates(dtype: str) -> None:
    """Nearest by search over the 256 codes, in float64: no cast of any library is trusted here."""
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = words.view(torch.bfloat16).float()
    values = values[~values.isnan()]
    got = saturating_cast_(values.clone(), Format(dtype, "1x128")).view(torch.uint8).numpy()

    width = {E4M3: 3, E5M2: 2}[dtype]
    bias = {E4M3: 7, E5M2: 15}[dtype]
    count = {E4M3: 0x7F, E5M2: 0x7C}[dtype]  # non-negative finite codes
    grid = np.array([value_of_code(code, width, bias) for code in range(count)])
    assert grid[-1] == {E4M3: 448, E5M2: 57344}[dtype]
    size = np.minimum(np.abs(values.numpy().astype(np.float64)), grid[-1])
    low = np.searchsorted(grid, size, side="right") - 1
    high = np.minimum(low + 1, count - 1)
    below, above = size - grid[low], grid[high] - size
    nearest = np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    assert np.array_equal(got, nearest + np.where(np.signbit(values.numpy()), 0x80, 0))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_values_saturate_whatever_the_cast_does(sign: float) -> None:
    values = sign * torch.tensor([448.0, 449.0, 464.0, 465.0, 480.0, 1e3, 1e9, math.inf])
    codes = saturating_cast_(values, Format(E4M3, "1x128"))
    assert torch.equal(codes.float(), torch.full((8,), sign * 448.0))
    assert saturating_cast_(torch.tensor([math.nan]), Format(E4M3, "1x128")).float().isnan().all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("value", [448, 449, 464, 465, 480, 1e3, -1e9, 3.0e38, -2e-12])
def test_the_largest_value_of_a_block_gets_the_largest_code(value: float, granularity: str) -> None:
    x = torch.zeros(3, 5)
    x[1, 2] = value
    q = quantize(x, Format(E4M3, granularity, source="float32"))
    assert q.codes[1, 2].float() == math.copysign(448.0, value)
    assert q.codes.float().count_nonzero() == 1


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0"])
def test_zero_blocks_are_finite_beside_others(dtype: str, granularity: str, scale_dtype: str) -> None:
    x = torch.zeros(256, 256, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    fmt = Format(dtype, granularity, scale_dtype=scale_dtype)
    q = quantize(x, fmt, checked=True)
    assert q.scales.isfinite().all()
    assert (q.scales > 0).all()
    floor = np.float32(1e-12) / np.float32(fmt.max)
    smallest = floor if scale_dtype == "float32" else 2.0 ** math.ceil(math.log2(floor))
    assert q.scales[-1, -1] == smallest
    back = dequantize(q)
    # 448 * fp32(1/448) need not be 1 in fp32; a power of two is exact
    assert back[0, 0] == (1.0 if scale_dtype == "ue8m0" else fmt.max * q.scales[0, 0])
    assert abs(back[0, 0] - 1.0) <= 2**-23
    assert back.count_nonzero() == 1


@PROFILE
@given(st.floats(2.0**-60, 2.0**60, width=32), st.integers(-60, 60))
def test_ue8m0_is_the_least_power_of_two_not_below_the_scale(size: float, power: int) -> None:
    fmt = Format(E4M3, "1x1", "ue8m0", amax_floor=1e-30, source="float32")
    plain = Format(E4M3, "1x1", amax_floor=1e-30, source="float32")
    edge = 448 * 2.0**power  # its scale is 2**power exactly, its neighbours' are not
    x = torch.tensor([[size, edge, np.nextafter(np.float32(edge), np.float32(0)), edge * (1 + 2.0**-23)]])
    rounded, exact = quantize(x, fmt).scales[0].tolist(), quantize(x, plain).scales[0].tolist()
    for up, scale in zip(rounded, exact, strict=True):
        assert math.frexp(up)[0] == 0.5
        assert up / 2 < scale <= up
    assert rounded[1] == 2.0**power
    assert rounded[3] == 2.0 ** (power + 1)


def test_a_block_of_zeros_under_the_inverse_rule_has_scale_one() -> None:
    fmt = Format(E4M3, "1x4", scale_rule="max/amax", amax_floor=0.0)
    q = quantize(torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, -1.0]]), fmt, checked=True)
    assert q.scales.tolist() == [[1.0, np.float32(1) / np.float32(224)]]
    assert q.codes[0].float().tolist() == [0, 0, 0, 0, 448, 0, 0, -224]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0"])
def test_the_inverse_rule_does_not_hide_inf_or_nan(bad: float, scale_dtype: str) -> None:
    fmt = Format(E4M3, "1x128", scale_dtype, scale_rule="max/amax", amax_floor=0.0)
    x = torch.ones(2, 128)
    x[1, 3] = bad
    q = quantize(x, fmt)
    assert q.scales.isfinite().tolist() == [[True], [False]]
    assert dequantize(q).isnan().all(1).tolist() == [False, True]
    with pytest.raises(NonFiniteError):
        quantize(x, fmt, checked=True)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_requantised_codes_are_those_of_quantising_the_dequantised_values(granularity: str) -> None:
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    first = Format(E4M3, granularity, divide="reciprocal", amax_floor=1e-4)
    second = Format(E4M3, granularity, "ue8m0", divide="reciprocal", amax_floor=1e-4, source="float32")
    once, twice = quantize(x, first), quantize(x, replace(first, requantize="ue8m0"))
    codes, scales = oracle(dequantize(once).numpy(), second)
    assert torch.equal(twice.scales, torch.from_numpy(scales))
    assert torch.equal(twice.codes.view(torch.uint8), torch.from_numpy(codes))
    rounded_first = quantize(x, replace(first, scale_dtype="ue8m0"))
    assert not torch.equal(dequantize(twice), dequantize(rounded_first)), "rounding twice changed nothing"


def test_log2_rounding_can_be_one_power_too_small_just_above_one() -> None:
    above = 2.0**-10 * (1 + 2.0**-23)
    x = torch.tensor([[448 * 2.0**-10, float(np.float32(448 * above))]])
    bits_rule = quantize(x, Format(E4M3, "1x1", "ue8m0", source="float32")).scales
    log2_rule = quantize(x, Format(E4M3, "1x1", "ue8m0_log2", source="float32")).scales
    assert bits_rule.tolist() == [[2.0**-10, 2.0**-9]]
    assert log2_rule.tolist() == [[2.0**-10, 2.0**-10]]


@pytest.mark.parametrize(
    "changes",
    [{"scale_dtype": "ue8m0_log2"}, {"divide": "reciprocal"}, {"amax_floor": -1.0}, {"amax_floor": math.nan}],
)
def test_the_inverse_rule_refuses_what_it_does_not_define(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        Format(**{"dtype": E4M3, "granularity": "1x128", "scale_rule": "max/amax", **changes})


def test_a_format_says_requantize_only_where_it_does() -> None:
    """Digests of programs whose weights are rounded once are what they were before the field existed."""
    plain = Format(E4M3, "128x128")
    assert "requantize" not in plain.to_dict()
    twice = replace(plain, requantize="ue8m0")
    assert Format.from_dict(twice.to_dict()) == twice
    assert (plain.powers_of_two, twice.powers_of_two) == (False, True)
    assert str(twice) == "e4m3 128x128 then ue8m0"


# -------------------- inf and NaN
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale_dtype", ["float32", "ue8m0"])
@pytest.mark.parametrize("divide", ["true", "reciprocal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_non_finite_input(bad: float, granularity: str, scale_dtype: str, divide: str, dtype: torch.dtype) -> None:
    fmt = Format(E4M3, granularity, scale_dtype=scale_dtype, divide=divide)
    x = torch.ones(200, 300, dtype=dtype)
    x[130, 131] = bad
    r, c = fmt.block
    where = f"first in rows {130 // r * r}..{130 // r * r + r - 1}, columns {131 // c * c}.."
    with pytest.raises(NonFiniteError, match=f"inf or NaN in 1 of .*, {where}"):
        quantize(x, fmt, checked=True)
    q = quantize(x, fmt)
    bad_block = torch.zeros_like(q.scales, dtype=torch.bool)
    bad_block[130 // r, 131 // c] = True
    assert torch.equal(~q.scales.isfinite(), bad_block)
    assert torch.equal(dequantize(q).isnan(), bad_block.repeat_interleave(r, 0).repeat_interleave(c, 1)[:200, :300])


@pytest.mark.parametrize(("value", "source"), [(1e5, "float16"), (3.4e38, "bfloat16")])
def test_overflow_of_the_source_dtype_is_noticed(value: float, source: str) -> None:
    x = torch.full((2, 2), value)
    with pytest.raises(NonFiniteError, match=f"beyond the range of {source}"):
        quantize(x, Format(E4M3, "1x128", source=source), checked=True)
    assert not quantize(x, Format(E4M3, "1x128", source=source)).scales.isfinite().any()


# -------------------- laws
@settings(PROFILE, max_examples=30)
@given(arrays(max_side=300), formats(granularity="128x128"))
def test_blocks_commute_with_transposition(x: Array, fmt: Format) -> None:
    weight = to_torch(x)
    q, transposed = quantize(weight, fmt), quantize(weight.t(), fmt)
    assert torch.equal(q.codes.view(torch.uint8).t(), transposed.codes.view(torch.uint8))
    assert torch.equal(q.scales.t(), transposed.scales)


@settings(PROFILE, max_examples=30)
@given(arrays(max_side=300), formats(granularity="1x128"))
def test_token_groups_commute_with_transposition(x: Array, fmt: Format) -> None:
    by_rows = quantize(to_torch(x).t(), fmt)
    fields = {**fmt.to_dict(), "granularity": "128x1"}
    by_tokens = quantize(to_torch(x), Format.from_dict(fields))
    assert torch.equal(by_rows.codes.view(torch.uint8).t(), by_tokens.codes.view(torch.uint8))
    assert torch.equal(by_rows.scales.t(), by_tokens.scales)


@settings(PROFILE, max_examples=30)
@given(
    arrays(max_side=200, dtype="bfloat16"),
    arrays(max_side=200, dtype="bfloat16"),
    formats(granularity="1x128"),
)
def test_a_row_does_not_depend_on_other_rows(x: Array, other: Array, fmt: Format) -> None:
    k = min(x.shape[1], other.shape[1])
    rows, more = to_torch(x[:, :k].copy()), to_torch(other[:, :k].copy())
    alone, together = quantize(rows, fmt), quantize(torch.cat([rows, more]), fmt)
    assert torch.equal(alone.codes.view(torch.uint8), together.codes.view(torch.uint8)[: len(rows)])
    assert torch.equal(alone.scales, together.scales[: len(rows)])
    for i in {0, len(rows) - 1}:
        assert bits(quantize(rows[i], fmt))[0][0] == alone.codes.view(torch.uint8)[i].tolist()


@PROFILE
@given(arrays(), formats(dtypes=(E4M3,)))
def test_round_trip_error_is_within_half_a_step(x: Array, fmt: Format) -> None:
    q = quantize(to_torch(x), fmt)
    r, c = fmt.block
    exact = x.astype(NUMPY[fmt.source]).astype(np.float64)
    scale = np.repeat(np.repeat(q.scales.numpy().astype(np.float64), r, 0), c, 1)[: x.shape[0], : x.shape[1]]
    # half a step of e4m3 (3 bits of mantissa, least step 2**-9), and the fp32 roundings of s, x/s and code*s
    bound = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * scale) * (1 + 2.0**-18) + 2.0**-149
    back = dequantize(q).numpy().astype(np.float64)
    assert (np.abs(back - exact) <= bound).all()


@PROFILE
@given(arrays(), formats())
def test_dequantize_is_code_times_scale(x: Array, fmt: Format) -> None:
    r, c = fmt.block
    codes, scales = oracle(x, fmt)
    want = codes.view(NUMPY[fmt.dtype]).astype(np.float32) * np.repeat(np.repeat(scales, r, 0), c, 1)
    want = want[: x.shape[0], : x.shape[1]]
    q = quantize(to_torch(x), fmt)
    assert torch.equal(dequantize(q), torch.from_numpy(want))
    assert torch.equal(dequantize(q, torch.bfloat16), to_torch(want.astype(NUMPY["bfloat16"])))


@settings(PROFILE, max_examples=30)
@given(arrays(max_side=300), formats(dtypes=(E4M3,)))
def test_power_of_two_scales_make_the_round_trip_idempotent(x: Array, fmt: Format) -> None:
    """With ue8m0, code * scale is exact, so quantising the result again must give back its every value."""
    fields = {**fmt.to_dict(), "scale_dtype": "ue8m0", "source": "float32", "amax_floor": 1e-12}
    fmt = Format.from_dict(fields)
    once = dequantize(quantize(to_torch(x), fmt))
    assert torch.equal(dequantize(quantize(once, fmt)), once)


# -------------------- ambient state
def test_gradients_autocast_and_threads_change_nothing() -> None:
    fmt = Format(E4M3, "1x128", scale_rule="amax*(1/max)", divide="reciprocal")
    x = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = bits(quantize(x, fmt))
    q = quantize(torch.nn.Parameter(x), fmt)
    assert bits(q) == want
    assert not q.scales.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert bits(quantize(x, fmt)) == want
        assert dequantize(q).dtype == torch.float32
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert bits(quantize(x, fmt)) == want
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(PROFILE, max_examples=60)
@given(arrays(), formats())
def test_a_gpu_gives_the_same_bits(x: Array, fmt: Format) -> None:
    q = quantize(to_torch(x).cuda(), fmt, checked=True)
    assert_equals_oracle(QTensor(q.codes.cpu(), q.scales.cpu(), q.shape, fmt), x, fmt)
    assert torch.equal(dequantize(q).cpu(), dequantize(quantize(to_torch(x), fmt)))


def test_shapes_on_the_meta_device() -> None:
    q = quantize(torch.empty(3, 5, 200, device="meta"), Format(E5M2, "128x128", "ue8m0"))
    assert q.codes.shape == (128, 256)
    assert q.scales.shape == (1, 2)
    assert dequantize(q, torch.bfloat16).shape == (3, 5, 200)


def test_wrong_inputs_are_named() -> None:
    fmt = Format(E4M3, "1x128")
    with pytest.raises(InputError, match="plain format bf16"):
        quantize(torch.zeros(2, 2), Format.plain("bfloat16"))
    for wrong in [torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), torch.tensor(1.0)]:
        with pytest.raises(InputError, match="cannot quantise a"):
            quantize(wrong, fmt)


# -------------------- Format itself
@given(formats())
def test_dict_round_trip_and_short_name(fmt: Format) -> None:
    data = fmt.to_dict()
    assert list(data) == [
        "dtype", "granularity", "scale_dtype", "scale_rule", "divide", "amax_floor", "source",
    ]  # fmt: skip
    assert Format.from_dict(data) == fmt
    assert hash(Format.from_dict(data)) == hash(fmt)


@given(formats(), formats())
def test_short_names_differ_where_formats_do(one: Format, two: Format) -> None:
    assert (str(one) == str(two)) == (one == two)


def test_short_names_and_properties() -> None:
    assert str(Format()) == "bf16"
    assert str(Format(E4M3, "1x128")) == "e4m3 1x128"
    assert str(Format(E5M2, "128x128", "ue8m0", "amax*(1/max)", "reciprocal", 1e-10, "float32")) == (
        "e5m2 128x128 ue8m0 amax*(1/max) reciprocal divide floor 1e-10 of fp32"
    )
    assert Format(E4M3, "128x64").block == (128, 64)
    assert Format(E4M3, "1x128").max == 448.0
    assert Format(E5M2, "1x128").max == 57344.0
    assert Format(E4M3, "1x128").is_quantized
    with pytest.raises(InputError, match="has no blocks"):
        _ = Format().block
    with pytest.raises(InputError, match="no largest value"):
        _ = Format.plain("bool").max


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int64", "int32", "bool"])
def test_plain_formats(dtype: str) -> None:
    fmt = Format.plain(dtype)
    assert not fmt.is_quantized
    assert fmt.to_dict() == {"dtype": dtype}
    assert Format.from_dict({"dtype": dtype}) == fmt
    assert fmt.torch_dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", E4M3, "float8_e5m2"])
def test_the_largest_value_is_torchs(dtype: str) -> None:
    fmt = Format(dtype=dtype, granularity="1x128") if dtype.startswith("float8") else Format.plain(dtype)
    assert fmt.max == torch.finfo(getattr(torch, dtype)).max


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dtype": E4M3, "granularity": "1x128", "scale_dtpye": "ue8m0"}, "did you mean 'scale_dtype'?"),
        ({"dtype": E4M3, "granularity": "1x128", "zzz": 1}, "known keys: dtype"),
        ({"granularity": "1x128"}, "dtype is missing"),
        ({}, "dtype is missing"),
        ({"dtype": "float8_e4m3"}, "dtype = 'float8_e4m3' is unknown"),
        ({"dtype": E4M3}, "granularity = None"),
        ({"dtype": "bfloat16", "granularity": "1x128"}, "has no meaning for bfloat16"),
        ({"dtype": "bfloat16", "source": "float32"}, "has no meaning for bfloat16"),
        *[
            ({"dtype": E4M3, "granularity": wrong}, "granularity = ")
            for wrong in ["", "128", "0x128", "1x", "1X128", "-1x128", "1x128x1", "1x128\n", 128, [1, 128]]
        ],
        ({"dtype": E4M3, "granularity": "1x128", "scale_dtype": "bfloat16"}, "scale_dtype = 'bfloat16'"),
        (
            {"dtype": E4M3, "granularity": "1x128", "scale_rule": "amax*max"},
            "use one of amax/max, amax*(1/max), max/amax",
        ),
        ({"dtype": E4M3, "granularity": "1x128", "divide": True}, "divide = True"),
        ({"dtype": E4M3, "granularity": "1x128", "source": E4M3}, "source = "),
        *[
            ({"dtype": E4M3, "granularity": "1x128", "amax_floor": wrong}, "amax_floor = ")
            for wrong in [0.0, -1e-12, 1e-38, math.inf, math.nan, "1e-12", 1, True, None]
        ],
    ],
)
def test_malformed_formats_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Format.from_dict(data)
    assert message in str(caught.value)
    assert isinstance(caught.value, PrecGraphError)
    assert "\n" not in str(caught.value).replace("\\n", "")
