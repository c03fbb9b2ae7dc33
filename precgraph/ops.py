"""The operators of the raised graph: what a node of a :class:`~precgraph.graph.PrecisionGraph` can mean.

Each function is an ``torch.fx`` call target and, at the same time, its own definition in the arithmetic of the
model's upstream code (torch's kernels, transformers' cast points). The ``aten`` kernels of the registry are these
functions themselves, so a raised graph run with them equals the Hugging Face model bit for bit, gradients too.
Exact (row-invariant) definitions of the same operators live in :mod:`precgraph.lowering.reference`.

Tensors are token-major over packed tokens: hidden states ``[1, T, C]``, heads ``[1, T, H, D]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.quantizer import QTensor
from precgraph.quantizer import quantize as quantize_tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What an attention node fixes: everything but the sequences, which the run-time context supplies.

    ``scale`` multiplies q·k in fp32; ``window`` is the number of visible keys (0: all); ``softcap`` is 0 or the bound
    of ``softcap * tanh(scores / softcap)``; ``layer`` selects the KV cache.
    """

    scale: float
    window: int
    softcap: float
    layer: int
    heads: int
    kv_heads: int
    head_dim: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# --------------------------------------------------------------------------------------------- forward


def embedding(ids: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """Rows of ``weight [V, C]`` at ``ids [1, T]``; ``padding_idx`` (-1: none) matters to the backward only."""
    return F.embedding(ids, weight, padding_idx if padding_idx >= 0 else None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., K] @ weight[N, K].T + bias``."""
    return F.linear(x, weight, bias)


def lm_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear that makes logits; whether they are bf16, as upstream, or fp32 is in the annotation."""
    return F.linear(x, weight, bias)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` of widened operands, ``[..., N]`` in fp32: DeepSeek-V3's routers."""
    return F.linear(x.float(), weight.float())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * bf16(x * rsqrt(mean(x²) + eps))``, mean and product in fp32: Llama, Qwen, Mistral (transformers 5)."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """``bf16(x * rsqrt(mean(x²) + eps) * (offset + weight))``, rounded once: OLMo 2 (offset 0), Gemma (1)."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scaled = normed * (offset + weight.float()) if offset else weight * normed
    return scaled.to(x.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, every step rounded to x's dtype (Gemma's logits)."""
    return torch.tanh(x / cap) * cap


def rope_table(position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin ``[1, T, D]`` of ``position · inv_freq`` in fp32, times ``scaling``, rounded to ``dtype``."""
    freqs = position_ids[:, :, None].float() * inv_freq.float()
    angles = torch.cat((freqs, freqs), dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [1, T, H, D]`` by halves; every product and the sum are rounded to the dtype of the operands.

    With fp32 tables (OLMo 2) that is fp32, and the sum is rounded once to x's dtype.
    """
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos.unsqueeze(2)) + (rotated * sin.unsqueeze(2))).to(x.dtype)


def polar_table(position_ids: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """``exp(i · position · inv_freq) * scaling``, complex64 ``[1, T, D/2]``: DeepSeek-V2."""
    angles = position_ids[..., None].float() * inv_freq.float()
    table: Tensor = torch.polar(torch.ones_like(angles), angles) * scaling
    return table


def polar_rope(x: Tensor, table: Tensor) -> Tensor:
    """Neighbours of ``x [1, H, T, D]`` as complex numbers times ``table [1, T, D/2]``, rounded once to x's dtype."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.unsqueeze(1)).flatten(3).type_as(x)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """``[1, T, H·D] -> [1, T, H, D]``, a view."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads


def merge_heads(x: Tensor) -> Tensor:
    """``[1, T, H, D] -> [1, T, H·D]``."""
    return x.flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Causal attention of packed sequences: ``[1, T, H, D]`` -> out ``[1, T, H·D]`` and log-sum-exp ``[T, H]`` fp32.

    It has no definition without sequences: the kernel takes them from the run-time context.
    """
    raise LoweringError("attention runs only inside a compiled program, which supplies the sequences")


def activate(x: Tensor, activation: str) -> Tensor:
    """``act(x)``, rounded to x's dtype."""
    return activation_function(activation)(x)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up``, the activation rounded to the operands' dtype before the product (SwiGLU, GeGLU)."""
    return activation_function(activation)(gate) * up


def add(x: Tensor, y: Tensor) -> Tensor:
    """A residual sum, or the sum of two gradients, rounded to the operands' dtype."""
    return x + y


def quantize(x: Tensor, fmt: Format) -> QTensor:
    """Codes and scales of ``x`` in ``fmt`` (:func:`precgraph.quantizer.quantize`)."""
    return quantize_tensor(x, fmt)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``."""
    return x.to(dtype)


def top_k(x: Tensor, k: int, ordered: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` greatest values of each row ``x [..., E]`` and their places; if ``ordered``, in descending order."""
    values, index = torch.topk(x, k, dim=-1, sorted=ordered)
    return values, index


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept."""
    return x.sum(-1, keepdim=True)


def dispatched(index: Tensor, experts: int, slots: int) -> list[tuple[Tensor, Tensor]]:
    """For each expert its places among the ``T·k`` choices of ``index [T, k]``, and the rows that they read.

    ``slots`` choices in a row read one row. The order is that of transformers' eager experts: by slot, then by token.
    """
    chosen = index.t()
    found = []
    for expert in range(experts):
        slot, token = torch.where(chosen == expert)
        places = token * index.shape[1] + slot
        found.append((places, places // slots))
    return found


def expert_linear(x: Tensor, weight: Tensor, index: Tensor, slots: int) -> Tensor:
    """``y[i] = weight[e] @ x[i // slots]`` with ``e`` the i-th entry of ``index [T, k]``.

    ``x [T·k / slots, K]``, ``weight [E, N, K]``, ``y [T·k, N]``.
    """
    y = x.new_empty(index.numel(), weight.shape[1])
    for one, (places, rows) in zip(weight, dispatched(index, len(weight), slots), strict=True):
        if len(places):
            y[places] = F.linear(x[rows], one)
    return y


def combine(y: Tensor, scores: Tensor, index: Tensor) -> Tensor:
    """Each token's expert outputs ``y [T·k, C]`` times ``scores [T, k]``, rounded, summed in order of the experts.

    ``index [T, k]`` names the experts. Every sum is rounded to y's dtype, as by ``index_add_``: ``[T, C]``.
    """
    parts = (y.view(*scores.shape, -1) * scores.unsqueeze(-1)).to(y.dtype)
    order = index.argsort(dim=-1, stable=True).unsqueeze(-1).expand_as(parts)
    total = torch.zeros_like(parts[:, 0])
    for part in parts.gather(1, order).unbind(1):
        total = total + part
    return total


def quantize_dispatched(x: Tensor, index: Tensor, fmt: Format, experts: int, slots: int) -> list[QTensor | None]:
    """The rows of each expert, in order of dispatch, quantised by ``fmt``; None for an expert without rows."""
    rows = [sources for _, sources in dispatched(index, experts, slots)]
    return [quantize_tensor(x[r], fmt) if len(r) else None for r in rows]


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """torch's kernel for the activation of a gated unit."""
    functions: dict[str, Any] = {"sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}
    function: Callable[[Tensor], Tensor] = functions[name]
    return function


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# -------------------------------------------------------------------------------------------- backward


def linear_dgrad(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """``Σ dy_i [..., N_i] @ weight_i [N_i, K]``: the gradient of a value that one or several fused linears read."""
    if len(dys) != 1:
        raise LoweringError("upstream arithmetic has no fused DGrad; use fuse_projections = false")
    flat = dys[0].reshape(-1, dys[0].shape[-1])
    return flat.mm(weights[0]).view(*dys[0].shape[:-1], weights[0].shape[1])


def linear_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """``dyᵀ @ x``: ``[N, K]``, summed over tokens."""
    return dy.reshape(-1, dy.shape[-1]).t().mm(x.reshape(-1, x.shape[-1]))


def wide_linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` of :func:`wide_linear`, fp32 until they are rounded."""
    dx, dweight = _autograd(wide_linear, (dy,), x, weight)
    return dx, dweight


def expert_dgrad(dy: Tensor, weight: Tensor, index: Tensor, slots: int) -> Tensor:
    """``dx`` of :func:`expert_linear`; a row's parts are added from the last expert to the first, as by autograd."""
    dx = dy.new_zeros(len(dy) // slots, weight.shape[2])
    for one, (places, rows) in zip(weight.flip(0), dispatched(index, len(weight), slots)[::-1], strict=True):
        dx[rows] += dy[places].mm(one)
    return dx


def expert_wgrad(dy: Tensor, x: Tensor, index: Tensor, experts: int, slots: int) -> Tensor:
    """``dweight [E, N, K]`` of :func:`expert_linear`: per expert over its rows, zero without rows."""
    rows = dispatched(index, experts, slots)
    return torch.stack([dy[places].t().mm(x[sources]) for places, sources in rows])


def combine_backward(dy: Tensor, y: Tensor, scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``(dy_rows, dscores)`` of :func:`combine`."""
    drows, dscores = vjp(combine, (y, scores, index), {}, (dy,), (0, 1))
    return drows, dscores


def top_k_backward(dy: Tensor, index: Tensor, width: int) -> Tensor:
    """``dx [..., width]`` of :func:`top_k`: ``dy`` in its places, else zero."""
    return dy.new_zeros(*dy.shape[:-1], width).scatter(-1, index, dy)


def bias_grad(dy: Tensor) -> Tensor:
    """``dy`` summed over tokens, ``[N]``."""
    return dy.reshape(-1, dy.shape[-1]).sum(0)


def embedding_backward(dy: Tensor, ids: Tensor, num_embeddings: int, padding_idx: int) -> Tensor:
    """Dense gradient ``[V, C]`` of :func:`embedding`."""
    grad: Tensor = torch.ops.aten.embedding_dense_backward(dy, ids, num_embeddings, padding_idx, False)
    return grad


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` of :func:`rms_norm`; the reciprocal root mean square is recomputed from ``x``."""
    dx, dweight = _autograd(rms_norm, (dy,), x, weight, eps)
    return dx, dweight


def wide_rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(dx, dweight)`` of :func:`wide_rms_norm`."""
    dx, dweight = _autograd(wide_rms_norm, (dy,), x, weight, eps, offset)
    return dx, dweight


def softcap_backward(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    """``dx`` of :func:`softcap`."""
    return _autograd(softcap, (dy,), x, cap)[0]


def rope_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``dx`` of :func:`rope`, with autograd's rounding points."""
    return _autograd(rope, (dy,), dy, cos, sin)[0]


def polar_rope_backward(dy: Tensor, table: Tensor) -> Tensor:
    """``dx`` of :func:`polar_rope`, as by autograd."""
    return vjp(polar_rope, (dy, table), {}, (dy,), (0,))[0]


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``(dgate, dup)`` of :func:`gated`."""
    dgate, dup = _autograd(gated, (dy,), gate, up, activation)
    return dgate, dup


def activate_backward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """``dx`` of :func:`activate`."""
    return _autograd(activate, (dy,), x, activation)[0]


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of :func:`attention` from its saved output and log-sum-exp."""
    raise LoweringError("attention runs only inside a compiled program, which supplies the sequences")


def accumulate_grad(target: Tensor, grad: Tensor) -> None:
    """The sink of a gradient: autograd adds ``grad`` to ``target.grad``, ``target`` being a parameter or an input."""


def vjp(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grads: Sequence[Tensor | None],
    wrt: Sequence[int],
) -> tuple[Tensor, ...]:
    """Vector-Jacobian product of an operator that the passes keep as it is: re-run under autograd.

    ``grads`` has one entry per output (``None``: no gradient reaches it); ``wrt`` are positions in the flattened
    ``(args, kwargs)`` whose gradients are wanted, in that order.
    """
    flat, tree = tree_flatten((list(args), dict(kwargs)))
    leaves = [a.detach().requires_grad_(i in wrt) if isinstance(a, Tensor) else a for i, a in enumerate(flat)]
    with torch.enable_grad():
        again_args, again_kwargs = tree_unflatten(leaves, tree)
        outputs = target(*again_args, **again_kwargs)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [leaves[i] for i in wrt]
    return torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True)


def _autograd(op: Callable[..., Any], grads: Sequence[Tensor], *args: Any) -> tuple[Tensor, ...]:
    return vjp(op, args, {}, grads, [i for i, a in enumerate(args) if isinstance(a, Tensor)])


FORWARD_OPS: tuple[Callable[..., Any], ...] = (
    embedding, linear, lm_head, rms_norm, wide_rms_norm, softcap, rope_table, rope, polar_table, polar_rope,
    split_heads, merge_heads, attention, activate, gated, add, quantize, cast, top_k, row_sum, expert_linear, combine,
    quantize_dispatched, wide_linear,
)  # fmt: skip
BACKWARD_OPS: tuple[Callable[..., Any], ...] = (
    linear_dgrad, linear_wgrad, bias_grad, embedding_backward, rms_norm_backward, wide_rms_norm_backward,
    softcap_backward, rope_backward, polar_rope_backward, activate_backward, gated_backward, attention_backward,
    wide_linear_backward, expert_dgrad, expert_wgrad, combine_backward, top_k_backward, vjp, accumulate_grad,
)  # fmt: skip
OPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in FORWARD_OPS + BACKWARD_OPS}
