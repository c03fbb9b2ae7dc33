"""The ordered passes from a traced graph to the training and the rollout program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from precgraph.graph import PrecisionGraph
from precgraph.passes.assign_formats import assign_formats
from precgraph.passes.bind_cache import bind_cache
from precgraph.passes.derive_backward import derive_backward
from precgraph.passes.fuse_projections import fuse_projections
from precgraph.passes.fuse_quantize import fuse_quantize
from precgraph.passes.insert_quantize import insert_quantize
from precgraph.passes.plan_recompute import plan_recompute
from precgraph.passes.plan_saved import plan_saved
from precgraph.passes.raise_ops import raise_ops
from precgraph.passes.spec import check_spec
from precgraph.recipe import Recipe

Pass = Callable[[PrecisionGraph], PrecisionGraph]


RECOMPUTE = ("cheap", "none")


def passes_for(mode: str, recipe: Recipe, recompute: str = "cheap") -> list[tuple[str, Pass]]:
    """The passes of ``mode`` (``train`` or ``infer``), in order, options bound. ``recompute``: of :data:`RECOMPUTE`."""
    common: list[tuple[str, Pass]] = [
        ("raise", raise_ops),
        ("assign_formats", partial(assign_formats, recipe=recipe)),
        ("fuse_projections", partial(fuse_projections, recipe=recipe)),
        ("insert_quantize", partial(insert_quantize, recipe=recipe)),
    ]
    train: list[tuple[str, Pass]] = [
        ("derive_backward", partial(derive_backward, recipe=recipe)),
        *([("plan_recompute", plan_recompute)] if recompute == "cheap" else []),
        ("plan_saved", plan_saved),
    ]
    infer: list[tuple[str, Pass]] = [("bind_cache", bind_cache)]
    return [*common, *{"train": train, "infer": infer}[mode], ("fuse_quantize", fuse_quantize)]


def build(
    raw: PrecisionGraph, mode: str, recipe: Recipe, *, recompute: str = "cheap", check: bool = False
) -> PrecisionGraph:
    """Run the passes of ``mode`` on a copy of ``raw``; with ``check`` the spec rules run after each."""
    graph = raw.copy()
    graph.mode = mode
    for name, apply in passes_for(mode, recipe, recompute):
        graph = apply(graph)
        graph.passes.append(name)
        if check:
            check_spec(graph, after=name)
    return graph
