"""Planted defects: ways in which one program of a pair can silently differ, and what a check must say of each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from precgraph import ops
from precgraph.graph import PrecisionGraph
from precgraph.recipe import LinearRule, Recipe, SelectRule
from tests.surgery import (
    JET,
    find,
    insert,
    keep_norm_as_it_is,
    pair,
    remove,
    set_argument,
    set_dtype,
    set_format,
    set_numerics,
    set_rule,
    set_spec,
    swap,
    swap_parameters,
)

Cause = tuple[str, str, str]  # module, operator, attribute
Mutation = Callable[[PrecisionGraph], object]
LINEARS = (
    *(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
# Where the values that linears read are made, and so quantised.
SOURCES = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


@dataclass(frozen=True)
class Planted:
    """A defect on the rollout side: another recipe, another config, or surgery after lowering; and its causes."""

    name: str
    causes: frozenset[Cause]
    count: int  # of root causes
    recipe: Recipe = JET
    family: str = "llama"
    mutate: Mutation | None = None
    config: tuple[tuple[str, Any], ...] = ()

    def graphs(self) -> tuple[PrecisionGraph, PrecisionGraph]:
        train, infer = pair(self.family, self.recipe, **dict(self.config))
        if self.mutate:
            self.mutate(infer)
            infer.graph.lint()
        return train, infer


def _layers(modules: Iterable[str], op: str, *attributes: str, layers: Iterable[int] = (0, 1)) -> list[Cause]:
    chosen = list(modules)
    return [
        (f"model.layers.{n}.{m}" if m else f"model.layers.{n}", op, a)
        for n in layers for m in chosen for a in attributes
    ]  # fmt: skip


def _planted(name: str, causes: Iterable[Cause], count: int | None = None, **given: Any) -> Planted:
    found = frozenset(causes)
    return Planted(name, found, len({c[:2] for c in found}) if count is None else count, **given)


def _linear(**changes: Any) -> Recipe:
    return replace(JET, linear=replace(JET.linear, **changes))


def _with(rule: str, **changes: Any) -> Recipe:
    return replace(JET, **{rule: replace(getattr(JET, rule), **changes)})


_X, _W = JET.linear.activation, JET.linear.weight
assert _X is not None
assert _W is not None
_L1 = "model.layers.1"
_SKIPPED = ("rule.gemm", "x", "weight")
_PLAIN = LinearRule(None, None, None, None, None)


def _doubled(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(ops.quantize, (node, node.args[1]))


def _scaled(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.0))


def _relu(graph: PrecisionGraph) -> None:
    node = find(graph, "activate", "act")
    node.target, node.args = torch.ops.aten.relu.default, node.args[:1]


def _one_linear_reads_plain(graph: PrecisionGraph) -> None:
    node = find(graph, "linear", f"{_L1}.self_attn.q_proj")
    quantizer = node.args[0]
    assert isinstance(quantizer, fx.Node)
    node.args = (quantizer.args[0], *node.args[1:])


def _other_output_of_topk(graph: PrecisionGraph) -> None:
    values = next(n for n in graph if n.target is operator.getitem and n.args[1] == 0)
    values.args = (values.args[0], 1)


def _both(*mutations: Mutation) -> Mutation:
    def apply(graph: PrecisionGraph) -> None:
        for mutate in mutations:
            mutate(graph)

    return apply


PLANTED = [
    # quantisers
    _planted(
        "weight granularity",
        _layers(LINEARS, "quantize", "granularity"),
        recipe=_linear(weight=replace(_W, granularity="64x128")),
    ),
    _planted(
        "activation granularity of one node",
        [(f"{_L1}.mlp", "quantize", "granularity")],
        mutate=lambda g: set_format(g, f"{_L1}.mlp", replace(_X, granularity="1x64")),
    ),
    _planted(
        "scale dtype",
        _layers((*LINEARS, *SOURCES), "quantize", "scale_dtype"),
        recipe=_linear(activation=replace(_X, scale_dtype="ue8m0"), weight=replace(_W, scale_dtype="ue8m0")),
    ),
    _planted(
        "scale rule",
        _layers(LINEARS, "quantize", "scale_rule"),
        recipe=_linear(weight=replace(_W, scale_rule="amax*(1/max)")),
    ),
    _planted(
        "true division",
        _layers(SOURCES, "quantize", "divide"),
        recipe=_linear(activation=replace(_X, divide="reciprocal")),
    ),
    _planted(
        "amax floor",
        _layers(SOURCES, "quantize", "amax_floor"),
        recipe=_linear(activation=replace(_X, amax_floor=1e-4)),
    ),
    _planted(
        "quantiser source dtype",
        _layers(SOURCES, "quantize", "source"),
        recipe=_linear(activation=replace(_X, source="float32")),
    ),
    _planted(
        "fp8 dtype", _layers(SOURCES, "quantize", "dtype"), recipe=_linear(activation=replace(_X, dtype="float8_e5m2"))
    ),
    _planted(
        "missing activation quantiser",
        [(f"{_L1}.input_layernorm", "quantize", "missing operator")],
        mutate=lambda g: remove(g, "quantize", f"{_L1}.input_layernorm"),
    ),
    _planted(
        "missing weight quantiser",
        [(f"{_L1}.mlp.up_proj", "quantize", "missing operator")],
        mutate=lambda g: remove(g, "quantize", f"{_L1}.mlp.up_proj"),
    ),
    _planted(
        "one of three linears reads the value itself",
        [(f"{_L1}.self_attn.q_proj", "linear", "x")],
        mutate=_one_linear_reads_plain,
    ),
    _planted(
        "doubled quantiser",
        [(f"{_L1}.mlp", "quantize", "extra operator")],
        mutate=lambda g: insert(g, "quantize", f"{_L1}.mlp", _doubled),
    ),
    # which layers
    _planted(
        "layer skipped by a pattern",
        _layers(["mlp.down_proj"], "linear", *_SKIPPED, layers=[1]),
        recipe=replace(JET, select=SelectRule(skip=(f"{_L1}.mlp.down_proj",))),
    ),
    _planted(
        "one of three siblings skipped",
        _layers(["self_attn.k_proj"], "linear", *_SKIPPED, layers=[0]),
        recipe=replace(JET, select=SelectRule(skip=("model.layers.0.self_attn.k_proj",))),
    ),
    _planted(
        "quantised router",
        [("route_proj", "linear", a) for a in _SKIPPED],
        family="moe",
        recipe=replace(JET, select=SelectRule(routers=False)),
    ),
    _planted("eval fork", _layers(LINEARS, "linear", *_SKIPPED), recipe=replace(JET, linear=_PLAIN)),
    _planted(
        "eval fork of a plain module",
        [(m, "linear", a) for m in ("up", "down") for a in _SKIPPED],
        family="mlp",
        recipe=replace(JET, linear=_PLAIN),
    ),
    # dtypes and rules
    _planted("linear accumulation", _layers(LINEARS, "linear", "accumulate"), recipe=_linear(accumulate="bfloat16")),
    _planted("logits dtype", [("lm_head", "lm_head", "dtype")], recipe=_with("lm_head", logits="bfloat16")),
    _planted("lm_head operands", [("lm_head", "lm_head", "compute")], recipe=_with("lm_head", operands="float32")),
    _planted("RoPE table dtype", [("model.rotary_emb", "rope_table", "dtype")], recipe=_with("rope", table="float32")),
    _planted(
        "RoPE compute dtype", _layers(["self_attn"], "rope", "compute"), 4, recipe=_with("rope", compute="float32")
    ),
    _planted(
        "softmax dtype", _layers(["self_attn"], "attention", "compute"), recipe=_with("attention", softmax="bfloat16")
    ),
    _planted(
        "probabilities dtype",
        _layers(["self_attn"], "attention", "rule.probabilities"),
        recipe=_with("attention", probabilities="float32"),
    ),
    _planted(
        "activation compute dtype", _layers(["mlp"], "gated", "compute"), recipe=_with("activation", compute="bfloat16")
    ),
    _planted(
        "norm reduction",
        [
            *_layers(["input_layernorm", "post_attention_layernorm"], "rms_norm", "rule.reduction"),
            ("model.norm", "rms_norm", "rule.reduction"),
        ],
        recipe=_with("norm", reduction="aten"),
    ),
    _planted(
        "norm cast position",
        [(f"{_L1}.input_layernorm", "rms_norm", "rule.cast")],
        mutate=lambda g: set_rule(g, "rms_norm", f"{_L1}.input_layernorm", cast="after_weight"),
    ),
    _planted(
        "norm left as aten operators",
        [(f"{_L1}.input_layernorm", "aten.to.dtype", "operator")],
        mutate=lambda g: keep_norm_as_it_is(g, f"{_L1}.input_layernorm"),
    ),
    _planted(
        "norm compute dtype",
        [("model.norm", "rms_norm", "compute"), ("model.norm", "rms_norm", "dtype")],
        mutate=lambda g: set_dtype(g, "rms_norm", "model.norm", "float16"),
    ),
    _planted(
        "residual dtype",
        [("model.layers.0", "add", "compute"), ("model.layers.0", "add", "dtype")],
        mutate=lambda g: set_dtype(g, "add", "model.layers.0", "float32"),
    ),
    _planted(
        "residual dtype of a later add alone",
        [("model.layers.0", "add", "compute"), ("model.layers.0", "add", "dtype")],
        mutate=lambda g: set_dtype(g, "add", "model.layers.0", "float32", nth=1),
    ),
    # constants
    _planted(
        "norm eps",
        [("model.norm", "rms_norm", "eps")],
        mutate=lambda g: set_argument(g, "rms_norm", "model.norm", 2, 1e-5),
    ),
    _planted(
        "norm eps in the config",
        [
            *_layers(["input_layernorm", "post_attention_layernorm"], "rms_norm", "eps"),
            ("model.norm", "rms_norm", "eps"),
        ],
        config=(("rms_norm_eps", 1e-5),),
    ),
    _planted(
        "attention scale",
        [(f"{_L1}.self_attn", "attention", "spec.scale")],
        mutate=lambda g: set_spec(g, f"{_L1}.self_attn", scale=0.125),
    ),
    _planted(
        "window",
        [(f"{_L1}.self_attn", "attention", "spec.window")],
        family="mistral",
        mutate=lambda g: set_spec(g, f"{_L1}.self_attn", window=0),
    ),
    _planted(
        "cache of another layer",
        [(f"{_L1}.self_attn", "attention", "spec.layer")],
        mutate=lambda g: set_spec(g, f"{_L1}.self_attn", layer=0),
    ),
    _planted(
        "activation function",
        [(f"{_L1}.mlp", "gated", "activation")],
        mutate=lambda g: set_argument(g, "gated", f"{_L1}.mlp", 2, "gelu"),
    ),
    # operators and edges
    _planted(
        "extra operator",
        [(f"{_L1}.post_attention_layernorm", "aten.mul.Tensor", "extra operator")],
        mutate=lambda g: insert(g, "rms_norm", f"{_L1}.post_attention_layernorm", _scaled),
    ),
    _planted(
        "missing operator",
        [(f"{_L1}.self_attn.k_norm", "rms_norm", "missing operator")],
        family="qwen3",
        mutate=lambda g: remove(g, "rms_norm", f"{_L1}.self_attn.k_norm"),
    ),
    _planted("another operator", [("act", "aten.relu.default", "operator")], family="mlp", mutate=_relu),
    _planted(
        "swapped gate and up",
        [(f"{_L1}.mlp", "gated", "gate"), (f"{_L1}.mlp", "gated", "up")],
        mutate=lambda g: swap(g, "gated", f"{_L1}.mlp"),
    ),
    _planted(
        "swapped query and key",
        [(f"{_L1}.self_attn", "attention", "q"), (f"{_L1}.self_attn", "attention", "k")],
        mutate=lambda g: swap(g, "attention", f"{_L1}.self_attn"),
    ),
    _planted(
        "indices of a top-k for its values", [("", "getitem", "arg1")], family="moe", mutate=_other_output_of_topk
    ),
    # parameters
    _planted(
        "bias dropped",
        [(f"{_L1}.self_attn.k_proj", "linear", "bias")],
        family="qwen2",
        mutate=lambda g: set_argument(g, "linear", f"{_L1}.self_attn.k_proj", 2, None),
    ),
    _planted("untied embedding", [("lm_head", "lm_head", "weight")], config=(("tie_word_embeddings", False),)),
    _planted(
        "tied embedding", [("lm_head", "lm_head", "weight")], family="qwen3", config=(("tie_word_embeddings", True),)
    ),
    _planted(
        "key and value weights exchanged",
        _layers(["self_attn.k_proj", "self_attn.v_proj"], "quantize", "x", layers=[1]),
        mutate=lambda g: swap_parameters(g, f"{_L1}.self_attn.k_proj.weight", f"{_L1}.self_attn.v_proj.weight"),
    ),
    _planted(
        "parameter shape",
        [("lm_head", "parameter", "shape"), ("model.embed_tokens", "parameter", "shape")],
        family="qwen2",
        config=(("vocab_size", 1024),),
    ),
    # kernels
    _planted(
        "kernel changed after lowering",
        [(f"{_L1}.mlp.gate_proj", "linear", "numerics")],
        mutate=lambda g: set_numerics(g, "linear", f"{_L1}.mlp.gate_proj"),
    ),
    # several at once
    _planted(
        "one rule in two layers",
        _layers(["mlp"], "gated", "activation"),
        mutate=_both(
            *(partial(set_argument, op="gated", module=f"model.layers.{n}.mlp", index=2, value="gelu") for n in (0, 1))
        ),
    ),
    _planted(
        "two rules at one node, a third upstream",
        [
            ("model.norm", "rms_norm", "eps"),
            ("model.norm", "rms_norm", "rule.cast"),
            (f"{_L1}.mlp", "gated", "activation"),
        ],
        mutate=_both(
            lambda g: set_argument(g, "rms_norm", "model.norm", 2, 1e-5),
            lambda g: set_rule(g, "rms_norm", "model.norm", cast="after_weight"),
            lambda g: set_argument(g, "gated", f"{_L1}.mlp", 2, "gelu"),
        ),
    ),
    _planted(
        "missing quantiser in a graph with another rule",
        [(f"{_L1}.mlp", "quantize", "missing operator"), *_layers(["self_attn"], "attention", "compute")],
        recipe=_with("attention", softmax="bfloat16"),
        mutate=lambda g: remove(g, "quantize", f"{_L1}.mlp"),
    ),
]
