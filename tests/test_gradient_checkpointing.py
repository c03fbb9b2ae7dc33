"""Checkpointing of the layers whose flag is set: the same bits, and each keeps what autograd says it keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

import precgraph
from precgraph.errors import InputError
from tests.families import causal_lm, plain_module

LAYERS, ROWS = 4, 70
IDS = torch.randint(0, 900, (2, ROWS // 2), generator=torch.Generator().manual_seed(0))
INDEX = ROWS * torch.int64.itemsize  # bytes of token ids, or of positions


@pytest.fixture(scope="module")
def actor() -> Any:
    return precgraph.compile(causal_lm("qwen3", num_hidden_layers=LAYERS).train(), "train")


def flag(actor: Any, *chosen: int) -> None:
    for i, layer in enumerate(actor.model.layers):
        layer.gradient_checkpointing = i in chosen


def kept(result: Tensor) -> dict[str, int]:
    """Bytes that autograd holds for the backward of ``result``, a segment."""
    found: dict[str, int] = {}
    seen: set[Any] = set()
    todo = [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [source for source, _ in node.next_functions]
        if type(node).__name__ == "_SegmentFunctionBackward":
            found[node.call.segment.name] = sum(t.nbytes for t in node.saved_tensors)
    return found


def gradients(model: Any, result: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    result.backward(torch.ones_like(result))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert mine.keys() == wanted.keys() and wanted
    assert all(torch.equal(mine[n], wanted[n]) for n in wanted)


def with_the_loss(actor: Any) -> Tensor:
    loss: Tensor = actor(IDS, labels=IDS).loss
    return loss


def with_logprobs(actor: Any) -> Tensor:
    return precgraph.token_logprobs(actor, IDS)


@pytest.mark.parametrize("forward", [with_the_loss, with_logprobs])
def test_flags_are_followed_layer_by_layer_at_each_forward(actor: Any, forward: Callable[[Any], Tensor]) -> None:
    actor.gradient_checkpointing_disable()
    result = forward(actor)
    whole, wanted = kept(result), gradients(actor, result)
    config = actor.config
    # A layer's inputs: bf16 hidden states, and the cosines and sines of RoPE.
    inputs = ROWS * (config.hidden_size + 2 * config.head_dim) * torch.bfloat16.itemsize
    assert all(whole[f"model.layers.{i}"] > 5 * inputs for i in range(LAYERS)) and whole["embed"] == INDEX

    def assert_checkpointed(*chosen: int) -> None:
        again = forward(actor)
        assert torch.equal(again, result)
        assert kept(again) == whole | {f"model.layers.{i}": inputs for i in chosen}
        assert_same(gradients(actor, again), wanted)

    for chosen in ((0,), (1, 3), ()):
        flag(actor, *chosen)
        assert_checkpointed(*chosen)
    actor.gradient_checkpointing_enable()
    assert_checkpointed(*range(LAYERS))
    flag(actor, 2)  # and still the flag of the model around the layers
    assert_checkpointed(2)
    flag(actor)
    assert actor.is_gradient_checkpointing
    assert_checkpointed()
    actor.gradient_checkpointing_disable()
    assert_checkpointed()


def test_a_backward_belongs_to_the_flags_of_its_forward(actor: Any) -> None:
    actor.gradient_checkpointing_disable()
    wanted = gradients(actor, with_the_loss(actor))
    flag(actor, 0, 2)
    loss = with_the_loss(actor)
    flag(actor, 1)
    assert_same(gradients(actor, loss), wanted)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("mlp", ["gate", "up"]),
        ("self_attn", ["q", "k", "v", "out", "lse"]),
        ("mlp.gate_proj", ["gate"]),
        ("mlp.down_proj", []),
        ("input_layernorm", []),
    ],
)
def test_a_module_inside_a_layer_makes_its_values_again(actor: Any, path: str, names: list[str]) -> None:
    """All that the layer keeps of it is left out, by its size; the rest, and every bit, stays."""
    actor.gradient_checkpointing_disable()
    result, config = with_the_loss(actor), actor.config
    whole, wanted = kept(result), gradients(actor, result)
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    bf16 = {"gate": config.intermediate_size, "up": config.intermediate_size, "q": heads, "k": kv_heads, "v": kv_heads,
            "out": heads, "lse": 2 * config.num_attention_heads}  # fmt: skip
    less = ROWS * sum(bf16[name] for name in names) * torch.bfloat16.itemsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor.model.layers[1].get_submodule(path), "gradient_checkpointing", True, raising=False)
        again = with_the_loss(actor)
        assert kept(again) == whole | {"model.layers.1": whole["model.layers.1"] - less}
        assert torch.equal(again, result)
        assert_same(gradients(actor, again), wanted)
        flag(actor, 1)  # the layer as a whole, whatever is inside
        everything = kept(with_the_loss(actor))
        patch.undo()
        assert everything == kept(with_the_loss(actor)) != whole
    flag(actor)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_all_modules_of_all_layers(family: str) -> None:
    """Fused projections, norms after a module, experts, latent attention: less is kept, and no bit changes."""
    actor = precgraph.compile(causal_lm(family).train(), "train")
    result = with_the_loss(actor)
    whole, wanted = kept(result), gradients(actor, result)
    for layer in actor.model.layers:
        for child in layer.children():
            child.gradient_checkpointing = True
    again = with_the_loss(actor)
    less = kept(again)
    assert {n for n in whole if less[n] < whole[n]} == {f"model.layers.{i}" for i in range(len(actor.model.layers))}
    assert torch.equal(again, result)
    assert_same(gradients(actor, again), wanted)


def test_flags_on_what_is_no_layer_checkpoint_no_layer_and_eval_changes_nothing(actor: Any) -> None:
    actor.gradient_checkpointing_disable()
    whole = kept(with_the_loss(actor))
    with pytest.MonkeyPatch.context() as patch:
        for module in (actor, actor.model, actor.model.embed_tokens, actor.lm_head):
            patch.setattr(module, "gradient_checkpointing", True, raising=False)
        assert kept(with_the_loss(actor)) == whole
    actor.gradient_checkpointing_enable({"use_reentrant": True})
    less = kept(with_the_loss(actor))
    actor.eval()
    assert kept(with_the_loss(actor)) == less != whole
    actor.train().gradient_checkpointing_disable()


@pytest.mark.parametrize("value", ["no", torch.tensor(True), 1, None])
@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.1.mlp", ""])
def test_a_flag_that_is_no_bool_is_refused_by_name(actor: Any, path: str, value: Any) -> None:
    module = actor.get_submodule(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gradient_checkpointing", value, raising=False)
        with pytest.raises(
            InputError, match=f"^{path or type(actor).__name__}: .*{type(value).__name__}; set it to True"
        ):
            with_the_loss(actor)
        with torch.no_grad():
            with_the_loss(actor)  # where no flag is read


def test_layers_of_a_class_without_the_flag_follow_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """As older model code has it, where the flag is the model's alone."""
    actor = precgraph.compile(causal_lm("qwen2").train(), "train")
    whole = kept(with_the_loss(actor))
    monkeypatch.delattr(GradientCheckpointingLayer, "gradient_checkpointing")
    assert kept(with_the_loss(actor)) == whole
    actor.model.gradient_checkpointing = True
    less = kept(with_the_loss(actor))
    assert all(less[f"model.layers.{i}"] < whole[f"model.layers.{i}"] / 3 for i in range(2))


def test_an_embedding_that_computes_is_checkpointed_with_any_layer() -> None:
    """Gemma scales its embeddings: the backward keeps them unscaled."""
    actor = precgraph.compile(causal_lm("gemma2").train(), "train")
    loss = with_the_loss(actor)
    whole, wanted = kept(loss), gradients(actor, loss)
    assert whole["embed"] > ROWS * actor.config.hidden_size * torch.bfloat16.itemsize
    flag(actor, 1)
    loss = with_the_loss(actor)
    assert kept(loss)["embed"] == INDEX and kept(loss)["model.layers.0"] == whole["model.layers.0"]
    assert_same(gradients(actor, loss), wanted)


def test_a_program_in_one_piece_is_checkpointed_by_any_flag() -> None:
    mlp, (x,) = plain_module("mlp")
    mlp.gradient_checkpointing = False  # a module's path, "model" here, is not the segment of that name
    compiled = precgraph.compile(nn.Sequential(OrderedDict(model=mlp)), "train", example_inputs=(x,))
    result = compiled(x)
    whole, wanted = kept(result), gradients(compiled, result)
    mlp.up.gradient_checkpointing = True
    again = compiled(x)
    assert torch.equal(again, result)
    assert kept(again) == {"model": x.nbytes} != whole
    assert_same(gradients(compiled, again), wanted)
    mlp.up.gradient_checkpointing = False
    assert kept(compiled(x)) == whole
