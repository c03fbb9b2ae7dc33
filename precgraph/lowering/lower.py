"""lower: choose a kernel for every node and write its numerics id into the annotation."""

from __future__ import annotations

import torch

from precgraph.graph import PrecisionGraph, annotate
from precgraph.lowering.registry import Kernel, backends, select


def lower(graph: PrecisionGraph, backend: str, device: torch.device) -> PrecisionGraph:
    """Set ``node.meta["kernel"]`` and ``precision.numerics`` of every call.

    Raises LoweringError, naming module and remedy, if a node has no kernel on ``backend``.
    """
    names = backends(backend, device)
    for node in graph:
        if node.op == "call_function":
            kernel = select(node, names, device)
            node.meta["kernel"] = kernel
            annotate(node, numerics=kernel.numerics)
    graph.passes.append("lower")
    return graph


def kernels(graph: PrecisionGraph) -> dict[str, Kernel]:
    """The kernel of every lowered node, by node name: what will run."""
    return {n.name: n.meta["kernel"] for n in graph if "kernel" in n.meta}
