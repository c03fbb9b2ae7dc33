"""What level numerics measured: the ``numerics`` table of the document, and its lines and rows as people see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from precgraph.report.document import how_many
from precgraph.strict_json import finite
from precgraph.verify.report import masked

if TYPE_CHECKING:
    from precgraph.verify.numerics import Measured, Numerics
    from precgraph.verify.values import Delta

GROWTH = ("after", "values that differ", "max |Δ|", "relative")
CAUSES = ("module", "node", "count", *GROWTH[1:])
Table = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]  # title, headings, rows


def measures(outcome: Numerics) -> dict[str, Any]:
    """The table, as JSON values."""
    return {
        "first": _plain(outcome.first) if outcome.first else None,
        "causes": [_plain(m) for m in outcome.causes],
        "growth": [{"segment": name, **_numbers(delta)} for name, delta in outcome.growth],
        "logprobs": finite(asdict(outcome.logprobs)) if outcome.logprobs else None,
    }


def _plain(m: Measured) -> dict[str, Any]:
    where = {"node": m.node, "module": m.module, "op": m.op, "segment": m.segment}
    return {**where, "delta": _numbers(m.delta), "alone": _numbers(m.alone) if m.alone else None}


def _numbers(delta: Delta) -> dict[str, Any]:
    return finite(asdict(delta) | {"share": delta.share, "bit_share": delta.bit_share})


# -------------------------------------------------------------------------------- as people are shown


def lines(document: Mapping[str, Any]) -> list[str]:
    """How much was compared, where the first difference is, and the log-probabilities."""
    compared, measured = document["compared"], document["numerics"]
    found = [f"{how_many(compared)} compared, {compared['differing'] or 'none'} of them different"]
    if compared["hidden"]:
        found.append(f"{compared['hidden']} nodes inside fused kernels, or not captured, have no value to compare")
    if first := measured["first"]:
        found.append(f"first divergence: {first['module'] or '(model)'}, {first['op']} ({_words(first['delta'])})")
    if p := measured["logprobs"]:
        found.append(
            f"log-probabilities of {p['tokens']} probe tokens: {p['differing']} differ, max |Δ| {_short(p['largest'])},"
            f" mean |Δ| {_short(p['mean'])}, k3 {_short(p['k3'])}"
        )
    return found


def tables(document: Mapping[str, Any]) -> list[Table]:
    """What differs by itself, and how the difference grows; none where nothing differs, or at another level."""
    if document["level"] != "numerics":
        return []
    measured = document["numerics"]
    found: list[Table] = []
    if measured["causes"]:
        found.append(("Differ by themselves, on equal inputs", CAUSES, _causes(measured["causes"])))
    if document["compared"]["differing"]:
        rows = [
            (row["segment"], f"{row['share']:.2%}", _short(row["largest"]), _short(row["relative"], 2))
            for row in folded(measured["growth"])
        ]
        found.append(("How the difference grows", GROWTH, rows))
    return found


def _causes(causes: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, ...]]:
    """What each kind of node does by itself: nodes of all layers in one row."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for m in causes:
        groups.setdefault((masked(m["module"]), m["op"]), []).append(m["alone"] or m["delta"])
    rows = []
    for (module, op), deltas in groups.items():
        share = sum(d["differing"] for d in deltas) / max(sum(d["values"] for d in deltas), 1)
        numbers = (f"{share:.2%}", _largest(deltas, "largest"), _largest(deltas, "relative", 2))
        shown = numbers if deltas[0]["measured"] else ("by hash", "", "")
        rows.append((module or "(model)", op, str(len(deltas)), *shown))
    return rows


def folded(growth: Sequence[Mapping[str, Any]], most: int = 14) -> list[Mapping[str, Any]]:
    """Equal segments as one row; of the rest at most about ``most``: the first two, the last, and some between."""
    equal = next((k for k, row in enumerate(growth) if row["differs"]), len(growth))
    rows: list[Mapping[str, Any]] = []
    if equal:
        first, last = growth[0]["segment"], growth[equal - 1]["segment"]
        rows.append({**growth[0], "segment": first if equal == 1 else f"{first} ... {last}"})
    rest = list(growth[equal:])
    every = max(1, math.ceil((len(rest) - 3) / (most - 3)))
    keep = {0, 1, len(rest) - 1, len(rest) - 2, *range(1, len(rest), every)}
    return rows + [row for k, row in enumerate(rest) if k in keep]


def _words(d: Mapping[str, Any]) -> str:
    if not d["measured"]:
        return "by its hash"
    stored = f", {d['bit_share']:.2%} of bits" if d["same_storage"] else ""
    return f"{d['share']:.1%} of values{stored} differ, max |Δ| {_short(d['largest'])}"


def _largest(deltas: Sequence[Mapping[str, Any]], key: str, digits: int = 3) -> str:
    values = [d[key] for d in deltas]
    return _short(None if None in values else max(values), digits)


def _short(value: float | None, digits: int = 3) -> str:
    """A number; the document has null for NaN and infinity."""
    return "not finite" if value is None else f"{value:.{digits}g}"
