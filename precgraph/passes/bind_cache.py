"""bind_cache: a rollout's attention reads keys and values from the paged cache of its layer."""

from __future__ import annotations

from precgraph import ops
from precgraph.graph import PrecisionGraph, annotate
from precgraph.passes.rewrite import is_call


def bind_cache(graph: PrecisionGraph) -> PrecisionGraph:
    """Set ``precision.cache`` of every attention node to its layer."""
    for node in graph:
        if is_call(node, ops.attention):
            annotate(node, cache=node.args[3].layer)  # type: ignore[union-attr]
    return graph
