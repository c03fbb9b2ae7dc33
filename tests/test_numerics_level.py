"""Level numerics: the first node that differs, every node that differs by itself, and nothing where all is equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from precgraph.capture import Run, compare_runs
from precgraph.checking import lowered
from precgraph.formats import Format, QTensor, dequantize, quantize
from precgraph.recipe import Recipe, SelectRule
from precgraph.runtime.store import WeightStore
from precgraph.trace import Trace, trace
from precgraph.verify.numerics import Numerics, mismatch
from precgraph.verify.values import compare
from tests.families import CAUSAL_LMS, VOCABULARY, causal_lm

JET = Recipe.jet_rl()
assert JET.linear.activation is not None
assert JET.linear.weight is not None
IDS = torch.randint(0, VOCABULARY, (20,), generator=torch.Generator().manual_seed(0))
LINEARS = tuple(f"self_attn.{p}_proj" for p in "qkvo") + tuple(f"mlp.{p}_proj" for p in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def llama() -> Trace:
    return trace(causal_lm("llama"))


def measure(traced: Trace, train: Recipe, infer: Recipe) -> Numerics:
    store = WeightStore(traced.tensors)
    runs = [Run(lowered(traced, mode, recipe, "reference"), store, IDS)
            for mode, recipe in (("train", train), ("infer", infer))]  # fmt: skip
    return compare_runs(runs[0], runs[1], IDS)


def linear(**changes: Any) -> Recipe:
    return replace(JET, linear=replace(JET.linear, **changes))


def found(outcome: Numerics) -> set[tuple[str, str, str]]:
    return {(f.code.partition(" ")[0], f.module, f.op) for f in outcome.report.violations}


@pytest.mark.parametrize("family", [*CAUSAL_LMS, "gemma2", "qwen3_moe", "deepseek_v3"])
def test_one_recipe_gives_no_differing_bit(family: str) -> None:
    outcome = measure(trace(causal_lm(family)), JET, JET)
    assert outcome.report.ok
    assert outcome.exit_code == outcome.differing == 0
    assert outcome.first is None
    assert not outcome.report.notes
    assert outcome.report.compared > 40
    assert all(delta.bits == 0 and delta.largest == 0 for _, delta in outcome.growth)
    assert outcome.logprobs is not None
    assert (outcome.logprobs.tokens, outcome.logprobs.differing, outcome.logprobs.k3) == (len(IDS) - 1, 0, 0.0)


def test_a_skipped_layer_is_the_only_cause_and_the_first_to_differ(llama: Trace) -> None:
    """Everything before layer 1's down projection is equal, and everything after it only inherits."""
    layer = "model.layers.1.mlp.down_proj"
    outcome = measure(llama, JET, replace(JET, select=SelectRule(skip=(layer,))))
    assert found(outcome) == {("PG108", layer, "linear")}
    assert outcome.first is not None
    assert (outcome.first.module, outcome.first.op) == (layer, "linear")
    # After it: the residual, the norm and the logits.
    assert outcome.differing == 4
    assert outcome.report.violations[0].inherited == 3
    growth = dict(outcome.growth)
    assert growth["model.layers.0"].differing == 0
    assert 0 < growth["model.layers.1"].relative < 0.2
    assert growth["head"].differing > 0


def test_an_activation_rule_differs_at_every_quantiser_and_nowhere_else(llama: Trace) -> None:
    """The first is that of layer 0's input; later ones have other inputs, and still are found by themselves."""
    outcome = measure(llama, JET, linear(activation=replace(JET.linear.activation, divide="reciprocal")))
    places = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    assert found(outcome) == {("PG104", f"model.layers.{n}.{p}", "quantize") for n in (0, 1) for p in places}
    assert outcome.first is not None
    assert (outcome.first.module, outcome.first.op) == ("model.layers.0.input_layernorm", "quantize")
    # Division and multiplication by the reciprocal give the same scales: only codes differ.
    assert all(c.alone is not None and c.alone.scales == 0 and c.alone.bits > 0 for c in outcome.causes)


def test_blocks_of_another_size_have_no_equal_bits_but_numbers(llama: Trace) -> None:
    outcome = measure(llama, JET, linear(weight=replace(JET.linear.weight, granularity="64x128")))
    assert found(outcome) == {("PG101", f"model.layers.{n}.{m}", "quantize") for n in (0, 1) for m in LINEARS}
    assert all(not c.delta.same_storage and 0 < c.delta.largest < 1 for c in outcome.causes)


def test_bf16_rollout(llama: Trace) -> None:
    """Every linear by itself; norms and attention of the other arithmetic too, as their kernels' names say."""
    outcome = measure(llama, JET, Recipe.bf16())
    linears = {(m, op) for code, m, op in found(outcome) if code == "PG108"}
    assert linears == {(f"model.layers.{n}.{m}", "linear") for n in (0, 1) for m in LINEARS}
    assert outcome.first is not None
    assert outcome.logprobs is not None
    assert outcome.logprobs.k3 > 1e-4


def test_a_flipped_bit_of_one_weight_is_the_first_and_only_cause(llama: Trace) -> None:
    """The packs of the rollout are made from a master of which one bit was flipped: no rule is to blame."""
    path = "model.layers.1.mlp.up_proj.weight"
    masters = dict(llama.tensors)
    masters[path] = masters[path].detach().clone()
    masters[path].view(torch.int16)[3, 5] ^= 1 << 6
    graphs = [lowered(llama, mode, JET, "reference") for mode in ("train", "infer")]
    runs = [Run(g, WeightStore(t), IDS) for g, t in zip(graphs, (llama.tensors, masters), strict=True)]
    outcome = compare_runs(runs[0], runs[1], IDS)
    assert found(outcome) == {("PG502", path.removesuffix(".weight"), "quantize")}
    assert outcome.first is not None
    assert outcome.first.module == path.removesuffix(".weight")


# ------------------------------------------------------------------------------------------- values


def test_differing_bits_are_counted() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 0.0])
    b = torch.tensor([1.0, 2.0, 3.0, -0.0])
    delta = compare(a, b)
    assert (delta.values, delta.differing, delta.bits, delta.all_bits, delta.largest) == (4, 1, 1, 128, 0.0)
    b.view(torch.int32)[1] ^= 0b1011
    delta = compare(a, b)
    assert (delta.differing, delta.bits) == (2, 4)
    assert delta.largest == 11 * 2**-22  # 2.0 has an ulp of 2^-22


def test_nan_equals_itself_and_is_infinitely_far_from_a_number() -> None:
    a = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    assert not compare(a, a.clone()).differs
    assert compare(a, torch.zeros_like(a)).largest == float("inf")


def test_codes_are_compared_as_bytes_and_as_values() -> None:
    x = torch.linspace(-3, 3, 256).view(2, 128).to(torch.bfloat16)
    q = quantize(x, JET.linear.activation)  # type: ignore[arg-type]
    codes = q.codes.clone()
    codes.view(torch.uint8)[1, 7] ^= 0b11
    other = QTensor(codes, q.scales, q.shape, q.format)
    delta = compare(q, other)
    assert (delta.values, delta.differing, delta.bits, delta.scales) == (256, 1, 2, 0)
    assert delta.largest == float((dequantize(q) - dequantize(other)).abs().max())
    doubled = QTensor(q.codes, q.scales * 2, q.shape, q.format)
    assert compare(q, doubled).scales == 2


def test_a_value_against_its_quantised_form_is_compared_as_numbers() -> None:
    x = torch.linspace(-3, 3, 256).view(2, 128).to(torch.bfloat16)
    delta = compare(x, quantize(x, Format(dtype="float8_e4m3fn", granularity="1x128")))
    assert not delta.same_storage
    assert 0 < delta.largest <= 3 * 2**-4


def test_k3() -> None:
    train: Tensor = torch.tensor([-1.0, -2.0])
    out = mismatch(train, torch.tensor([-1.5, -2.0]))
    assert out.k3 == pytest.approx((torch.tensor(0.5).double().exp().item() - 1.5) / 2)
    assert (out.largest, out.mean, out.differing) == (0.5, 0.25, 1)
