"""plan_saved: which forward values the backward keeps, stated in the graph.

A value is saved if a node of the backward reads it: a linear's input in FP8 along tokens, a norm's input, the inputs
of a gated unit, attention's q, k, v, output and log-sum-exp. Parameters, and what is made once per weight update, are
not saved. Reciprocal root mean squares and activations are recomputed inside the backward's kernels.
"""

from __future__ import annotations

from precgraph.graph import PrecisionGraph, annotate, precision


def plan_saved(graph: PrecisionGraph) -> PrecisionGraph:
    """Set ``precision.saved`` on forward values that backward nodes read."""
    for node in graph:
        if node.op == "call_function" and precision(node).phase == "forward":
            annotate(node, saved=any(precision(u).phase == "backward" for u in node.users))
    return graph
