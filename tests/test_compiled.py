"""compile(): the result is the model, to callers and to checkpoints; what cannot be served is refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast

import precgraph
from precgraph import InputError, NumericsStateError, StaleWeightsError, UnsupportedModelError
from precgraph.runtime import runner
from tests.families import VOCABULARY, causal_lm, config, plain_module


def tokens(rows: int, width: int, seed: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, width), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def actor() -> Any:
    """A compiled Qwen2 that tests only call."""
    return precgraph.compile(causal_lm("qwen2"), "train")


@pytest.fixture(scope="module")
def rollout(actor: Any) -> Any:
    return precgraph.compile(actor, "infer")


# --------------------------------------------------------------------------------------- it is the model


def test_class_parameters_and_state() -> None:
    model = causal_lm("llama")
    compiled = precgraph.compile(model, "train")
    assert isinstance(compiled, LlamaForCausalLM) and type(compiled).__name__ == "LlamaForCausalLM"
    assert type(model) is LlamaForCausalLM, "the model itself is left alone"
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
    for (_, mine), (_, original) in zip(compiled.named_parameters(), model.named_parameters(), strict=True):
        assert mine is original
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert compiled.lm_head.weight is compiled.model.embed_tokens.weight, "tied weights stay tied"
    assert compiled.config is model.config


def test_both_modes_share_parameters_and_store(actor: Any, rollout: Any) -> None:
    assert rollout.precgraph.store is actor.precgraph.store
    assert all(a is b for a, b in zip(rollout.parameters(), actor.parameters(), strict=True))
    assert (actor.precgraph.mode, rollout.precgraph.mode) == ("train", "infer")


def test_what_it_carries_prints_as_one_line(actor: Any, rollout: Any) -> None:
    """The fields hold every weight, and ``print(actor)`` of a dataclass would show them."""
    for model, mode in ((actor, "train"), (rollout, "infer")):
        compiled = model.precgraph
        digest, version = compiled.graph.digest()[:16], compiled.store.version
        wanted = f"Compiled('{mode}', recipe 'jet_rl', digest {digest}, weights version {version})"
        assert repr(compiled) == str(compiled) == wanted


def test_output_class(actor: Any) -> None:
    ids = tokens(2, 6)
    out = actor(ids)
    assert isinstance(out, CausalLMOutputWithPast) and out.loss is None
    assert out.logits.shape == (2, 6, VOCABULARY) and out.logits.dtype == torch.float32
    (logits,) = actor(ids, return_dict=False)
    assert torch.equal(logits, out.logits)
    loss, logits = actor(ids, labels=ids, return_dict=False)
    assert torch.equal(logits, out.logits) and loss.ndim == 0


def test_loss_is_hugging_faces(actor: Any) -> None:
    """Of the same logits: shifted, -100 ignored, divided by the global number of items if that is given."""
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for extra in ({}, {"num_items_in_batch": 40}, {"num_items_in_batch": torch.tensor(17)}):
        out = actor(ids, attention_mask=mask, labels=labels, **extra)
        wanted = causal_lm("qwen2").loss_function(logits=out.logits, labels=labels, vocab_size=VOCABULARY, **extra)
        assert torch.equal(out.loss, wanted)
    total = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )
    torch.testing.assert_close(out.loss, total / 17)


def test_state_dict_round_trip() -> None:
    source, target = (precgraph.compile(causal_lm("qwen3", seed=s), "train") for s in (0, 1))
    ids = tokens(1, 11)
    wanted = source(ids).logits
    assert not torch.equal(target(ids).logits, wanted)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(ids).logits, wanted)


def test_save_pretrained_and_reload(tmp_path: Path) -> None:
    compiled = precgraph.compile(causal_lm("llama"), "train")
    compiled.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(loaded) is LlamaForCausalLM
    for (name, a), (_, b) in zip(compiled.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = tokens(1, 9)
    assert torch.equal(precgraph.compile(loaded, "infer")(ids).logits, compiled(ids).logits)


def test_deepcopy_is_independent() -> None:
    """A frozen reference model: a policy's copy with weights, store and program of its own."""
    actor = precgraph.compile(causal_lm("qwen2"), "train")
    ids = tokens(1, 8)
    before = actor(ids).logits.detach()
    reference = copy.deepcopy(actor)
    assert reference.precgraph.store is not actor.precgraph.store
    assert not {p.data_ptr() for p in reference.parameters()} & {p.data_ptr() for p in actor.parameters()}
    with torch.no_grad():
        for p in actor.parameters():
            p.add_(0.05)
    actor.sync()
    assert not torch.equal(actor(ids).logits, before)
    assert torch.equal(reference(ids).logits, before)
    assert copy.deepcopy(precgraph.compile(actor, "infer")).precgraph.mode == "infer"


def test_pickle_is_refused(actor: Any) -> None:
    with pytest.raises(InputError, match="state_dict"):
        pickle.dumps(actor)


def test_calls_leave_nothing_behind() -> None:
    """The graph of a call dies with its last reference, without the garbage collector's help."""
    actor = precgraph.compile(causal_lm("qwen2"), "train")

    def live() -> int:
        return sum(type(x) is runner._Call for x in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        for checkpoint in (False, True):
            if checkpoint:
                actor.gradient_checkpointing_enable()
            for backward in (False, True):
                out = actor(tokens(1, 20), labels=tokens(1, 20))
                assert live() == 4  # embedding, two layers, head
                if backward:
                    out.loss.backward()
                del out
                assert live() == 0
    finally:
        gc.enable()


def test_saved_values_are_freed_by_the_backward() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train")
    out = actor(tokens(1, 20), labels=tokens(1, 20))
    out.loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.loss.backward()


def test_a_graph_can_be_kept_for_a_second_backward() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train")
    for checkpoint in (False, True):
        if checkpoint:
            actor.gradient_checkpointing_enable()
        loss = actor(tokens(1, 20), labels=tokens(1, 20)).loss
        weight = actor.model.layers[0].mlp.up_proj.weight
        (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
        (second,) = torch.autograd.grad(loss, weight)
        assert torch.equal(first, second)


def test_compiling_twice_and_another_recipe(actor: Any) -> None:
    """The store holds what either recipe needs; each program keeps its own numbers."""
    plain = precgraph.compile(actor, "train", precgraph.Recipe.bf16())
    ids = tokens(1, 12)
    assert plain(ids).logits.dtype == torch.bfloat16
    assert not torch.equal(plain(ids).logits.float(), actor(ids).logits)
    wanted = causal_lm("qwen2")
    wanted.set_attn_implementation("precgraph")
    assert torch.equal(plain(ids).logits, wanted(ids).logits)


# -------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])}, "hole in row 0"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask must be"),
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask must be"),
        ({"attention_mask": torch.zeros(2, 4)}, "every position is masked"),
        ({"past_key_values": object()}, "KV cache"),
        ({"use_cache": True}, "KV cache"),
        ({"inputs_embeds": torch.zeros(2, 4, 128)}, "takes input_ids"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
        ({"token_type_ids": torch.zeros(2, 4)}, "unknown argument 'token_type_ids'"),
        ({"position_ids": torch.zeros(3, 4, dtype=torch.long)}, "position_ids must be"),
        ({"position_ids": torch.arange(4.0)[None]}, "position_ids must be"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}, "jump from 1 to 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, "one unmasked row"),
    ],
)
def test_bad_calls(actor: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        actor(tokens(2, 4), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0.0, 4.0])}, "cu_seq_lens must be int64 or int32"),
        ({"cu_seq_lens_q": torch.tensor([[0, 2], [3, 4]])}, "cu_seq_lens must be int64 or int32"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "must rise from 0 to 4"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 2, 4])}, "must rise from 0 to 4"),
        ({"cu_seq_lens_q": torch.tensor([0, 4]), "position_ids": torch.tensor([[0, 1, 0, 1]])}, "jump from 1 to 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 4])}, "must equal"),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1]])}, "seq_idx divides"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]]), "position_ids": torch.tensor([[0, 0, 1, 0]])}, "jump from 1"),
    ],
)
def test_bad_packing(actor: Any, arguments: dict[str, Any], message: str) -> None:
    """Where a batch says two things about its sequences, attention across them would go unnoticed."""
    with pytest.raises(InputError, match=message):
        actor(tokens(1, 4), **arguments)


def test_bad_ids(actor: Any) -> None:
    for ids, message in (
        (torch.tensor([[1, VOCABULARY]]), f"1..{VOCABULARY}, outside the vocabulary"),
        (torch.tensor([[-1, 2]]), "-1..2, outside the vocabulary"),
        (torch.tensor([1, 2]), "input_ids must be int64 or int32"),
        (torch.ones(1, 4), "input_ids must be int64 or int32"),
    ):
        with pytest.raises(InputError, match=message):
            actor(ids)
    with pytest.raises(InputError, match="takes input_ids"):
        actor()
    with pytest.raises(InputError, match="KV cache"):
        actor.generate(tokens(1, 4), max_new_tokens=2)


def test_padding_may_hold_any_id(actor: Any) -> None:
    """-100 or an id beyond the vocabulary, where the mask is 0, is never looked up."""
    ids, mask = torch.tensor([[-100, 5, 6]]), torch.tensor([[0, 1, 1]])
    assert torch.equal(actor(ids, attention_mask=mask).logits[0, 1:], actor(ids[:, 1:]).logits[0])


def test_token_logprobs_needs_a_compiled_language_model() -> None:
    with pytest.raises(InputError, match="compile"):
        precgraph.token_logprobs(causal_lm("qwen2"), tokens(1, 4))


def test_bad_modes_and_models() -> None:
    with pytest.raises(InputError, match="'train' or 'infer'"):
        precgraph.compile(causal_lm("qwen2"), "eval")
    with pytest.raises(InputError, match="torch module.*from_pretrained"):
        precgraph.compile("a path")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="example_inputs"):
        precgraph.compile(plain_module("mlp")[0])
    with pytest.raises(precgraph.LoweringError, match="no backend is called 'gpu'"):
        precgraph.compile(causal_lm("qwen2"), backend="gpu")


def test_inputs_of_plain_modules() -> None:
    module, (x,) = plain_module("mlp")
    compiled = precgraph.compile(module, example_inputs=(x,))
    assert compiled(x[:, :5]).shape == (1, 5, 48)
    for bad, message in (
        ((x, x), "1 inputs, not 2"),
        ((x.float(),), "bfloat16"),
        ((x[..., :95],), "96"),
        ((x[0],), "96"),
    ):
        with pytest.raises(InputError, match=message):
            compiled(*bad)


class Adapter(nn.Module):
    """Like a PEFT layer: the base layer inside, and low-rank matrices beside it."""

    def __init__(self, base: nn.Linear, lora: bool) -> None:
        super().__init__()
        self.base_layer = base
        if lora:
            self.lora_A = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        return out


@pytest.mark.parametrize("lora", [True, False])
def test_adapters_are_refused(lora: bool) -> None:
    model = causal_lm("qwen2")
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj, lora)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        precgraph.compile(model)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(rope: str) -> None:
    model = causal_lm("llama")
    model.config.rope_parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=rope):
        precgraph.compile(model)


class ThreeInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).bfloat16()

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.layer(a) + 2 * b - c


def test_one_tensor_may_be_several_example_inputs() -> None:
    module, x = ThreeInputs(), torch.randn(2, 4, 8).bfloat16()
    compiled = precgraph.compile(copy.deepcopy(module), recipe=precgraph.Recipe.bf16(), example_inputs=(x, x, x))
    others = tuple(torch.randn(2, 5, 8).bfloat16() for _ in range(3))
    assert torch.equal(compiled(*others), module(*others))


def test_dropout_is_refused() -> None:
    model = Qwen2ForCausalLM._from_config(config("qwen2", attention_dropout=0.1), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="attention_dropout = 0.1"):
        precgraph.compile(model)
    module, example = plain_module("mlp")
    module.act = nn.Sequential(nn.GELU(), nn.Dropout(0.2))
    with pytest.raises(UnsupportedModelError, match=r"'act\.1' drops out with p = 0.2"):
        precgraph.compile(module, example_inputs=example)


def test_parameters_of_another_dtype_are_refused() -> None:
    model = causal_lm("qwen2")
    model.model.norm.float()
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight.*float32"):
        precgraph.compile(model)


def test_models_without_a_language_model_head_are_named() -> None:
    model = causal_lm("qwen3")
    for other in (model.model, Qwen3ForSequenceClassification._from_config(model.config, dtype=torch.bfloat16)):
        with pytest.raises(
            UnsupportedModelError,
            match=rf"{type(other).__name__} has no language model head.*ForCausal.*value model .* uncompiled",
        ):
            precgraph.compile(other)


def test_a_model_that_was_converted_is_refused() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train")
    actor.float()
    with pytest.raises(UnsupportedModelError, match=r"weight was torch\.bfloat16.*float32"):
        actor(tokens(1, 4))


def test_a_resized_vocabulary_is_noticed() -> None:
    """Where embeddings are tied, Hugging Face gives the parameter other data: it stays the same object."""
    actor = precgraph.compile(causal_lm("llama"), "train")
    actor.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    with pytest.raises(StaleWeightsError, match=rf"weight was \[{VOCABULARY}, .*compile the model again"):
        actor(tokens(1, 4))


def test_layers_that_share_a_module_are_refused() -> None:
    model = causal_lm("qwen2")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    actor = precgraph.compile(model, "train")
    with pytest.raises(UnsupportedModelError, match="give every layer modules of its own"):
        actor(tokens(1, 4))


def test_a_replaced_parameter_is_noticed() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train")
    actor.model.layers[0].mlp.up_proj.weight = nn.Parameter(actor.model.layers[0].mlp.up_proj.weight * 2)
    with pytest.raises(StaleWeightsError, match=r"model\.layers\.0\.mlp\.up_proj\.weight.*replaced"):
        actor(tokens(1, 4))


# ------------------------------------------------------------------------------------------ ambient state


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_matmul_precision(actor: Any, rollout: Any, precision: str) -> None:
    loss = actor(tokens(1, 4), labels=tokens(1, 4)).loss
    torch.set_float32_matmul_precision(precision)
    try:
        for call in (lambda: actor(tokens(1, 4)), lambda: rollout(tokens(1, 4)), loss.backward):
            with pytest.raises(NumericsStateError, match="float32 matmul precision"):
                call()
    finally:
        torch.set_float32_matmul_precision("highest")


def test_flushed_subnormals(actor: Any) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(NumericsStateError, match="subnormal"):
            actor(tokens(1, 4))
    finally:
        torch.set_flush_denormal(False)


def test_backward_under_autocast(actor: Any) -> None:
    weight = actor.model.layers[1].mlp.down_proj.weight
    (wanted,) = torch.autograd.grad(actor(tokens(1, 30), labels=tokens(1, 30)).loss, weight)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(actor(tokens(1, 30), labels=tokens(1, 30)).loss, weight)
    assert torch.equal(found, wanted)
