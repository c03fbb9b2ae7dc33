"""``precgraph env`` and ``precgraph check --level env``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from precgraph.cli.console import console, guarded, progress, require_place, write_result
from precgraph.cli.results import Json, JsonFile, Output
from precgraph.errors import InputError


@guarded
def env(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Record the digests of this model's programs too.")
    ] = None,
    recipe: Annotated[str, typer.Option(metavar="SPEC", help="The recipe of these programs.")] = "jet_rl",
    as_json: Json = False,
    json_file: JsonFile = None,
) -> None:
    """Record what can change a bit on this machine: versions, cards, CPU, switches, a fixed list of variables.

    Compare the records of two machines with `precgraph check A.json B.json --level env`. No secrets are recorded.
    """
    require_place(json_file)
    with progress() as step:
        step("starting torch")
        from precgraph.environment import record

        data = record(_digests(model, recipe, step) if model else None)
    write_result(data, as_json, json_file, _print)


def _digests(model: str, spec: str, step: Any) -> dict[str, str]:
    from precgraph.checking import lowered
    from precgraph.cli.model import load_recipe, trace_model

    recipe, (_, traced) = load_recipe(spec), trace_model(model, step)
    return {mode: lowered(traced, mode, recipe).digest() for mode in ("train", "infer")}


def check_machines(train: str, infer: str | None, output: Output) -> int:
    """Compare two records; the exit code."""
    if infer is None:
        raise InputError("--level env compares two records", remedy="precgraph check A.json B.json --level env")
    from precgraph.verify.environment import compare_environments, read

    report = compare_environments(read(train), read(infer))
    sides = {"train": train, "infer": infer}
    context = {"level": "env", "model": train, "sides": sides, "compared": {"facts": report.compared}}
    return output.conclude(report, context)


def _print(data: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "found", title="What can change a bit here", title_justify="left")
    rows = [*data["versions"].items(), *((f"cpu {k}", v) for k, v in data["cpu"].items())]
    rows += [(f"card {i}", f"{c['name']}, compute capability {c['capability']}") for i, c in enumerate(data["cards"])]
    rows += [*data["flags"].items(), *data["variables"].items(), *data["digests"].items()]
    for name, value in rows:
        table.add_row(escape(str(name)), escape(str(value)))
    console().print(table)
