"""``precgraph rule``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated

import typer

from precgraph.cli.console import console, guarded, write_json
from precgraph.cli.results import Json
from precgraph.errors import InputError

if TYPE_CHECKING:
    from precgraph.verify.rules import Rule
    from precgraph.verify.why import Why


@guarded
def rule(
    code: Annotated[
        str, typer.Argument(metavar="CODE", help="PG103, or words of its name; all for the table.", show_default=False)
    ] = "all",
    as_json: Json = False,
) -> None:
    """Explain a code of a report: what it means, why it matters and by how much, an example, and what to do."""
    from precgraph.verify.rules import RULES
    from precgraph.verify.why import WHY

    entries = {key: _entry(RULES[key], WHY[key]) for key in RULES}
    if code == "all":
        if as_json:
            write_json({"schema": 1, "rules": list(entries.values())})
        else:
            for entry in entries.values():
                typer.echo(f"{entry['code']}  {entry['name']}: {entry['what']}")
        return
    wanted = code.strip().upper()
    found = [e for e in entries.values() if wanted in _names(e)]
    found = found or [e for e in entries.values() if wanted and wanted in e["name"].upper()]
    if not found and wanted.startswith("AU"):
        raise InputError(
            f"{code!r} is a verdict of `precgraph audit`, not a rule of `check`",
            remedy="its report says what was measured and what to do; docs/checkpoints.md has the table of AU codes",
        )
    if not found:
        near = difflib.get_close_matches(wanted, [e["code"] for e in entries.values()], n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise InputError(f"no rule has the code {code!r}{hint}", remedy="precgraph rule lists them all")
    if as_json:
        write_json({"schema": 1, **found[0]} if len(found) == 1 else {"schema": 1, "rules": found})
        return
    from rich.markup import escape

    out = console()
    for entry in found:
        out.print(f"[bold]{entry['code']} {entry['name']}[/]")
        for title in ("what", "why", "effect", "example", "remedy"):
            if entry[title]:
                out.print(f"[bold]{title:<8}[/] {escape(entry[title])}", highlight=False)


def _names(entry: dict[str, str]) -> tuple[str, ...]:
    code, name = entry["code"], entry["name"].upper()
    return code, name, f"{code} {name}"


def _entry(rule: Rule, why: Why) -> dict[str, str]:
    return {
        "code": rule.number, "name": rule.name, "what": rule.words, "why": why.why, "effect": why.effect,
        "example": why.example, "remedy": rule.remedy,
    }  # fmt: skip
