"""A document for a terminal: the verdict and its causes, then what was compared, and tables of what differs where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from precgraph.report import numerics
from precgraph.report.document import (
    cause_lines,
    difference,
    how_many,
    kernels,
    kind,
    one_line,
    refused,
    rows_of,
    value_lines,
    verdict,
)
from precgraph.verify.report import REFUSED, over_modules

TITLES = {
    "violation": ("Differences", "red"),
    "known": ("Known from the baseline", "yellow"),
    "suppressed": ("Suppressed", "yellow"),
    "note": ("Notes: nothing that the rollout's numbers depend on", "yellow"),
    "not_proved": ("Not proved: what the rollout's numbers may depend on", "yellow"),
}
_LEAST = (12, 50, 14, 10, 10, 24)  # columns of the table of findings: what each has at least, if it has as much
_COLOURS = {"consistent": "green", "not proved": "yellow", "accepted": "yellow"}


def show(document: Mapping[str, Any], out: Console) -> None:
    """Print a document."""
    show_verdict(document, out)
    for line in cause_lines(document):
        out.print(f"  {_safe(line)}", highlight=False)
    for line in summary(document):
        out.print(_safe(line), highlight=False)
    if run := kernels(document):
        out.print(_kernel_table(run))
    for table in numerics.tables(document):
        out.print(_measured(table))
    for state, (title, colour) in TITLES.items():
        rows = over_modules(rows_of(document, state))
        if rows:
            out.print(_findings(title, rows, colour, out.width))
    if document["fixed"]:
        out.print(f"Fixed since the baseline: {len(document['fixed'])}")
        for f in document["fixed"]:
            out.print(_safe(f"  {f['code']}  {f['module'] or '(model)'}"), highlight=False)


def show_verdict(document: Mapping[str, Any], out: Console) -> None:
    """Print the verdict alone, as one line."""
    word, rest = verdict(document)
    colour = _COLOURS[word] if document["ok"] else "red"
    out.print(f"[bold {colour}]{word}:[/] {_safe(rest)}")


def summary(document: Mapping[str, Any]) -> list[str]:
    """What was compared, in lines of text."""
    compared, sides = document["compared"], document.get("sides", {})
    lines = [
        f"{document.get('family') or document.get('model', '')}  training: {sides.get('train', '')}, "
        f"rollout: {sides.get('infer', '')}, level {document['level']}"
    ]
    if operators := refused(document):
        shown = ", ".join(operators[:5]) + (f" and {len(operators) - 5} others" if len(operators) > 5 else "")
        lines.append(f"{REFUSED}, as nothing says that it treats each token alone: {shown}")
    if document["level"] == "graph":
        lines.append(
            f"{compared['nodes']} nodes compared, {_linears(compared)}, backend {document['backend']} for "
            f"{document['device']}"
        )
        lines += _stacks(document["stacks"])
    elif document["level"] == "weights":
        lines.append(
            f"{compared['tensors']} tensors compared, {compared['quantized']} of them in FP8; "
            f"{compared['bytes'] / 1e6:.0f} MB"
        )
    elif document["level"] == "numerics":
        lines += numerics.lines(document)
    elif document["level"] == "env":
        lines.append(f"{how_many(compared)} compared")
    return lines


def _linears(compared: Mapping[str, Any]) -> str:
    """How many linear layers are quantised, on each side where the sides differ in that."""
    infer, train = (
        f"{side['quantized_linears']} of {side['linears']}" for side in (compared, compared.get("train", compared))
    )
    if train == infer:
        return f"{infer} linear layers quantised"
    return f"linear layers quantised: rollout {infer}, training {train}"


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


def _kernel_table(run: Mapping[str, int]) -> Table:
    table = Table("kernel (numerics id)", "nodes", title="What runs the rollout", title_justify="left")
    table.columns[0].overflow, table.columns[1].justify = "fold", "right"
    for name, count in run.items():
        table.add_row(_safe(name), str(count))
    return table


def _measured(measured: numerics.Table) -> Table:
    title, headings, rows = measured
    table = Table(title=title, title_justify="left")
    for heading in headings:
        left = heading in ("after", "module", "node")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_safe, row))
    return table


def _findings(title: str, rows: Sequence[Mapping[str, Any]], colour: str, width: int) -> RenderableType:
    """A table, or one block a row where its columns would be too narrow. Both fold text and never crop it."""
    last = "reason" if "reason" in rows[0] else "what to do"
    headings = ("code", "where", "what differs", "training", "rollout", last)
    cells = []
    for row in rows:
        what, train, infer = ("\n".join(map(_safe, lines)) for lines in (difference(row), row["train"], row["infer"]))
        cells.append(
            ("\n".join(map(_safe, _codes(row))), _where(row), what, train, infer,
             _safe(row.get("reason") or row["remedy"]))
        )  # fmt: skip
    widths = _widths([headings, *cells], width)
    if widths is None:
        return _blocks(title, rows, colour)
    table = Table(title=title, title_justify="left", show_lines=True)
    for heading, columns in zip(headings, widths, strict=True):
        table.add_column(heading, overflow="fold", width=columns)
    for code, *rest in cells:
        table.add_row(f"[{colour}]{code}[/]", *rest)
    return table


def _codes(row: Mapping[str, Any]) -> list[str]:
    """The rule's code and name, and the codes that a suppression has to cover besides."""
    return [row["code"], *(f"and {code}" for code in row["codes"][1:])]


def _widths(cells: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Width of each column, or None if they would be narrower than can be read. Rich's own choice may not fit."""
    wanted = [
        max(cell_len(line) for cell in column for line in (cell or " ").split("\n"))
        for column in zip(*cells, strict=True)
    ]
    widths = [min(pair) for pair in zip(wanted, _LEAST, strict=True)]
    room = width - sum(widths) - 3 * len(widths) - 1
    if room < 0:
        return None
    while room and widths != wanted:
        for k, most in enumerate(wanted):
            if room and widths[k] < most:
                widths[k], room = widths[k] + 1, room - 1
    return widths


def _blocks(title: str, rows: Sequence[Mapping[str, Any]], colour: str) -> RenderableType:
    lines = [f"[italic]{title}[/]"]
    for row in rows:
        lines += ["", f"[{colour}]{_safe(' '.join(_codes(row)))}[/]  {_where(row).replace(chr(10), ', ')}"]
        lines += [f"  {_safe(line)}" for line in value_lines(row) or [row["message"]]]
        word, text = ("reason", row["reason"]) if "reason" in row else ("what to do", row["remedy"])
        lines.append(f"  {word}: {_safe(text)}")
    return Text.from_markup("\n".join(lines), overflow="fold")


def _where(row: Mapping[str, Any]) -> str:
    """The modules; the operator and how many there are; how many nodes inherit the difference."""
    inherited = f"\n+ {row['inherited']} nodes inherit it" if row["inherited"] else ""
    return f"{_safe(row['module'] or '(model)')}\n{_safe(kind(row))}{inherited}"


def _safe(text: str) -> str:
    """No markup of rich's, and no line of its own."""
    return escape(one_line(text))
