"""``precgraph diff``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from precgraph.cli.console import guarded, write_json

MOST = 40  # lines of each kind that people are shown


@guarded
def diff(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A graph, or a report.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, without leaving anything out.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every finding that became known too, and cut no list.")
    ] = False,
) -> None:
    """Say what changed between two graphs (`show --format json`) or two reports (`check -o`).

    Exit code 0: nothing; 1: something; 2: could not compare.
    """
    from precgraph.report.diff import diff_files

    found = diff_files(a, b)
    if as_json:
        write_json(found)
    else:
        for line in _lines(found, None if verbose else MOST):
            typer.echo(line)
    raise typer.Exit(0 if found["equal"] else 1)


def _lines(found: Mapping[str, Any], most: int | None) -> Iterator[str]:
    """For people: at most ``most`` lines of a kind, and what became known as a count; None: all."""
    if found["equal"]:
        yield f"equal: the two {found['kind']}s differ in nothing"
        return
    yield from _values("", found["fields"])
    if found["kind"] == "report":
        for title, key in (
            ("new", "new"), ("fixed", "fixed"), ("new, not proved", "not_proved_new"),
            ("gone, not proved", "not_proved_gone"), ("new note", "notes_new"), ("gone note", "notes_gone"),
        ):  # fmt: skip
            yield from _cut([f"{title}: {_finding(f)}" for f in found[key]], most)
        moved = [m for m in found["moved"] if most is None or m["b"] != "known"]
        yield from _cut([f"{m['a']} -> {m['b']}: {_finding(m['finding'])}" for m in moved], most)
        if left := len(found["moved"]) - len(moved):
            yield f"known now, of the baseline: {left} (--verbose lists them)"
        yield f"{len(found['new'])} new, {len(found['fixed'])} fixed, {len(found['moved'])} in another state"
        return
    for title, key in (("only in A", "only_a"), ("only in B", "only_b")):
        yield from _cut([f"{title}: {n['name']}  {n['op']}  {_plain(n['module'])}" for n in found[key]], most)
    lines = []
    for node in found["changed"]:
        name = node["name"] if node["name_a"] == node["name"] else f"{node['name_a']} -> {node['name']}"
        lines.append(f"differs: {name}  {node['op']}  {_plain(node['module'])}")
        lines += _values("    ", node["fields"])
    yield from _cut(lines, most)
    yield from _cut([f"parameter {line}" for line in _values("", found["parameters"])], most)
    yield from (["the nodes stand in another order"] if found["order"] else [])
    yield f"{len(found['changed'])} nodes differ, {len(found['only_a'])} only in A, {len(found['only_b'])} only in B"


def _finding(f: Mapping[str, Any]) -> str:
    from precgraph.verify.report import operator

    values = [f"{n} {t} | {i}" for n, t, i in zip(f["attributes"], f["train"], f["infer"], strict=True)]
    return _plain(f"{f['code']}  {f['module'] or '(model)'}  {operator(f)}  {', '.join(values)}")


def _values(indent: str, fields: Mapping[str, Any]) -> list[str]:
    return [_plain(f"{indent}{key}: {_word(x)} -> {_word(y)}") for key, (x, y) in fields.items()]


def _word(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(text: str) -> str:
    from precgraph.report import one_line  # not before the command runs, so that help is instant

    return one_line(text)


def _cut(lines: list[str], most: int | None) -> Iterator[str]:
    yield from lines[:most]
    if most is not None and len(lines) > most:
        yield f"... and {len(lines) - most} more lines (--verbose shows all)"
