"""The raised graph in bf16 is the Hugging Face model: logits and every gradient bit for bit.

The oracle is the untouched model, its attention routed to the same attention function.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import precgraph
from precgraph import Recipe
from precgraph.attention import IMPLEMENTATION
from tests.families import CAUSAL_LMS, PLAIN_MODULES, VOCABULARY, causal_lm, plain_module

Gradients = dict[str, Tensor | None]


def tokens(rows: int, width: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, width), generator=torch.Generator().manual_seed(seed))


def step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Gradients]:
    """Logits, loss and all gradients of one supervised step."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same_step(model: PreTrainedModel, ids: Tensor) -> Gradients:
    """One step of ``model``'s copy by Hugging Face and one of the compiled model; returns the gradients."""
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation(IMPLEMENTATION)
    compiled = precgraph.compile(model, "train", Recipe.bf16())
    logits, loss, gradients = step(compiled, ids)
    wanted_logits, wanted_loss, wanted = step(oracle, ids)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, wanted_logits)
    assert torch.equal(loss, wanted_loss)
    assert_same_gradients(gradients, wanted)
    return gradients


def assert_same_gradients(gradients: Gradients, wanted: Gradients) -> None:
    assert gradients.keys() == wanted.keys()
    for name, grad in wanted.items():
        mine = gradients[name]
        if grad is None or mine is None:
            assert grad is mine, name
        else:
            assert mine.dtype == grad.dtype and torch.equal(mine, grad), name


@pytest.mark.parametrize("family", CAUSAL_LMS)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients(family: str, tied: bool) -> None:
    """Lengths on both sides of a tile; 150 passes Mistral's window."""
    model = causal_lm(family, tie_word_embeddings=tied).train()
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation(IMPLEMENTATION)
    compiled = precgraph.compile(model, "train", Recipe.bf16())
    for rows, width in ((1, 3), (1, 17), (1, 150), (3, 33)):
        logits, loss, gradients = step(compiled, tokens(rows, width))
        wanted_logits, wanted_loss, wanted = step(oracle, tokens(rows, width))
        assert torch.equal(logits, wanted_logits), width
        assert torch.equal(loss, wanted_loss), width
        assert_same_gradients(gradients, wanted)
        assert all(g is not None and g.abs().max() > 0 for g in gradients.values())


@pytest.mark.parametrize("family", CAUSAL_LMS)
def test_gradient_checkpointing(family: str) -> None:
    plain = assert_same_step(causal_lm(family).train(), tokens(1, 40))
    model = causal_lm(family).train()
    model.gradient_checkpointing_enable()
    again = assert_same_step(model, tokens(1, 40))
    assert_same_gradients(again, plain)


SOME = ("embed_tokens", "layers.1.self_attn.q_proj", "layers.0.input_layernorm")


@pytest.mark.parametrize(("family", "frozen"), [*((f, SOME) for f in CAUSAL_LMS), ("qwen2", ("layers.0",))])
def test_frozen_parameters(family: str, frozen: tuple[str, ...]) -> None:
    model = causal_lm(family, tie_word_embeddings=False)
    held = [n for n, _ in model.named_parameters() if any(f"{part}." in n for part in frozen)]
    assert len(held) >= len(frozen)
    for name in held:
        model.get_parameter(name).requires_grad_(False)
    gradients = assert_same_step(model, tokens(1, 19))
    assert all((gradients[n] is None) == (n in held) for n in gradients)


def test_parameters_frozen_and_freed_after_compilation() -> None:
    """Both ways after the program was built: a freed parameter must not silently stay without a gradient."""
    model, path = causal_lm("qwen2"), "model.layers.0.mlp.up_proj.weight"
    compiled = precgraph.compile(model, "train", Recipe.bf16())
    full = step(compiled, tokens(1, 9))[2]
    model.get_parameter(path).requires_grad_(False)
    part = step(compiled, tokens(1, 9))[2]
    assert_same_gradients(part, {**full, path: None})
    model.get_parameter(path).requires_grad_(True)
    assert_same_gradients(step(compiled, tokens(1, 9))[2], full)


def test_gradients_accumulate_over_micro_batches() -> None:
    model = causal_lm("llama")
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation(IMPLEMENTATION)
    compiled = precgraph.compile(model, "train", Recipe.bf16())
    for each in (compiled, oracle):
        for seed in range(3):
            each(input_ids=tokens(1, 12, seed), labels=tokens(1, 12, seed)).loss.backward()
    assert_same_gradients(
        {n: p.grad for n, p in compiled.named_parameters()}, {n: p.grad for n, p in oracle.named_parameters()}
    )


@pytest.mark.slow
def test_smollm2(smollm2: PreTrainedModel) -> None:
    """Real weights: hidden 576 and a KV width of 192, tied embeddings."""
    before = smollm2.config._attn_implementation
    compiled = precgraph.compile(smollm2, "train", Recipe.bf16())
    ids = tokens(1, 21)
    try:
        logits, loss, gradients = step(compiled, ids)
        smollm2.set_attn_implementation(IMPLEMENTATION)
        wanted_logits, wanted_loss, wanted = step(smollm2, ids)
    finally:
        smollm2.set_attn_implementation(before)
        smollm2.zero_grad(set_to_none=True)
    assert torch.equal(logits, wanted_logits) and torch.equal(loss, wanted_loss)
    assert len(gradients) == 272
    assert_same_gradients(gradients, wanted)


# ------------------------------------------------------------------------------------ plain modules


def vjp(module: nn.Module, x: Tensor, seed: int = 5) -> tuple[Tensor, Tensor | None, Gradients]:
    """Output, input gradient and parameter gradients for a random upstream gradient."""
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype))
    return y.detach(), x.grad, {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("name", PLAIN_MODULES)
def test_plain_modules(name: str) -> None:
    module, (example,) = plain_module(name)
    compiled = precgraph.compile(copy.deepcopy(module), "train", Recipe.bf16(), example_inputs=(example,))
    for count in (1, 12, 131):
        x = torch.randn(1, count, example.shape[-1], generator=torch.Generator().manual_seed(count)).to(example.dtype)
        y, dx, gradients = vjp(compiled, x)
        wanted_y, wanted_dx, wanted = vjp(module, x)
        assert torch.equal(y, wanted_y)
        assert dx is not None and wanted_dx is not None and torch.equal(dx, wanted_dx)
        assert_same_gradients(gradients, wanted)
        assert all(g is not None for g in gradients.values())


def test_plain_module_without_input_gradient() -> None:
    module, (x,) = plain_module("custom_norm")
    compiled = precgraph.compile(copy.deepcopy(module), "train", Recipe.bf16(), example_inputs=(x,))
    for each in (module, compiled):
        each(x).float().square().sum().backward()
    assert_same_gradients(
        {n: p.grad for n, p in compiled.named_parameters()}, {n: p.grad for n, p in module.named_parameters()}
    )


def assert_as_eager(module: nn.Module, x: Tensor) -> None:
    """Output, the input's gradient and the weights', bit for bit those of the module as it is."""
    compiled = precgraph.compile(copy.deepcopy(module), "train", Recipe.bf16(), example_inputs=(x,))
    y, dx, gradients = vjp(compiled, x)
    wanted_y, wanted_dx, wanted = vjp(module, x)
    assert torch.equal(y, wanted_y)
    assert dx is not None and wanted_dx is not None and torch.equal(dx, wanted_dx)
    assert_same_gradients(gradients, wanted)


class StoppedGradients(nn.Module):
    """Every way to stop a gradient: ``no_grad``, ``detach``, an operator without a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        with torch.no_grad():
            size = y.abs().amax(-1, keepdim=True) + 1
            turned = y.transpose(1, 2)
        kept: Tensor = turned.transpose(1, 2)
        return y / size + (y - y.detach()) * torch.ones_like(y) + kept * y


def test_gradients_stop_where_the_module_stops_them() -> None:
    torch.manual_seed(0)
    module = StoppedGradients().bfloat16()
    x = torch.randn(1, 9, 32).bfloat16()
    assert_as_eager(module, x)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[..., 0] = 0
        return y


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class TorchAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.dropout = nn.Linear(8, 8).bfloat16(), dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), x, x, is_causal=True, dropout_p=self.dropout)


def test_torchs_attention_that_drops_nothing_draws_nothing() -> None:
    torch.manual_seed(0)
    module, x = TorchAttention(dropout=0.0), torch.randn(2, 4, 8).bfloat16()
    assert_as_eager(module, x)


def test_what_has_no_pure_graph_is_refused() -> None:
    example = (torch.ones(1, 4, 8, dtype=torch.bfloat16),)
    with pytest.raises(precgraph.TraceError, match=r"layer.*writes into its argument.*out of place"):
        precgraph.compile(Wrapper(InPlace()), example_inputs=example)
    with pytest.raises(precgraph.UnsupportedModelError, match=r"layer.*random numbers"):
        precgraph.compile(Wrapper(Noisy()), example_inputs=example)
    with pytest.raises(precgraph.UnsupportedModelError, match=r"layer.*random numbers.*set its dropout to 0"):
        precgraph.compile(Wrapper(TorchAttention(dropout=0.1)), example_inputs=example)


class Wrapper(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out
