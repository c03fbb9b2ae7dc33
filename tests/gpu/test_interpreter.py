"""What stands in for the hardware in Triton's interpreter, against the definitions of the formats; and its alarms."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.device import INTERPRETED, require_pinned_triton

if not INTERPRETED:
    pytest.skip("measures Triton's interpreter; run `make test-kernels`", allow_module_level=True)

import numpy as np
import triton
import triton.language as tl

from tests.gpu.interpreter import encode, rough_reciprocal
from tests.gpu.interpreter_gluon import Array

FORMATS = {tl.bfloat16: (8, 7, 0x7F7F), tl.float8e4nv: (4, 3, 0x7E), tl.float8e5: (5, 2, 0x7B)}
"""Bits of the exponent and of the mantissa, and the code of the largest value."""


def values(dtype: tl.dtype) -> Array:
    """Of all codes that are finite and not below zero, float64, by the definition."""
    exponents, mantissas, largest = FORMATS[dtype]
    exponent, mantissa = np.divmod(np.arange(largest + 1), 1 << mantissas)
    fraction = mantissa / (1 << mantissas) + (exponent > 0)
    return np.ldexp(fraction, np.maximum(exponent, 1) - ((1 << (exponents - 1)) - 1))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_values_are_rounded_to_the_nearest_and_ties_to_even(dtype: tl.dtype) -> None:
    right = values(dtype)
    codes = np.arange(len(right))
    halfway = ((right[:-1] + right[1:]) / 2).astype(np.float32)
    assert (halfway == (right[:-1] + right[1:]) / 2).all()
    sign = 1 << (dtype.primitive_bitwidth - 1)
    for x, wanted in (
        (right.astype(np.float32), codes),
        (halfway, codes[:-1] + codes[:-1] % 2),
        (np.nextafter(halfway, np.float32(0)), codes[:-1]),
        (np.nextafter(halfway, np.float32(np.inf)), codes[1:]),
    ):
        assert (encode(x, dtype) == wanted).all()
        assert (encode(-x, dtype) == wanted + sign).all()


@pytest.mark.parametrize("dtype", [tl.float8e4nv, tl.float8e5], ids=str)
def test_fp8_saturates_and_keeps_nan(dtype: tl.dtype) -> None:
    largest = FORMATS[dtype][2]
    beyond = np.array([values(dtype)[-1] * 1.01, 1e30, np.inf, np.nan], np.float32)
    assert encode(beyond, dtype).tolist() == [largest, largest, largest, 0x7F]
    assert encode(-beyond[:3], dtype).tolist() == [largest + 128] * 3


def test_a_rough_reciprocal_is_the_neighbour_of_the_exact_one() -> None:
    x = np.arange(1 << 23, 253 << 23, 65521, np.int32).view(np.float32)
    x = np.concatenate((x, -x))
    below, above, exact = rough_reciprocal(-np.inf)(x), rough_reciprocal(np.inf)(x), 1 / x.astype(np.float64)
    assert (below < exact).all() and (exact < above).all()
    between = np.nextafter(below, above)
    assert ((between == above) | (between == exact)).all()
    special = np.array([np.inf, -np.inf, 0.0, -0.0, 1e-40, 2.0**127], np.float32)
    for toward in (-np.inf, np.inf):
        assert rough_reciprocal(toward)(special).tolist() == [0.0, 0.0, np.inf, -np.inf, np.inf, 0.0]


@triton.jit
def _copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def _twice(x, out):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [tl.load(x + at)], tl.float32, True, 1))


@triton.jit
def _count(out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out + at, 1, mask=at < n)


@triton.jit
def _copy_from(address, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(address).to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def _root_of_ratio(x, y, out, ROOT: tl.constexpr):
    tl.store(out, tl.sqrt(tl.load(x)) if ROOT else tl.load(x) / tl.load(y))


def test_memory_outside_a_launchs_tensors_is_not_touched() -> None:
    whole = torch.arange(8.0)
    _copy[(1,)](whole[:5], out := torch.empty(5), 5, 8)
    assert out.tolist() == whole[:5].tolist()
    for x, out in ((whole[:5], torch.empty(8)), (whole, whole.clone()[:5])):
        with pytest.raises(Exception, match="outside the tensors of its launch"):
            _copy[(1,)](x, out, 6, 8)
    counts = torch.zeros(8, dtype=torch.int64)
    _count[(3,)](counts[:5], 5, 8)
    assert counts.tolist() == [3] * 5 + [0] * 3
    with pytest.raises(Exception, match="outside the tensors of its launch"):
        _count[(1,)](counts[:5], 6, 8)


def test_a_read_address_lets_loads_through_but_no_store() -> None:
    whole = torch.arange(8.0)
    address = torch.tensor([whole.data_ptr()])
    _copy_from[(1,)](address, out := torch.empty(8), 8, 8)
    assert out.tolist() == whole.tolist()
    with pytest.raises(Exception, match="outside the tensors of its launch"):
        _copy_from[(1,)](address, out[:5], 6, 8)
    with pytest.raises(Exception, match="outside the tensors of its launch"):  # no launch but that one
        _copy[(1,)](whole[:5], out, 6, 8)


def test_what_is_left_unwritten_is_no_number() -> None:
    _copy[(1,)](torch.ones(8), out := torch.empty(8), 5, 8)
    assert out.isnan().tolist() == [False] * 5 + [True] * 3
    assert torch.empty(4, dtype=torch.float8_e4m3fn).float().isnan().all()


@pytest.mark.parametrize(("root", "exact"), [(True, "tl.sqrt_rn"), (False, "tl.div_rn")])
def test_what_a_gpu_approximates_is_refused(root: bool, exact: str) -> None:
    with pytest.raises(Exception, match=f"a GPU approximates .*: {exact} is exact"):
        _root_of_ratio[(1,)](torch.ones(1), torch.ones(1), torch.empty(1), root)


def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    with pytest.raises(RuntimeError, match=r"fits .* triton [\d.]+, not of 3.6.0: run `make test-kernels`"):
        require_pinned_triton()


def test_ptx_that_nobody_described_is_refused() -> None:
    with pytest.raises(Exception, match=r"does not say what this PTX computes: add.f32"):
        _twice[(1,)](torch.ones(4), torch.empty(4))
