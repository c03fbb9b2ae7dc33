"""A :class:`~precgraph.graph.PrecisionGraph` for people: as text and as Graphviz dot.

Nodes are grouped by segment; layers that are alike are shown once, the lowest one standing for all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from precgraph.errors import InputError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, Record
from precgraph.saved import saved_bytes_a_token

_LAYER = re.compile(r"\.(\d+)$")
_GAP = "  "
_WIDEST = 90  # longer cells do not widen their column


@dataclass(frozen=True)
class Group:
    """Consecutive nodes of one segment: its parameters, its forward (and refresh) or its backward.

    ``layers`` are the numbers of the layers that the group stands for, empty outside of layers; ``alike`` the groups
    that it stands for, node by node, if it has been folded.
    """

    segment: str
    kind: str
    records: tuple[Record, ...]
    layers: tuple[int, ...] = ()
    alike: tuple[Group, ...] = ()

    @property
    def title(self) -> str:
        """``model.layers.0-27 (28 alike), forward``."""
        name = self.segment or "model"
        if len(self.layers) > 1:
            low, high = min(self.layers), max(self.layers)
            numbers = f"{low}-{high}" if high - low + 1 == len(self.layers) else ",".join(map(str, sorted(self.layers)))
            name = f"{_LAYER.sub('', name)}.{numbers} ({len(self.layers)} alike)"
        return f"{name}, {self.kind}"


def groups(graph: PrecisionGraph, *, fold: bool = True, layer: int | None = None) -> list[Group]:
    """The graph's nodes in order, by segment; ``fold`` joins layers that are alike, ``layer`` keeps one layer only.

    InputError: the graph has no such layer.
    """
    found = list(_runs(graph.records()))
    if layer is not None:
        chosen = [g for g in found if g.layers == (layer,)]
        if not chosen:
            last = max((n for g in found for n in g.layers), default=None)
            raise InputError(
                f"the model has no layer {layer}",
                remedy="leave --layer out" if last is None else f"layers are 0 to {last}",
            )
        return chosen
    return _folded(found) if fold else found


def render_text(graph: PrecisionGraph, *, fold: bool = True, layer: int | None = None, align: bool = True) -> list[str]:
    """One line a node, in columns that :data:`COLUMNS` names; ``align`` pads them to one width within a group."""
    paths = {r.name: r.parameter for r in graph.records() if r.parameter}
    lines = [describe(graph), _GAP.join(COLUMNS)]
    for group in groups(graph, fold=fold, layer=layer):
        rows = [_cells(r, group.segment, paths) for r in group.records]
        widths = [_width(row[i] for row in rows) if align else 0 for i in range(len(COLUMNS))]
        lines += ["", f"== {group.title}"]
        lines += [
            (_GAP + _GAP.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip() for row in rows
        ]
    return lines


def render_saved(graph: PrecisionGraph) -> list[str]:
    """What the backward keeps of the forward, a line a segment (neighbours that keep the same share one)."""
    lines = []
    for size, members in groupby(saved_bytes_a_token(graph).items(), key=lambda item: item[1]):
        names = [name or "model" for name, _ in members]
        lines.append(f"{_GAP}{' to '.join(dict.fromkeys((names[0], names[-1])))}{_GAP}{size:g}")
    return ["", "== saved for the backward, bytes a token", *lines] if lines else []


def describe(graph: PrecisionGraph) -> str:
    """What the graph is, in one line."""
    recipe = (graph.recipe or {}).get("name", "no recipe yet")
    last = graph.passes[-1] if graph.passes else "trace"
    return f"{graph.family}, {graph.mode} program, recipe {recipe}, after {last}: {len(graph.graph.nodes)} nodes"


# ------------------------------------------------------------------------------------------ groups


def _runs(records: Sequence[Record]) -> Iterator[Group]:
    for (segment, kind), members in groupby(records, key=lambda r: (r.precision.segment, _kind(r))):
        number = _LAYER.search(segment)
        yield Group(segment, kind, tuple(members), (int(number[1]),) if number else ())


def _kind(record: Record) -> str:
    if record.parameter:
        return "parameters"
    return "backward" if record.precision.phase == "backward" else "forward"


def _folded(found: Sequence[Group]) -> list[Group]:
    places = {r.name: (g, i) for g in found for i, r in enumerate(g.records)}
    out: list[Group] = []
    for _, alike in groupby(found, key=lambda g: _signature(g, places)):
        members = list(alike)
        lowest = min(members, key=lambda g: g.layers)
        out.append(replace(lowest, layers=tuple(n for g in members for n in g.layers), alike=tuple(members)))
    return out


def _signature(group: Group, places: Mapping[str, tuple[Group, int]]) -> Any:
    """Equal for groups that differ in nothing but the number of their layer; unequal to all outside of layers."""
    if not group.layers:
        return id(group)

    def mask(text: str | None) -> str | None:
        inside = text is not None and (text == group.segment or text.startswith(group.segment + "."))
        return "@" + text[len(group.segment) :] if text is not None and inside else text

    def source(producer: str) -> Any:
        at, index = places[producer]
        if at.segment == group.segment:
            return at.kind, index
        return str(at.records[index].tensor), at.records[index].precision.format

    rows = []
    fusions: dict[str | None, str | None] = {None: None}  # to the order of first members: names may hold node names
    for r in group.records:
        p = r.precision
        fusion = fusions.setdefault(p.fusion, str(len(fusions)))
        cache = None if p.cache is None else -1
        p = replace(p, module=mask(p.module) or "", segment="", fusion=fusion, cache=cache)
        operands = tuple((place, source(producer)) for place, producer in r.operands)
        attributes = json.dumps(_without_layer(r.attributes), sort_keys=True)
        rows.append((r.op, operands, attributes, p, str(r.tensor), mask(r.parameter)))
    return _LAYER.sub("", group.segment), group.kind, tuple(rows)


def _without_layer(value: Any) -> Any:
    return {k: _without_layer(v) for k, v in value.items() if k != "layer"} if hasattr(value, "items") else value


# -------------------------------------------------------------------------------------------- text

COLUMNS = ("node", "value", "compute/accumulate", "numerics", "role", "saved", "phase", "module", "rules")


def _width(cells: Iterable[str]) -> int:
    """The longest cell that is not an outlier."""
    return max((len(c) for c in cells if len(c) <= _WIDEST), default=0)


def _cells(r: Record, segment: str, paths: Mapping[str, str]) -> tuple[str, ...]:
    p = r.precision
    shape = f" [{', '.join(map(str, r.tensor.shape))}]" if r.tensor else ""
    details = [f"{k}={v}" for k, v in p.rules]
    details += [f"fusion={_local(p.fusion, segment)}"] if p.fusion else []
    details += [f"cache={p.cache}"] if p.cache is not None else []
    details += [f"({p.note})"] if p.note else []
    return (
        _call(r, segment, paths),
        f"{p.format}{shape}",
        f"{_short(p.compute)}/{_short(p.accumulate)}",
        p.numerics or "-",
        p.role,
        "saved" if p.saved else "-",
        p.phase,
        _local(p.module, segment) or "-",
        " ".join(details),
    )


def _call(r: Record, segment: str, paths: Mapping[str, str]) -> str:
    if r.parameter:
        return _local(r.parameter, segment)
    inputs = [_local(paths.get(name) or name, segment) for _, name in r.operands]
    # A quantiser's format is the format of its value, which has a column of its own.
    constants = [f"{k}={_constant(v)}" for k, v in r.attributes.items() if k != "fmt" and v is not None]
    return f"{r.name} = {r.op}({', '.join([*inputs, *constants])})" if r.op != "input" else f"{r.name} = input"


def _constant(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + " ".join(f"{k}={_constant(v)}" for k, v in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(dtype: str | None) -> str:
    return "-" if dtype is None else str(Format.plain(dtype))


def _local(path: str, segment: str) -> str:
    """``.mlp.up_proj`` for a path inside the segment."""
    return path[len(segment) :] if segment and path.startswith(segment + ".") else path


# --------------------------------------------------------------------------------------------- dot

_COLOURS = {"forward": "#dbe9f6", "refresh": "#fbe5c8", "backward": "#e6dcf2", "parameters": "#eeeeee"}


def render_dot(graph: PrecisionGraph, *, fold: bool = True, layer: int | None = None) -> list[str]:
    """The graph in Graphviz's dot language: a cluster a group, edges labelled with format and place."""
    shown = groups(graph, fold=fold, layer=layer)
    stand_in = _stand_ins(shown)
    formats = {r.name: r.precision.format for r in graph.records()}
    lines = [f"digraph {_quote(graph.family or 'model')} {{", f"  label={_quote(describe(graph))};", "  rankdir=TB;"]
    lines.append('  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10];')
    for number, group in enumerate(shown):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quote(group.title)};"]
        lines += [f"    {_dot_node(r, group)}" for r in group.records]
        lines.append("  }")
    for r in (r for group in shown for r in group.records):
        for place, producer in r.operands:
            source = stand_in.get(producer)
            if source is not None and source != r.name:
                label = _quote(f"{place} {formats[producer]}")
                lines.append(f"  {_quote(source)} -> {_quote(r.name)} [label={label}, fontsize=8];")
    return [*lines, "}"]


def _stand_ins(shown: Iterable[Group]) -> dict[str, str]:
    """For every node, the shown node that stands for it; none for nodes of layers that are left out."""
    pairs = ((m, g) for g in shown for m in g.alike or (g,))
    return {r.name: s.name for m, g in pairs for r, s in zip(m.records, g.records, strict=True)}


def _dot_node(r: Record, group: Group) -> str:
    p = r.precision
    kind = "parameters" if r.parameter else p.phase
    parts = [_local(r.parameter, group.segment) if r.parameter else f"{r.name}: {r.op}", str(p.format)]
    parts += [p.numerics] if p.numerics else []
    parts += ["saved"] if p.saved else []
    return f"{_quote(r.name)} [label={_quote(chr(10).join(parts))}, fillcolor={_quote(_COLOURS[kind])}];"


def _quote(text: str) -> str:
    """A dot string: quotes and backslashes escaped, newlines as ``\\n``."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
