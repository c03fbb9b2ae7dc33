"""Build programs of the shared families, and change them as a careless hand would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx

from precgraph import ops
from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, annotate, op_name, precision, tensor, with_rules
from precgraph.lowering.lower import lower
from precgraph.passes.pipeline import build
from precgraph.recipe import Recipe
from precgraph.trace import trace
from tests.families import CAUSAL_LMS, meta_lm, plain_module

JET = Recipe.jet_rl()


# ---------------------------------------------------------------------------------------- building


@cache
def raw(family: str, **changes: Any) -> PrecisionGraph:
    """The traced graph of a family or plain module; ``changes`` are of the family's config."""
    if family in CAUSAL_LMS:
        return trace(meta_lm(family, **changes)).graph
    return trace(*plain_module(family)).graph


def program(family: str, mode: str, recipe: Recipe = JET, **changes: Any) -> PrecisionGraph:
    """One program, not lowered."""
    return build(raw(family, **changes), mode, recipe, check=True)


def lowered(*graphs: PrecisionGraph) -> bool:
    """Choose reference kernels for all of them, or for none if a recipe has none for one of them."""
    try:
        copies = [lower(g.copy(), "reference", torch.device("meta")) for g in graphs]
    except LoweringError:
        return False
    for graph, copy in zip(graphs, copies, strict=True):
        graph.graph, graph.passes, graph.libraries = copy.graph, copy.passes, copy.libraries
    return True


def pair(family: str, recipe: Recipe = JET, **changes: Any) -> tuple[PrecisionGraph, PrecisionGraph]:
    """The training program of ``jet_rl`` and the rollout program of ``recipe``."""
    train, infer = program(family, "train"), program(family, "infer", recipe, **changes)
    lowered(train, infer)
    return train, infer


# ----------------------------------------------------------------------------------------- surgery


def find(graph: PrecisionGraph, op: str, module: str, nth: int = 0) -> fx.Node:
    """The ``nth`` node of this operator in this module."""
    return [n for n in graph if op_name(n) == op and precision(n).module == module][nth]


def set_argument(graph: PrecisionGraph, op: str, module: str, index: int, value: object) -> None:
    node = find(graph, op, module)
    node.args = (*node.args[:index], value, *node.args[index + 1 :])  # type: ignore[assignment]


def set_spec(graph: PrecisionGraph, module: str, **changes: Any) -> None:
    """Change fields of an attention."""
    node = find(graph, "attention", module)
    assert isinstance(node.args[3], ops.AttentionSpec)
    node.args = (*node.args[:3], replace(node.args[3], **changes))  # type: ignore[assignment]


def set_rule(graph: PrecisionGraph, op: str, module: str, **rules: str) -> None:
    node = find(graph, op, module)
    node.meta["precision"] = with_rules(precision(node), **rules)


def set_format(graph: PrecisionGraph, module: str, fmt: Format) -> None:
    """Give one quantiser another format."""
    set_argument(graph, "quantize", module, 1, fmt)
    annotate(find(graph, "quantize", module), format=fmt)


def set_dtype(graph: PrecisionGraph, op: str, module: str, dtype: str, nth: int = 0) -> None:
    """Compute a value in another dtype and keep it so."""
    node = find(graph, op, module, nth)
    node.meta["tensor"] = replace(tensor(node), dtype=dtype)
    annotate(node, format=Format.plain(dtype), compute=dtype)


def set_numerics(graph: PrecisionGraph, op: str, module: str) -> None:
    """Another kernel serves one node."""
    annotate(find(graph, op, module), numerics="somebody.else/1")


def remove(graph: PrecisionGraph, op: str, module: str) -> None:
    """Take out a node that passes its first operand on."""
    node = find(graph, op, module)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(node)


def insert(graph: PrecisionGraph, op: str, module: str, make: Callable[[fx.Graph, fx.Node], fx.Node]) -> fx.Node:
    """Put a node that ``make`` makes from it behind a node, for all its users."""
    node = find(graph, op, module)
    users = list(node.users)
    with graph.graph.inserting_after(node):
        new = make(graph.graph, node)
    new.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, new)
    return new


def swap(graph: PrecisionGraph, op: str, module: str, nth: int = 0) -> None:
    """Exchange the first two operands."""
    node = find(graph, op, module, nth)
    node.args = (node.args[1], node.args[0], *node.args[2:])


def swap_parameters(graph: PrecisionGraph, first: str, second: str) -> None:
    """Read each of two parameters where the other belongs."""
    names = {first: second, second: first}
    for node in graph:
        if node.op == "get_attr" and node.target in names:
            node.target = names[str(node.target)]


def keep_norm_as_it_is(graph: PrecisionGraph, module: str) -> None:
    """Write an RMSNorm out in aten operators with the cast *after* the weight, as a pattern would leave it."""
    norm = find(graph, "rms_norm", module)
    x, weight, eps = norm.args
    assert isinstance(x, fx.Node)
    aten, g = torch.ops.aten, graph.graph
    with g.inserting_before(norm):
        wide = g.call_function(aten.to.dtype, (x, torch.float32))
        mean = g.call_function(aten.mean.dim, (g.call_function(aten.pow.Tensor_Scalar, (wide, 2)), [-1], True))
        scale = g.call_function(aten.rsqrt.default, (g.call_function(aten.add.Tensor, (mean, eps)),))
        scaled = g.call_function(aten.mul.Tensor, (g.call_function(aten.mul.Tensor, (wide, scale)), weight))
        out = g.call_function(aten.to.dtype, (scaled, torch.bfloat16))
    for node in graph:
        if "precision" not in node.meta:
            node.meta = dict(norm.meta)
    norm.replace_all_uses_with(out)
    g.erase_node(norm)


def rename(graph: PrecisionGraph, names: Iterable[tuple[str, str]]) -> PrecisionGraph:
    """The same program under other module and parameter paths: regular expressions and what replaces them."""

    def new(path: str) -> str:
        for pattern, replacement in names:
            path = re.sub(pattern, replacement, path)
        return path

    names = tuple(names)
    graph = graph.copy()
    for node in graph:
        if node.op == "get_attr":
            node.target = new(str(node.target))
        annotate(node, module=new(precision(node).module))
    graph.parameters = {
        new(path): replace(p, aliases=tuple(map(new, p.aliases))) for path, p in graph.parameters.items()
    }
    return graph
