"""``precgraph check``."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precgraph.cli.console import choose, console, guarded, progress, write_json
from precgraph.cli.model import MODEL, SIDE_HELP, trace_model

if TYPE_CHECKING:
    from rich.table import Table

    from precgraph.graph import PrecisionGraph
    from precgraph.verify import Report
    from precgraph.verify.report import Row

SCHEMA = 1
LEVELS = ("graph", "weights")


@guarded
def check(
    model: Annotated[str, MODEL],
    train: Annotated[str, typer.Option(metavar="SPEC", help=f"Training side. {SIDE_HELP}")] = "jet_rl",
    infer: Annotated[str, typer.Option(metavar="SPEC", help="Rollout side, in the same way.")] = "jet_rl",
    backend: Annotated[str, typer.Option(help="Backend to lower both sides for.")] = "auto",
    level: Annotated[
        str,
        typer.Option(
            help="graph: compare the programs; no weights are read. weights: compare the bytes of the FP8 checkpoint "
            "--infer with what --train makes of the masters MODEL."
        ),
    ] = "graph",
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON to FILE, or to stdout for -.")
    ] = None,
) -> None:
    """Prove that the rollout's program is inside the training forward, or list every root cause why it is not.

    Exit code 0: consistent; 1: inconsistent; 2: could not check.
    """
    choose("--level", level, LEVELS)
    if level == "weights":
        from precgraph.cli.weights import check_bytes

        raise typer.Exit(check_bytes(model, train, infer, json_to))
    with progress() as step:
        step("reading the recipes")
        from precgraph.stacks.pair import explain, linear_modules, parse, resolve

        named = parse(train), parse(infer)
        traced = trace_model(model, step)
        from precgraph.checking import check as compare
        from precgraph.checking import lowered
        from precgraph.lowering.lower import backend_name, target

        device = target(traced.tensors.values())
        layers = linear_modules(traced.graph) if any(side.stack for side in named) else ()
        sides = resolve(*named, layers, os.environ)
        recipes = sides[0].recipe, sides[1].recipe
        step("building the training program")
        train_graph = lowered(traced, "train", recipes[0], backend, device)
        step("building the rollout program")
        infer_graph = lowered(traced, "infer", recipes[1], backend, device)
        step("comparing")
        report = explain(compare(train_graph, infer_graph), *sides)
        summary = {
            "schema": SCHEMA,
            "model": model,
            "family": traced.graph.family,
            "level": level,
            "backend": backend_name(backend, device),
            "device": device.type,
            "recipes": {"train": recipes[0].to_dict(), "infer": recipes[1].to_dict()},
            "stacks": {"train": sides[0].to_json(), "infer": sides[1].to_json()},
            "digests": {"train": train_graph.digest(), "infer": infer_graph.digest()},
            "compared": _compared(report, infer_graph),
            **_outcome(report),
        }
    if json_to is not None:
        write_json(summary, json_to)
    if json_to != "-":
        _print(summary, report, train, infer)
    raise typer.Exit(report.exit_code)


def _outcome(report: Report) -> dict[str, Any]:
    data = report.to_json()
    return {key: data[key] for key in ("ok", "violations", "not_proved", "notes")}


def _compared(report: Report, infer: PrecisionGraph) -> dict[str, Any]:
    """What the verdict rests on: nodes, linears, and how many nodes each kernel runs, by numerics id."""
    forward = [r for r in infer.records() if r.precision.phase == "forward" and r.precision.numerics]
    linears = [r for r in forward if r.op == "linear"]
    return {
        "nodes": report.compared,
        "linears": len(linears),
        "quantized_linears": sum(r.precision.rule("gemm") == "quantized" for r in linears),
        "kernels": dict(sorted(Counter(str(r.precision.numerics) for r in forward).items())),
    }


# ------------------------------------------------------------------------------------ for people


def _print(summary: dict[str, Any], report: Report, train: str, infer: str) -> None:
    out = console()
    compared = summary["compared"]
    out.print(f"[bold]{summary['family']}[/]  training: {train}, rollout: {infer}, level {summary['level']}")
    out.print(
        f"{compared['nodes']} nodes compared, {compared['quantized_linears']} of {compared['linears']} linear layers "
        f"quantised, backend {summary['backend']} for {summary['device']}"
    )
    _print_stacks(summary["stacks"])
    out.print(_kernel_table(compared["kernels"]))
    rows = report.rows()
    if any(r.violation for r in rows):
        out.print(_findings("Root causes", [r for r in rows if r.violation], "red"))
    if any(not r.violation for r in rows):
        out.print(
            _findings(
                "Notes: nothing that the rollout's numbers depend on", [r for r in rows if not r.violation], "yellow"
            )
        )
    if report.not_proved:
        out.print(_findings("Not proved: what the rollout's numbers may depend on", report.open_rows(), "yellow"))
    out.print(_verdict(report))


def _print_stacks(stacks: dict[str, Any]) -> None:
    """What the recipes of other people's stacks rest on, and what they leave open."""
    from precgraph.stacks import NOT_MODELLED

    out = console()
    for side, stack in stacks.items():
        if stack is None:
            continue
        skipped = f", {len(stack['skipped'])} layers left out" if stack["skipped"] else ""
        out.print(f"{side}: {stack['stack']}, {stack['version']}{skipped}", markup=False, highlight=False)
        taken = ", ".join(stack["taken_from_the_other_side"])
        if taken:
            out.print(f"  not known, so taken from the other side: {taken}", markup=False, highlight=False)
    if any(stacks.values()):
        out.print(f"Not compared: {NOT_MODELLED}", markup=False, highlight=False)


def _verdict(report: Report) -> str:
    if report.ok:
        open_points = len(report.not_proved)
        but = f", but for {open_points} points that are not proved" if open_points else ""
        return f"[bold green]consistent:[/] the rollout's program is inside the training forward{but}"
    causes, inherited = len(report.violations), sum(f.inherited for f in report.violations)
    return (
        f"[bold red]inconsistent:[/] {causes} root {'cause' if causes == 1 else 'causes'}; "
        f"{inherited} more nodes only inherit a difference"
    )


def _kernel_table(kernels: dict[str, int]) -> Table:
    from rich.table import Table

    table = Table("kernel (numerics id)", "nodes", title="What runs the rollout", title_justify="left")
    table.columns[1].justify = "right"
    for name, count in kernels.items():
        table.add_row(name, str(count))
    return table


def _findings(title: str, rows: list[Row], colour: str) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_lines=True)
    longest = max(len(row.module) for row in rows)
    widths = {"code": (5, 16), "where": (min(longest, 50), None), "what to do": (12, 30)}
    for heading in ("code", "where", "what differs", "training", "rollout", "what to do"):
        least, most = widths.get(heading, (None, None))
        table.add_column(heading, overflow="fold", min_width=least, max_width=most)
    for row in rows:
        where = f"{row.module or '(model)'}\n{row.op}" + (f", {row.count} nodes" if row.count > 1 else "")
        where += f"\n+ {row.inherited} nodes inherit it" if row.inherited else ""
        columns = ["\n".join(values) for values in (row.attributes, row.train, row.infer)]
        cells = [where, columns[0] or row.message, columns[1], columns[2], row.remedy]
        table.add_row(f"[{colour}]{row.code}[/]", *map(escape, cells))
    return table
