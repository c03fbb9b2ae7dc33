"""lower: choose a kernel for every node and write its numerics id into the annotation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

import precgraph
from precgraph.graph import PrecisionGraph, annotate, output_node
from precgraph.lowering.registry import AUTO, backends, select


def target(tensors: Iterable[Tensor]) -> torch.device:
    """The device to lower a model of these tensors for: theirs, or, where weights are on meta, the GPU if there is one,
    else the CPU."""
    devices = [t.device for t in tensors]
    if all(device.type != "meta" for device in devices):
        return devices[0] if devices else torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def backend_name(backend: str, device: torch.device) -> str:
    """The backend that ``auto`` means on ``device``, or the one that was asked for by name."""
    return AUTO.get(device.type, "reference") if backend == "auto" else backend


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
    graph.libraries = _libraries(graph)
    return graph


def _libraries(graph: PrecisionGraph) -> tuple[str, ...]:
    """Names and versions of what computes the forward; the backward's kernels are no part of a policy."""
    found = {f"precgraph {precgraph.__version__}", f"torch {torch.__version__}"}
    seen: set[fx.Node] = set()
    stack = [output_node(graph.graph)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
            found.add(node.meta["kernel"].library if "kernel" in node.meta else "")
    return tuple(sorted(found - {""}))
