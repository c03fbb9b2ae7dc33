"""The weight store: noticed changes, refreshes in place, and no rollout or backward on weights that have moved on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import precgraph
from precgraph import NonFiniteError, StaleWeightsError
from tests.families import CAUSAL_LMS, VOCABULARY, causal_lm

IDS = torch.randint(0, VOCABULARY, (1, 23), generator=torch.Generator().manual_seed(4))


def compiled_pair(seed: int = 0, *, checked: bool = False, family: str = "qwen2") -> tuple[Any, Any]:
    actor = precgraph.compile(causal_lm(family, seed), "train", checked=checked)
    return actor, precgraph.compile(actor, "infer")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS).logits
    return out


def fresh_logits(actor: Any) -> Tensor:
    """Those of a model compiled from nothing on the same weights."""
    model = causal_lm(actor.config.model_type, seed=9)
    model.load_state_dict(actor.state_dict())
    return logits(precgraph.compile(model, "infer"))


def backward(actor: Any) -> None:
    actor(IDS, labels=IDS).loss.backward()


# ---------------------------------------------------------------------------------------------- updates


@torch.no_grad()
@pytest.mark.parametrize("family", CAUSAL_LMS)
def test_an_in_place_write_and_a_sync_equal_a_new_model(family: str) -> None:
    """Every kind of weight, those that packs are made from and those that are read as they are."""
    actor, rollout = compiled_pair(family=family)
    before = logits(rollout)
    other = dict(causal_lm(family, seed=1).named_parameters())
    for name, parameter in actor.named_parameters():
        parameter.copy_(other[name])
        with pytest.raises(StaleWeightsError, match=r"call actor\.sync\(\)"):
            rollout(IDS)
    assert actor.sync() == 2
    after = logits(rollout)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh_logits(actor))
    assert torch.equal(after, logits(actor))


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
def test_optimizer_steps_are_noticed(kind: str) -> None:
    """Also those, like the fused one, that bump no version counter."""
    actor, rollout = compiled_pair()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2, foreach=kind == "foreach", fused=kind == "fused")
    before = logits(rollout)
    backward(actor)
    optimizer.step()
    with pytest.raises(StaleWeightsError):
        rollout(IDS)
    with pytest.raises(StaleWeightsError):
        precgraph.token_logprobs(rollout, IDS)
    trained = logits(actor)
    assert not torch.equal(trained, before)
    assert torch.equal(trained, fresh_logits(actor)), "a training forward always runs on the current masters"
    actor.sync()
    assert torch.equal(logits(rollout), trained)


def test_a_step_on_other_parameters_is_not_ours() -> None:
    actor, rollout = compiled_pair()
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.AdamW([other]).step()
    assert not actor.precgraph.store.stale
    rollout(IDS)


@torch.no_grad()
@pytest.mark.parametrize("write", ["add", "copy", "assign"])
def test_data_writes_are_noticed_in_checked_mode(write: str) -> None:
    actor, rollout = compiled_pair(checked=True)
    weight = actor.model.layers[1].mlp.down_proj.weight
    if write == "add":
        weight.data.add_(0.25)
    elif write == "copy":
        weight.data.copy_(weight.data.flip(0))
    else:
        weight.data = weight.data * 2
    with pytest.raises(StaleWeightsError):
        rollout(IDS)
    actor.sync()
    assert torch.equal(logits(rollout), fresh_logits(actor))


@torch.no_grad()
def test_checking_can_begin_with_the_rollout() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train")
    rollout = precgraph.compile(actor, "infer", checked=True)
    rollout(IDS)
    actor.model.norm.weight.data.mul_(2)
    with pytest.raises(StaleWeightsError):
        rollout(IDS)


def test_zero_gradients_change_no_bit() -> None:
    """A step of size zero still makes the store stale: only the bytes say that nothing changed."""
    actor, rollout = compiled_pair()
    before = logits(rollout)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.0)
    backward(actor)
    optimizer.step()
    actor.sync()
    assert torch.equal(logits(rollout), before)


@torch.no_grad()
def test_storage_never_moves() -> None:
    actor, rollout = compiled_pair(family="llama")
    store = actor.precgraph.store

    def addresses() -> dict[str, int]:
        return {f"{key}.{n}": t.data_ptr() for key, p in store.packs.items() for n, t in p.tensors().items()}

    before, views = addresses(), [p.untyped_storage().data_ptr() for p in actor.parameters()]
    assert len(before) > 10
    for version in (2, 3, 4):
        for parameter in actor.parameters():
            parameter.mul_(1.01)
        assert actor.sync() == store.version == version
        assert addresses() == before
    assert views == [p.untyped_storage().data_ptr() for p in actor.parameters()]
    assert torch.equal(logits(rollout), fresh_logits(actor))


@torch.no_grad()
def test_weights_are_packed_once_for_both_programs_and_uses() -> None:
    actor, _ = compiled_pair(family="llama")
    paths = [str(key) for key in actor.precgraph.store.packs]
    assert len(paths) == len(set(paths)) == 2 * 7 + 1, "seven linears a layer, and the tied embedding as lm_head"
    assert actor.model.embed_tokens.weight.dtype == torch.bfloat16


# ------------------------------------------------------------------------------- backward on other weights


@pytest.mark.parametrize("checkpoint", [False, True])
def test_backward_after_a_sync_is_refused(checkpoint: bool) -> None:
    actor, _ = compiled_pair()
    if checkpoint:
        actor.gradient_checkpointing_enable()
    loss = actor(IDS, labels=IDS).loss
    actor.sync()
    with pytest.raises(StaleWeightsError, match=r"backward\(\) before actor\.sync\(\)"):
        loss.backward()


@pytest.mark.parametrize("fused", [False, True])
def test_backward_after_a_step_is_refused(fused: bool) -> None:
    """Old codes and new norm weights would make a gradient of no model at all."""
    actor, _ = compiled_pair()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2, fused=fused)
    backward(actor)
    loss = actor(IDS, labels=IDS).loss
    optimizer.step()
    with pytest.raises(StaleWeightsError, match=r"norm\.weight.*before optimizer\.step\(\)"):
        loss.backward()


def test_an_optimizer_may_step_during_the_backward() -> None:
    """Each parameter is updated as soon as its gradient is there, which no later segment sees."""
    actor, rollout = compiled_pair()
    twin, _ = compiled_pair()
    for parameter in actor.parameters():
        own = torch.optim.SGD([parameter], lr=0.5)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    backward(actor)
    together = torch.optim.SGD(twin.parameters(), lr=0.5)
    backward(twin)
    together.step()
    assert all(torch.equal(a, b) for a, b in zip(actor.parameters(), twin.parameters(), strict=True))
    actor.sync()
    assert torch.equal(logits(rollout), logits(twin))


# --------------------------------------------------------------------------------------------- non-finite


BAD = {
    "model.layers.1.mlp.up_proj.weight": "nan", "model.layers.0.self_attn.q_proj.bias": "inf",
    "model.norm.weight": "nan", "model.embed_tokens.weight": "-inf", "lm_head.weight": "inf",
}  # fmt: skip


@torch.no_grad()
def test_a_non_finite_weight_is_named() -> None:
    """Packed or not, quantised or not, when compiling and when syncing."""
    actor, rollout = compiled_pair()
    for path, value in BAD.items():
        place = actor.get_parameter(path).flatten()[5:6]
        good = place.clone()
        place.fill_(float(value))
        with pytest.raises(NonFiniteError, match=path):
            actor.sync()
        with pytest.raises(StaleWeightsError):
            rollout(IDS)
        place.copy_(good)
    actor.sync()
    assert torch.equal(logits(rollout), fresh_logits(actor))
    for path in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        model = causal_lm("qwen2")
        model.get_parameter(path).flatten()[5] = float(BAD[path])
        with pytest.raises(NonFiniteError, match=path):
            precgraph.compile(model)


def test_checked_mode_names_the_module_that_overflows() -> None:
    """Weights are finite, their product is not."""
    actor = precgraph.compile(causal_lm("qwen2"), "train", checked=True)
    with torch.no_grad():
        actor.model.layers[1].mlp.up_proj.weight.fill_(1e38)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj"):
        actor(IDS)


def test_checked_mode_names_the_module_of_a_bad_gradient() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train", checked=True)
    bad = torch.zeros(1, 23, VOCABULARY)
    bad[0, 3, 7] = float("nan")
    with pytest.raises(NonFiniteError, match=r"lm_head"):
        actor(IDS).logits.backward(bad)
