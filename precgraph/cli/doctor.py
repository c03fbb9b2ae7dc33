"""``precgraph doctor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precgraph.cli.console import console, guarded, progress, write_json
from precgraph.cli.results import Json

if TYPE_CHECKING:
    from rich.table import Table

    from precgraph.machine import Status
    from precgraph.selftest import Outcome

SCHEMA = 1


@guarded
def doctor(
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Also test the reference kernels on the CPU: no row's bits may depend on the other rows."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what is installed, which backends can run here and what to do about the rest.

    Exit code 0: fine; 1: a test of --exact failed, or a global switch changes bits; 2: could not test.
    """
    with progress() as step:
        step("looking at the machine")
        from precgraph import machine

        found, backends, flags = machine.facts(), machine.backends(), machine.flags()
        outcomes = _test(step) if exact else []
    ok = all(f.ok for f in flags) and all(o.ok for o in outcomes)
    if as_json:
        write_json({
            "schema": SCHEMA,
            "ok": ok,
            "facts": {f.name: f.value for f in found},
            "backends": [asdict(b) for b in backends],
            "flags": [asdict(f) for f in flags],
            "exact": [{**asdict(o), "ok": o.ok} for o in outcomes] if exact else None,
        })  # fmt: skip
    else:
        out = console()
        out.print(_table("Installed", ("", "found"), [(f.name, f.value) for f in found]))
        out.print(_status_table("Backends", backends))
        out.print(_status_table("Numerics of this process", flags))
        if exact:
            out.print(_outcome_table(outcomes))
        out.print(_verdict(ok, exact))
    raise typer.Exit(0 if ok else 1)


def _test(step: Callable[[str], None]) -> list[Outcome]:
    from precgraph.selftest import row_invariance

    return list(row_invariance(step=lambda what: step(f"row invariance: {what}")))


def _verdict(ok: bool, exact: bool) -> str:
    if not ok:
        return "[bold red]not fine:[/] see the lines marked no"
    if not exact:
        return "doctor --exact tests the reference kernels on the CPU"
    return "[bold green]reference kernels on the CPU:[/] no row depends on another. Kernels of a GPU were not tested."


# ------------------------------------------------------------------------------------------ tables


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(cell if cell in (_YES, _NO) else escape(str(cell)) for cell in row))
    return table


_YES, _NO = "[green]yes[/]", "[red]no[/]"


def _status_table(title: str, rows: Sequence[Status]) -> Table:
    cells = [(s.name, _YES if s.ok else _NO, s.detail, "" if s.ok else s.remedy) for s in rows]
    return _table(title, ("", "ok", "", "what to do"), cells)


def _outcome_table(outcomes: Sequence[Outcome]) -> Table:
    cells = [(o.kernel, o.numerics, o.shape, o.threads, o.batches, _YES if o.ok else _NO, o.failure) for o in outcomes]
    headings = ("kernel", "numerics", "shape", "threads", "batches", "ok", "what differs")
    return _table("Row invariance of the reference kernels on the CPU, bit for bit", headings, cells)
