"""Rules of ``raise`` for layers of experts: their routers, linears and sums."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from precgraph import ops
from precgraph.graph import TensorSpec, annotate, arguments, tensor
from precgraph.passes.rewrite import Rule, closed, emit, is_call

aten = torch.ops.aten


def top_k(graph: fx.Graph, node: Any) -> fx.Node | None:
    """The greatest values along the last dimension."""
    if not is_call(node, aten.topk.default):
        return None
    given = arguments(node)
    x, width = given["self"], len(tensor(given["self"]).shape)
    if given.get("dim", -1) not in (-1, width - 1) or not given.get("largest", True):
        return None
    if not all(is_call(u, operator.getitem) for u in node.users):
        return None
    return emit(graph, ops.top_k, (x, given["k"], given.get("sorted", True)), like=node, tensor=None)


def row_sum(graph: fx.Graph, node: Any) -> fx.Node | None:
    if not is_call(node, aten.sum.dim_IntList) or node.kwargs or node.args[1:] not in (([-1], True), ([-1],)):
        return None
    x = tensor(node.args[0])
    if tensor(node).dtype != x.dtype:
        return None
    total = emit(graph, ops.row_sum, (node.args[0],), like=node, tensor=TensorSpec(x.dtype, (*x.shape[:-1], 1)))
    return total if len(node.args) == 3 else emit(graph, aten.squeeze.dim, (total, -1), like=node)


def wide_linear(graph: fx.Graph, node: Any) -> fx.Node | None:
    """A linear of operands that were both widened to fp32."""
    if not is_call(node, aten.linear.default) or len(node.args) != 2 or node.kwargs:
        return None
    if not all(is_call(a, aten.to.dtype) and a.args[1] == torch.float32 for a in node.args):
        return None
    x, weight = (a.args[0] for a in node.args)
    if weight.op != "get_attr" or not tensor(x).dtype == tensor(weight).dtype == "bfloat16":
        return None
    return emit(graph, ops.wide_linear, (x, weight), like=node) if closed(node, node.args) else None


def expert_linear(graph: fx.Graph, node: Any) -> fx.Node | None:
    """The linear of all experts, in the module that its weight's path names: two share one module of the model."""
    if not is_call(node, torch.ops.precgraph.expert_linear.default) or node.args[1].op != "get_attr":
        return None
    new = emit(graph, ops.expert_linear, node.args, like=node)
    annotate(new, module=str(node.args[1].target))
    return new


def combine(graph: fx.Graph, node: Any) -> fx.Node | None:
    if not is_call(node, torch.ops.precgraph.combine.default):
        return None
    return emit(graph, ops.combine, node.args, like=node)


def cat_of_slices(graph: fx.Graph, node: Any) -> fx.Node | None:
    """New memory whose two slices are filled, one after the other: ``cat([x, y], dim)`` (DeepSeek's keys)."""
    if not is_call(node, aten.slice_scatter.default) or not is_call(node.args[0], aten.slice_scatter.default):
        return None
    (inner, y, dim, middle, end), (base, x, other, start, stop) = node.args, node.args[0].args
    width = tensor(node).shape[dim]
    whole = isinstance(width, int) and start == 0 and stop == middle and end >= width
    if not is_call(base, aten.new_zeros.default) or dim != other or not whole or not closed(node, [inner]):
        return None
    return emit(graph, aten.cat.default, ([x, y], dim), like=node)


EXPERT_RULES: tuple[Rule, ...] = (cat_of_slices, wide_linear, top_k, row_sum, expert_linear, combine)
