"""Reference kernels around the GEMMs, in exact arithmetic.

Composed from fp32 ``exp``, ``erf``, ``/`` and ``sqrt``, whose results do not depend on the length of a tensor, where
torch's own fused kernels (``silu`` in fp32, ``gelu``) differ between their vector body and scalar tail. Sums follow
:func:`~precgraph.lowering.reference.reductions.ordered_sum`. Cast points are those of the upstream definitions in
:mod:`precgraph.ops` and of their autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from precgraph.lowering.reference.reductions import ordered_sum

_SQRT_HALF = math.sqrt(0.5)
_GELU_TANH = math.sqrt(2 / math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * bf16(x * (1 / sqrt(sum(x²) / n + eps)))``, fp32 inside."""
    return weight * _normed(x, eps)[0].to(x.dtype)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)``: ``g = bf16(dy * weight)``, ``dx = r * (g - x̂ * mean(g * x̂))``; dweight sums in fp32."""
    normed, reciprocal = _normed(x, eps)
    dweight = (dy.float() * normed.to(x.dtype).float()).flatten(0, -2).sum(0)
    g = (dy * weight).float()
    mean = ordered_sum(g * normed) / torch.tensor(float(x.shape[-1]), dtype=torch.float32, device=x.device)
    return (reciprocal * (g - normed * mean)).to(x.dtype), dweight.to(weight.dtype)


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """``bf16(x̂ * (offset + weight))``, fp32 inside."""
    return (_normed(x, eps)[0] * (offset + weight.float())).to(x.dtype)


def wide_rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(dx, dweight)``: as :func:`rms_norm_backward`, but ``g = dy * (offset + weight)`` stays fp32."""
    normed, reciprocal = _normed(x, eps)
    wide = dy.float()
    g = wide * (offset + weight.float())
    mean = ordered_sum(g * normed) / torch.tensor(float(x.shape[-1]), dtype=torch.float32, device=x.device)
    return (reciprocal * (g - normed * mean)).to(x.dtype), (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` in fp32, rounded to x's dtype."""
    bound = torch.tensor(cap, device=x.device)
    return (_tanh(x.float() / bound) * bound).to(x.dtype)


def softcap_backward(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    """``dy * (1 - tanh²(x / cap))`` in fp32, rounded once."""
    tanh = _tanh(x.float() / torch.tensor(cap, device=x.device))
    return (dy.float() * (1 - tanh * tanh)).to(x.dtype)


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x̂ = x * r`` and ``r``, fp32; the division is by a tensor, since a Python number would be inverted on CUDA."""
    wide = x.float()
    mean = ordered_sum(wide * wide) / torch.tensor(float(x.shape[-1]), dtype=torch.float32, device=x.device)
    reciprocal = 1 / torch.sqrt(mean + eps)
    return wide * reciprocal, reciprocal


def wide_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE with fp32 products and sum, rounded once."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos.float().unsqueeze(2) + rotated * sin.float().unsqueeze(2)).to(x.dtype)


def wide_rope_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``dx`` of :func:`wide_rope`: the inverse rotation of ``dy``, rounded once."""
    wide = dy.float()
    first, second = (wide * sin.float().unsqueeze(2)).chunk(2, dim=-1)
    return (wide * cos.float().unsqueeze(2) + torch.cat((second, -first), dim=-1)).to(dy.dtype)


def polar_table(position_ids: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """cos and sin times ``scaling``, as the parts of complex numbers."""
    angles = position_ids[..., None].float() * inv_freq.float()
    return torch.complex(angles.cos() * scaling, angles.sin() * scaling)


def polar_rope(x: Tensor, table: Tensor) -> Tensor:
    """Every product and sum rounded to fp32 by itself (torch's complex product may fuse them), then to x's dtype."""
    return _turned(x, table.real.unsqueeze(1), table.imag.unsqueeze(1))


def polar_rope_backward(dy: Tensor, table: Tensor) -> Tensor:
    """``dx`` of :func:`polar_rope`: ``dy`` turned back."""
    return _turned(dy, table.real.unsqueeze(1), -table.imag.unsqueeze(1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2).to(x.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation in fp32, rounded to x's dtype."""
    return _ACTIVATIONS[activation](x.float())[0].to(x.dtype)


def activate_backward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """``dy * act'(x)`` in fp32, rounded once."""
    return (dy.float() * _ACTIVATIONS[activation](x.float())[1]).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``bf16(act(gate)) * up``."""
    return activate(gate, activation) * up


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``(dgate, dup)``; ``dy * up`` is rounded before it meets the derivative, as autograd rounds it."""
    value, slope = _ACTIVATIONS[activation](gate.float())
    dgate = ((dy * up).float() * slope).to(gate.dtype)
    return dgate, dy * value.to(gate.dtype)


# Each returns the value and the derivative, fp32.


def _sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    value = 1 / (1 + torch.exp(-x))
    return value, value * (1 - value)


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = 1 / (1 + torch.exp(-x))
    return x / (1 + torch.exp(-x)), sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(x * _SQRT_HALF))
    return x * cdf, cdf + x * (_INV_SQRT_2PI * torch.exp(-0.5 * (x * x)))


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    inner = _GELU_TANH * (x + 0.044715 * (x * x * x))
    tanh = _tanh(inner)
    slope = _GELU_TANH * (1 + 3 * 0.044715 * (x * x))
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * ((1 - tanh * tanh) * slope)


def _tanh(x: Tensor) -> Tensor:
    return 1 - 2 / (torch.exp(2 * x) + 1)


_ACTIVATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "sigmoid": _sigmoid, "silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh,
}  # fmt: skip
