"""plan_recompute: forward values that the backward makes again instead of keeping them.

A value is made again if operators of :data:`CHEAP` alone lead to it from parameters and from what is kept anyway, or
if what would have to be kept in its place is smaller (:mod:`precgraph.saved` counts). Its nodes are repeated in the
phase ``backward``, right before their first reader, with the same operands and annotation, and so with the same
kernels: every bit is the same. What only the backward read, as WGrad's operands are, leaves the forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from precgraph.graph import PrecisionGraph, op_name, output_node, precision
from precgraph.saved import TOKENS, Buffer, buffer, buffer_bytes, is_saved_by, is_view

CHEAP = {
    "quantize", "quantize_dispatched", "gated", "activate", "rms_norm", "wide_rms_norm", "rope", "polar_rope",
    "merge_heads", "aten.reshape.default", "aten.flatten.using_ints", "aten.contiguous.default", "aten.cat.default",
    "aten.pad.default",
}  # fmt: skip
"""Operators that may be repeated, besides views: each reads and writes its values once or twice, none multiplies
matrices."""

NOTE = "made again for the backward"


def plan_recompute(graph: PrecisionGraph) -> PrecisionGraph:
    """Repeat in the backward what is cheaper to make again than to keep."""
    _Plan(graph).run()
    return graph


def is_cheap(node: fx.Node) -> bool:
    """Whether a node may be repeated."""
    return op_name(node) in CHEAP or is_view(node)


class _Plan:
    def __init__(self, graph: PrecisionGraph) -> None:
        self.graph = graph.graph
        self.order = {n: i for i, n in enumerate(graph)}
        self.again: dict[fx.Node, fx.Node] = {}  # forward nodes to their repetitions, operands first
        self.kept: dict[Buffer, list[fx.Node]] = {}  # what the backward reads, by the memory that it lies in
        for node in graph:
            if any(is_saved_by(node, user) for user in node.users):
                self.kept.setdefault(buffer(node), []).append(node)

    def run(self) -> None:
        for owners in sorted(self.kept, key=lambda b: self.order[b[0]]):  # operands before what is made of them
            chain = self._chain(owners)
            if chain is not None:
                self._repeat(owners, chain)
        self._place()

    def _chain(self, owners: Buffer) -> list[fx.Node] | None:
        """The nodes to repeat so that ``owners`` need not be kept, in order; None if that is impossible or no gain."""
        values = self.kept[owners]
        segments = {precision(u).segment for v in values for u in v.users if is_saved_by(v, u)}
        if len(owners) > 1 or not is_cheap(owners[0]) or segments != {precision(owners[0]).segment}:
            return None
        chain: set[fx.Node] = set()
        instead: set[Buffer] = set()  # what would have to be kept that is not
        todo = list(values)
        while todo:
            node = todo.pop()
            if node in chain or node in self.again or node.op == "get_attr":
                continue
            home = buffer(node)
            if home != owners and home in self.kept:
                continue
            if is_cheap(node):
                chain.add(node)
                todo += node.all_input_nodes
            else:
                instead.add(home)
        if any(precision(n).segment not in segments for n in chain):
            return None
        less = buffer_bytes(owners, TOKENS) - sum(buffer_bytes(b, TOKENS) for b in instead)
        return sorted(chain, key=self.order.__getitem__) if less > 0 else None

    def _repeat(self, owners: Buffer, chain: Iterable[fx.Node]) -> None:
        end = output_node(self.graph)
        for node in chain:
            with self.graph.inserting_before(end):
                copy = self.graph.node_copy(node, lambda n: self.again.get(n, n))
            copy.meta = {k: v for k, v in node.meta.items() if k == "tensor"}
            role = "activation" if precision(node).role == "saved" else precision(node).role
            copy.meta["precision"] = replace(precision(node), phase="backward", role=role, note=NOTE)
            self.again[node] = copy
            for value in copy.all_input_nodes:
                if is_saved_by(value, copy):
                    self.kept.setdefault(buffer(value), [])
        for node in self.kept.pop(owners):
            for user in [u for u in node.users if is_saved_by(node, u)]:
                user.replace_input_with(node, self.again[node])

    def _place(self) -> None:
        """Each repetition right before its first reader; what nothing in the forward reads any more leaves it."""
        first: dict[fx.Node, fx.Node] = {}
        for copy in reversed(self.again.values()):  # readers first
            readers = (first.get(u, u) for u in copy.users)
            first[copy] = min(readers, key=self.order.__getitem__)
        for copy in self.again.values():
            first[copy].prepend(copy)
        for node in reversed(self.again):
            if not node.users:
                self.graph.erase_node(node)
