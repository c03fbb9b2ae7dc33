"""fuse_quantize: a quantiser joins the operator that makes its input, so that one kernel may serve both.

The groups are annotations (``precision.fusion``); a backend that has a kernel for a group uses it, with the numerics
of the single operators. The nodes stay, so graphs compare the same whether a backend fuses or not.
"""

from __future__ import annotations

from torch import fx

from precgraph import ops
from precgraph.graph import PrecisionGraph, annotate, precision
from precgraph.passes.rewrite import is_call

PRODUCERS = (ops.rms_norm, ops.gated, ops.activate)


def fuse_quantize(graph: PrecisionGraph) -> PrecisionGraph:
    """Name a group after each producer: a residual add that only feeds a norm's layer, the producer, its quantisers."""
    for node in list(graph):
        if not is_call(node, *PRODUCERS):
            continue
        quantizers = [u for u in node.users if is_call(u, ops.quantize)]
        if not quantizers:
            continue
        members = [node, *quantizers]
        source = node.args[0]
        if is_call(node, ops.rms_norm) and is_call(source, ops.add) and _same_segment(source, node):
            members.append(source)  # type: ignore[arg-type]
        name = f"{precision(node).module}.{node.target.__name__}"  # type: ignore[union-attr]
        for member in members:
            annotate(member, fusion=name)
    return graph


def _same_segment(a: fx.Node | object, b: fx.Node) -> bool:
    return isinstance(a, fx.Node) and precision(a).segment == precision(b).segment
