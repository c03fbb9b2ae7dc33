"""What passes share: reading nodes and writing new ones with their annotation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

from torch import fx

from precgraph.format import Format
from precgraph.graph import Precision, TensorSpec, precision

Rule = Callable[[fx.Graph, Any], fx.Node | None]  # fx types arguments too loosely to match on


def is_call(value: Any, *targets: Callable[..., Any]) -> bool:
    """Whether ``value`` is a node that calls one of ``targets``."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets


def emit(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    like: fx.Node,
    tensor: TensorSpec | Literal["same"] | None = "same",
    **changes: Any,
) -> fx.Node:
    """Append a call at the graph's insertion point, annotated as ``like`` but for ``changes``.

    The value has ``like``'s shape and dtype unless ``tensor`` says otherwise (None: a tuple); a plain format follows
    the tensor's dtype unless given.
    """
    node = graph.call_function(target, args)
    spec: TensorSpec | None = like.meta.get("tensor") if tensor == "same" else tensor
    annotation: Precision = precision(like)
    if spec is not None:
        node.meta["tensor"] = spec
        changes.setdefault("format", Format.plain(spec.dtype))
    node.meta["precision"] = replace(annotation, **{"saved": False, **changes})
    return node


def closed(result: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether nothing but the pattern itself uses the pattern's inner nodes, and gradients pass all of them or none."""
    allowed = {*inside, result}
    if len({precision(n).rule("gradient") for n in allowed}) > 1:
        return False
    return all(user in allowed for node in inside for user in node.users)
