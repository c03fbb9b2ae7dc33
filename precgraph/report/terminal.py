"""A document for a terminal: tables, then the verdict as the last line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precgraph.report.document import one_line, rows_of, verdict

TITLES = {
    "violation": ("Root causes", "red"),
    "known": ("Known from the baseline", "yellow"),
    "suppressed": ("Suppressed", "yellow"),
    "note": ("Notes: nothing that the rollout's numbers depend on", "yellow"),
    "not_proved": ("Not proved: what the rollout's numbers may depend on", "yellow"),
}
_COLOURS = {"consistent": "green", "accepted": "yellow", "unclean": "red", "inconsistent": "red"}


def show(document: Mapping[str, Any], out: Console) -> None:
    """Print a document."""
    for line in summary(document):
        out.print(_safe(line), highlight=False)
    kernels = document["compared"].get("kernels")
    if kernels:
        out.print(_kernel_table(kernels))
    for state, (title, colour) in TITLES.items():
        rows = rows_of(document, state)
        if rows:
            out.print(_findings(title, rows, colour))
    if document["fixed"]:
        out.print(f"Fixed since the baseline: {len(document['fixed'])}")
        for f in document["fixed"]:
            out.print(_safe(f"  {f['code']}  {f['module'] or '(model)'}"), highlight=False)
    word, rest = verdict(document)
    out.print(f"[bold {_COLOURS[word]}]{word}:[/] {_safe(rest)}")


def summary(document: Mapping[str, Any]) -> list[str]:
    """What was compared, in lines of text."""
    compared, sides = document["compared"], document.get("sides", {})
    lines = [
        f"{document.get('family') or document.get('model', '')}  training: {sides.get('train', '')}, "
        f"rollout: {sides.get('infer', '')}, level {document['level']}"
    ]
    if document["level"] == "graph":
        lines.append(
            f"{compared['nodes']} nodes compared, {compared['quantized_linears']} of {compared['linears']} linear "
            f"layers quantised, backend {document['backend']} for {document['device']}"
        )
        lines += _stacks(document["stacks"])
    elif document["level"] == "weights":
        lines.append(
            f"{compared['tensors']} tensors compared, {compared['quantized']} of them in FP8; "
            f"{compared['bytes'] / 1e6:.0f} MB"
        )
    return lines


def _stacks(stacks: Mapping[str, Any]) -> list[str]:
    """What the recipes of other people's stacks rest on, and what they leave open."""
    lines = []
    for side, stack in stacks.items():
        if stack is None:
            continue
        skipped = f", {len(stack['skipped'])} layers left out" if stack["skipped"] else ""
        lines.append(f"{side}: {stack['stack']}, {stack['version']}{skipped}")
        if stack.get("keys"):
            lines.append(f"  {stack['config']}: {stack['keys']}")
        taken = ", ".join(stack["taken_from_the_other_side"])
        if taken:
            lines.append(f"  not known, so taken from the other side: {taken}")
    left_out = dict.fromkeys(f"Not compared: {stack['not_modelled']}" for stack in stacks.values() if stack)
    return [*lines, *left_out]


def _kernel_table(kernels: Mapping[str, int]) -> Table:
    table = Table("kernel (numerics id)", "nodes", title="What runs the rollout", title_justify="left")
    table.columns[1].justify = "right"
    for name, count in kernels.items():
        table.add_row(_safe(name), str(count))
    return table


def _findings(title: str, rows: Sequence[Mapping[str, Any]], colour: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    longest = max(len(row["module"]) for row in rows)
    last = "reason" if "reason" in rows[0] else "what to do"
    widths = {"code": (5, 16), "where": (min(longest, 50), None), last: (12, 30)}
    for heading in ("code", "where", "what differs", "training", "rollout", last):
        least, most = widths.get(heading, (None, None))
        table.add_column(heading, overflow="fold", min_width=least, max_width=most)
    for row in rows:
        where = f"{_safe(row['module'] or '(model)')}\n{_safe(row['op'])}" + (
            f", {row['count']} nodes" if row["count"] > 1 else ""
        )
        where += f"\n+ {row['inherited']} nodes inherit it" if row["inherited"] else ""
        columns = ["\n".join(map(_safe, row[key])) for key in ("attributes", "train", "infer")]
        last_cell = _safe(row.get("reason") or row["remedy"])
        table.add_row(
            f"[{colour}]{_safe(row['code'])}[/]", where, columns[0] or _safe(row["message"]), *columns[1:], last_cell
        )
    return table


def _safe(text: str) -> str:
    """No markup of rich's, and no line of its own."""
    return escape(one_line(text))
