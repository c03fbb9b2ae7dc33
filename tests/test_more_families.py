"""The further families, each by the properties that matter most: Hugging Face's bits in BF16, no mismatch in FP8."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import precgraph
from precgraph import Recipe, RecipeError, UnsupportedModelError, ops
from precgraph.attention import IMPLEMENTATION
from precgraph.experts import IMPLEMENTATION as EXPERTS_OF_OURS
from precgraph.graph import op_name, precision
from precgraph.lowering.reference import elementwise, experts, gemm
from precgraph.mixers import require_attention
from precgraph.quantizer import dequantize, quantize
from precgraph.recipe import RopeRule
from precgraph.runtime.engine import Engine
from precgraph.verify import check_inclusion
from tests.families import LIKE_LMS, MORE_LMS, causal_lm
from tests.rollouts import mixed_params, prompts_of, worst_difference
from tests.test_bf16_equals_huggingface import assert_same_gradients, step, tokens, vjp
from tests.test_parity import Pair, assert_equal, make_pair, padded, scored, sequences, valid

LENGTHS = (1, 7, 129)
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v2", "deepseek_v2_lite")


@cache
def fp8(family: str) -> Pair:
    """Trainer and rollout of a family, what the rollout says of sequences; read only."""
    return make_pair(causal_lm(family), sequences(LENGTHS))


@pytest.mark.parametrize("family", (*MORE_LMS, *LIKE_LMS))
def test_bf16_equals_huggingface(family: str) -> None:
    model = causal_lm(family).train()
    oracle: Any = copy.deepcopy(model)
    oracle.set_attn_implementation(IMPLEMENTATION)
    if family in EXPERTS:
        oracle.set_experts_implementation("eager")
    compiled = precgraph.compile(model, "train", Recipe.bf16())
    for rows, width in ((1, 1), (1, 17), (1, 130), (3, 9)):
        logits, loss, gradients = step(compiled, tokens(rows, width))
        wanted_logits, wanted_loss, wanted = step(oracle, tokens(rows, width))
        assert torch.equal(logits, wanted_logits), width
        assert torch.equal(loss, wanted_loss) or width == 1
        assert_same_gradients(gradients, wanted)
    assert all(g is not None and g.abs().max() > 0 for g in gradients.values())


@pytest.mark.parametrize("family", (*MORE_LMS, *LIKE_LMS))
def test_training_equals_rollout(family: str) -> None:
    """Alone, under gradients; padded on both sides; packed."""
    pair = fp8(family)
    for row, logits in zip(pair.sequences, pair.logits, strict=True):
        out = pair.actor(row[None]).logits
        assert out.requires_grad and torch.equal(out[0].detach(), logits)
    with torch.no_grad():
        for side in ("left", "right"):
            ids, mask = padded(pair.sequences, side, extra=3)
            assert_equal(valid(pair.actor(ids, attention_mask=mask).logits, mask), pair.logits)
            assert_equal(scored(precgraph.token_logprobs(pair.actor, ids, mask), mask), pair.logprobs)
        rows = pair.sequences[::-1]
        positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
        for model in (pair.actor, pair.rollout):
            out = model(torch.cat(rows)[None], position_ids=positions).logits[0]
            assert_equal(out.split([len(r) for r in rows]), pair.logits[::-1])


@pytest.mark.parametrize("family", (*MORE_LMS, *LIKE_LMS))
def test_engine_equals_the_trainer(family: str) -> None:
    pair = fp8(family)
    prompts, params = prompts_of(LENGTHS), mixed_params(len(LENGTHS), max_tokens=6)
    done = Engine(pair.rollout, max_batch_tokens=50).generate(prompts, params)
    for layout in ("left", "packed"):
        assert worst_difference(pair.actor, done, params, layout) == 0.0


@pytest.mark.parametrize("family", (*MORE_LMS, *LIKE_LMS))
def test_rollout_is_part_of_training(family: str) -> None:
    pair = fp8(family)
    assert check_inclusion(pair.actor.precgraph.graph, pair.rollout.precgraph.graph).ok
    assert pair.actor.precgraph.graph.digest() == pair.rollout.precgraph.graph.digest()


@pytest.mark.parametrize("family", (*MORE_LMS, *LIKE_LMS))
def test_every_forward_kernel_is_row_invariant(family: str) -> None:
    graph = fp8(family).rollout.precgraph.graph
    assert not [n.name for n in graph if "kernel" in n.meta and n.meta["kernel"].row_invariant is not True]
    kept = {op_name(n) for n in graph if op_name(n).startswith("aten.") and precision(n).module}
    assert kept <= ELEMENTWISE | MOVES


# Gemma's scale of embeddings, a router's probabilities, and what moves values.
ELEMENTWISE = {
    "aten.add.Tensor",
    "aten.sub.Tensor",
    "aten.mul.Tensor",
    "aten.to.dtype",
    "aten.div.Tensor",
    "aten.softmax.int",
}
MOVES = {
    "aten.cat.default",
    "aten.expand.default",
    "aten.split_with_sizes.default",
    "aten.pad.default",
    "aten.squeeze.dim",
    "aten.unsqueeze.default",
    "aten.unflatten.int",
    "aten.gather.default",
    "aten.zeros_like.default",
    "aten.scatter.value",
    "aten.bitwise_not.default",
    "aten.masked_fill.Scalar",
    "aten.slice.Tensor",
    "aten.chunk.default",
    "aten.transpose.int",
    "aten.max.dim",
    "aten.view.default",
    "aten.reshape.default",
}


# ---------------------------------------------------------------------------------------- experts


def experts_of(pair: Pair) -> dict[str, Any]:
    """The packed weights of the experts, by path."""
    packs = pair.actor.precgraph.store.packs
    return {k.path: pack for k, pack in packs.items() if ".experts." in k.path}


@pytest.mark.parametrize("family", EXPERTS)
def test_routers_stay_and_experts_are_quantised(family: str) -> None:
    """A router by what it feeds, alike in all layers; with more experts than any shape rule would catch."""
    graph = fp8(family).rollout.precgraph.graph
    linears = [n for n in graph if op_name(n) in ("linear", "expert_linear", "wide_linear")]
    routers = [n for n in linears if precision(n).module.endswith("mlp.gate")]
    moe_layers = 2 if family == "mixtral" else 1
    assert len(routers) == moe_layers
    for n in linears:
        assert (precision(n).rule("gemm") != "quantized") == (n in routers)
    for n in routers:
        assert precision(n).role == "router"
    experts = [precision(n).module for n in linears if op_name(n) == "expert_linear"]
    assert len(experts) == 2 * moe_layers == len(set(experts)) and all("mlp.experts." in m for m in experts)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_quantised_one_by_one(family: str) -> None:
    pair = fp8(family)
    for path, pack in experts_of(pair).items():
        weight = pair.actor.get_parameter(path)
        count, rows, columns = weight.shape
        stored = pack.tensors()
        assert stored["scales"].shape == (count, -(-rows // 128), -(-columns // 128))
        for e in range(count):
            alone = quantize(weight[e], Recipe.jet_rl().linear.weight)
            assert torch.equal(stored["codes"][e].view(torch.uint8), alone.codes.view(torch.uint8))
            assert torch.equal(stored["scales"][e], alone.scales)


def test_a_sync_updates_experts() -> None:
    """In place, to what a new model has."""
    actor = precgraph.compile(causal_lm("mixtral", seed=0), "train")
    other = causal_lm("mixtral", seed=1)
    before = {
        k.path: p.tensors()["codes"].data_ptr()
        for k, p in actor.precgraph.store.packs.items()
        if "codes" in p.tensors()
    }
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            parameter.copy_(other.get_parameter(name))
    actor.sync()
    ids = tokens(1, 40)
    with torch.no_grad():
        assert torch.equal(actor(ids).logits, precgraph.compile(other, "train")(ids).logits)
    packs = actor.precgraph.store.packs
    assert before == {k.path: p.tensors()["codes"].data_ptr() for k, p in packs.items() if "codes" in p.tensors()}


def test_equal_scores_select_the_first() -> None:
    scores = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 2.0, 1.0, 2.0]])
    for rows in (scores, scores.repeat(300, 1)):
        values, index = experts.top_k(rows, 2, True)
        assert index[:2].tolist() == [[0, 1], [1, 3]] and values[:2].tolist() == [[1.0, 1.0], [2.0, 2.0]]
        assert torch.equal(index, index[:2].repeat(len(rows) // 2, 1))


@pytest.mark.parametrize("slots", [1, 3])
def test_expert_gemms_against_float64(slots: int) -> None:
    """All three GEMMs on dequantised operands; expert 4 gets no token, expert 0 more than a block of them."""
    generator = torch.Generator().manual_seed(slots)
    tokens_, k, count, rows, columns = 150, 3, 5, 192, 144
    index = torch.stack(
        [torch.tensor([0, 1 + t % 2, 3])[torch.randperm(3, generator=generator)] for t in range(tokens_)]
    )
    x = torch.randn(tokens_ * k // slots, columns, generator=generator).bfloat16()
    dy = torch.randn(tokens_ * k, rows, generator=generator).bfloat16()
    weight = torch.randn(count, rows, columns, generator=generator).bfloat16()
    rule = Recipe.jet_rl().linear
    pack = experts.Float64Experts.create(weight, rule.weight)
    xq, dq = quantize(x, rule.activation), quantize(dy, rule.grad_output)
    wide_x, wide_dy = dequantize(xq, torch.float32).double(), dequantize(dq, torch.float32).double()
    wide_w = torch.stack([dequantize(quantize(w, rule.weight)).double() for w in weight])
    flat, source = index.flatten(), torch.arange(tokens_ * k) // slots
    y = experts.linear(gemm.fp8_linear)(xq, pack, index, slots)
    close(y, torch.einsum("snk,sk->sn", wide_w[flat], wide_x[source]))
    dx = experts.dgrad(gemm.fp8_dgrad)(dq, pack, index, slots)
    close(dx, torch.zeros_like(wide_x).index_add(0, source, torch.einsum("snk,sn->sk", wide_w[flat], wide_dy)))
    parts = [ops.quantize_dispatched(v, index, f, count, s) for v, f, s in (
        (dy, rule.wgrad_grad_output, 1), (x, rule.wgrad_activation, slots))]  # fmt: skip
    dweight = experts.fp8_wgrad(*parts, index, count, slots)
    for e in range(count):
        if parts[0][e] is None:
            assert not dweight[e].any() and e == 4
        else:
            close(dweight[e], dequantize(parts[0][e]).double().t() @ dequantize(parts[1][e]).double())
    plain = experts.Float32Experts.create(weight, None)
    y = experts.linear(gemm.tiled_linear)(x, plain, index, slots)
    close(y, torch.einsum("snk,sk->sn", weight.double()[flat], x.double()[source]))
    dx = experts.dgrad(gemm.plain_dgrad)(dy, plain, index, slots)
    close(
        dx,
        torch.zeros_like(wide_x).index_add(0, source, torch.einsum("snk,sn->sk", weight.double()[flat], dy.double())),
    )
    for e, (places, sources) in enumerate(ops.dispatched(index, count, slots)):
        wanted = dy[places].double().t() @ x[sources].double()
        close(experts.plain_wgrad(dy, x, index, count, slots)[e], wanted)


def close(found: Tensor, wanted: Tensor) -> None:
    """To bf16's rounding of the result and of the parts that it is a sum of."""
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))


def test_rotation_of_complex_numbers() -> None:
    """Both arithmetics against float64 rotations, and the gradient as the rotation back."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 37, 16, generator=generator).bfloat16()
    positions, frequencies = torch.arange(37)[None], 1e4 ** (-torch.arange(8) / 8)
    angles = (positions[0, :, None].float() * frequencies).double()
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    for define in (ops, elementwise):
        table = define.polar_table(positions, frequencies, 1.0)
        assert table.dtype == torch.complex64
        for found, wanted in (
            (define.polar_rope(x, table), pairs * turn),
            (define.polar_rope_backward(x, table), pairs * turn.conj()),
        ):
            assert found.dtype == torch.bfloat16
            wide = torch.view_as_real(wanted).flatten(-2)
            assert bool(((found.double() - wide).abs() <= 2**-8 * wide.abs() + 1e-5).all())


def test_a_narrower_table_cannot_apply_to_complex_numbers() -> None:
    recipe = replace(Recipe.jet_rl(), rope=RopeRule(table="bfloat16"))
    with pytest.raises(RecipeError, match="rope.table = 'bfloat16' cannot apply"):
        precgraph.compile(causal_lm("deepseek_v2_lite"), "train", recipe)


def test_gpt_oss_is_refused_by_what_it_lacks() -> None:
    """Not served: the first thing that has no exact kernel is named with its module, and the rest in the remedy."""
    small: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    with torch.device("meta"):
        model = GptOssForCausalLM._from_config(GptOssConfig(**small), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"^model.layers.0.self_attn: GptOssAttention: .* sinks") as e:
        precgraph.check(model)
    assert "biases and interleaved, transposed weights" in str(e.value)
    layer = model.model.layers[0].mlp.experts
    x, index = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(UnsupportedModelError, match="GptOssExperts: experts with biases, transposed"):
        ALL_EXPERTS_FUNCTIONS[EXPERTS_OF_OURS](layer, x, index, torch.zeros(3, 2))


_SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "pad_token_id": 0,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_SECOND = {"layer_types": ["full_attention", "linear_attention"]}
# What a family needs besides, and the module and the words that its error names.
OTHER_MIXERS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": (_SECOND, "model.layers.1.linear_attn: Qwen3NextGatedDeltaNet is a recurrence"),
    "mamba2": ({"num_heads": 8, "n_groups": 1}, "backbone.layers.0.mixer: Mamba2Mixer is a recurrence"),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_dt_rank": 4},
              "model.layers.1.mamba: JambaMambaMixer is a recurrence"),
    "bamba": ({**_MAMBA, "attn_layer_indices": [0]}, "model.layers.1.mamba: BambaMixer is a recurrence"),
    "falcon_h1": ({**_MAMBA, "mamba_d_ssm": 128}, "model.layers.0.mamba: FalconH1Mixer is a recurrence"),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "num_mem_blocks": 1},
               "model.layers.0.mamba: Zamba2MambaMixer is a recurrence"),
    "granitemoehybrid": ({**_MAMBA, "layer_types": ["attention", "mamba"]},
                         "model.layers.1.mamba: GraniteMoeHybridMambaLayer is a recurrence"),
    "minimax": (_SECOND, "model.layers.1.self_attn: MiniMaxLightningAttention is a recurrence"),
    "lfm2": ({"layer_types": ["full_attention", "conv"]}, "model.layers.1.conv: Lfm2ShortConv is a convolution"),
    "recurrent_gemma": ({}, "model.layers.0.temporal_block: RecurrentGemmaRecurrentBlock is a convolution"),
    "deepseek_v32": ({"num_key_value_heads": 4},
                     "model.layers.0.self_attn: DeepseekV32Attention is attention to keys that an indexer picks"),
    "rwkv": ({}, "RwkvForCausalLM has a state beside keys and values"),
}  # fmt: skip


def tiny(kind: str, **changes: Any) -> Any:
    """A two-layer model of any type of transformers, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**_SMALL, **changes}), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", OTHER_MIXERS)
def test_where_tokens_meet_otherwise_than_in_attention(kind: str) -> None:
    """Recurrences, convolutions, indexed keys: refused before anything is traced, by the first module that does so."""
    own, message = OTHER_MIXERS[kind]
    with pytest.raises(UnsupportedModelError, match=f"^{re.escape(message)}.*; models are served whose") as error:
        precgraph.check(tiny(kind, **own))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "operator"), [("granite", "aten.div.Tensor"), ("cohere", "aten.mul.Tensor")])
def test_logits_that_are_scaled_after_the_head(kind: str, operator: str) -> None:
    """In the model's own forward, which no module's path names: its class does."""
    with pytest.raises(UnsupportedModelError, match=rf"^{kind.title()}ForCausalLM: the logits are made by {operator},"):
        precgraph.check(tiny(kind))


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("phi4_multimodal", {"num_hidden_layers": 1}),  # convolutions in its tower for sound
        ("granitemoehybrid", {**_MAMBA, "layer_types": ["attention", "attention"]}),  # of a class that can have a state
    ],
)
def test_what_the_layers_do_not_run_refuses_no_model(kind: str, own: dict[str, Any]) -> None:
    require_attention(tiny(kind, **own))


def test_a_trace_that_fails_is_one_line_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torch prints the graph of an export that meets a data-dependent branch, and advises variables of its own."""
    with pytest.raises(precgraph.TraceError, match=r"module 'model.layers.0.mlp.experts' cannot be traced") as error:
        precgraph.check(tiny("longcat_flash", num_layers=1, qk_rope_head_dim=16))
    assert "\n" not in str(error.value)
    with pytest.raises(precgraph.TraceError, match="depends on how many tokens there are") as error:
        precgraph.check(tiny("doge"))
    assert "TORCH_LOGS" not in str(error.value)
    assert capfd.readouterr().err == ""


class Normalised(nn.Module):
    """Writes into a value of its own (``aliased``: one that has another name)."""

    def __init__(self, aliased: bool) -> None:
        super().__init__()
        self.aliased = aliased
        self.lin = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x).float()
        z = y.transpose(1, 2) if self.aliased else y + 1
        top = y if self.aliased else y * 2
        top /= top.sum(-1, keepdim=True)
        return top.to(x.dtype) + (z.transpose(1, 2) if self.aliased else z).to(x.dtype)


def test_a_write_into_a_value_without_another_name() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 9, 32).bfloat16()
    module = Normalised(aliased=False).bfloat16()
    compiled = precgraph.compile(copy.deepcopy(module), "train", Recipe.bf16(), example_inputs=(x,))
    (y, dx, gradients), (wanted_y, wanted_dx, wanted) = vjp(compiled, x), vjp(module, x)
    assert torch.equal(y, wanted_y)
    assert dx is not None and wanted_dx is not None and torch.equal(dx, wanted_dx)
    assert_same_gradients(gradients, wanted)
    with pytest.raises(precgraph.TraceError, match="writes into its argument"):
        precgraph.compile(Normalised(aliased=True).bfloat16(), "train", example_inputs=(x,))
