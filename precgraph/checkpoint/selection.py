"""Which weights of a model a recipe quantises, and how: taken from the graph, not from names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from precgraph import ops
from precgraph.checkpoint.layout import Part, layout
from precgraph.errors import RecipeError, UnsupportedModelError
from precgraph.format import Format
from precgraph.graph import precision
from precgraph.passes.assign_formats import assign_formats
from precgraph.passes.raise_ops import raise_ops
from precgraph.passes.rewrite import is_call
from precgraph.recipe import Recipe
from precgraph.trace import Trace, trace

Shapes = dict[str, tuple[int, ...]]
_STALE_BUFFERS = ".rotary_emb.inv_freq"  # old checkpoints hold it; it is computed


@dataclass(frozen=True, slots=True)
class Selection:
    """What a recipe says about the tensors of a checkpoint, by their names there (experts one by one).

    ``format`` is that of the ``quantized`` weights; ``kept`` are the modules of the linear layers that stay in the
    model's dtype, with the reason, the head and routers among them, and ``experts`` a whole layer of them; ``dtypes``
    are the dtypes of all other parameters (buffers have the masters'); ``tied`` maps names that checkpoints leave out
    to the names that they share a tensor with; ``parts`` says where in the model each tensor is; ``ignores`` a name of
    which the model reads nothing.
    """

    format: Format
    quantized: frozenset[str]
    kept: dict[str, str]
    dtypes: dict[str, torch.dtype]
    shapes: Shapes
    tied: dict[str, str]
    parts: Mapping[str, Part] = field(default_factory=dict)
    ignores: Callable[[str], bool] = lambda _: False

    def keeps(self, module: str) -> bool:
        """Whether the linear ``module`` stays in the model's dtype, by itself or with all experts of its layer."""
        parent, experts, _ = module.partition(".experts.")
        return module in self.kept or (bool(experts) and f"{parent}.experts" in self.kept)


def select(model: nn.Module, recipe: Recipe, traced: Trace | None = None) -> Selection:
    """Trace a model (its weights are not read), unless it is ``traced`` or compiled, and ask the recipe.

    RecipeError if the recipe quantises none of its weights, or some linears of a layer of experts and not others;
    UnsupportedModelError for experts whose blocks lie across two of a checkpoint's tensors.
    """
    if recipe.linear.weight is None:
        raise RecipeError(
            f"the recipe {recipe.name!r} quantises no weights", remedy="use one that does, such as jet_rl"
        )
    compiled = getattr(model, "precgraph", None)
    if traced is None:
        traced = trace(model) if compiled is None else compiled.trace
    chosen, kept = _choose(assign_formats(raise_ops(traced.graph.copy()), recipe))
    if not chosen:
        raise RecipeError("the recipe leaves out every linear layer of this model", remedy="correct select")
    parts = layout(model)
    _require_whole_blocks(parts, chosen, recipe.linear.weight)
    for name, part in parts.items():  # a renamed module is left out under both of its names
        for module in [m for m in kept if part.expert is None and part.path.rpartition(".")[0] == m]:
            kept[name.rpartition(".")[0]] = kept[module]
    state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    tied = {str(a): str(b) for a, b in (getattr(model, "all_tied_weights_keys", None) or {}).items()}
    quantized = frozenset(name for name, part in parts.items() if part.path in chosen)
    return Selection(
        recipe.linear.weight,
        quantized,
        kept,
        {n: state[p.path].dtype for n, p in parts.items() if n not in quantized and p.path in parameters},
        {n: p.shape(tuple(state[p.path].shape)) for n, p in parts.items()},
        tied,
        parts,
        ignored(model),
    )


def ignored(model: nn.Module) -> Callable[[str], bool]:
    """Says of a tensor's name whether transformers passes over it on purpose, such as over DeepSeek-V3's layers for
    several tokens at a time."""
    unread = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return lambda name: name.endswith(_STALE_BUFFERS) or any(p.search(name) for p in unread)


def _choose(nodes: Iterable[fx.Node]) -> tuple[set[str], dict[str, str]]:
    """Paths of the parameters that are quantised, and the modules of the others with the reason."""
    chosen, kept = set(), {}
    experts: dict[str, set[bool]] = {}
    for node in nodes:
        p = precision(node)
        if is_call(node, ops.lm_head):
            kept[p.module or "lm_head"] = "the head, in its own rule"
        elif is_call(node, ops.wide_linear):
            kept[p.module] = "its products are fp32"
        elif is_call(node, ops.linear, ops.expert_linear):
            quantized = p.rule("gemm") == "quantized"
            module = p.module.rpartition(".")[0] if is_call(node, ops.expert_linear) else p.module
            if is_call(node, ops.expert_linear):
                experts.setdefault(module, set()).add(quantized)
            if quantized:
                chosen.add(str(node.args[1].target))  # type: ignore[union-attr]
            else:
                kept[module] = p.note
    for module, outcomes in experts.items():
        if len(outcomes) > 1:
            raise RecipeError(
                "the recipe quantises some linears of these experts and leaves out others, which no skip list can say",
                path=module, remedy="add all of them to select.skip, or none",
            )  # fmt: skip
    return chosen, kept


def _require_whole_blocks(parts: Mapping[str, Part], chosen: set[str], fmt: Format) -> None:
    """Rows of one slice that a checkpoint has in two tensors must not share a block and so a scale."""
    rows = fmt.block[0]
    for name, part in parts.items():
        if part.path in chosen and part.expert is not None and part.rows[0] % rows:
            raise UnsupportedModelError(
                f"its {part.rows[1] - part.rows[0]} rows share a block of {rows} with another tensor's, as the trainer "
                "quantises them; a checkpoint of experts one by one cannot hold that",
                path=name, remedy="the width of the experts must be a multiple of the block",
            )  # fmt: skip
