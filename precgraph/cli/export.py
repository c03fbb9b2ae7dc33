"""``precgraph export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precgraph.cli.console import guarded, progress, write_json
from precgraph.cli.model import MODEL, SPEC_HELP, load_recipe
from precgraph.cli.results import Json


@guarded
def export(
    model: Annotated[str, MODEL],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A directory that does not exist yet.")],
    recipe: Annotated[str, typer.Option("--recipe", metavar="SPEC", help=SPEC_HELP)] = "jet_rl",
    as_json: Json = False,
) -> None:
    """Write a Hugging Face block FP8 checkpoint: the codes and scales that the training forward uses, byte for byte."""
    with progress() as step:
        step("reading the recipe")
        rules = load_recipe(recipe)
        step("starting torch")
        from precgraph.checkpoint import export as write

        done = write(model, output, rules, step)
    if as_json:
        write_json({
            "schema": 1, "model": model, "recipe": rules.to_dict(), "folder": str(done.folder),
            "quantized": done.quantized, "kept": done.kept, "files": done.shards, "bytes": done.nbytes,
            "zeros": done.zeros, "ragged": done.ragged,
        })  # fmt: skip
    else:
        typer.echo(
            f"{done.folder}: {done.quantized} weights in {rules.linear.weight}, {done.kept} tensors as they were, "
            f"{done.shards} {'file' if done.shards == 1 else 'files'}, {done.nbytes / 1e6:.1f} MB"
        )
        if done.zeros:
            typer.echo(f"{len(done.zeros)} of the weights are all zero, {done.zeros[0]} first: was their file written?")
        if done.ragged:
            typer.echo(f"{done.ragged} of the weights end within a block, which transformers without a GPU cannot read")
