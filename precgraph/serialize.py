"""A :class:`~precgraph.graph.PrecisionGraph` as plain JSON data, and back.

Names and order of nodes are kept, so the digest is too. Reading executes nothing: an operator is looked up by
name among precgraph's own, ``getitem`` and aten's, and every other name is an error. Kernels are not written:
they belong to a machine; their numerics ids are.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import torch
from torch import fx

import precgraph.attention  # noqa: F401  registers the opaque attention of raw graphs
from precgraph import ops
from precgraph.errors import GraphError, PrecGraphError
from precgraph.format import Format
from precgraph.graph import (
    SCHEMA,
    Parameter,
    Precision,
    PrecisionGraph,
    TensorSpec,
    function_name,
    op_name,
    precision,
)

_ATEN = re.compile(r"aten\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_RAW_ATTENTION = "precgraph.attention.default"
_KINDS = {"parameter": "get_attr", "input": "placeholder", "output": "output"}
_TORCH: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_T = TypeVar("_T")


def function_from_name(name: str) -> Callable[..., Any]:
    """The inverse of :func:`~precgraph.graph.function_name`; GraphError if nothing has this name."""
    if name in ops.OPS:
        return ops.OPS[name]
    if name == "getitem":
        return operator.getitem
    if name == _RAW_ATTENTION:
        opaque: Callable[..., Any] = torch.ops.precgraph.attention.default
        return opaque
    found = _ATEN.fullmatch(name)
    packet = getattr(torch.ops.aten, found[1], None) if found else None
    overload = getattr(packet, found[2], None) if found and packet is not None else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise GraphError(
            f"{name!r} is not an operator of precgraph or aten",
            remedy="write the graph with this version of precgraph and of torch",
        )
    return overload


# ------------------------------------------------------------------------------------------- write


def graph_to_json(graph: PrecisionGraph) -> dict[str, Any]:
    """The graph as dicts, lists, strings, finite numbers, booleans and None; else GraphError."""
    return {
        "schema": SCHEMA,
        "mode": graph.mode,
        "family": graph.family,
        "causal_lm": graph.causal_lm,
        "recipe": graph.recipe,
        "passes": list(graph.passes),
        "libraries": list(graph.libraries),
        "parameters": {path: _plain(asdict(p)) for path, p in graph.parameters.items()},
        "nodes": [_node_to_json(node) for node in graph],
    }


def _node_to_json(node: fx.Node) -> dict[str, Any]:
    data: dict[str, Any] = {"name": node.name, "op": op_name(node)}
    if node.op in ("get_attr", "placeholder"):
        data["target"] = str(node.target)
    elif node.op == "call_function" and function_from_name(data["op"]) is not node.target:
        raise GraphError(f"node {node.name} calls {node.target}, which is not precgraph's {data['op']}")
    try:
        data["args"] = [_write(a) for a in node.args]
        data["kwargs"] = {k: _write(v) for k, v in node.kwargs.items()}
    except GraphError as error:
        raise GraphError(f"node {node.name} ({data['op']}): {error}") from None
    spec = node.meta.get("tensor")
    data["tensor"] = None if spec is None else {"dtype": spec.dtype, "shape": list(spec.shape)}
    data["precision"] = _precision_to_json(precision(node))
    return data


def _precision_to_json(annotation: Precision) -> dict[str, Any]:
    data = {f.name: getattr(annotation, f.name) for f in fields(annotation)}
    data["format"] = annotation.format.to_dict()
    data["rules"] = dict(annotation.rules)
    return data


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}


def _write(value: Any) -> Any:
    """An argument as tagged JSON: a dict has one key, its tag; lists stand for themselves."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [_write(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [_write(v) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(k): _write(v) for k, v in value.items()}}
    if isinstance(value, Format):
        return {"format": value.to_dict()}
    if isinstance(value, ops.AttentionSpec):
        return {"attention": value.to_dict()}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for tag, kind in _TORCH.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    if callable(value):
        name = function_name(value)
        if function_from_name(name) is value:
            return {"function": name}
    raise GraphError(f"an argument of type {type(value).__name__} has no JSON form")


# -------------------------------------------------------------------------------------------- read


def graph_from_json(data: Mapping[str, Any]) -> PrecisionGraph:
    """Rebuild a graph. GraphError, naming the node: not what :func:`graph_to_json` writes."""
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise GraphError(f"not a precision graph of schema {SCHEMA} (found {found!r})")
    graph = PrecisionGraph(fx.Graph(), {})
    with _Reading("the graph"):
        graph.mode, graph.family = _typed(data["mode"], str), _typed(data["family"], str)
        graph.causal_lm = _typed(data["causal_lm"], bool)
        graph.recipe = None if data["recipe"] is None else dict(_typed(data["recipe"], Mapping))  # type: ignore[type-abstract]
        graph.passes = [_typed(p, str) for p in data["passes"]]
        graph.libraries = tuple(_typed(v, str) for v in data["libraries"])
        nodes = _typed(data["nodes"], list)
        for path, p in data["parameters"].items():
            graph.parameters[path] = _read_parameter(p)
    env: dict[str, fx.Node] = {}
    for row in nodes:
        name = row.get("name") if isinstance(row, Mapping) else None
        with _Reading(f"node {name!r}"):
            _read_node(graph, row, env)
    if not env or next(iter(reversed(graph.graph.nodes))).op != "output":
        raise GraphError("a precision graph ends with its output; the data is cut short")
    graph.graph.lint()
    return graph


class _Reading:
    """Turns what malformed data raises into a GraphError that says where."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, PrecGraphError):
            raise GraphError(f"{self.where}: {error}") from None
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError | RuntimeError):
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise GraphError(f"{self.where}: malformed data ({what})") from None


def _typed(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _read_node(graph: PrecisionGraph, row: Mapping[str, Any], env: dict[str, fx.Node]) -> None:
    name, op = _typed(row["name"], str), _typed(row["op"], str)
    if name in env:
        raise ValueError("two nodes have this name")
    target: Any
    if op in ("parameter", "input"):
        target = _typed(row["target"], str)
        if op == "parameter" and target not in graph.parameters:
            raise ValueError(f"{target!r} is not among the parameters")
    else:
        target = "output" if op == "output" else function_from_name(op)
    args = tuple(_read(a, env) for a in _typed(row["args"], list))
    kwargs = {k: _read(v, env) for k, v in row["kwargs"].items()}
    node = graph.graph.create_node(_KINDS.get(op, "call_function"), target, args, kwargs, name=name)
    if node.name != name:
        raise ValueError("torch.fx does not allow this name")
    spec = row["tensor"]
    if spec is not None or op == "output":
        node.meta["tensor"] = spec and TensorSpec(_typed(spec["dtype"], str), tuple(spec["shape"]))
    node.meta["precision"] = _read_precision(row["precision"])
    env[name] = node


def _read_parameter(data: Mapping[str, Any]) -> Parameter:
    values = dict(data)
    values["shape"], values["aliases"] = tuple(values["shape"]), tuple(values["aliases"])
    return Parameter(**values)


def _read_precision(data: Mapping[str, Any]) -> Precision:
    values = dict(data)
    values["format"] = Format.from_dict(values["format"])
    values["rules"] = tuple((_typed(k, str), _typed(v, str)) for k, v in values["rules"].items())
    return Precision(**values)


def _read(value: Any, env: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(v, env) for v in value]
    if not isinstance(value, Mapping):
        return value
    ((tag, inner),) = value.items()
    match tag:
        case "node":
            if inner not in env:
                raise ValueError(f"reads {inner!r}, which no earlier node makes")
            return env[inner]
        case "tuple":
            return tuple(_read(v, env) for v in inner)
        case "dict":
            return {k: _read(v, env) for k, v in inner.items()}
        case "float":
            return float(inner)
        case "format":
            return Format.from_dict(inner)
        case "attention":
            return ops.AttentionSpec(**inner)
        case "function":
            return function_from_name(inner)
        case "device":
            return torch.device(inner)
        case _ if tag in _TORCH:
            found = getattr(torch, _typed(inner, str), None)
            return _typed(found, _TORCH[tag])
    raise ValueError(f"unknown tag {tag!r}")
