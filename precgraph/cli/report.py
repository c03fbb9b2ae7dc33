"""``precgraph report`` and ``precgraph schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precgraph.cli import results
from precgraph.cli.console import guarded, write_json


@guarded
def report(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="What check -o wrote.", show_default=False)],
    html: results.Html = None,
    sarif: results.Sarif = None,
    junit: results.Junit = None,
    github: results.GitHub = False,
) -> None:
    """Show the result of an earlier check again, or write it in other formats. The exit code is that check's."""
    from precgraph.report import load

    document = load(file)
    results.Formats(html=html, sarif=sarif, junit=junit, github=github, reads=(file,)).write(document)
    raise typer.Exit(document["exit_code"])


@guarded
def schema() -> None:
    """Print the JSON schema of what check --json prints and -o writes."""
    from precgraph.report import schema as read

    write_json(read())
