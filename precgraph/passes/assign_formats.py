"""assign_formats: the recipe's rules become annotations of the nodes.

Afterwards every node says in which dtypes it computes, accumulates and rounds, and every linear whether its GEMMs
are quantised; the quantisers themselves come with the next pass.
"""

from __future__ import annotations

import torch
from torch import fx

from precgraph import ops
from precgraph.errors import RecipeError
from precgraph.format import Format
from precgraph.graph import (
    PrecisionGraph,
    TensorSpec,
    annotate,
    op_name,
    precision,
    tensor,
    with_rules,
)  # fmt: skip
from precgraph.passes.rewrite import is_call
from precgraph.recipe import Recipe

aten = torch.ops.aten
# Between a router and its top-k stand only these.
_ROUTER_PATH = (
    aten.softmax.int, aten.sigmoid.default, aten.to.dtype, aten.view.default, aten.reshape.default, aten.add.Tensor,
    ops.add, ops.activate, aten.masked_fill.Scalar,
)  # fmt: skip


def assign_formats(graph: PrecisionGraph, recipe: Recipe) -> PrecisionGraph:
    """Annotate every node by ``recipe``. Raises RecipeError if a skip pattern matches no linear layer."""
    linears = [n for n in graph if is_call(n, ops.linear, ops.expert_linear)]
    recipe.require_patterns_used(precision(n).module for n in linears)
    for node in graph:
        if node.op == "call_function":
            _assign(node, recipe)
    graph.recipe = recipe.to_dict()
    return graph


def _assign(node: fx.Node, recipe: Recipe) -> None:
    node.meta["precision"] = with_rules(precision(node), arithmetic=recipe.arithmetic)
    match op_name(node):
        case "linear" | "expert_linear":
            _assign_linear(node, recipe)
        case "lm_head":
            _assign_head(node, recipe)
        case "wide_linear":
            annotate(node, compute="float32", accumulate="float32", role="router" if feeds_topk(node) else "activation")
        case "rms_norm" | "wide_rms_norm" as norm:
            annotate(node, compute=recipe.norm.compute)
            cast = "before_weight" if norm == "rms_norm" else "after_weight"
            _rules(node, reduction=recipe.norm.reduction, cast=cast)
        case "rope_table":
            dtype = node.args[3] if recipe.rope.table == "model" else getattr(torch, recipe.rope.table)
            node.args = (*node.args[:3], dtype)
            annotate(node, compute="float32")
            for user in node.users:
                _set_dtype(user, str(dtype).removeprefix("torch."))
        case "rope":
            table = tensor(node.args[1]).dtype  # type: ignore[arg-type]  # an fp32 table makes the rotation fp32
            annotate(node, compute=table if recipe.rope.compute == "model" else recipe.rope.compute)
        case "polar_table" | "polar_rope":
            _require_wide_rope(recipe)
            annotate(node, compute="float32")
        case "attention":
            annotate(node, compute=recipe.attention.softmax, accumulate="float32")
            _rules(node, probabilities=recipe.attention.probabilities)
        case "gated" | "activate" | "softcap":
            annotate(node, compute=recipe.activation.compute)
        case "add":
            annotate(node, compute=tensor(node).dtype)


def _require_wide_rope(recipe: Recipe) -> None:
    """A rotation in complex numbers has no narrower form."""
    for key, value in (("rope.table", recipe.rope.table), ("rope.compute", recipe.rope.compute)):
        if value not in ("model", "float32"):
            raise RecipeError(f"{key} = {value!r} cannot apply to RoPE in complex numbers", remedy='write "model"')


def _assign_linear(node: fx.Node, recipe: Recipe) -> None:
    kept = _kept(node, recipe)
    annotate(node, accumulate=recipe.linear.accumulate, note=kept)
    if feeds_topk(node):
        annotate(node, role="router")
    quantized = recipe.linear.weight is not None and not kept
    if not quantized:
        _rules(node, gemm="plain", bias="aten" if recipe.arithmetic == "aten" else "after_rounding")
    else:  # torch has no GEMM of blocks in FP8: there is one arithmetic for it
        _rules(node, gemm="quantized", bias="after_rounding", arithmetic="exact")
        _set_dtype(node, recipe.linear.output)


def _kept(node: fx.Node, recipe: Recipe) -> str:
    """Why a linear is not quantised, or an empty string."""
    rows, columns = tensor(node.args[1]).shape[-2:]  # type: ignore[arg-type]
    assert isinstance(rows, int) and isinstance(columns, int)
    if recipe.skips(precision(node).module):
        return "left out by select.skip"
    if recipe.select.routers and feeds_topk(node):
        return "router: feeds a top-k"
    if min(rows, columns) < recipe.select.min_features:
        return f"{rows}x{columns} is smaller than select.min_features = {recipe.select.min_features}"
    return ""


def feeds_topk(node: fx.Node) -> bool:
    """Whether the value reaches a top-k through nothing but normalisation: a router, by what it does."""
    frontier = list(node.users)
    while frontier:
        user = frontier.pop()
        if is_call(user, ops.top_k, aten.topk.default):
            return True
        if is_call(user, *_ROUTER_PATH):
            frontier.extend(user.users)
    return False


def _assign_head(node: fx.Node, recipe: Recipe) -> None:
    annotate(node, compute=recipe.lm_head.operands, accumulate="float32")
    _set_dtype(node, recipe.lm_head.logits)
    (user,) = node.users
    if is_call(user, ops.softcap):
        _set_dtype(user, recipe.lm_head.logits)
        node, (user,) = user, user.users
    user.meta.update(precision=precision(node), tensor=tensor(node))


def _rules(node: fx.Node, **rules: str) -> None:
    node.meta["precision"] = with_rules(precision(node), **rules)


def _set_dtype(node: fx.Node, dtype: str) -> None:
    node.meta["tensor"] = TensorSpec(dtype, tensor(node).shape)
    annotate(node, format=Format.plain(dtype))
