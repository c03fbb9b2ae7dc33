"""From MODEL and SPEC to a traced model and a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precgraph.loading import Source
    from precgraph.recipe import Recipe
    from precgraph.trace import Trace

MODEL = typer.Argument(
    metavar="MODEL",
    help="A checkpoint's directory, a config.json, a .gguf file, or a hub id where there is a network.",
    show_default=False,
)
BACKENDS = ("auto", "reference", "triton", "triton_flash", "deep_gemm")  # registry.BACKENDS, without importing torch
Backend = Annotated[
    str, typer.Option(metavar="NAME", help=f"Kernels to lower for: {', '.join(BACKENDS)}. doctor says which can run.")
]
SPEC_HELP = "A preset (jet_rl, bf16) or a recipe file (.toml; `precgraph recipe jet_rl` writes one to start from)."
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="SPEC", show_default=False, help=f"{SPEC_HELP} By default what MODEL brings, else jet_rl."
    ),
]

SIDE_HELP = (
    f"{SPEC_HELP} Or a stack (te, vllm; `precgraph stacks` lists them), STACK:CONFIG for its own configuration file, "
    "or the directory of a checkpoint that vLLM serves."
)


def trace_model(model: str | Source, step: Callable[[str], None]) -> tuple[PreTrainedModel, Trace]:
    """The model, its parameters on the meta device, and its raw graph: no weights are read."""
    step("starting torch")
    from precgraph.loading import find, load_config_model
    from precgraph.trace import trace

    source = find(model)
    step(f"reading the config of {source.name}")
    built = load_config_model(source)
    step(f"tracing {type(built).__name__} of {getattr(built.config, 'num_hidden_layers', '?')} layers")
    return built, trace(built)


def recipe_for(spec: str | None, model: str) -> Recipe:
    """The recipe of ``--recipe``; without one that which MODEL brings, or jet_rl."""
    from precgraph.checkpoint.carried import carried_recipe

    return load_recipe(spec) if spec is not None else carried_recipe(model) or load_recipe("jet_rl")


def load_recipe(spec: str) -> Recipe:
    """The preset of that name, or the recipe in that file."""
    from precgraph.recipe import Recipe

    is_file = spec.endswith(".toml") or "/" in spec or Path(spec).is_file()
    return Recipe.load(spec) if is_file else Recipe.preset(spec)
