"""``precgraph recipe``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from precgraph.cli.console import guarded, write_file
from precgraph.errors import InputError


@guarded
def recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The preset: jet_rl or bf16.", show_default=False)],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write, instead of stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a preset as a recipe file to start from: every rule that can change a bit, spelled out."""
    from precgraph.recipe import Recipe

    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "recipe.toml"
        Recipe.preset(name).save(draft)
        text = draft.read_text()
    if output is None:
        typer.echo(text, nl=False)
    elif output.exists() and not force:
        raise InputError("exists already", path=str(output), remedy="name another file, or add --force")
    else:
        write_file(output, text)
