"""derive_backward: DGrad, WGrad and every other gradient as nodes of the graph.

The forward is walked in reverse, so that gradients which meet are added in the order in which autograd would add
them. Quantisers are straight-through: a linear's gradient belongs to the value before its quantiser. What the passes
do not know gets a ``vjp`` node, which re-runs the operator under autograd.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from precgraph import ops
from precgraph.errors import GraphError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, TensorSpec, annotate, output_node, precision, tensor
from precgraph.passes.insert_quantize import quantizer
from precgraph.passes.rewrite import emit, is_call
from precgraph.recipe import Recipe

Rule = Callable[["_Backward", fx.Node, fx.Node], None]


def derive_backward(graph: PrecisionGraph, recipe: Recipe) -> PrecisionGraph:
    """Append the backward: an input node ``grad_*`` per output, then gradients down to ``accumulate_grad`` sinks.

    A tensor that is used twice (a tied embedding) gets a sink per use. Gradients are derived for the
    parameters marked trainable and for floating-point inputs.
    """
    _Backward(graph, recipe).run()
    return graph


class _Backward:
    def __init__(self, graph: PrecisionGraph, recipe: Recipe) -> None:
        self.graph = graph.graph
        self.parameters = graph.parameters
        self.recipe = recipe
        self.forward = [n for n in graph.graph.nodes if n.op != "output"]
        self.order = {n: i for i, n in enumerate(self.forward)}
        self.grads: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, dict[int, fx.Node]] = defaultdict(dict)  # of nodes with several outputs
        self.quantized: dict[tuple[fx.Node, Format], fx.Node] = {}
        # Members of fused DGrads that wait for their siblings: per value and group (gradient, weight, linear).
        self.groups: dict[fx.Node, dict[str, list[tuple[fx.Node, fx.Node, fx.Node]]]] = defaultdict(dict)
        self.needs = self._differentiable()

    def run(self) -> None:
        output = output_node(self.graph)
        outputs = output.args[0] if isinstance(output.args[0], tuple) else (output.args[0],)
        with self.graph.inserting_before(output):
            for value in outputs:
                if isinstance(value, fx.Node) and value in self.needs:
                    self._seed(value)
            for node in reversed(self.forward):
                for group in list(self.groups.get(node, ())):  # a sibling that no gradient reached
                    self.emit_dgrad(node, group)
                if node in self.needs and (node in self.grads or node in self.parts):
                    self._backward_of(node)
        for value, grad in self.grads.items():
            value.meta["gradient"] = grad.name

    def _differentiable(self) -> set[fx.Node]:
        """Nodes that a gradient reaches: their value depends on a trainable parameter or a floating-point input."""
        needs: set[fx.Node] = set()
        for node in self.forward:
            if precision(node).rule("gradient") == "stopped":
                continue
            floating = "tensor" not in node.meta or tensor(node).dtype.startswith(("float", "bfloat", "complex"))
            if node.op == "get_attr":
                parameter = self.parameters[str(node.target)]
                wanted = parameter.trainable and not parameter.buffer
            elif node.op == "placeholder":
                wanted = floating
            else:
                wanted = floating and any(a in needs for a in node.all_input_nodes)
            if wanted:
                needs.add(node)
        return needs

    def _seed(self, value: fx.Node) -> None:
        seed = self.graph.placeholder(f"grad_{value.name}")
        seed.meta["tensor"] = tensor(value)
        seed.meta["precision"] = precision(value)
        annotate(seed, role="gradient", phase="backward", numerics=None, saved=False, note="")
        self.give(value, seed)

    def _backward_of(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = cast(tuple[fx.Node, int], node.args)
            self.parts[source][index] = self.grads[node]
        elif node in self.parts and node.target not in RULES:
            self._unknown(node, self.parts[node])
        else:
            rule = RULES.get(node.target)
            grad = self.grads.get(node) or self.parts[node][0]
            if rule is None:
                self._unknown(node, {0: grad})
            else:
                rule(self, node, grad)

    # ------------------------------------------------------------------------------- for the rules
    def emit(self, target: Callable[..., Any], args: tuple[Any, ...], *, like: fx.Node, **changes: Any) -> fx.Node:
        """A node of the backward, in ``like``'s module, segment and arithmetic."""
        changes.setdefault("role", "gradient")
        arithmetic = tuple(r for r in precision(like).rules if r[0] == "arithmetic")
        base = {"rules": arithmetic, "fusion": None, "note": "", "cache": None, "compute": "float32"}
        return emit(self.graph, target, args, like=like, phase="backward", **{**base, **changes})

    def give(self, value: fx.Node, grad: fx.Node) -> None:
        """Add ``grad`` to the gradient of ``value``."""
        if value not in self.needs:
            return
        if value.op in ("get_attr", "placeholder"):  # each contribution of its own: segments run one after the other
            self.emit(ops.accumulate_grad, (value, grad), like=grad, role="sink", compute=None)
            return
        if value in self.grads:
            grad = self.emit(ops.add, (self.grads[value], grad), like=grad, compute=tensor(grad).dtype)
        self.grads[value] = grad

    def weight_gradient(self, master: fx.Node) -> TensorSpec:
        """The gradient of a linear's weight: fp32 sums, rounded to its dtype unless the recipe keeps them."""
        wide = self.recipe.gradient.master == "float32"
        return replace(tensor(master), dtype="float32") if wide else tensor(master)

    def give_parts(self, node: fx.Node, targets: list[Any], like: fx.Node) -> None:
        """The outputs of ``node`` are gradients of ``targets``; those that nobody needs get no node."""
        for index, value in enumerate(targets):
            if isinstance(value, fx.Node) and value in self.needs:
                grad = self.emit(operator.getitem, (node, index), like=like, tensor=tensor(value), compute=None)
                self.give(value, grad)

    def emit_dgrad(self, x: fx.Node, group: str) -> None:
        """One DGrad of all members that have a gradient, in the order of the forward."""
        dys, weights, linears = zip(*reversed(self.groups[x].pop(group)), strict=True)
        accumulate = precision(linears[0]).accumulate
        args = (list(dys), list(weights))
        self.give(x, self.emit(ops.linear_dgrad, args, like=linears[0], tensor=tensor(x), accumulate=accumulate))

    def quantize(self, value: fx.Node, fmt: Format | None, like: fx.Node, role: str) -> fx.Node:
        """The quantised form of a gradient, made once per format; the value itself where the recipe has none."""
        if fmt is None:
            return value
        if (value, fmt) not in self.quantized:
            self.quantized[value, fmt] = quantizer(
                self.graph, value, fmt, like=like, role=role, phase="backward", module=precision(like).module
            )
        return self.quantized[value, fmt]

    def _unknown(self, node: fx.Node, parts: dict[int, fx.Node]) -> None:
        """The vector-Jacobian product of an operator kept as it is."""
        flat, _ = tree_flatten((list(node.args), dict(node.kwargs)))
        wrt = [i for i, a in enumerate(flat) if isinstance(a, fx.Node) and a in self.needs]
        count = max(max(parts) + 1, _outputs(node))
        grads = [parts.get(i) for i in range(count)]
        call = self.emit(
            ops.vjp, (node.target, list(node.args), dict(node.kwargs), grads, wrt), like=node, tensor=None, compute=None
        )
        self.give_parts(call, [flat[i] for i in wrt], like=node)


def _outputs(node: fx.Node) -> int:
    target = node.target
    return len(target._schema.returns) if isinstance(target, torch._ops.OpOverload) else 1


# ------------------------------------------------------------------------------------------- rules


def _embedding(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    ids, weight, padding_idx = node.args
    assert isinstance(weight, fx.Node)
    args = (dy, ids, tensor(weight).shape[0], padding_idx)
    b.give(weight, b.emit(ops.embedding_backward, args, like=node, tensor=tensor(weight), role="weight_gradient"))


def _linear(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    operand, weight, bias = node.args
    rule = b.recipe.linear if precision(node).rule("gemm") == "quantized" else None
    x, master = _source(operand), _source(weight)
    if x in b.needs:
        _dgrad(b, node, dy, x, rule.grad_output if rule else None)
    if master in b.needs:
        saved = x
        if rule and rule.wgrad_activation:
            saved = _saved_quantizer(b, x, node, rule.wgrad_activation)
        right = b.quantize(dy, rule.wgrad_grad_output if rule else None, node, "gradient")
        call = b.emit(
            ops.linear_wgrad, (right, saved), like=node, tensor=b.weight_gradient(master), role="weight_gradient",
            accumulate=precision(node).accumulate,
        )  # fmt: skip
        b.give(master, call)
    if isinstance(bias, fx.Node) and bias in b.needs:
        grad = b.emit(
            ops.bias_grad, (dy,), like=node, tensor=tensor(bias), role="weight_gradient", accumulate="float32"
        )
        b.give(bias, grad)


def _dgrad(b: _Backward, node: fx.Node, dy: fx.Node, x: fx.Node, fmt: Format | None) -> None:
    """DGrad of one linear, or, at the first member of a fused group, of the whole group at once."""
    group = precision(node).fusion or node.name
    left = b.quantize(dy, fmt, node, "gradient")
    b.groups[x].setdefault(group, []).append((left, node.args[1], node))  # type: ignore[arg-type]
    if not any(_pending(b, u, node) for u in node.args[0].users):  # type: ignore[union-attr]
        b.emit_dgrad(x, group)


def _pending(b: _Backward, other: fx.Node, node: fx.Node) -> bool:
    """Whether ``other`` is a member of node's group whose backward, if it gets a gradient, is still to come."""
    if (
        not is_call(other, ops.linear)
        or precision(node).fusion is None
        or precision(other).fusion != precision(node).fusion
    ):
        return False
    return b.order[other] < b.order[node]


def _saved_quantizer(b: _Backward, x: fx.Node, node: fx.Node, fmt: Format) -> fx.Node:
    """WGrad's activation operand: quantised along tokens from the same value, in the forward, next to its twin."""
    if (x, fmt) not in b.quantized:
        with b.graph.inserting_after(node.args[0]):  # type: ignore[arg-type]
            b.quantized[x, fmt] = quantizer(b.graph, x, fmt, like=node, role="saved", module=precision(x).module)
    return b.quantized[x, fmt]


def _source(operand: Any) -> fx.Node:
    """The value behind a quantiser."""
    source: fx.Node = operand.args[0] if is_call(operand, ops.quantize) else operand
    return source


def _lm_head(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    x, weight, bias = node.args
    operands = precision(node).compute
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and operands is not None
    if tensor(dy).dtype != operands:
        spec = TensorSpec(operands, tensor(dy).shape)
        dy = b.emit(ops.cast, (dy, getattr(torch, operands)), like=node, tensor=spec, compute=None)
    if x in b.needs:
        b.give(x, b.emit(ops.linear_dgrad, ([dy], [weight]), like=node, tensor=tensor(x), accumulate="float32"))
    if weight in b.needs:
        b.give(weight, b.emit(ops.linear_wgrad, (dy, x), like=node, tensor=b.weight_gradient(weight),
                              role="weight_gradient", accumulate="float32"))  # fmt: skip
    if isinstance(bias, fx.Node) and bias in b.needs:
        grad = b.emit(
            ops.bias_grad, (dy,), like=node, tensor=tensor(bias), role="weight_gradient", accumulate="float32"
        )
        b.give(bias, grad)


def _norm(backward: Callable[..., Any]) -> Rule:
    def rule(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
        call = b.emit(backward, (dy, *node.args), like=node, tensor=None, rules=precision(node).rules)
        b.give_parts(call, list(node.args[:2]), like=node)

    return rule


def _softcap(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    x, cap = node.args
    assert isinstance(x, fx.Node)
    compute = precision(node).compute
    b.give(x, b.emit(ops.softcap_backward, (dy, x, cap), like=node, tensor=tensor(x), compute=compute))


def _expert_linear(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    operand, weight, index, slots = node.args
    rule = b.recipe.linear if precision(node).rule("gemm") == "quantized" else None
    x, master = _source(operand), _source(weight)
    accumulate = precision(node).accumulate
    if x in b.needs:
        left = b.quantize(dy, rule.grad_output if rule else None, node, "gradient")
        args = (left, weight, index, slots)
        b.give(x, b.emit(ops.expert_dgrad, args, like=node, tensor=tensor(x), accumulate=accumulate))
    if master in b.needs:
        experts = tensor(master).shape[0]
        right, saved = dy, x
        if rule and rule.wgrad_activation and rule.wgrad_grad_output:
            # After both: a shared expert may have quantised the operand before the router chose.
            with b.graph.inserting_after(max(operand, index)):  # type: ignore[type-var, arg-type]
                saved = _dispatched(b, x, node, rule.wgrad_activation, slots, role="saved")
            right = _dispatched(b, dy, node, rule.wgrad_grad_output, 1, role="gradient", phase="backward")
        args = (right, saved, index, experts, slots)  # type: ignore[assignment]
        grad = b.emit(
            ops.expert_wgrad, args, like=node, tensor=tensor(master), role="weight_gradient", accumulate=accumulate
        )
        b.give(master, grad)


def _dispatched(b: _Backward, value: fx.Node, node: fx.Node, fmt: Format, slots: Any, **changes: Any) -> fx.Node:
    """WGrad's operand: each expert's rows, quantised along its own tokens."""
    arithmetic = tuple(r for r in precision(node).rules if r[0] == "arithmetic")
    args = (value, node.args[2], fmt, tensor(_source(node.args[1])).shape[0], slots)
    base = {"rules": arithmetic, "fusion": None, "note": "", "compute": "float32", "accumulate": None, "format": fmt}
    return emit(b.graph, ops.quantize_dispatched, args, like=node, tensor=tensor(value), **{**base, **changes})


def _combine(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    call = b.emit(ops.combine_backward, (dy, *node.args), like=node, tensor=None)
    b.give_parts(call, list(node.args[:2]), like=node)


def _top_k(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    index = next(u for u in node.users if is_call(u, operator.getitem) and u.args[1] == 1)
    args = (dy, index, tensor(x).shape[-1])
    b.give(x, b.emit(ops.top_k_backward, args, like=node, tensor=tensor(x)))


def _rope(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    x, cos, sin = node.args
    assert isinstance(x, fx.Node)
    compute = precision(node).compute
    b.give(x, b.emit(ops.rope_backward, (dy, cos, sin), like=node, tensor=tensor(x), compute=compute))


def _polar_rope(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    x, table = node.args
    assert isinstance(x, fx.Node)
    b.give(x, b.emit(ops.polar_rope_backward, (dy, table), like=node, tensor=tensor(x)))


def _attention(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    q, k, v, spec = node.args
    with b.graph.inserting_after(node):
        lse = emit(b.graph, operator.getitem, (node, 1), like=node, role="saved", compute=None,
                   tensor=TensorSpec("float32", (tensor(q).shape[1], spec.heads)))  # type: ignore[arg-type, union-attr] # fmt: skip
    out = next(u for u in node.users if is_call(u, operator.getitem) and u.args[1] == 0)
    args = (dy, q, k, v, out, lse, spec)
    call = b.emit(ops.attention_backward, args, like=node, tensor=None, rules=precision(node).rules)
    b.give_parts(call, [q, k, v], like=node)


def _activate(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    x, activation = node.args
    assert isinstance(x, fx.Node)
    b.give(x, b.emit(ops.activate_backward, (dy, x, activation), like=node, tensor=tensor(x)))


def _gated(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    gate, up, activation = node.args
    call = b.emit(ops.gated_backward, (dy, gate, up, activation), like=node, tensor=None)
    b.give_parts(call, [gate, up], like=node)


def _add(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    for value in node.args:
        b.give(value, dy)  # type: ignore[arg-type]


def _split_heads(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    b.give(source, b.emit(ops.merge_heads, (dy,), like=node, tensor=tensor(source), compute=None))


def _no_gradient(b: _Backward, node: fx.Node, dy: fx.Node) -> None:
    raise GraphError(f"{node.name}: no gradient passes through a {node.target}")


RULES: dict[Any, Rule] = {
    ops.embedding: _embedding, ops.linear: _linear, ops.lm_head: _lm_head, ops.rope: _rope,
    ops.rms_norm: _norm(ops.rms_norm_backward), ops.wide_rms_norm: _norm(ops.wide_rms_norm_backward),
    ops.wide_linear: _norm(ops.wide_linear_backward),
    ops.softcap: _softcap, ops.expert_linear: _expert_linear, ops.combine: _combine, ops.top_k: _top_k,
    ops.attention: _attention, ops.activate: _activate, ops.gated: _gated, ops.add: _add, ops.split_heads: _split_heads,
    ops.polar_rope: _polar_rope, ops.rope_table: _no_gradient, ops.polar_table: _no_gradient,
}  # fmt: skip
