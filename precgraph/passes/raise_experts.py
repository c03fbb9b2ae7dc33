"""Rules of ``raise`` for layers of experts: their routers, linears and sums."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from precgraph import ops
from precgraph.graph import annotate, arguments, tensor
from precgraph.passes.rewrite import Rule, emit, is_call

aten = torch.ops.aten


def top_k(graph: fx.Graph, node: Any) -> fx.Node | None:
    """The greatest values along the last dimension, sorted."""
    if not is_call(node, aten.topk.default):
        return None
    given = arguments(node)
    x, width = given["self"], len(tensor(given["self"]).shape)
    if given.get("dim", -1) not in (-1, width - 1) or not given.get("largest", True) or not given.get("sorted", True):
        return None
    if not all(is_call(u, operator.getitem) for u in node.users):
        return None
    return emit(graph, ops.top_k, (x, given["k"]), like=node, tensor=None)


def row_sum(graph: fx.Graph, node: Any) -> fx.Node | None:
    if not is_call(node, aten.sum.dim_IntList) or node.kwargs or node.args[1:] != ([-1], True):
        return None
    if tensor(node).dtype != tensor(node.args[0]).dtype:
        return None
    return emit(graph, ops.row_sum, (node.args[0],), like=node)


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


EXPERT_RULES: tuple[Rule, ...] = (top_k, row_sum, expert_linear, combine)
