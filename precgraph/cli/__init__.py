"""The ``precgraph`` command. Nothing here imports torch before a command runs, so that help is instant.

Exit codes: 0 consistent or done, 1 inconsistent or a test failed, 2 could not.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import precgraph
from precgraph.cli import audit, bisect, check, diff, digest, doctor, env, export, recipe, report, rule, show, stacks
from precgraph.cli.console import settings


class _Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``--debug`` is accepted after the command too. What is no text (bytes of another encoding) is refused: it
        could be named in no report."""
        for word in args:
            if any("\ud800" <= c <= "\udfff" for c in word):
                raise typer.BadParameter(f"a name that is not UTF-8: {word!a}")
        if "--debug" in args:
            args = ["--debug", *(a for a in args if a != "--debug")]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    name="precgraph",
    help="One model, one recipe, two programs: FP8 training and rollout with bitwise equal log-probabilities.",
    epilog="Exit codes: 0 consistent or done, 1 inconsistent or a test failed, 2 could not.",
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
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")] = False,
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
    app(prog_name="precgraph")
