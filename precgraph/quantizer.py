"""The numerics that a format names: quantised tensors, and the one definition of the quantiser.

A `Format` (:mod:`precgraph.format`) states everything that changes a bit of a quantised tensor. `quantize` and
`dequantize` are the torch reference of that statement: every other kernel (Triton, DeepGEMM's operands, an engine's
weight loader) has to give the same codes and scales bit for bit.

The rule, in fp32 throughout, for each block of ``r x c`` values that were first rounded to ``source``::

    amax  = max(largest |x|, amax_floor)
    scale = amax / max                      or  amax * fp32(1 / max)
    scale = scale rounded up to a power of two, for ue8m0
    code  = round_to_nearest_even(clamp(x / scale, -max, max))      or  x * fp32(1 / scale)

and, for stacks that keep the inverse (``scale_rule`` "max/amax")::

    inverse = fp32(max / amax), rounded down to a power of two for ue8m0; 1 where amax is 0, the largest value of
              ``source`` where it overflows
    code    = round_to_nearest_even(clamp(x * inverse, -max, max)),    scale = fp32(1 / inverse)

``requantize`` "ue8m0" then dequantises in fp32 and quantises once more to powers of two, as an engine does that wants
such scales and is given others (vLLM 0.32, ``requant_weight_ue8m0_inplace``).

Upstreams differ in each of these choices (DeepGEMM 2.6, vLLM 0.33, torchao 0.18, TransformerEngine 2), hence the
fields; `precgraph.stacks` says which stack makes which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from precgraph.errors import InputError, NonFiniteError
from precgraph.format import Format

__all__ = ["QTensor", "dequantize", "quantize", "saturating_cast_"]

_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000  # fields of an fp32 word


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A quantised tensor, seen as [M, K] (leading dims flattened), in blocks of r x c.

    codes: FP8 [M up to a multiple of r, K up to a multiple of c], contiguous, zero padded.
    scales: fp32 [ceil(M/r), ceil(K/c)], contiguous; powers of two for ue8m0. value = code * scale.
    shape: the logical shape, leading dims included.
    """

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    format: Format


@torch.no_grad()
def quantize(x: Tensor, fmt: Format, *, checked: bool = False) -> QTensor:
    """Quantise ``x`` (bf16, fp16 or fp32; [..., K] of any strides) by the rule of ``fmt``.

    ``x`` is not changed, and no gradient flows. Each block depends on its own values only, so with one row a
    block a row's codes do not depend on the rows beside it.

    A block that holds an inf or NaN after rounding to ``fmt.source`` gets a non-finite scale and dequantises
    to NaN in *every* place (its codes are unspecified); ``checked=True`` raises `NonFiniteError` instead, and
    costs a device synchronisation. `InputError`: another dtype, a 0-d tensor, a plain format.
    """
    if not fmt.is_quantized:
        raise InputError(f"cannot quantise to the plain format {fmt}", remedy="cast with Tensor.to instead")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.ndim == 0:
        raise InputError(
            f"cannot quantise a {x.ndim}-d {x.dtype} tensor",
            remedy="pass bf16, fp16 or fp32 with at least one dimension",
        )
    blocks = _split(x, fmt)  # [M/r, r, K/c, c] fp32
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if fmt.scale_rule != "max/amax":  # which has its floor in float64
        # The floor is a tensor, not a number: amax and floor then meet as two fp32 values, and NaN stays NaN.
        amax = torch.maximum(amax, _constant(fmt.amax_floor, x.device))
    if checked:
        _require_finite(amax, x, fmt)
    rows, r, cols, c = blocks.shape
    if fmt.scale_rule == "max/amax":
        inverse = _inverse_scale(amax, fmt)
        scales, values = _constant(1.0, x.device) / inverse, blocks.mul_(inverse)
    else:
        scales = _scale(amax, fmt)
        # True division needs a tensor divisor: on CUDA torch turns `/ number` into a multiplication.
        values = blocks.div_(scales) if fmt.divide == "true" else blocks.mul_(_constant(1.0, x.device) / scales)
    codes = saturating_cast_(values, fmt).reshape(rows * r, cols * c)
    once = QTensor(codes, scales.reshape(rows, cols), x.shape, fmt)
    return _requantized(once) if fmt.requantize == "ue8m0" else once


def _requantized(q: QTensor) -> QTensor:
    """Codes and scales quantised again to powers of two: vLLM 0.32, ``requant_weight_ue8m0_inplace``."""
    second = Format(
        q.format.dtype, q.format.granularity, "ue8m0_log2", divide="reciprocal", amax_floor=1e-4, source="float32"
    )
    again = quantize(dequantize(q), second)
    return QTensor(again.codes, again.scales, q.shape, q.format)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``code * scale`` in fp32, cut to the logical shape, rounded once to ``dtype``; contiguous."""
    r, c = q.format.block
    rows, cols = q.scales.shape
    k = q.shape[-1]
    m = math.prod(q.shape[:-1])
    blocks = q.codes.float().reshape(rows, r, cols, c).mul_(q.scales.view(rows, 1, cols, 1))
    return blocks.view(rows * r, cols * c)[:m, :k].to(dtype).contiguous().view(q.shape)


def saturating_cast_(values: Tensor, fmt: Format) -> Tensor:
    """fp32 values, already divided by their scale, to FP8 codes: clamp to +-max, round to nearest even.

    The clamp (in place: ``values`` is used up) comes first because casts of too large values differ by
    backend and version, NaN in some and saturated in others. NaN stays NaN.
    """
    return values.clamp_(-fmt.max, fmt.max).to(fmt.torch_dtype)


def _split(x: Tensor, fmt: Format) -> Tensor:
    """``x`` rounded to the source dtype, as zero padded fp32 blocks [M/r, r, K/c, c]; always a copy."""
    r, c = fmt.block
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    rows, cols = -(-m // r), -(-k // c)
    flat = x.reshape(m, k).to(getattr(torch, fmt.source))
    flat = flat.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if (rows * r, cols * c) != (m, k):
        flat = F.pad(flat, (0, cols * c - k, 0, rows * r - m))
    return flat.view(rows, r, cols, c)


def _scale(amax: Tensor, fmt: Format) -> Tensor:
    """The fp32 scale of each block from its floored amax; inf and NaN stay non-finite."""
    one, largest = _constant(1.0, amax.device), _constant(fmt.max, amax.device)
    scale = amax / largest if fmt.scale_rule == "amax/max" else amax * (one / largest)
    if fmt.scale_dtype == "ue8m0_log2":
        return scale.log2().ceil().exp2()
    return _round_up_to_power_of_two(scale) if fmt.scale_dtype == "ue8m0" else scale


def _inverse_scale(amax: Tensor, fmt: Format) -> Tensor:
    """``max / amax`` rounded once to fp32; 0 for inf and NaN for NaN, so that its inverse is not finite either.

    TransformerEngine's ``compute_scale_from_amax``: what overflows becomes the largest value of the input's dtype, and
    a zero block gets 1. A float64 quotient rounded to fp32 is the fp32 quotient, and torchao's is one of float64.
    """
    wide = torch.clamp(amax.double(), min=fmt.amax_floor)
    inverse = (fmt.max / wide).float()
    largest = _constant(torch.finfo(getattr(torch, fmt.source)).max, amax.device)
    inverse = torch.where(inverse.isposinf(), largest, inverse)
    if fmt.scale_dtype == "ue8m0":
        inverse = (inverse.view(torch.int32) & ~_MANTISSA).view(torch.float32)
        inverse = torch.where(amax.isnan(), amax, inverse)
    return torch.where(wide == 0, _constant(1.0, amax.device), inverse)


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Positive normal fp32 to the next power of two, exact powers unchanged.

    Done on the bits: ceil(log2(x)) is one too small just above a power of two.
    """
    bits = scale.view(torch.int32)
    rounded = (bits + _MANTISSA) & _EXPONENT  # any mantissa bit carries into the exponent
    return torch.where(scale.isfinite(), rounded.view(torch.float32), scale)


def _constant(value: float, device: torch.device) -> Tensor:
    """A 0-d fp32 tensor made on the device by a fill, which a CUDA graph can capture (a copy it cannot)."""
    return torch.full((), value, dtype=torch.float32, device=device)


def _require_finite(amax: Tensor, x: Tensor, fmt: Format) -> None:
    bad = (~amax.isfinite()).flatten().nonzero()
    if len(bad) == 0:
        return
    row, col = divmod(int(bad[0]), amax.shape[2])
    r, c = fmt.block
    raise NonFiniteError(
        f"inf or NaN in {len(bad)} of {amax.numel()} blocks of a {list(x.shape)} {x.dtype} tensor quantised "
        f"to {fmt}, first in rows {row * r}..{row * r + r - 1}, columns {col * c}..{col * c + c - 1}",
        remedy=f"look for an overflow upstream, or a value beyond the range of {fmt.source}",
    )
