"""What changed between two graphs, or between two reports, as JSON data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precgraph import strict_json
from precgraph.errors import InputError
from precgraph.report.document import findings_of, load

if TYPE_CHECKING:
    from precgraph.graph import PrecisionGraph

SCHEMA = 1
# What a report says of its findings, which are compared one by one.
_OF_FINDINGS = {
    "causes", "violations", "suppressed", "known", "fixed", "not_proved", "notes", "rows", "parts", "ok", "exit_code",
}  # fmt: skip


def diff_files(a: Path, b: Path) -> dict[str, Any]:
    """Two files of one kind: ``kind`` (graph or report), ``equal``, and what changed.

    InputError: a file is neither, or the two are not of one kind or level; CheckError: a graph has no operators.
    """
    (kind, first), (other, second) = (_read(path) for path in (a, b))
    if kind != other:
        raise InputError(f"is a {other}, and {a} a {kind}", path=str(b), remedy="name two files of one kind")
    if kind == "graph":
        from precgraph.report.graph_diff import diff_graphs  # needs torch, which reports do not

        changed = diff_graphs(_graph(first, a), _graph(second, b))
    else:
        changed = diff_reports(load(a), load(b))
    return {"schema": SCHEMA, "kind": kind, "a": str(a), "b": str(b), **changed}


def _read(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Graph or report, and its data."""
    data = strict_json.read(path)
    if isinstance(data, Mapping) and "nodes" in data and "parameters" in data:
        return "graph", data
    if isinstance(data, Mapping) and "violations" in data:
        return "report", data
    raise InputError(
        "is neither a graph nor a report", path=str(path),
        remedy="write one with precgraph show --format json, or check -o",
    )  # fmt: skip


def _graph(data: Mapping[str, Any], path: Path) -> PrecisionGraph:
    from precgraph.serialize import graph_from_json

    try:
        return graph_from_json(data)
    except Exception as error:
        raise InputError(f"is no whole graph: {error}", path=str(path)) from None


def diff_reports(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Findings that are new, fixed, or in another state (failing, suppressed, known), and all else that changed."""
    if a["level"] != b["level"]:
        raise InputError(f"the reports are of levels {a['level']} and {b['level']}", remedy="name two of one level")
    a, b = ({"strict": False, **side} for side in (a, b))  # which older reports do not say
    old = {f["fingerprint"]: (f, state) for f, state in _states(a)}
    new = {f["fingerprint"]: (f, state) for f, state in _states(b)}
    moved = [
        {"finding": new[mark][0], "a": old[mark][1], "b": new[mark][1]}
        for mark in old.keys() & new.keys()
        if old[mark][1] != new[mark][1]
    ]
    fields = differing(a, b, tuple(key for key in dict.fromkeys([*a, *b]) if key not in _OF_FINDINGS))
    found: dict[str, Any] = {
        "new": [f for mark, (f, _) in new.items() if mark not in old],
        "fixed": [f for mark, (f, _) in old.items() if mark not in new],
        "moved": sorted(moved, key=lambda m: str(m["finding"]["module"])),
        "fields": fields,
    }
    for key in ("not_proved", "notes"):
        marks = [{f["fingerprint"]: f for f in side[key]} for side in (a, b)]
        found[f"{key}_new"] = [f for mark, f in marks[1].items() if mark not in marks[0]]
        found[f"{key}_gone"] = [f for mark, f in marks[0].items() if mark not in marks[1]]
    return {"equal": not any(found.values()), **found}


def _states(document: Mapping[str, Any]) -> list[tuple[dict[str, Any], str]]:
    states = {"violations": "failing", "suppressed": "suppressed", "known": "known"}
    places = {f["fingerprint"]: state for key, state in states.items() for f in document[key]}
    return [(f, places[f["fingerprint"]]) for f in findings_of(document)]


def differing(a: Any, b: Any, keys: tuple[str, ...], prefix: str = "") -> dict[str, list[Any]]:
    """Every leaf in which two tables differ: its path, and both values; a missing one is null."""
    out: dict[str, list[Any]] = {}
    for key in keys:
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            out |= differing(x, y, tuple(dict.fromkeys([*x, *y])), f"{prefix}{key}.")
        elif json.dumps(x, sort_keys=True) != json.dumps(y, sort_keys=True):
            out[prefix + key] = [x, y]
    return out
