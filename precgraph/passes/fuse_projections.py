"""fuse_projections: quantised linears that read one value (q, k, v; gate, up) become one group.

The forward of a group computes the same bits as its members alone, each member's rows being padded to whole blocks on
its own. Its DGrad sums all members in fp32 and rounds once, where separate ones would round each to bf16.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from precgraph import ops
from precgraph.graph import PrecisionGraph, annotate, precision
from precgraph.passes.rewrite import is_call
from precgraph.recipe import Recipe


def fuse_projections(graph: PrecisionGraph, recipe: Recipe) -> PrecisionGraph:
    """Name the group in ``precision.fusion`` of every linear that has a sibling on the same input."""
    if not recipe.linear.fuse_projections:
        return graph
    siblings: dict[tuple[fx.Node, str], list[fx.Node]] = defaultdict(list)
    for node in graph:
        if is_call(node, ops.linear) and precision(node).rule("gemm") == "quantized":
            parent = precision(node).module.rpartition(".")[0]
            siblings[node.args[0], parent].append(node)  # type: ignore[index]
    for (_, parent), members in siblings.items():
        if len(members) > 1:
            names = "+".join(precision(m).module.rpartition(".")[2] for m in members)
            for member in members:
                annotate(member, fusion=f"{parent}.{names}".lstrip("."))
    return graph
