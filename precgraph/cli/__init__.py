"""The ``precgraph`` command. Nothing here imports torch before a command runs, so that help is instant.

Exit codes: 0 consistent, done or (without --strict) not proved, 1 inconsistent or a test failed, 2 could not.
"""

from __future__ import annotations

from typing import Annotated

import typer

import precgraph
from precgraph.cli import audit, bisect, check, diff, digest, doctor, env, export, recipe, report, rule, show, stacks
from precgraph.cli.console import Debug, Group, ending_with_its_reader, settings

app = typer.Typer(
    cls=Group,
    name="precgraph",
    help="One model, one recipe, two programs: FP8 training and rollout with bitwise equal log-probabilities.",
    epilog="Exit codes: 0 consistent, done or (without --strict) not proved, 1 inconsistent or a test failed, "
    "2 could not.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"precgraph {precgraph.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    settings.debug = debug


for command in (
    check.check,
    diff.diff,
    bisect.bisect,
    show.show,
    digest.digest,
    export.export,
    audit.audit,
    doctor.doctor,
    env.env,
    recipe.recipe,
    report.report,
    report.schema,
    rule.rule,
    stacks.stacks,
):
    app.command()(command)


def main() -> None:
    """Entry point of the ``precgraph`` script."""
    with ending_with_its_reader():
        app(prog_name="precgraph")
