"""plan_saved: which forward values the backward keeps, stated in the graph.

A value is saved if a node of the backward reads it: a norm's input, the inputs of a gated unit, attention's v, output
and log-sum-exp, and of what ``plan_recompute`` could make again from these only what it was told to leave. Parameters,
and what is made once per weight update, are not saved.
"""

from __future__ import annotations

from precgraph.graph import PrecisionGraph, annotate, precision


def plan_saved(graph: PrecisionGraph) -> PrecisionGraph:
    """Set ``precision.saved`` on forward values that backward nodes read."""
    for node in graph:
        if node.op == "call_function" and precision(node).phase == "forward":
            annotate(node, saved=any(precision(u).phase == "backward" for u in node.users))
    return graph
