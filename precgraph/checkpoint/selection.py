"""Which weights of a model a recipe quantises, and how: taken from the graph, not from names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from precgraph import ops
from precgraph.errors import RecipeError
from precgraph.formats import Format
from precgraph.graph import precision
from precgraph.passes.assign_formats import assign_formats
from precgraph.passes.raise_ops import raise_ops
from precgraph.passes.rewrite import is_call
from precgraph.recipe import Recipe
from precgraph.trace import Trace, trace


@dataclass(frozen=True, slots=True)
class Selection:
    """What a recipe says about the tensors of a model's state.

    ``format`` is that of the ``quantized`` weights (names of parameters); ``kept`` are the modules of the linear layers
    that stay in the model's dtype, with the reason, the head among them; ``dtypes`` are the dtypes of all other
    tensors; ``tied`` maps names that checkpoints leave out to the names that they share a tensor with.
    """

    format: Format
    quantized: frozenset[str]
    kept: dict[str, str]
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]


def select(model: nn.Module, recipe: Recipe, traced: Trace | None = None) -> Selection:
    """Trace a model (its weights are not read), unless it is ``traced`` or compiled, and ask the recipe.

    RecipeError if the recipe quantises none of its weights.
    """
    if recipe.linear.weight is None:
        raise RecipeError(
            f"the recipe {recipe.name!r} quantises no weights", remedy="use one that does, such as jet_rl"
        )
    compiled = getattr(model, "precgraph", None)
    if traced is None:
        traced = trace(model) if compiled is None else compiled.trace
    graph = assign_formats(raise_ops(traced.graph.copy()), recipe)
    quantized, kept = set(), {}
    for node in graph:
        if is_call(node, ops.lm_head):
            kept[precision(node).module or "lm_head"] = "the head, in its own rule"
        if is_call(node, ops.linear):
            p = precision(node)
            if p.rule("gemm") == "quantized":
                quantized.add(str(node.args[1].target))  # type: ignore[union-attr]
            else:
                kept[p.module] = p.note
    if not quantized:
        raise RecipeError("the recipe leaves out every linear layer of this model", remedy="correct select")
    state = model.state_dict()
    tied = {str(a): str(b) for a, b in (getattr(model, "all_tied_weights_keys", None) or {}).items()}
    return Selection(
        recipe.linear.weight,
        frozenset(quantized),
        kept,
        {name: t.dtype for name, t in state.items() if name not in quantized},
        {name: tuple(t.shape) for name, t in state.items()},
        tied,
    )
