"""Whole programs on the card: the trainer's log-probabilities are the rollout's, bit for bit; gradients are right."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import precgraph
from precgraph.format import Format
from precgraph.recipe import Recipe
from precgraph.runtime.cache import PagedCache
from precgraph.runtime.engine import Engine, run_paged
from precgraph.runtime.logprobs import logprobs_from_logits
from precgraph.runtime.sampling import SamplingParams

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

CONFIGS: dict[str, tuple[Any, Any]] = {
    "qwen3-8b": (Qwen3ForCausalLM, Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, num_hidden_layers=4, tie_word_embeddings=False,
    )),
    "smollm2": (LlamaForCausalLM, LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152,
        num_hidden_layers=4, tie_word_embeddings=True,
    )),
    # Layers without a window, and with one that most sequences exceed.
    "windows": (Qwen3ForCausalLM, Qwen3Config(
        hidden_size=1024, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        vocab_size=4001, num_hidden_layers=4, tie_word_embeddings=False, use_sliding_window=True, sliding_window=100,
        max_window_layers=2,
    )),
}  # fmt: skip
LENGTHS = (1024, 300, 129, 7, 588)
TOKENS = sum(LENGTHS)


@cache
def pair(name: str) -> tuple[Any, Any]:
    """Trainer and rollout on one store."""
    make, config = CONFIGS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make._from_config(config, dtype=torch.bfloat16)
    actor = precgraph.compile(model, "train")
    return actor, precgraph.compile(actor, "infer")


@cache
def sequences(name: str) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(CONFIGS[name][1].vocab_size) for _ in range(n)] for n in LENGTHS]


def packed(name: str) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([t for s in sequences(name) for t in s], device="cuda")[None]
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    return ids, bounds


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_runs_on_gpu_kernels(name: str) -> None:
    actor, _ = pair(name)
    kernels = actor.precgraph.kernels().values()
    assert {k.backend for k in kernels} >= {"deep_gemm", "flash_attention", "triton"}
    assert not [k.op for k in kernels if k.backend == "reference" and not k.numerics.startswith("aten.")]


@pytest.mark.parametrize("name", CONFIGS)
def test_trainer_and_rollout_agree_on_every_bit(name: str) -> None:
    """The training forward, packed, against the rollout: whole prompts, chunks of 100 and 9, single tokens."""
    actor, rollout = pair(name)
    ids, bounds = packed(name)
    right = precgraph.token_logprobs(actor, ids, cu_seq_lens=bounds).detach()[0]
    assert torch.equal(right, precgraph.token_logprobs(rollout, ids, cu_seq_lens=bounds)[0])
    compiled, cache_ = rollout.precgraph, PagedCache(rollout.precgraph.graph, ids.device, 200, 16, reuse=False)
    all_ids, starts = sequences(name), bounds.tolist()
    blocks = [cache_.pool.allocate(cache_.pool.blocks_for(n)) for n in LENGTHS]

    def differing(calls: list[tuple[int, int, int]]) -> int:
        """Run parts of sequences in one call; how many of their log-probabilities differ from the trainer's."""
        with torch.no_grad():
            hidden = run_paged(compiled, cache_, [(all_ids[i], blocks[i], a, b) for i, a, b in calls])
            rows = [starts[i] + p for i, a, b in calls for p in range(a, b)]
            last = {starts[i] + n - 1 for i, n in enumerate(LENGTHS)}
            keep = torch.tensor([r for r, row in enumerate(rows) if row not in last], device="cuda")
            where = torch.tensor(rows, device="cuda")[keep]
            if not len(keep):
                return 0
            scores = logprobs_from_logits(compiled.logits(hidden[:, keep]), ids[0, where + 1])
        return int((scores != right[where]).sum())

    for size in (TOKENS, 100):
        for start in range(0, max(LENGTHS), size):
            assert differing([(i, start, min(start + size, n)) for i, n in enumerate(LENGTHS) if start < n]) == 0
    draw = random.Random(1)
    for _ in range(10):
        assert differing([(i, p, p + 1) for i, n in enumerate(LENGTHS) for p in [draw.randrange(n)]]) == 0
        assert differing([(0, p, p + 1) for p in [draw.randrange(LENGTHS[0])]]) == 0
        assert differing([(i, p, min(n, p + 9)) for i, n in enumerate(LENGTHS) for p in [draw.randrange(n)]]) == 0


@pytest.mark.parametrize("name", ["windows", "smollm2"])
def test_the_engine_samples_with_the_trainers_bits(name: str) -> None:
    """Prompts longer than a window and shorter, in chunks beside requests that decode; prefixes from the cache."""
    actor, rollout = pair(name)
    prompts = [s[:n] for s, n in zip(sequences(name), (500, 299, 99, 7, 250), strict=True)]
    prompts += [prompts[0][:333], prompts[1]]
    params = [SamplingParams(40, t, seed=i) for i, t in enumerate((1.0, 0.7, 1.3, 1.0, 0.7, 1.0, 1.0))]
    engine = Engine(rollout, max_batch_tokens=90)
    for done, p in zip(engine.generate(prompts, params), params, strict=True):
        ids = torch.tensor([done.prompt_token_ids + done.token_ids], device="cuda")
        with torch.no_grad():
            scores = precgraph.token_logprobs(actor, ids, temperature=p.temperature)[0]
        assert scores[len(done.prompt_token_ids) - 1 :].tolist() == done.logprobs


def test_windows_attend_by_triton_on_both_sides() -> None:
    for side in pair("windows"):
        found = [k.backend for k in side.precgraph.kernels().values() if k.op == "attention"]
        assert sorted(found) == ["flash_attention"] * 2 + ["triton"] * 2


def test_a_rollout_on_other_gemms_is_near_and_says_so() -> None:
    """Triton's GEMMs for DeepGEMM's: other sums of the same products, which the check names."""
    actor, _ = pair("smollm2")
    rollout = precgraph.compile(actor, "infer", backend="triton_flash")
    kernels = rollout.precgraph.kernels().values()
    assert not [k.op for k in kernels if k.backend == "reference" and not k.numerics.startswith("aten.")]
    assert not precgraph.check(actor, rollout).ok
    ids, bounds = packed("smollm2")
    with torch.no_grad():
        right, found = (precgraph.token_logprobs(side, ids, cu_seq_lens=bounds) for side in (actor, rollout))
    assert 0 < float((right - found).abs().mean()) < 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward repeats its bits when torch is told to, with checkpointing of layers and of modules too."""
    actor, _ = pair(name)
    ids, bounds = packed(name)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def gradients() -> dict[str, Tensor]:
        actor.zero_grad(set_to_none=True)
        (-precgraph.token_logprobs(actor, ids, cu_seq_lens=bounds)).mean().backward()
        return {n: p.grad.clone() for n, p in actor.named_parameters()}

    torch.use_deterministic_algorithms(True)
    try:
        first, again = gradients(), gradients()
        actor.gradient_checkpointing_enable()
        checkpointed = [gradients()]
        actor.gradient_checkpointing_disable()
        for module in (m for layer in actor.model.layers for m in (layer.self_attn, layer.mlp)):
            monkeypatch.setattr(module, "gradient_checkpointing", True, raising=False)
        checkpointed.append(gradients())
    finally:
        actor.gradient_checkpointing_disable()
        torch.use_deterministic_algorithms(False)
    assert [n for n in first if not torch.equal(first[n], again[n])] == []
    assert all(bool(g.isfinite().all()) and float(g.float().norm()) > 0 for g in first.values())
    assert [n for n in first for found in checkpointed if not torch.equal(first[n], found[n])] == []
    actor.zero_grad(set_to_none=True)


def copy_of(actor: Any, recipe: Recipe, backend: str) -> Any:
    """Another model of actor's weights."""
    make, config = CONFIGS["smollm2"]
    with torch.device("cuda"):
        twin = make._from_config(config, dtype=torch.bfloat16)
    twin.load_state_dict(actor.state_dict())
    return precgraph.compile(twin, "train", recipe, backend)


def test_gradients_are_as_near_to_bf16_as_the_references() -> None:
    """FP8 codes flip where GEMMs round elsewhere, so backends differ by about as much as FP8 from BF16, but both are
    equally far from BF16; so is the WGrad whose activations are quantised in 128x128 blocks."""
    actor, _ = pair("smollm2")
    jet = Recipe.jet_rl()
    blocks = replace(jet, linear=replace(jet.linear, wgrad_activation=Format("float8_e4m3fn", "128x128")))
    models = {
        "bf16": copy_of(actor, Recipe.bf16(), "auto"), "reference": copy_of(actor, jet, "reference"), "fp8": actor,
        "blocks": copy_of(actor, blocks, "auto"),
    }  # fmt: skip
    ids = packed("smollm2")[0][:, :400]
    grads = {}
    for name, model in models.items():
        model.zero_grad(set_to_none=True)
        (-precgraph.token_logprobs(model, ids)).mean().backward()
        grads[name] = {n: p.grad.double() for n, p in model.named_parameters()}
    error = {
        name: {n: float((g - grads["bf16"][n]).norm() / grads["bf16"][n].norm()) for n, g in grads[name].items()}
        for name in models
    }
    mean = {name: sum(errors.values()) / len(errors) for name, errors in error.items()}
    print("mean relative error of gradients against bf16:", {name: round(m, 4) for name, m in mean.items()})
    for name in ("fp8", "blocks"):
        assert mean[name] < 1.05 * mean["reference"]
        assert all(e < 1.25 * error["reference"][n] for n, e in error[name].items())


def test_a_refresh_is_captured_once_and_refills_in_place() -> None:
    """Every kind of refresh, eager, captured and replayed, makes the packs of a new store; nothing moves."""
    make, config = CONFIGS["smollm2"]
    with torch.device("cuda"):
        model = make._from_config(config, dtype=torch.bfloat16)
    actor = precgraph.compile(model, "train")
    store = actor.precgraph.store
    ids = torch.arange(50, device="cuda")[None]
    actor(ids, labels=ids).loss.backward()  # makes the transposed copies, which the refreshes fill too
    places = [t.data_ptr() for pack in store.packs.values() for t in pack.storage()]
    for step in range(1, 5):
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.mul_(1 + 2.0**-step)
        actor.sync()
        fresh = type(store)(store.masters)
        fresh.require(store.packs)
        for key, pack in store.packs.items():
            for mine, theirs in zip(stored(pack), stored(fresh.packs[key]), strict=True):
                assert torch.equal(mine, theirs), f"refresh {step}: {key}"
    assert places == [t.data_ptr() for pack in store.packs.values() for t in pack.storage()]


def stored(pack: Any) -> list[Tensor]:
    """Codes as bytes, scales and values; of a weight in FP8 the transposed copy too."""
    tensors = [*pack.tensors().values(), *(pack.transposed() if hasattr(pack, "transposed") else ())]
    return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]
