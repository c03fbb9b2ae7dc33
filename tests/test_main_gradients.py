"""``gradient.master = "float32"``: sums of a WGrad stay fp32, and micro-batches change the order of additions alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import precgraph
from precgraph import LoweringError, Recipe
from precgraph.recipe import GradientRule
from tests.families import VOCABULARY, causal_lm

GROUP = 128  # tokens that share the scales of a WGrad's operands
IDS = torch.randint(0, VOCABULARY, (2, GROUP), generator=torch.Generator().manual_seed(3))


def compiled(master: str, family: str = "qwen3") -> Any:
    recipe = replace(Recipe.jet_rl(), gradient=GradientRule(master=master))
    return precgraph.compile(causal_lm(family), "train", recipe)


def backward(actor: Any, ids: Tensor) -> None:
    """Of a loss that is a sum over tokens, so that micro-batches add up."""
    logits = actor(ids).logits
    logits.logsumexp(-1).sum().backward()


def gradients(actor: Any) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}
    return found | {n: p.main_grad for n, p in actor.named_parameters() if hasattr(p, "main_grad")}


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_rounded_they_are_the_plain_gradients(family: str) -> None:
    plain, wide = compiled("bfloat16", family), compiled("float32", family)
    for actor in (plain, wide):
        backward(actor, IDS)
    main = {n for n, p in wide.named_parameters() if hasattr(p, "main_grad")}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in main} >= {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name, parameter in wide.named_parameters():
        right = dict(plain.named_parameters())[name].grad
        if name in main:
            assert parameter.grad is None and parameter.main_grad.dtype == torch.float32
            assert not torch.equal(parameter.main_grad, right.float()), f"{name} was rounded"
        assert torch.equal(gradients(wide)[name].to(right.dtype), right), name


def test_two_micro_batches_are_one_batch() -> None:
    """Each holds one group of tokens, so their fp32 sums are added in the order of one batch of both. But for lm_head's
    bf16 product, whose order along tokens is the CPU library's own."""
    whole, parts = compiled("float32"), compiled("float32")
    backward(whole, IDS)
    for row in IDS.split(1):
        backward(parts, row)
    for name, parameter in whole.named_parameters():
        if not hasattr(parameter, "main_grad"):
            continue
        other = dict(parts.named_parameters())[name].main_grad
        if name == "lm_head.weight":
            assert (other - parameter.main_grad).norm() < 1e-5 * parameter.main_grad.norm()
        else:
            assert torch.equal(other, parameter.main_grad), name


def test_checkpointing_adds_once() -> None:
    actor, again = compiled("float32"), compiled("float32")
    again.gradient_checkpointing_enable()
    for model in (actor, again):
        model.train()
        backward(model, IDS)
    for name, gradient in gradients(actor).items():
        assert torch.equal(gradients(again)[name], gradient), name


def test_torchs_own_kernels_have_no_fp32_sums() -> None:
    recipe = replace(Recipe.bf16(), gradient=GradientRule(master="float32"))
    with pytest.raises(LoweringError, match="no kernel .* serves linear_wgrad making fp32"):
        precgraph.compile(causal_lm("llama"), "train", recipe)


@pytest.mark.parametrize("before", [torch.zeros(8), torch.zeros(1, dtype=torch.bfloat16)], ids=["shape", "dtype"])
def test_a_main_grad_of_another_kind_is_refused(before: Tensor) -> None:
    actor = compiled("float32")
    name, weight = next((n, p) for n, p in actor.named_parameters() if n.endswith("down_proj.weight"))
    weight.main_grad = before.expand(weight.shape) if before.numel() == 1 else before
    with pytest.raises(precgraph.InputError, match=rf"{name}: main_grad is {before.dtype}"):
        backward(actor, IDS)
