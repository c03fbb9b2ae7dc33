"""insert_quantize: a quantiser in front of each operand of a quantised linear.

A value is quantised once per format however many linears read it. A weight is quantised from its master in the
``refresh`` phase, once per update.
"""

from __future__ import annotations

from torch import fx

from precgraph import ops
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, precision, with_rules
from precgraph.passes.rewrite import emit, is_call
from precgraph.recipe import Recipe


def insert_quantize(graph: PrecisionGraph, recipe: Recipe) -> PrecisionGraph:
    """Quantise both operands of every linear marked ``gemm = quantized``."""
    rule = recipe.linear
    made: dict[tuple[fx.Node, Format], fx.Node] = {}
    for node in list(graph):
        if not is_call(node, ops.linear, ops.expert_linear) or precision(node).rule("gemm") != "quantized":
            continue
        x, weight, *rest = node.args
        assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and rule.activation and rule.weight
        with graph.graph.inserting_before(node):
            if (x, rule.activation) not in made:
                made[x, rule.activation] = quantizer(
                    graph.graph, x, rule.activation, like=node, module=precision(x).module
                )
            if (weight, rule.weight) not in made:
                made[weight, rule.weight] = quantizer(
                    graph.graph, weight, rule.weight, like=node, role="weight", phase="refresh"
                )
                if is_call(node, ops.expert_linear):
                    _in_slices(made[weight, rule.weight])
        node.args = (made[x, rule.activation], made[weight, rule.weight], *rest)
    return graph


def _in_slices(node: fx.Node) -> None:
    """A stack of weights is quantised slice by slice: no block has rows of two experts."""
    node.meta["precision"] = with_rules(precision(node), slices="apart")


def quantizer(
    graph: fx.Graph, value: fx.Node, fmt: Format, *, like: fx.Node, role: str = "activation", **changes: str
) -> fx.Node:
    """A quantiser of ``value``, in ``like``'s segment and module unless changed."""
    arithmetic = tuple(r for r in precision(like).rules if r[0] == "arithmetic")
    return emit(
        graph, ops.quantize, (value, fmt), like=like, tensor=value.meta["tensor"], format=fmt, role=role,
        compute="float32", accumulate=None, rules=arithmetic, fusion=None, note="", **changes,
    )  # fmt: skip
