"""raise: aten patterns become the operators of :mod:`precgraph.ops`.

Each rule is anchored on the node that makes a pattern's result and either rewrites that pattern exactly or leaves it
alone; what no rule knows stays as it is. The raised graph computes the same bits as the traced one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from precgraph import ops
from precgraph.errors import UnsupportedModelError
from precgraph.graph import PrecisionGraph, annotate, arguments, op_name, output_node, precision, tensor
from precgraph.passes.raise_experts import EXPERT_RULES
from precgraph.passes.raise_polar import POLAR_RULES
from precgraph.passes.rewrite import Rule, closed, emit, is_call

aten = torch.ops.aten


def raise_ops(graph: PrecisionGraph) -> PrecisionGraph:
    """Apply :data:`RULES` in order, each over the whole graph."""
    for rule in RULES:
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or node._erased:
                continue
            with graph.graph.inserting_before(node):
                replacement = rule(graph.graph, node)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                graph.graph.erase_node(node)
        graph.graph.eliminate_dead_code()
    if graph.causal_lm:
        _raise_head(graph)
    return graph


def _same_gradient(*values: fx.Node) -> bool:
    """Whether gradients stop at all of the values or at none."""
    return len({precision(v).rule("gradient") for v in values}) == 1


# ------------------------------------------------------------------------------------------ layout


def cancel_transposes(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``transpose(transpose(x, a, b), a, b) -> x``."""
    if not is_call(node, aten.transpose.int):
        return None
    inner = node.args[0]
    if not is_call(inner, aten.transpose.int) or set(inner.args[1:]) != set(node.args[1:]):
        return None
    source: fx.Node = inner.args[0]
    return source if _same_gradient(source, inner, node) else None


def infer_size(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``view(x, [1, size(ids, 1), C]) -> view(x, [1, -1, C])``: the one size that is computed follows from the rest."""
    if not is_call(node, aten.view.default, aten.reshape.default):
        return None
    shape = tensor(node).shape
    if not any(isinstance(s, fx.Node) for s in node.args[1]) or sum(isinstance(s, str) for s in shape) != 1:
        return None
    inferred = [-1 if isinstance(s, str) else s for s in shape]
    return emit(graph, node.target, (node.args[0], inferred), like=node)


def split_heads(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``view(x, [1, T, -1, D])`` of ``[1, T, H·D] -> split_heads(x, D)``."""
    if not is_call(node, aten.view.default, aten.reshape.default):
        return None
    source, shape, result = node.args[0], node.args[1], tensor(node).shape
    before = tensor(source).shape if "tensor" in source.meta else ()
    if len(before) != 3 or len(result) != 4 or before[:2] != result[:2] or not isinstance(result[3], int):
        return None
    if len(shape) != 4 or shape[2] not in (-1, result[2]) or shape[3] != result[3]:
        return None
    return emit(graph, ops.split_heads, (source, result[3]), like=node)


def merge_heads(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``reshape(unflatten(x, -1, [H, D]), [1, T, -1]) -> x``."""
    if is_call(node, aten.reshape.default, aten.view.default) and is_call(node.args[0], aten.unflatten.int):
        source: fx.Node = node.args[0].args[0]
        if tensor(source).shape == tensor(node).shape and _same_gradient(source, node.args[0], node):
            return source
    return None


# --------------------------------------------------------------------------------------- operators


def embedding(graph: fx.Graph, node: Any) -> fx.Node | None:
    if not is_call(node, aten.embedding.default):
        return None
    given = arguments(node)
    if given.get("scale_grad_by_freq") or given.get("sparse"):
        return None
    return emit(graph, ops.embedding, (given["indices"], given["weight"], given.get("padding_idx", -1)), like=node)


def linear(graph: fx.Graph, node: Any) -> fx.Node | None:
    if not is_call(node, aten.linear.default):
        return None
    given = arguments(node)
    weight, bias = given["weight"], given.get("bias")
    if weight.op != "get_attr" or (bias is not None and bias.op != "get_attr"):
        return None
    return emit(graph, ops.linear, (given["input"], weight, bias), like=node)


def rms_norm(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``w * to(x32 * rsqrt(mean(x32²) + eps), x.dtype)`` with ``x32 = to(x, fp32)``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    weight, narrow = _sort(node.args, lambda n: n.op == "get_attr")
    found = _normed(narrow.args[0]) if is_call(narrow, aten.to.dtype) else None
    if found is None or len(tensor(weight).shape) != 1:
        return None
    x, eps, inner = found
    if narrow.args[1] != getattr(torch, tensor(x).dtype) or not closed(node, [narrow, *inner]):
        return None
    return emit(graph, ops.rms_norm, (x, weight, eps), like=node)


def wide_rms_norm(graph: fx.Graph, node: Any) -> fx.Node | None:
    """The norm rounded after its weight: ``to(w * x̂32, x.dtype)``, or ``type_as(x̂32 * (1 + to(w, fp32)), x)``."""
    if not is_call(node, aten.to.dtype, aten.type_as.default) or not is_call(node.args[0], aten.mul.Tensor):
        return None
    product = node.args[0]
    for normed, factor in (product.args, product.args[::-1]):
        found, scale = _normed(normed), _offset_weight(factor)
        if found is None or scale is None:
            continue
        (x, eps, inner), (weight, offset, shifted) = found, scale
        if tensor(node).dtype == tensor(x).dtype and closed(node, [product, *inner, *shifted]):
            return emit(graph, ops.wide_rms_norm, (x, weight, eps, offset), like=node)
    return None


def _normed(scaled: Any) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """``x``, ``eps`` and all nodes of ``x32 * rsqrt(mean(x32²) + eps)``."""
    if not is_call(scaled, aten.mul.Tensor):
        return None
    rsqrt, wide = _sort(scaled.args, lambda n: is_call(n, aten.rsqrt.default))
    if rsqrt is None or not is_call(wide, aten.to.dtype) or wide.args[1] != torch.float32:
        return None
    shifted = rsqrt.args[0]
    if not is_call(shifted, aten.add.Tensor) or not isinstance(shifted.args[1], float):
        return None
    mean = shifted.args[0]
    if not is_call(mean, aten.mean.dim) or mean.args[1:] != ([-1], True):
        return None
    square = mean.args[0]
    if not is_call(square, aten.pow.Tensor_Scalar) or square.args != (wide, 2):
        return None
    return wide.args[0], shifted.args[1], [scaled, rsqrt, wide, shifted, mean, square]


def _offset_weight(factor: Any) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """The weight, what is added to it in fp32, and the nodes in between; the weight alone has no offset."""
    if not isinstance(factor, fx.Node):
        return None
    inner: list[fx.Node] = []
    weight: Any = factor
    offset = 0.0
    if is_call(factor, aten.add.Tensor) and isinstance(factor.args[1], float) and not factor.kwargs:
        weight, offset = factor.args[0], factor.args[1]
        if offset == 0.0 or not is_call(weight, aten.to.dtype) or weight.args[1] != torch.float32:
            return None
        inner, weight = [factor, weight], weight.args[0]
    one_row = weight.op == "get_attr" and len(tensor(weight).shape) == 1
    return (weight, offset, inner) if one_row else None


def norm_of_transposed(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``norm(transpose(x, 1, 2)) -> transpose(norm(x), 1, 2)``: a norm of heads does not mind their order."""
    if not is_call(node, ops.wide_rms_norm) or not is_call(node.args[0], aten.transpose.int):
        return None
    turned = node.args[0]
    if set(turned.args[1:]) != {1, 2} or len(tensor(turned).shape) != 4 or not _same_gradient(node, turned):
        return None
    source: Any = turned.args[0]
    norm = emit(graph, ops.wide_rms_norm, (source, *node.args[1:]), like=node, tensor=tensor(source))
    return emit(graph, aten.transpose.int, (norm, 1, 2), like=node)


def softcap(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``tanh(x / cap) * cap``."""
    if not is_call(node, aten.mul.Tensor) or not is_call(node.args[0], aten.tanh.default):
        return None
    tanh, cap = node.args
    inner = tanh.args[0]
    if not isinstance(cap, float) or not is_call(inner, aten.div.Tensor) or inner.args[1] != cap:
        return None
    return emit(graph, ops.softcap, (inner.args[0], cap), like=node) if closed(node, [tanh, inner]) else None


def drop_empty(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``cat([x, nothing]) -> x``: what is left of a partial rotation that rotates all."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2:
        return None
    kept, empty = node.args[0]
    if tensor(empty).shape[-1] != 0 or tensor(kept) != tensor(node) or not _same_gradient(kept, node):
        return None
    return kept  # type: ignore[no-any-return]


def rope_table(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``to(cos(cat(f, f)) * scaling, dtype)`` with ``f = position · inv_freq`` in fp32; sin shares one operator.

    Without the cast (OLMo 2) the table is fp32.
    """
    found = _table_source(node)
    if found is None:
        return None
    function, positions, frequencies, scaling, dtype = found
    for user in positions.users:
        if is_call(user, ops.rope_table) and user.args == (positions, frequencies, scaling, dtype):
            table = user
            break
    else:
        table = emit(
            graph, ops.rope_table, (positions, frequencies, scaling, dtype), like=node, tensor=None, role="table"
        )
    index = 0 if function is aten.cos.default else 1
    return emit(graph, operator.getitem, (table, index), like=node, role="table")


def _table_source(node: Any) -> tuple[Any, ...] | None:
    scaled, dtype = node, torch.float32
    if is_call(node, aten.to.dtype):
        scaled, dtype = node.args
    elif any(is_call(u, aten.to.dtype) for u in node.users):  # then that is the table
        return None
    if not is_call(scaled, aten.mul.Tensor):
        return None
    trig, scaling = scaled.args
    if not is_call(trig, aten.cos.default, aten.sin.default) or not isinstance(scaling, float | int):
        return None
    cat = trig.args[0]
    if not is_call(cat, aten.cat.default) or cat.args[1:] != (-1,) or len(cat.args[0]) != 2:
        return None
    if cat.args[0][0] is not cat.args[0][1] or tensor(cat).dtype != "float32":
        return None
    factors = _product(cat.args[0][0])
    if factors is None:
        return None
    positions, frequencies = map(_strip, factors)
    if positions.op != "placeholder" or frequencies.op != "get_attr" or tensor(frequencies).dtype != "float32":
        return None
    return trig.target, positions, frequencies, float(scaling), dtype


def _product(node: Any) -> tuple[Any, Any] | None:
    """Positions and frequencies of ``positions * frequencies``, or of the matrix product of one column and one row that
    transformers up to 5.17 has in its place: one product per element, so the same bits."""
    if is_call(node, aten.mul.Tensor):
        return node.args[0], node.args[1]
    turned = is_call(node, aten.transpose.int) and node.args[1:] == (1, 2)
    if not turned or not is_call(node.args[0], aten.matmul.default):
        return None
    column, row = node.args[0].args
    return (row, column) if tensor(column).shape[-1] == 1 and tensor(row).shape[-2] == 1 else None


def _strip(node: Any) -> fx.Node:
    """Below the casts to fp32, unsqueezes and expansions of the frequency product."""
    casts = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)
    while is_call(node, aten.unsqueeze.default, aten.expand.default) or (
        is_call(node, *casts) and tensor(node).dtype == "float32"
    ):
        node = node.args[0]
    found: fx.Node = node
    return found


def rope(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``x * cos + rotate_half(x) * sin`` on ``transpose(y, 1, 2)``, transposed back: ``rope(y, cos, sin)``."""
    if not is_call(node, aten.transpose.int) or set(node.args[1:]) != {1, 2}:
        return None
    rounded = node.args[0]  # tables in fp32 make the sum fp32
    total = rounded.args[0] if is_call(rounded, aten.to.dtype) else rounded
    if not is_call(total, aten.add.Tensor) or not all(is_call(a, aten.mul.Tensor) for a in total.args):
        return None
    straight, turned = total.args
    x, cos = straight.args
    rotated, sin = turned.args
    inner = _rotate_half(rotated, x)
    if inner is None or not is_call(x, aten.transpose.int) or set(x.args[1:]) != {1, 2}:
        return None
    if not all(is_call(t, aten.unsqueeze.default) and t.args[1] == 1 for t in (cos, sin)):
        return None
    if tensor(node).dtype != tensor(x).dtype or not closed(node, [rounded, total, straight, turned, rotated, *inner]):
        return None
    return emit(graph, ops.rope, (x.args[0], cos.args[0], sin.args[0]), like=node)


def _rotate_half(rotated: Any, x: Any) -> list[fx.Node] | None:
    """The inner nodes of ``cat(-x[..., D/2:], x[..., :D/2])``, or None."""
    if not is_call(rotated, aten.cat.default) or rotated.args[1:] not in ((-1,), (3,)) or len(rotated.args[0]) != 2:
        return None
    negative, first = rotated.args[0]
    if not is_call(negative, aten.neg.default):
        return None
    second = negative.args[0]
    width = tensor(x).shape[-1]
    assert isinstance(width, int)
    for half, start, end in ((first, 0, width // 2), (second, width // 2, width)):
        if not is_call(half, aten.slice.Tensor) or half.args[0] is not x or half.args[1] not in (3, -1):
            return None
        if half.args[2] != start or min(half.args[3], width) != end or len(half.args) > 4:
            return None
    return [negative, first, second]


def attention(graph: fx.Graph, node: Any) -> fx.Node | None:
    if not is_call(node, torch.ops.precgraph.attention.default):
        return None
    q, k, v, scale, window, softcap, layer = node.args
    heads, width = tensor(q).shape[2:]
    spec = ops.AttentionSpec(scale, window, softcap, layer, heads, tensor(k).shape[2], width)  # type: ignore[arg-type]
    return emit(graph, ops.attention, (q, k, v, spec), like=node, tensor=None)


def activate(graph: fx.Graph, node: Any) -> fx.Node | None:
    if is_call(node, aten.silu.default):
        name = "silu"
    elif is_call(node, aten.sigmoid.default):
        name = "sigmoid"
    elif is_call(node, aten.gelu.default):
        name = {"none": "gelu", "tanh": "gelu_tanh"}[node.kwargs.get("approximate", "none")]
    else:
        return None
    return emit(graph, ops.activate, (node.args[0], name), like=node)


def gated(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``activate(gate) * up`` of two values of one shape."""
    if not is_call(node, aten.mul.Tensor):
        return None
    active, up = _sort(node.args, lambda n: is_call(n, ops.activate))
    if active is None or not isinstance(up, fx.Node) or tensor(up) != tensor(active) or not closed(node, [active]):
        return None
    return emit(graph, ops.gated, (active.args[0], up, active.args[1]), like=node)


def add(graph: fx.Graph, node: Any) -> fx.Node | None:
    if not is_call(node, aten.add.Tensor) or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    x, y = node.args
    if not tensor(x) == tensor(y) == tensor(node) or tensor(node).dtype not in ("bfloat16", "float16", "float32"):
        return None
    return emit(graph, ops.add, (x, y), like=node, role="residual")


RULES: tuple[Rule, ...] = (
    embedding, linear, rms_norm, wide_rms_norm, norm_of_transposed, softcap, rope_table, merge_heads, infer_size,
    split_heads, drop_empty, rope, cancel_transposes, attention, activate, gated, add, *EXPERT_RULES,
    *POLAR_RULES,
)  # fmt: skip


def _sort(pair: Any, wanted: Callable[[fx.Node], bool]) -> tuple[Any, Any]:
    """The two operands of a commutative node, the wanted one first; (None, None) if there is none."""
    if len(pair) == 2 and all(isinstance(n, fx.Node) for n in pair):
        for first, second in (pair, pair[::-1]):
            if wanted(first):
                return first, second
    return None, None


def _raise_head(graph: PrecisionGraph) -> None:
    """The linear that makes a language model's output, maybe softly capped, is its lm_head."""
    output = output_node(graph.graph)
    result: Any = output.args[0]
    capped = is_call(result, ops.softcap) and len(result.args[0].users) == 1
    node = result.args[0] if capped else result
    if not is_call(node, ops.linear):
        raise UnsupportedModelError(
            f"the logits are made by {op_name(result)}, not by a linear layer: the recipe's [lm_head] would apply to "
            "nothing, so that the model is neither served nor compared",
            path=precision(result).module or graph.family or None,
            remedy="a family needs a rule in precgraph/passes/raise_ops.py that says what follows its lm_head",
        )
    node.target = ops.lm_head
    annotate(node, role="logits")
    annotate(result, role="logits")
    output.meta.update(precision=precision(result), tensor=tensor(result))
