"""The part of a program that a report draws: one layer and what differs outside of layers, as JSON data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from precgraph.graph import PrecisionGraph, Record
from precgraph.verify.report import Finding, Report

MOST = 200  # nodes of one drawing
TRAIN_ONLY = "train:"  # before the names of nodes that the rollout lacks: the rollout's own may be called alike
_NUMBER = re.compile(r"\.(\d+)$")


@dataclass(slots=True)
class _Node:
    name: str
    record: Record
    operands: list[tuple[str, str]]

    @property
    def segment(self) -> str:
        return self.record.precision.segment


def drawn_name(finding: Finding) -> str:
    """The name under which a part has the node of a finding."""
    return (TRAIN_ONLY if "missing operator" in finding.attributes else "") + finding.node


def drawn_parts(train: PrecisionGraph, infer: PrecisionGraph, report: Report) -> list[dict[str, Any]]:
    """The rollout's layer with the most differences (the first, if none differs), and each segment outside of layers
    that has one; a model without layers is one part. Operators that only the training side has are in it too.

    A part has ``segment``, ``layers`` (how many the model has), ``nodes``, ``edges`` and ``left_out``, the number of
    nodes beyond :data:`MOST`.
    """
    lacking = {f.node for f in report.violations if "missing operator" in f.attributes}
    nodes = _all_nodes(train, infer, lacking)
    marked = {drawn_name(f) for f in (*report.violations, *report.notes, *report.not_proved) if f.node}
    differing = Counter(nodes[n].segment for f in report.violations if (n := drawn_name(f)) in nodes)
    members: dict[str, list[_Node]] = {}
    for node in nodes.values():
        if node.record.precision.phase != "backward" and node.record.op != "output":
            members.setdefault(node.segment, []).append(node)
    layers = [s for s in members if _NUMBER.search(s)]
    chosen = {s for s in members if s not in layers and (differing[s] or not layers)}
    if layers:
        chosen.add(max(layers, key=lambda s: differing[s]))
    return [_part(s, len(layers), members[s], marked, nodes) for s in members if s in chosen]


def _all_nodes(train: PrecisionGraph, infer: PrecisionGraph, lacking: set[str]) -> dict[str, _Node]:
    """The rollout's nodes, and between them those of the training side in ``lacking``, wired up by names."""
    nodes = {r.name: _Node(r.name, r, list(r.operands)) for r in infer.records()}
    if not lacking:
        return nodes
    ours = {r.name: r for r in train.records()}

    def counterpart(name: str) -> str | None:
        if name in lacking:
            return TRAIN_ONLY + name
        return name if name in nodes and nodes[name].record.op == ours[name].op else None

    added = {}
    for name in ours.keys() & lacking:
        pairs = [(place, counterpart(producer)) for place, producer in ours[name].operands]
        added[TRAIN_ONLY + name] = _Node(TRAIN_ONLY + name, ours[name], [(p, n) for p, n in pairs if n is not None])
    for record in ours.values():
        user = counterpart(record.name)
        if user is not None and user in nodes:
            nodes[user].operands += [(place, TRAIN_ONLY + p) for place, p in record.operands if p in lacking]
    return {**nodes, **added}


def _part(
    segment: str, layers: int, members: Sequence[_Node], marked: set[str], everything: dict[str, _Node]
) -> dict[str, Any]:
    # Parameters are named at the operators that read them, and drawn only where they differ themselves.
    kept = [n for n in members if n.record.parameter is None or n.name in marked]
    names = _within(kept, marked)
    nodes, edges, outside = [], [], {}
    for node in kept:
        if node.name not in names:
            continue
        nodes.append(_plain(node, everything))
        for place, producer in node.operands:
            if everything[producer].record.parameter is not None and producer not in names:
                continue
            edges.append([producer, node.name, place])
            if producer not in names:
                outside[producer] = {**_plain(everything[producer], {}), "outside": True}
    return {
        "segment": segment, "layers": layers, "nodes": [*outside.values(), *nodes], "edges": edges,
        "left_out": len(kept) - len(nodes),
    }  # fmt: skip


def _within(members: Sequence[_Node], marked: set[str]) -> set[str]:
    """At most MOST names: marked nodes and what they read first, then the rest in program order."""
    names = [n.name for n in members]
    near = [x for n in members if n.name in marked for x in (n.name, *(p for _, p in n.operands))]
    own = set(names)
    return set([n for n in dict.fromkeys([*near, *names]) if n in own][:MOST])


def _plain(node: _Node, everything: dict[str, _Node]) -> dict[str, Any]:
    record, p = node.record, node.record.precision
    shape = f" [{', '.join(map(str, record.tensor.shape))}]" if record.tensor else ""
    reads = [q.record.parameter for _, n in node.operands if (q := everything.get(n)) and q.record.parameter]
    return {
        "name": node.name, "op": record.op, "module": record.parameter or p.module, "value": f"{p.format}{shape}",
        "numerics": p.numerics, "side": "train" if node.name.startswith(TRAIN_ONLY) else "both", "reads": reads,
        "outside": False,
    }  # fmt: skip
