"""A part of a program as an inline SVG, from top to bottom, each difference marked by colour, symbol and code."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from precgraph.report.document import number
from precgraph.report.junit import clean
from precgraph.report.layout import layout

WIDTH, HEIGHT, GAP, RISE, LANE = 178, 50, 14, 30, 8  # of a node, the room beside and below it, of a passing edge
_KEYS = {
    "violation": "violations", "known": "known", "suppressed": "suppressed", "not_proved": "not_proved",
    "note": "notes",
}  # fmt: skip
_SYMBOLS = {"violation": "✗", "known": "●", "suppressed": "○", "not_proved": "?", "note": "i"}


@dataclass(frozen=True, slots=True)
class Mark:
    """What a report says of a node: its worst state, that finding's number, what differs, and that in words."""

    state: str
    number: str
    attributes: tuple[str, ...]
    text: str


def marks(document: Mapping[str, Any]) -> dict[str, Mark]:
    """Marks by the names of nodes in the document's parts."""
    found: dict[str, Mark] = {}
    for state, key in _KEYS.items():
        for f in document[key]:
            place = ("train:" if "missing operator" in f["attributes"] else "") + f["node"]
            sides = zip(f["attributes"], f["train"], f["infer"], strict=True)
            values = [f"{name}: train {ours} | rollout {theirs}" for name, ours, theirs in sides]
            if f["node"] and place not in found:
                text = "\n".join([f["code"], *values, f["message"]])
                found[place] = Mark(state, number(f), tuple(f["attributes"]), text)
    return found


def draw(part: Mapping[str, Any], marked: Mapping[str, Mark]) -> Markup:
    """The ``svg`` element; all text in it is escaped."""
    nodes = {n["name"]: n for n in part["nodes"]}
    edges = [(a, b) for a, b, _ in part["edges"] if a in nodes and b in nodes]
    plan = layout(list(nodes), edges, (WIDTH, HEIGHT), (GAP, RISE), LANE)
    svg = ET.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {plan.width} {plan.height}", width=str(plan.width),
        height=str(plan.height), role="img",
    )  # fmt: skip
    ET.SubElement(svg, "title").text = clean(f"Graph of {part['segment'] or 'the model'}")
    for points in plan.routes.values():
        ET.SubElement(svg, "path", {"class": "edge", "d": _curve(points)})
    for name, node in nodes.items():
        svg.append(_box(node, plan.places[name], marked.get(name), part["segment"]))
    return Markup(ET.tostring(svg, encoding="unicode"))  # ElementTree has escaped it


def _curve(points: Sequence[tuple[int, int]]) -> str:
    """Down from the bottom of one box to the top of another, upright through the middle of each lane between."""
    (x, y), (end_x, end_y) = points[0], points[-1]
    stops = [(x, y + HEIGHT // 2), *points[1:-1], (end_x, end_y - HEIGHT // 2 - 3)]
    path = [f"M{stops[0][0]},{stops[0][1]}"]
    for (x1, y1), (x2, y2) in pairwise(stops):
        middle = (y1 + y2) // 2
        path.append(f"C{x1},{middle} {x2},{middle} {x2},{y2}")
    return " ".join(path)


# ------------------------------------------------------------------------------------------- boxes


def _box(node: Mapping[str, Any], place: tuple[int, int], mark: Mark | None, segment: str) -> ET.Element:
    (x, y), middle = place, WIDTH // 2
    kind = mark.state if mark else "outside" if node["outside"] else "train" if node["side"] == "train" else "plain"
    group = ET.Element("g", {"class": f"node {kind}", "transform": f"translate({x},{y})"})
    where = node["module"]
    lines = [f"{node['op']}  {where}", node["value"], *([node["numerics"]] if node["numerics"] else [])]
    lines += [f"reads {path}" for path in node["reads"]]
    lines += ["The rollout lacks this operator."] if node["side"] == "train" else []
    ET.SubElement(group, "title").text = clean("\n".join([*lines, *(["", mark.text] if mark else [])]))
    ET.SubElement(group, "rect", width=str(WIDTH), height=str(HEIGHT), rx="5")
    local = where[len(segment) :].lstrip(".") if segment and where.startswith(segment) else where
    label = f"{_SYMBOLS[mark.state]} {node['op']}" if mark else node["op"]
    value = ", ".join(mark.attributes) if mark and mark.attributes else node["value"]
    texts = ((_end(label, 16 if mark else 22), "op"), (_end(local, 25), "at"), (_start(value, 25), "at"))
    for line, (text, name) in enumerate(texts):
        place_of = {"class": name, "x": str(middle), "y": str(15 + 14 * line), "text-anchor": "middle"}
        ET.SubElement(group, "text", place_of).text = clean(text)
    if mark:
        badge = {"class": "code", "x": str(WIDTH - 4), "y": "12", "text-anchor": "end"}
        ET.SubElement(group, "text", badge).text = clean(mark.number)
    return group


def _start(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _end(text: str, most: int) -> str:
    """The end of a long text, which for a module path says more than its start."""
    text = " ".join(text.split())
    return text if len(text) <= most else "…" + text[1 - most :]
