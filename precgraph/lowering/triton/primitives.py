# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# ruff: noqa: RET505 - the kernel compiler drops an untaken branch, not what follows a return
"""Device functions: the numerics of every Triton kernel, but for sums (:mod:`~precgraph.lowering.triton.reductions`).

Each is bit for bit what :mod:`precgraph.quantizer` and :mod:`precgraph.lowering.reference` compute on the same device:

- Nothing is contracted to an FMA and nothing flushes subnormals: every launch passes :data:`EXACT`.
- ``/`` is not IEEE division in Triton: `tl.div_rn`, `tl.sqrt_rn`, and libdevice's ``exp`` and ``log``, which are
  the functions that torch's CUDA kernels call.
- A largest magnitude is taken on the bits, as integers, in which NaN is larger than infinity and is kept.
"""

from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.lowering.registry import TAKE_REFERENCE

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Launch options that every kernel needs to give the reference's bits."""

OVERLAPPING = EXACT | {"launch_pdl": True}
"""Those of a kernel that begins with :func:`await_inputs`: the GPU starts it while the kernel before it still ends
(programmatic dependent launch). A decoding step is hundreds of kernels of a few microseconds, and the pause between two
is one."""

GROUP = 128
"""Values that share a scale, along one or both axes: the only granularity that the kernels implement."""

_FLOOR = 1e-20  # below it, the remainder of a division could be subnormal
_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

Rule = tuple[float, int, bool, bool, bool, bool, bool]
"""What of a format the kernels compile in: max, bits of the amax floor, and whether the scale multiplies by 1/max, is
rounded up to a power of two, divides by its reciprocal, whether the quotient needs a second refinement, and whether
codes are e5m2."""


def rule(fmt: Format | None, granularity: str) -> Rule | None:
    """The compile-time form of ``fmt``, or None for None. `LoweringError`: a format that the kernels do not compute."""
    if fmt is None:
        return None
    foreign = fmt.scale_rule == "max/amax" or fmt.scale_dtype == "ue8m0_log2" or fmt.requantize != "none"
    if fmt.granularity != granularity or fmt.amax_floor < _FLOOR or foreign:
        raise LoweringError(
            f"the Triton quantisers compute {granularity} with an amax floor of at least {_FLOOR} and a scale of amax, "
            f"once, not {fmt}",
            remedy=f"change the recipe's format, or {TAKE_REFERENCE}",
        )
    floor = struct.unpack("<i", struct.pack("<f", fmt.amax_floor))[0]
    multiplies, power, inverse = fmt.scale_rule != "amax/max", fmt.scale_dtype == "ue8m0", fmt.divide != "true"
    return fmt.max, floor, multiplies, power, inverse, fmt.source == "float32", fmt.dtype == "float8_e5m2"


def source(*formats: Format | None) -> tl.dtype:
    """The dtype that a value is rounded to before it is quantised; one kernel has one."""
    names = {fmt.source for fmt in formats if fmt is not None} or {"bfloat16"}
    if len(names) != 1:
        raise LoweringError(
            f"one kernel cannot round its input to {' and '.join(sorted(names))}",
            remedy=f"give both formats of a value one source, or {TAKE_REFERENCE}",
        )
    return _TL[getattr(torch, names.pop())]


@functools.cache
def meaning(rows: Format | None, tokens: Format | None) -> tuple[tl.dtype, Rule | None, Rule | None]:
    """:func:`source` and both :func:`rule` of what is quantised along rows, along tokens or both."""
    rules = rule(rows, "1x128"), rule(tokens, "128x1")
    return source(rows, tokens), *rules


def require(*tensors: Tensor | None) -> None:
    """`LoweringError`, naming the requirement, unless all tensors are on one device that the kernels run on."""
    devices = {t.device for t in tensors if t is not None}
    if len(devices) != 1:
        raise LoweringError(f"operands are on {len(devices)} devices", remedy="move them to one CUDA device")
    _require_device(devices.pop())


@functools.cache
def _require_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise LoweringError(f"the Triton kernels run on CUDA devices, not on {device}", remedy=TAKE_REFERENCE)
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        raise LoweringError(
            f"the Triton kernels need FP8 tensor cores (compute capability 9.0, Hopper); "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}",
            remedy=f"run on an H100 or newer, or {TAKE_REFERENCE}",
        )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The next one from ``n`` on; Triton's own function takes the host two microseconds."""
    return 1 << (n - 1).bit_length()


# ------------------------------------------------------------------------------------------ tiles


@triton.jit
def await_inputs():
    """Wait for the kernel before to end, and let the next one be started; before anything is read or written."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def tile_of(tile, lines, COLUMNS: tl.constexpr):
    """``(line, column)`` of a tile, in bands of 8 lines, each band column by column.

    Programs that run together then read long pieces of rows and write long pieces of transposed rows.
    """
    band = tile // (8 * COLUMNS)
    height = tl.minimum(lines - band * 8, 8)
    within = tile - band * 8 * COLUMNS
    return band * 8 + within % height, within // height


@triton.jit
def inside_tile(rows, cols, T, WIDTH: tl.constexpr):
    """What of a tile a matrix ``[T, WIDTH]`` has."""
    return rows[:, None] < T if WIDTH % 128 == 0 else (rows[:, None] < T) & (cols[None, :] < WIDTH)


@triton.jit
def load_tile(x, rows, cols, stride, inside):
    """Values of ``rows`` that are ``stride`` apart, zero outside."""
    return tl.load(x + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=inside, other=0.0)


# ------------------------------------------------------------------------------------------ quantiser


@triton.jit
def negative(x):
    """``-x``, of zeros too: Triton's own unary minus subtracts from +0. It folds into the next FMA's operand."""
    return x * -1.0


@triton.jit
def magnitude(x):
    """Bits of ``|x|`` as int32: ordered like the values, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def refine(quotient, x, divisor, inverse):
    """One step of Markstein's division: add the exact remainder times the reciprocal. A quotient of -0 stays -0."""
    return tl.fma(negative(tl.fma(quotient, divisor, negative(x))), inverse, quotient)


@triton.jit
def rough_reciprocal(x):
    """The hardware's ``1 / x``, one unit in the last place off."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """IEEE ``1 / x`` without branches, for ``2**-126 <= x <= 2**126``."""
    rough = rough_reciprocal(x)
    return tl.fma(negative(tl.fma(x, rough, -1.0)), rough, rough)


@triton.jit
def scale_of(amax, RULE: tl.constexpr):
    """``(scale, 1 / scale)`` fp32 from the bits of the largest magnitude of each block."""
    bits = tl.maximum(amax, RULE[1])
    largest = bits.to(tl.float32, bitcast=True)
    scale = largest * (1.0 / RULE[0])
    if not RULE[2]:
        scale = refine(scale, largest, RULE[0], 1.0 / RULE[0])
    if RULE[3]:
        mantissa = scale.to(tl.int32, bitcast=True) + 0x007FFFFF  # any mantissa bit carries into the exponent
        scale = (mantissa & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits < 0x7F800000, scale, largest)
    return scale, reciprocal(scale)


@triton.jit
def ratio(x, scale, inverse, RULE: tl.constexpr):
    """``x / scale`` in fp32, as the rule divides.

    The quotient comes from the correctly rounded reciprocal and its exact remainder: one step gives IEEE division's
    bits for every bf16 and fp16 mantissa over every fp32 scale mantissa, two for any fp32 value.
    """
    quotient = x * inverse
    if not (RULE[3] or RULE[4]):  # by a power of two, and by the reciprocal, the product is the result
        quotient = refine(quotient, x, scale, inverse)
        if RULE[5]:
            quotient = refine(quotient, x, scale, inverse)
    return quotient


@triton.jit
def pack_pair(first, second, RULE: tl.constexpr):
    """Two fp32 to two FP8 codes, rounded to nearest even and saturated, as one int16 with the first one low."""
    asm: tl.constexpr = "cvt.rn.satfinite." + ("e5m2x2" if RULE[6] else "e4m3x2") + ".f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(asm, "=h,f,f", [first, second], tl.int16, is_pure=True, pack=1)


@triton.jit
def pack_four(a, b, c, d, RULE: tl.constexpr):
    """Four fp32 to FP8 codes like :func:`pack_pair`, as one int32 with the first one lowest."""
    name: tl.constexpr = "e5m2x2" if RULE[6] else "e4m3x2"
    cast: tl.constexpr = "cvt.rn.satfinite." + name + ".f32 "
    asm: tl.constexpr = (
        "{ .reg .b16 lo, hi; " + cast + "lo, $2, $1; " + cast + "hi, $4, $3; mov.b32 $0, {lo, hi}; }"
    )  # fmt: skip
    return tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], tl.int32, is_pure=True, pack=1)


@triton.jit
def quantise_rows(x, axis: tl.constexpr, RULE: tl.constexpr, dtype: tl.constexpr):
    """``(codes, scales)`` of ``x``, in its source dtype, in groups that span ``axis``. The cast saturates."""
    wide = x.to(tl.float32)
    scale, inverse = scale_of(tl.max(magnitude(wide), axis), RULE)
    codes = ratio(wide, tl.expand_dims(scale, axis), tl.expand_dims(inverse, axis), RULE).to(dtype)
    return codes, scale


@triton.jit
def store_in_place(at, x, inside):
    """Store fp32 ``x`` from the threads that hold it, of which several may: `tl.store` would first deal it out anew.

    That costs two barriers, which a program that stores the scales of many pieces feels.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,f,r",
        [at.to(tl.int64), x, inside.to(tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_rows(x, codes, scales, rows, col, T, stride, RULE: tl.constexpr):
    """Quantise a tile ``[R, 128]`` of ``rows`` from column ``col`` in groups along the row.

    ``codes [T, stride]``, ``scales [stride/128, T up to 4]``.
    """
    store_groups(x, codes, scales, rows, col + tl.arange(0, 128), col // 128, T, stride, RULE)


@triton.jit
def store_groups(x, codes, scales, rows, cols, group, T, stride, RULE: tl.constexpr):
    """:func:`store_rows`, of the 128 columns ``cols``, in whatever layout they are, that are group ``group``."""
    quantised, scale = quantise_rows(x, 1, RULE, codes.dtype.element_ty)
    inside = rows < T
    tl.store(codes + rows[:, None].to(tl.int64) * stride + cols[None, :], quantised, mask=inside[:, None])
    aligned = ((T + 3) // 4) * 4
    tl.store(scales + group.to(tl.int64) * aligned + rows, scale, mask=inside)


# ------------------------------------------------------------------------------------------ elementwise


@triton.jit
def bf16(x):
    """fp32 rounded to bf16 and widened again: a cast point."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def widen(x):
    """To fp32; of bf16 two values an operation pair, where a conversion would first move each into its register."""
    if x.dtype == tl.bfloat16:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [x], tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x):
    """fp32 rounded to bf16, two at once."""
    asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def times(x, y):
    """The bf16 product of bf16 values, two at once: the bits of a product in fp32 that is rounded."""
    return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def erf(x):
    """The ``erff`` of CUDA 13, which torch's wheels for it call; the libdevice of Triton 3.6 has an older one."""
    large = tl.abs(x) >= 1.00296
    t = tl.where(large, tl.abs(x), x * x)
    r = tl.where(large, 0.000112198715, 8.4834945e-05)
    r = tl.fma(r, t, tl.where(large, -0.0013275252, -0.00082130916))
    r = tl.fma(r, t, tl.where(large, 0.008396535, 0.005213489))
    r = tl.fma(r, t, tl.where(large, -0.040246584, -0.026868774))
    r = tl.fma(r, t, tl.where(large, 0.15950431, 0.11284005))
    r = tl.fma(r, t, tl.where(large, 0.9129177, -0.37612665))
    r = tl.fma(r, t, tl.where(large, 0.62906003, 0.12837915))
    t = tl.where(large, negative(t), x)
    r = tl.fma(r, t, t)
    power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [r], tl.float32, is_pure=True, pack=1)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return tl.where(large, ((1.0 - power).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), r)


_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_GELU_TANH = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)
_CUBIC_SLOPE = tl.constexpr(3 * 0.044715)


@triton.jit
def activation_value(x, NAME: tl.constexpr):
    """``act(x)`` in fp32, for every bf16 ``x``; of silu only what its rounding to bf16 needs."""
    if NAME == "silu":
        return (x * 0.25) * rough_reciprocal(_silu_quarter(x))  # not IEEE division, but the same bf16 for every bf16 x
    elif NAME == "gelu":
        return x * (0.5 * (1.0 + erf(x * _SQRT_HALF)))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        return 0.5 * x * (1.0 + _gelu_tanh(x))


@triton.jit
def activation_slope(x, NAME: tl.constexpr):
    """``act'(x)`` in fp32, for every finite bf16 ``x``."""
    if NAME == "silu":
        sigmoid = tl.where(x < -88.75, 0.0, reciprocal(_silu_quarter(x)) * 0.25)  # exp(-x) is infinite below
        return sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif NAME == "gelu":
        cdf = 0.5 * (1.0 + erf(x * _SQRT_HALF))
        return cdf + x * (_INV_SQRT_2PI * exp(-0.5 * (x * x)))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        tanh = _gelu_tanh(x)
        slope = _GELU_TANH * (1.0 + _CUBIC_SLOPE * (x * x))
        return 0.5 * (1.0 + tanh) + 0.5 * x * ((1.0 - tanh * tanh) * slope)


@triton.jit
def _silu_quarter(x):
    """``(1 + exp(-x)) / 4``: a quarter, because the reciprocal of the whole can be subnormal."""
    return tl.fma(exp(negative(x)), 0.25, 0.25)


@triton.jit
def _gelu_tanh(x):
    inner = _GELU_TANH * (x + _CUBIC * (x * x * x))
    return 1.0 - reciprocal(tl.minimum(exp(2.0 * inner) + 1.0, 1e37)) * 2.0  # beyond 1e37 the 1 absorbs it
