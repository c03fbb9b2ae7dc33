"""PrecisionGraph: a ``torch.fx`` graph in which every value carries its precision.

``node.meta["precision"]`` (:class:`Precision`) and ``node.meta["tensor"]`` (:class:`TensorSpec`) are the one place of
the annotations; the records, the networkx view, the JSON, the text and the digest are derived from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from precgraph import ops
from precgraph.errors import GraphError
from precgraph.format import Format

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype (torch name) and shape of a value; a dimension that varies with the tokens is a string such as ``"T"``."""

    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Precision:
    """Everything about a value, and about the node that makes it, that can change a bit of the result.

    ``role`` is what the value is (activation, weight, master, gradient, logits, table, index ...), ``format`` how it
    is stored; ``compute`` and ``accumulate`` are dtypes of the arithmetic; ``rules`` are further named choices
    (position of casts, reduction order, softmax dtype ...); ``numerics`` is the id of the kernel's numerics, set by
    lowering; ``fusion`` names the group of nodes that one kernel may serve; ``saved`` marks what the backward keeps;
    ``cache`` is the KV cache layer that a rollout's attention reads; ``note`` says why a node was left as it is, or
    that it repeats one of the forward.
    ``phase`` is forward, backward or refresh (made once per weight update).
    """

    format: Format
    role: str = "activation"
    compute: str | None = None
    accumulate: str | None = None
    rules: tuple[tuple[str, str], ...] = ()
    numerics: str | None = None
    fusion: str | None = None
    saved: bool = False
    cache: int | None = None
    note: str = ""
    phase: str = "forward"
    module: str = ""
    segment: str = ""

    def rule(self, name: str) -> str | None:
        """The value of one of ``rules``, or None."""
        return dict(self.rules).get(name)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the model: shape, dtype (torch name), and the other names that share its storage.

    ``buffer`` says that no checkpoint holds it (a buffer outside the model's state, or a constant): its values are part
    of the program, and ``content`` is the sha256 of dtype, shape and bytes, empty if there are none (meta device). For
    weights, persistent buffers among them, it is empty: their values change while the program stays.
    """

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    buffer: bool = False
    aliases: tuple[str, ...] = ()
    content: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One node in plain data: what the verifier, the JSON and the networkx view see.

    ``operands`` are ``(place, producer)`` pairs, a place being ``"x"`` or ``"weights.0"``; ``attributes`` the other
    arguments as JSON values; ``parameter`` the path that a parameter node reads.
    """

    name: str
    op: str
    operands: tuple[tuple[str, str], ...]
    attributes: Mapping[str, Any]
    precision: Precision
    tensor: TensorSpec | None
    parameter: str | None = None


@dataclass(eq=False)
class PrecisionGraph:
    """One program: ``mode`` is ``raw`` (as traced), ``train`` or ``infer``; ``passes`` lists what has been applied.

    ``parameters`` are the tensors that parameter nodes read, by their canonical path; ``family`` is the model's class;
    ``causal_lm`` says that the inputs are ``input_ids`` and ``position_ids`` and the output logits. ``libraries`` are
    names and versions of the code behind the forward's kernels, sorted; lowering sets them.
    """

    graph: fx.Graph
    parameters: dict[str, Parameter]
    mode: str = "raw"
    family: str = ""
    causal_lm: bool = False
    recipe: dict[str, Any] | None = None
    passes: list[str] = field(default_factory=list)
    libraries: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self.graph.nodes)

    def copy(self) -> PrecisionGraph:
        """An independent copy; annotations are immutable and shared."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.graph, env)
        graph.output(output)
        for old in self.graph.nodes:
            new = output_node(graph) if old.op == "output" else env[old]
            new.meta = dict(old.meta)
        return replace(self, graph=graph, parameters=dict(self.parameters), passes=list(self.passes))

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def segments(self) -> list[str]:
        """Segment names in the order in which the forward meets them."""
        return list(dict.fromkeys(precision(n).segment for n in self if n.op == "call_function"))

    # ------------------------------------------------------------------------------------ views
    def refused(self) -> list[fx.Node]:
        """Of a lowered graph: the forward's nodes for which ``precgraph.compile`` refuses it. In a causal LM of exact
        arithmetic these are kernels of which nothing says that they treat each token alone."""
        if not self.causal_lm or (self.recipe or {}).get("arithmetic") != "exact":
            return []
        kernels = ((node, node.meta.get("kernel")) for node in self if precision(node).phase == "forward")
        return [node for node, kernel in kernels if kernel is not None and kernel.row_invariant is None]

    def records(self) -> list[Record]:
        """The nodes as plain data, in order."""
        return [_record(n) for n in self.graph.nodes]

    def networkx(self) -> nx.MultiDiGraph:
        """Nodes with their :class:`Record` under ``record``; edges carry ``place`` and the producer's ``format``."""
        view = nx.MultiDiGraph(mode=self.mode, family=self.family)
        records = self.records()
        formats = {r.name: r.precision.format for r in records}
        for r in records:
            view.add_node(r.name, record=r)
        for r in records:
            for place, producer in r.operands:
                view.add_edge(producer, r.name, place=place, format=formats[producer])
        return view

    def to_json(self) -> dict[str, Any]:
        """Plain data that :meth:`from_json` reads back; the same graph always gives the same data."""
        from precgraph.serialize import graph_to_json

        return graph_to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrecisionGraph:
        """Rebuild a graph; operators are looked up by name among precgraph's and aten's, nothing is executed."""
        from precgraph.serialize import graph_from_json

        return graph_from_json(data)

    def digest(self) -> str:
        """sha256 over the canonical *forward* program: operators, attributes, formats, rules and numerics ids, the
        values of buffers and constants that are no weights, and, once lowered, the versions of the code that runs it.

        Only what the output depends on counts, in an order that follows from the edges alone: node names, layouts and
        what a training graph adds (saved copies, the backward) do not, so both programs of one policy have one digest.
        """
        records = {r.name: r for r in self.records()}
        order: dict[str, int] = {}
        rows = []
        for name in _post_order(records, output_node(self.graph).name):
            r, p = records[name], records[name].precision
            order[name] = len(order)
            content = self.parameters[r.parameter].content if r.parameter is not None else ""
            rows.append([
                r.op, [[place, order[producer]] for place, producer in r.operands], dict(r.attributes), r.parameter,
                content, str(r.tensor), p.role, p.format.to_dict(), p.compute, p.accumulate, dict(p.rules), p.numerics,
            ])  # fmt: skip
        return hashlib.sha256(json.dumps([rows, self.libraries], sort_keys=True).encode()).hexdigest()


def _post_order(records: Mapping[str, Record], root: str) -> Iterator[str]:
    """Ancestors of ``root``, each after its operands."""
    seen: set[str] = set()
    stack = [(root, False)]
    while stack:
        name, expanded = stack.pop()
        if expanded:
            yield name
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack.extend((producer, False) for _, producer in reversed(records[name].operands))


# ------------------------------------------------------------------------------------------- nodes


def precision(node: fx.Node) -> Precision:
    """The node's annotation; a node without one is a bug of the pass that made it."""
    try:
        annotation: Precision = node.meta["precision"]
    except KeyError:
        raise GraphError(f"node {node.name} ({op_name(node)}) has no precision annotation") from None
    return annotation


def tensor(node: fx.Node) -> TensorSpec:
    """Dtype and shape of the node's value."""
    spec: TensorSpec = node.meta["tensor"]
    return spec


def annotate(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the node's annotation."""
    node.meta["precision"] = replace(precision(node), **changes)


def with_rules(annotation: Precision, **rules: str) -> Precision:
    """The annotation with these rules added or replaced."""
    return replace(annotation, rules=tuple(sorted({**dict(annotation.rules), **rules}.items())))


def op_name(node: fx.Node) -> str:
    """``rms_norm`` for an operator of ours, ``aten.mul.Tensor`` for torch's, ``parameter``, ``input`` or ``output``."""
    if node.op == "call_function":
        return function_name(node.target)
    names = {"get_attr": "parameter", "placeholder": "input", "output": "output"}
    try:
        return names[node.op]
    except KeyError:
        raise GraphError(f"node {node.name}: {node.op} does not occur in a precision graph") from None


def function_name(target: Any) -> str:
    """Name of a call target; :func:`function_from_name` is its inverse."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(target.__name__)


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by name: the parameters of our operators, the schema's names of aten's."""
    target = node.target
    if node.op != "call_function":
        return {"value": node.args[0]} if node.op == "output" else {}
    if isinstance(target, torch._ops.OpOverload):
        names = [a.name for a in target._schema.arguments]
    elif function_name(target) in ops.OPS:
        names = list(target.__code__.co_varnames[: target.__code__.co_argcount])  # type: ignore[union-attr]
    else:
        names = [f"arg{i}" for i in range(len(node.args))]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def defaults(op: torch._ops.OpOverload) -> dict[str, Any]:
    """What the schema of an aten operator says of arguments that are left out, by name."""
    return {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}


def _record(node: fx.Node) -> Record:
    operands: list[tuple[str, str]] = []
    attributes: dict[str, Any] = {}
    for name, value in arguments(node).items():
        attribute = _split(value, name, operands)
        if attribute is not _OPERAND:
            attributes[name] = attribute
    return Record(
        name=node.name,
        op=op_name(node),
        operands=tuple(operands),
        attributes=attributes,
        precision=precision(node),
        tensor=node.meta.get("tensor"),
        parameter=str(node.target) if node.op == "get_attr" else None,
    )


_OPERAND = object()  # in the place of an argument that is a node, and so an edge


def _split(value: Any, place: str, operands: list[tuple[str, str]]) -> Any:
    """Append the nodes inside ``value`` to ``operands`` and return what is left as a JSON value."""
    if isinstance(value, fx.Node):
        operands.append((place, value.name))
        return _OPERAND
    if isinstance(value, list | tuple):
        rest = [_split(v, f"{place}.{i}", operands) for i, v in enumerate(value)]
        if value and all(v is _OPERAND for v in rest):
            return _OPERAND
        return ["operand" if v is _OPERAND else v for v in rest]
    return plain(value)


def plain(value: Any) -> Any:
    """A constant argument as a JSON value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, Format | ops.AttentionSpec):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if callable(value):
        return function_name(value)
    raise GraphError(f"an argument of type {type(value).__name__} cannot stand in a precision graph")
