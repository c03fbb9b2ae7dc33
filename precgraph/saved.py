"""What a training program keeps of its forward for the backward, in bytes, counted from the graph alone.

A buffer is counted once however many views of it are kept, and as a whole: a slice of a fused projection keeps all of
it. Linears of one projection group without biases count as one buffer, as where one GEMM makes them. Parameters, and
what is made once per weight update, are not counted.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from precgraph import ops
from precgraph.errors import GraphError
from precgraph.graph import PrecisionGraph, op_name, precision, tensor

TOKENS = 128  # what groups along tokens are as long as, so that nothing is padded
Buffer = tuple[fx.Node, ...]  # the values that share one piece of memory, without their views

# Results that share their operand's memory, whatever its strides.
VIEWS = frozenset((
    "split_heads", "aten.alias.default", "aten.chunk.default", "aten.detach.default", "aten.expand.default",
    "aten.permute.default", "aten.select.int", "aten.slice.Tensor", "aten.split.Tensor",
    "aten.split_with_sizes.default", "aten.squeeze.dim", "aten.t.default", "aten.transpose.int",
    "aten.unflatten.int", "aten.unsqueeze.default", "aten.view.default",
))  # fmt: skip


def saved_bytes(graph: PrecisionGraph, tokens: int = TOKENS) -> dict[str, int]:
    """Bytes kept per segment of a training graph that runs ``tokens`` tokens; a buffer counts where it is first read.

    Empty without a backward.
    """
    seen: set[Buffer] = set()
    found: dict[str, int] = {}
    readers: dict[str, list[fx.Node]] = {name: [] for name in graph.segments()}
    for node in graph:
        if node.op == "call_function" and precision(node).phase == "backward":
            readers[precision(node).segment].append(node)
    for segment, nodes in readers.items():
        kept = dict.fromkeys(buffer(a) for n in nodes for a in n.all_input_nodes if is_saved_by(a, n))
        if kept:
            found[segment] = sum(buffer_bytes(b, tokens) for b in kept if b not in seen)
        seen.update(kept)
    return found


def saved_bytes_a_token(graph: PrecisionGraph) -> dict[str, float]:
    """:func:`saved_bytes` of whole groups of tokens, divided by their number."""
    return {segment: size / TOKENS for segment, size in saved_bytes(graph).items()}


def is_saved_by(value: fx.Node, reader: fx.Node) -> bool:
    """Whether ``reader`` belongs to the backward and ``value`` is the forward's to keep for it."""
    if value.op not in ("call_function", "placeholder") or reader.target is ops.accumulate_grad:
        return False
    return precision(value).phase == "forward" and precision(reader).phase == "backward"


def buffer(node: fx.Node) -> Buffer:
    """The memory that a forward value lies in."""
    while is_view(node):
        node = node.all_input_nodes[0]
    group = precision(node).fusion
    if op_name(node) != "linear" or group is None or node.args[2] is not None:
        return (node,)
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return tuple(u for u in x.users if op_name(u) == "linear" and precision(u).fusion == group and u.args[2] is None)


def is_view(node: fx.Node) -> bool:
    """Whether the value shares the memory of its first operand; the parts of a split do."""
    if node.target is operator.getitem:
        return op_name(node.all_input_nodes[0]) in VIEWS
    return op_name(node) in VIEWS


def buffer_bytes(owners: Buffer, tokens: int) -> int:
    """Its size: padded codes and scales of quantised values, otherwise elements."""
    return sum(_value_bytes(node, tokens) for node in owners)


def _value_bytes(node: fx.Node, tokens: int) -> int:
    if "tensor" not in node.meta:
        raise GraphError(f"node {node.name} ({op_name(node)}) has several values, and none of them is a buffer")
    *leading, width = [_size(d, tokens) for d in tensor(node).shape] or [1]
    rows, fmt = math.prod(leading), precision(node).format
    if not fmt.is_quantized:
        return rows * width * int(getattr(torch, tensor(node).dtype).itemsize)
    if op_name(node) == "quantize_dispatched":  # each row once for every expert that reads it
        slots = node.args[4]
        assert isinstance(slots, int)
        rows *= slots
    r, c = fmt.block
    blocks = -(-rows // r) * -(-width // c)
    return blocks * (r * c + torch.float32.itemsize)


def _size(dim: int | str, tokens: int) -> int:
    """A dimension, such as ``T`` or ``3*T``."""
    if isinstance(dim, int) or dim == "T":
        return tokens if dim == "T" else int(dim)
    import sympy  # type: ignore[import-untyped]  # torch has it, and writes dimensions in its language

    return int(sympy.sympify(dim).subs("T", tokens))
