"""A layer of experts as three opaque operators, which Hugging Face models reach under the name ``precgraph``.

``model.set_experts_implementation("precgraph")`` routes the experts of a model here. Under ``torch.export`` the result
is one graph for every routing, without loops over tokens; the definitions are those of :mod:`precgraph.ops`, which
compute what transformers' eager loop over experts computes, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from precgraph import ops
from precgraph.errors import UnsupportedModelError

IMPLEMENTATION = "precgraph"


@torch.library.custom_op("precgraph::expert_linear", mutates_args=())
def opaque_expert_linear(x: Tensor, weight: Tensor, index: Tensor, slots: int) -> Tensor:
    """:func:`precgraph.ops.expert_linear`."""
    return ops.expert_linear(x, weight, index, slots)


@opaque_expert_linear.register_fake
def _(x: Tensor, weight: Tensor, index: Tensor, slots: int) -> Tensor:
    return x.new_empty(index.shape[0] * index.shape[1], weight.shape[1])


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, index, ctx.slots = inputs
    ctx.save_for_backward(x, weight, index)


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, index = ctx.saved_tensors
    dx = ops.expert_dgrad(dy, weight, index, ctx.slots)
    return dx, ops.expert_wgrad(dy, x, index, weight.shape[0], ctx.slots), None, None


opaque_expert_linear.register_autograd(_linear_backward, setup_context=_save_linear)


@torch.library.custom_op("precgraph::combine", mutates_args=())
def opaque_combine(y: Tensor, scores: Tensor, index: Tensor) -> Tensor:
    """:func:`precgraph.ops.combine`."""
    return ops.combine(y, scores, index)


@opaque_combine.register_fake
def _(y: Tensor, scores: Tensor, index: Tensor) -> Tensor:
    return y.new_empty(scores.shape[0], y.shape[1])


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return (*ops.combine_backward(dy, *ctx.saved_tensors), None)


opaque_combine.register_autograd(_combine_backward, setup_context=_save_combine)


def _huggingface_experts(self: nn.Module, hidden: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """transformers' experts interface (5.x): ``hidden [T, C]``, ``index`` and ``scores [T, k]``; returns ``[T, C]``."""
    kind: Any = self
    if kind.has_bias or kind.is_transposed or not kind.has_gate or not kind.is_concatenated or kind._is_expert_parallel:
        raise UnsupportedModelError(
            f"{type(self).__name__}: experts with biases, transposed, ungated or interleaved weights, or on several "
            "devices, have no exact kernel"
        )
    both = opaque_expert_linear(hidden, kind.gate_up_proj, index, index.shape[1])
    each = opaque_expert_linear(kind._apply_gate(both), kind.down_proj, index, 1)
    out: Tensor = opaque_combine(each, scores, index)
    return out


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _huggingface_experts)
