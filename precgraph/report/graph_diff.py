"""What changed between two graphs. Nodes are paired as the checker pairs them: their names are numbers of a build."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from precgraph.graph import PrecisionGraph
from precgraph.report.diff import differing
from precgraph.verify.align import Aligner, Alignment
from precgraph.verify.program import Program, canonicalise, describe

_HEAD = ("mode", "family", "causal_lm", "recipe", "passes", "libraries")
_NODE = ("op", "target", "tensor", "precision")


def diff_graphs(a: PrecisionGraph, b: PrecisionGraph) -> dict[str, Any]:
    """``equal``, nodes that only one graph has, pairs that differ and in what, and the same for parameters.

    CheckError: a graph has no operators. Linear in the number of nodes and edges.
    """
    return _GraphDiff(a, b).run()


class _GraphDiff:
    def __init__(self, a: PrecisionGraph, b: PrecisionGraph) -> None:
        self.data = a.to_json(), b.to_json()
        self.rows = tuple({row["name"]: row for row in side["nodes"]} for side in self.data)
        self.a, self.b = Program(a, "first"), Program(b, "second")
        canonicalise(self.a, self.b)
        self.alignment = Alignment()
        Aligner(self.a, self.b, self.alignment, self.a.forward, self.b.forward).run()
        # All that is left at once: what only one of the forwards still reads is a node of both.
        Aligner(self.a, self.b, self.alignment, list(self.a.records), list(self.b.records)).run()
        self.leads = _leads(self.a), _leads(self.b)

    def run(self) -> dict[str, Any]:
        to_b, (a, b) = self.alignment.to_infer, self.data
        place = {name: k for k, name in enumerate(self.b.records)}
        order = [place[to_b[name]] for name in self.a.records if name in to_b]
        found = {
            "only_a": [_short(self.a, name) for name in self.a.records if name not in to_b],
            "only_b": [_short(self.b, name) for name in self.b.records if name not in self.alignment.to_train],
            "changed": list(self._changed()),
            "parameters": differing(a["parameters"], b["parameters"], (*a["parameters"], *b["parameters"])),
            "fields": differing(a, b, _HEAD),
            "order": [] if order == sorted(order) else ["nodes"],
        }
        return {"equal": not any(found.values()), **found}

    def _changed(self) -> Iterator[dict[str, Any]]:
        for i in self.b.records:
            t = self.alignment.to_train.get(i)
            if t is not None and (fields := self._fields(t, i)):
                yield {**_short(self.b, i), "name_a": t, "fields": fields}

    def _fields(self, t: str, i: str) -> dict[str, list[Any]]:
        found = differing(self.rows[0][t], self.rows[1][i], _NODE)
        if self._one_group(t, i):
            found.pop("precision.fusion", None)
        return found | self._arguments(t, i)

    def _one_group(self, t: str, i: str) -> bool:
        """Whether two nodes are in one fusion group: its name may hold a node's, so its first member decides."""
        f, g = self.a.records[t].precision.fusion, self.b.records[i].precision.fusion
        return bool(f and g) and self.alignment.to_infer.get(self.leads[0][f]) == self.leads[1][g]

    def _arguments(self, t: str, i: str) -> dict[str, list[Any]]:
        """Constants that differ, and edges that do not come from one node."""
        ours, theirs = _constants(self.a, t), _constants(self.b, i)
        found = differing({"arguments": ours}, {"arguments": theirs}, ("arguments",))
        for place in dict.fromkeys((*self.a.operands[t], *self.b.operands[i])):
            p, q = self.a.operands[t].get(place), self.b.operands[i].get(place)
            if p is None or q is None or self.alignment.to_infer.get(p) != q:
                found[f"arguments.{place}"] = [
                    _value(self.a, p) if p else ours.get(place), _value(self.b, q) if q else theirs.get(place)
                ]  # fmt: skip
        return found


def _leads(program: Program) -> dict[str | None, str]:
    """The first member of each fusion group."""
    return {r.precision.fusion: r.name for r in reversed(program.records.values())}


def _short(program: Program, name: str) -> dict[str, str]:
    record = program.records[name]
    return {"name": name, "op": record.op, "module": record.precision.module}


def _constants(program: Program, name: str) -> dict[str, Any]:
    """The attributes, with what JSON has no numbers for in words."""
    found: dict[str, Any] = json.loads(json.dumps(dict(program.records[name].attributes)), parse_constant=str)
    return found


def _value(program: Program, name: str) -> str:
    words = describe(program, name)
    return words if program.is_leaf(name) else f"{name} ({words})"
