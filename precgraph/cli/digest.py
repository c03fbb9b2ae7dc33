"""``precgraph digest``."""

from __future__ import annotations

from typing import Annotated

import typer

from precgraph.cli.console import choose, guarded, progress, write_json
from precgraph.cli.model import MODEL, Backend, RecipeOption, recipe_for, trace_model
from precgraph.cli.results import Json


@guarded
def digest(
    model: Annotated[str, MODEL],
    recipe: RecipeOption = None,
    mode: Annotated[str, typer.Option(help="train or infer; the two are equal for one policy.")] = "train",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Print the digest of the forward program: what trainer and engine compare before the first token.

    It covers operators, formats, numeric rules, weights' paths, values of buffers that no checkpoint holds, and the
    numerics ids and versions of the chosen kernels: those for this machine's GPU, or for its CPU if there is none.
    """
    choose("--mode", mode, ("train", "infer"))
    with progress() as step:
        step("reading the recipe")
        rules = recipe_for(recipe, model)
        _, traced = trace_model(model, step)
        from precgraph.checking import lowered
        from precgraph.lowering.lower import backend_name, target

        device = target(traced.tensors.values())
        step(f"building the {mode} program")
        value = lowered(traced, mode, rules, backend, device).digest()
    if as_json:
        write_json({
            "schema": 1, "model": model, "mode": mode, "backend": backend_name(backend, device), "device": device.type,
            "recipe": rules.to_dict(), "digest": value,
        })  # fmt: skip
    else:
        typer.echo(value)
