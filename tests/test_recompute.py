"""What the backward makes again: the same bits, and as many bytes less as a hand count and autograd say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers import Qwen3Config, Qwen3ForCausalLM

import precgraph
from precgraph import Recipe
from precgraph.errors import InputError
from precgraph.graph import PrecisionGraph, op_name, precision
from precgraph.lowering.lower import lower
from precgraph.passes.pipeline import build
from precgraph.passes.plan_recompute import NOTE
from precgraph.render import render_saved
from precgraph.runtime.contexts import PackedContext
from precgraph.saved import saved_bytes
from precgraph.trace import trace
from tests.families import CAUSAL_LMS, MORE_LMS, causal_lm, meta_lm, plain_module

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MORE_LMS]


def program(model: Any, recompute: str, recipe: Recipe | None = None) -> PrecisionGraph:
    graph = build(trace(model).graph, "train", recipe or Recipe.jet_rl(), recompute=recompute, check=True)
    return lower(graph, "reference", torch.device("cpu"))


def repeated(graph: PrecisionGraph, segment: str) -> Counter[str]:
    nodes = [n for n in graph if precision(n).note == NOTE and precision(n).segment == segment]
    assert all(precision(n).phase == "backward" for n in nodes)
    return Counter(map(op_name, nodes))


# --------------------------------------------------------------------------------------------- bits


def step(name: str, recompute: str, recipe: Recipe, checkpoint: bool = False) -> tuple[Any, Tensor]:
    actor = precgraph.compile(causal_lm(name).train(), "train", recipe, recompute=recompute)
    if checkpoint:
        actor.gradient_checkpointing_enable()
    ids = torch.randint(900, (2, 70), generator=torch.Generator().manual_seed(0))
    out = actor(ids, labels=ids)
    out.loss.backward()
    return actor, out.logits


def assert_same(kept: tuple[Any, Tensor], again: tuple[Any, Tensor]) -> None:
    assert torch.equal(kept[1], again[1])
    for (path, p), q in zip(kept[0].named_parameters(), again[0].parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), path
        assert p.grad is None or torch.equal(p.grad, q.grad), path
    assert kept[0].precgraph.graph.digest() == again[0].precgraph.graph.digest(), "no part of the policy"


@pytest.mark.parametrize("name", [*CAUSAL_LMS, *SLOW])
def test_no_bit_changes(name: str) -> None:
    kept, again = (step(name, recompute, Recipe.jet_rl()) for recompute in ("none", "cheap"))
    assert_same(kept, again)
    before, after = (saved_bytes(actor.precgraph.graph) for actor, _ in (kept, again))
    assert before.keys() == after.keys() and all(after[s] < before[s] for s in before if s != "embed")


@pytest.mark.parametrize("checkpoint", [False, True], ids=["bf16", "checkpointed"])
def test_nor_with_torchs_kernels_or_checkpoints(checkpoint: bool) -> None:
    recipe = Recipe.jet_rl() if checkpoint else Recipe.bf16()
    assert_same(step("qwen3", "none", recipe), step("qwen3", "cheap", recipe, checkpoint))


def test_plain_modules() -> None:
    model, inputs = plain_module("mlp")
    results = []
    for recompute in ("none", "cheap"):
        compiled = precgraph.compile(model, "train", example_inputs=inputs, recompute=recompute)
        results.append(torch.autograd.grad(compiled(*inputs).float().square().sum(), list(compiled.parameters())))
        assert repeated(compiled.precgraph.graph, "model") == (
            {"quantize": 1, "activate": 1} if recompute == "cheap" else {}
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_option_stays_with_the_model() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train", recompute="none")
    again = precgraph.compile(actor, "train")
    assert again.precgraph.recompute == "none" and "plan_recompute" not in again.precgraph.graph.passes
    assert "plan_recompute" in precgraph.compile(actor, "train", recompute="cheap").precgraph.graph.passes
    with pytest.raises(InputError, match="cheap, none"):
        precgraph.compile(actor, "train", recompute="all")


# -------------------------------------------------------------------------------------------- bytes


def qwen3_8b(layers: int = 2) -> Any:
    """Qwen3-8B's shapes on the meta device."""
    shape = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, num_hidden_layers=layers, tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3ForCausalLM._from_config(shape, dtype=torch.bfloat16)


def codes(width: int) -> int:
    """Bytes a token along tokens: a code a value, an fp32 scale for 128."""
    return width + 4 * width // 128


def test_bytes_of_an_8b_layer_by_hand() -> None:
    """A token of a layer: inputs of both norms, q, k, v as projected, out and log-sum-exp, gate and up."""
    hidden, wide, heads, kv = 4096, 12288, 4096, 1024
    lean = 2 * (2 * hidden + heads + 2 * kv + heads + 2 * wide) + 4 * 32
    operands = 2 * codes(hidden) + codes(heads) + codes(wide)  # of qkv, gate and up; o; down
    full = lean + 2 * (heads + kv) + operands  # and q, k as rotated
    assert (full, lean) == (121728, 86144)
    model = qwen3_8b()
    for recompute, layer, head in (("none", full, 2 * 2 * hidden), ("cheap", lean, 2 * hidden)):
        graph = program(model, recompute)
        for tokens in (128, 8192):
            found = saved_bytes(graph, tokens)
            assert found["model.layers.1"] == tokens * layer
            assert found["head"] == tokens * head
            assert found["model.layers.0"] == tokens * (layer + 2 * 2 * 128), "and the tables that all layers share"
            assert found["embed"] == tokens * 8, "ids"
    assert render_saved(graph)[2:] == [
        "  embed  8",
        "  model.layers.0  86656",
        "  model.layers.1  86144",
        "  head  8192",
    ]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_bytes_are_what_autograd_keeps(name: str, recompute: str) -> None:
    actor = precgraph.compile(causal_lm(name), "train", recompute=recompute)
    ids = torch.arange(256)[None]
    memory: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        memory[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        hidden = actor.precgraph.hidden(ids, ids.clone(), PackedContext((0, 100, 256)))
    found = saved_bytes(actor.precgraph.graph, 256)
    # The reference makes q, k and v apart, so that Mistral's q and k as projected are not kept by v.
    apart = 256 * 2 * (128 + 32) * 2 if (name, recompute) == ("mistral", "none") else 0
    assert sum(memory.values()) == sum(v for s, v in found.items() if s != "head") - apart
    hidden.sum().backward()


# --------------------------------------------------------------------------------------- what is made again


def test_what_a_layer_makes_again() -> None:
    attention = {"rope": 2, "quantize": 4, "gated": 1}
    assert repeated(program(meta_lm("qwen3"), "cheap"), "model.layers.0") == attention | {"rms_norm": 4}
    assert repeated(program(meta_lm("mistral"), "cheap"), "model.layers.0") == attention | {"rms_norm": 2}
    # With biases q and k as projected are memory of their own, as large as q and k rotated.
    assert repeated(program(meta_lm("qwen2"), "cheap"), "model.layers.0") == {"quantize": 4, "gated": 1, "rms_norm": 2}
    experts = repeated(program(meta_lm("qwen3_moe"), "cheap"), "model.layers.0")
    assert experts["quantize_dispatched"] == 2 and experts["quantize"] == 2 and experts["gated"] == 1


def test_nothing_else_changes() -> None:
    """Apart from where they are made, the values are the same: same annotation, same kernels, each node once."""
    model = meta_lm("qwen3")
    kept, again = program(model, "none"), program(model, "cheap")

    def rows(graph: PrecisionGraph, phase: str) -> Counter[Any]:
        return Counter(
            (op_name(n), p.module, p.segment, str(p.format), p.compute, p.rules, p.numerics)
            for n in graph if (p := precision(n)).phase == phase and p.note != NOTE
        )  # fmt: skip

    assert rows(kept, "backward") == rows(again, "backward")
    left = rows(kept, "forward") - rows(again, "forward")
    assert {r[0] for r in left} == {"quantize"} and sum(left.values()) == 8
    copies = [n for n in again if precision(n).note == NOTE]
    order = {n: i for i, n in enumerate(again)}

    def needed(node: fx.Node) -> int:
        """The first reader that is not itself a repetition."""
        return min(needed(u) if u in copies else order[u] for u in node.users)

    for node in copies:
        following = next(n for n in list(again)[order[node] + 1 :] if n not in copies)
        assert order[following] == needed(node), "made no earlier than it is read"


def test_what_would_cost_more_is_kept() -> None:
    """With down_proj alone trainable, its operand in codes is half a value; gate and up would be four times that."""
    model = causal_lm("qwen3")
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path.endswith("layers.1.mlp.down_proj.weight"))
    graph = program(model, "cheap")
    assert repeated(graph, "model.layers.1") == {}
    assert saved_bytes(graph)["model.layers.1"] == 128 * codes(288)
