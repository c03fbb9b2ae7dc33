"""``precgraph show``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated

import typer

from precgraph.cli.console import choose, guarded, progress, write_json
from precgraph.cli.model import MODEL, Backend, RecipeOption, recipe_for, trace_model
from precgraph.errors import InputError

if TYPE_CHECKING:
    from precgraph.graph import PrecisionGraph
    from precgraph.recipe import Recipe
    from precgraph.trace import Trace

FORMATS = ("text", "dot", "json")


@guarded
def show(
    model: Annotated[str, MODEL],
    mode: Annotated[str, typer.Option(help="The program to show: train or infer.")] = "train",
    recipe: RecipeOption = None,
    after: Annotated[
        str, typer.Option(metavar="PASS", help="Show the graph after this pass (trace, raise, ..., lower).")
    ] = "lower",
    diff: Annotated[bool, typer.Option("--diff", help="Show what the pass changed.")] = False,
    style: Annotated[str, typer.Option("--format", help="text, dot or json.")] = "text",
    layer: Annotated[int | None, typer.Option(help="Show this layer only.", show_default=False)] = None,
    unfold: Annotated[bool, typer.Option("--all", help="Show every layer, alike or not.")] = False,
    backend: Backend = "auto",
) -> None:
    """Print the graph of a program: a node a line, with its precision. Layers that are alike are shown once."""
    choose("--mode", mode, ("train", "infer"))
    choose("--format", style, FORMATS)
    if diff and style != "text":
        raise InputError(f"--diff is text, and cannot be {style}", remedy="leave --format out")
    if style == "json" and (layer is not None or unfold):
        raise InputError("json is always the whole graph", remedy="leave --layer and --all out")
    with progress() as step:
        step("reading the recipe")
        rules = recipe_for(recipe, model)
        _require_pass(mode, rules, after)
        _, traced = trace_model(model, step)
        step(f"building the {mode} program")
        before, graph = _stages(traced, mode, rules, backend, after)
    if style == "json":
        from precgraph.saved import saved_bytes_a_token

        write_json(graph.to_json() | {"saved_bytes_a_token": saved_bytes_a_token(graph)})
        return
    from precgraph.render import render_dot, render_saved, render_text

    fold = not unfold
    if style == "dot":
        lines = render_dot(graph, fold=fold, layer=layer)
    elif diff:
        lines = _difference(before, graph, after, fold, layer)
    else:
        lines = render_text(graph, fold=fold, layer=layer) + (render_saved(graph) if layer is None else [])
    typer.echo("\n".join(lines))


def _pass_names(mode: str, recipe: Recipe) -> tuple[str, ...]:
    from precgraph.passes.pipeline import passes_for

    return ("trace", *(name for name, _ in passes_for(mode, recipe)), "lower")


def _require_pass(mode: str, recipe: Recipe, after: str) -> None:
    choose("--after", after, _pass_names(mode, recipe))


def _stages(
    traced: Trace, mode: str, recipe: Recipe, backend: str, after: str
) -> tuple[PrecisionGraph | None, PrecisionGraph]:
    """The graph before and after a pass; nothing comes before the trace."""
    from precgraph.lowering.lower import lower, target
    from precgraph.passes.pipeline import passes_for
    from precgraph.passes.spec import check_spec

    graph = traced.graph.copy()
    graph.mode = mode
    before: PrecisionGraph | None = None
    if after == "trace":
        return None, graph
    for name, apply in passes_for(mode, recipe):
        before = graph.copy() if name == after else None
        graph = apply(graph)
        graph.passes.append(name)
        check_spec(graph, after=name)
        if name == after:
            return before, graph
    before = graph.copy()
    return before, lower(graph, backend, target(traced.tensors.values()))


def _difference(
    before: PrecisionGraph | None, graph: PrecisionGraph, after: str, fold: bool, layer: int | None
) -> list[str]:
    from precgraph.render import render_saved, render_text

    if before is None:
        raise InputError("nothing comes before the trace", remedy="name a pass: --after raise --diff")
    old, new = (
        render_text(g, fold=fold, layer=layer, align=False)[2:] + (render_saved(g) if layer is None else [])
        for g in (before, graph)
    )
    changes = difflib.unified_diff(old, new, f"before {after}", f"after {after}", lineterm="", n=2)
    return list(changes) or [f"{after} changes nothing in this model"]
