"""fuse_quantize: name the groups of neighbouring nodes that one kernel may serve, quantisers above all.

The groups are annotations (``precision.fusion``); a backend that has a kernel for a group uses it, with the numerics
of the single operators. The nodes stay, so graphs compare the same whether a backend fuses or not. Groups lie within
one phase; a node is in one group at most, by the first rule of :data:`RULES` that claims it. All but the add before a
norm lie within one segment too: where segments run one by one, the two are split.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from torch import fx

from precgraph import ops
from precgraph.graph import PrecisionGraph, annotate, precision
from precgraph.passes.rewrite import is_call

Rule = Callable[[fx.Node], list[fx.Node]]  # the members of the group that a node anchors, or nothing


def fuse_quantize(graph: PrecisionGraph) -> PrecisionGraph:
    """Name a group after the module and the operator that anchors it."""
    for suffix, rule in RULES:
        for node in list(graph):
            members = [m for m in rule(node) if precision(m).fusion is None]
            if len(members) > 1 and _together(members):
                for member in members:
                    annotate(member, fusion=f"{precision(node).module}.{suffix}({node.name})")
    return graph


def _together(members: list[fx.Node]) -> bool:
    """One phase, and one segment but for an add that the group begins with."""
    rest = members[1:] if is_call(members[0], ops.add) else members
    return len({_place(m) for m in rest}) == 1 and precision(members[0]).phase == precision(rest[0]).phase


def _place(node: fx.Node) -> tuple[str, str]:
    return precision(node).segment, precision(node).phase


def _users(node: fx.Node, *targets: Callable[..., object]) -> list[fx.Node]:
    return [u for u in node.users if is_call(u, *targets)]


def _quantizers(node: fx.Node, place: tuple[str, str] | None = None) -> list[fx.Node]:
    """Quantisers along rows or along tokens, in one segment and phase: ``place``, by default that of the first.

    Blocks of both are quantised on their own: no fused kernel makes them.
    """
    found = [q for q in _users(node, ops.quantize) if 1 in precision(q).format.block]
    return [q for q in found if _place(q) == (place or _place(found[0]))]


# ----------------------------------------------------------------------------------------- forward


def norm_quantize(node: fx.Node) -> list[fx.Node]:
    """The residual add before a norm, the norm, its quantisers."""
    if not is_call(node, ops.rms_norm):
        return []
    before = [node.args[0]] if is_call(node.args[0], ops.add) else []
    return [*before, node, *_quantizers(node, _place(node))]  # type: ignore[list-item]


def gated_quantize(node: fx.Node) -> list[fx.Node]:
    """A gated unit, or an activation, and its quantisers."""
    return [node, *_quantizers(node, _place(node))] if is_call(node, ops.gated, ops.activate) else []


def rotations(node: fx.Node) -> list[fx.Node]:
    """The rotations of the q and the k that an attention or its backward reads, each after its norm if it has one."""
    if not is_call(node, ops.attention, ops.attention_backward):
        return []
    q, k = node.args[:2] if is_call(node, ops.attention) else node.args[1:3]
    if q is k or not is_call(q, ops.rope) or not is_call(k, ops.rope):
        return []
    parts = [norm_rope(n) or [n] for n in (q, k)]  # type: ignore[arg-type, list-item]
    return [*parts[0], *parts[1]] if _kinds(parts[0]) == _kinds(parts[1]) else []


def _kinds(part: list[fx.Node]) -> list[object]:
    """What a rotation of q and one of k, and their norms, share: one call has one table, one eps and one arithmetic."""
    *norms, turn = part
    tables = turn.args[1:]
    return [tables, *(n.args[2] for n in norms), *((p.format, p.compute, p.rules) for p in map(precision, part))]


def norm_rope(node: fx.Node) -> list[fx.Node]:
    """The norm of q or k and its rotation, where the two do not go together."""
    source = node.args[0] if is_call(node, ops.rope) else None
    return [source, node] if is_call(source, ops.rms_norm) else []  # type: ignore[list-item]


# ---------------------------------------------------------------------------------------- backward


def _made_again(backward: fx.Node, target: Callable[..., object]) -> list[fx.Node]:
    """The operator that a backward is of, if it is repeated there for nothing but its quantisers, and these."""
    for node in _users(backward.args[1], target):  # type: ignore[arg-type]
        quantizers = _quantizers(node, _place(backward))
        if node.args == backward.args[1:] and _place(node) == _place(backward) and len(quantizers) == len(node.users):
            return [node, *quantizers]
    return []


def norm_rope_backward(node: fx.Node) -> list[fx.Node]:
    """A rotation of q or k and its norm, backwards, with both gradients."""
    source = node.args[0] if is_call(node, ops.rms_norm_backward) else None
    if not is_call(source, ops.rope_backward):
        return []
    return [source, node, *_users(node, operator.getitem)]  # type: ignore[list-item]


def norm_backward_add(node: fx.Node) -> list[fx.Node]:
    """A norm's backward, the addition of its gradient to the residual's, and the norm made again for its quantisers."""
    if not is_call(node, ops.rms_norm_backward):
        return []
    parts = _users(node, operator.getitem)
    adds = [u for part in parts if part.args[1] == 0 for u in _users(part, ops.add)]
    return [*_made_again(node, ops.rms_norm), node, *parts, *adds] if len(adds) == 1 else []


def gated_backward_quantize(node: fx.Node) -> list[fx.Node]:
    """A gated unit's backward, the quantisers of both gradients, and the unit made again for its own."""
    if not is_call(node, ops.gated_backward):
        return []
    parts = _users(node, operator.getitem)
    return [*_made_again(node, ops.gated), node, *parts, *(q for part in parts for q in _quantizers(part))]


def gradients_of_projections(node: fx.Node) -> list[fx.Node]:
    """The quantisers of all output gradients of a projection group, which one DGrad reads."""
    if not is_call(node, ops.linear_dgrad) or len(node.args[0]) == 1:  # type: ignore[arg-type]
        return []
    return [q for dy in _quantized(node) for q in _quantizers(dy)]


def _quantized(dgrad: fx.Node) -> Iterator[fx.Node]:
    """What the operands of a DGrad were quantised from."""
    for dy in dgrad.args[0]:  # type: ignore[union-attr]
        if is_call(dy, ops.quantize):
            yield dy.args[0]  # type: ignore[union-attr, misc]


def wgrads_of_projections(node: fx.Node) -> list[fx.Node]:
    """The WGrads of the linears that read one value."""
    readers = _users(node, ops.linear_wgrad) if is_call(node, ops.quantize) else []
    return [w for w in readers if w.args[1] is node]


def twin_quantizers(node: fx.Node) -> list[fx.Node]:
    """The quantisers of one value: along its rows and along tokens."""
    return _quantizers(node) if node.op != "get_attr" else []


RULES: tuple[tuple[str, Rule], ...] = (
    ("rotated_backward", norm_rope_backward),
    ("norm_backward", norm_backward_add),
    ("gated_backward", gated_backward_quantize),
    ("norm", norm_quantize),
    ("gated", gated_quantize),
    ("rotated", rotations),
    ("rotated", norm_rope),
    ("gradients", gradients_of_projections),
    ("wgrads", wgrads_of_projections),
    ("twins", twin_quantizers),
)
