"""Weights on the wire, without an engine: fingerprints, what a policy consists of, stores that hold no masters."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import precgraph
from precgraph import Recipe
from precgraph.errors import InputError, StaleWeightsError, SyncError
from precgraph.loading import load_config_model, load_model
from precgraph.runtime.compiled import build_lowered
from precgraph.runtime.contexts import PackedContext
from precgraph.runtime.runner import Runner
from precgraph.runtime.vllm.sync import Entry, Manifest, Receiver, describe, fingerprint, policy, save_weights
from precgraph.runtime.vllm.weights import RolloutStore, wire
from precgraph.skeleton import skeleton
from precgraph.trace import trace
from tests.families import CAUSAL_LMS, causal_lm, config


def oracle(raw: bytes, block: int = 1 << 21) -> int:
    """The fingerprint's formula in Python's integers."""
    golden, limit = 0x9E3779B97F4A7C15, 1 << 64

    def key(n: int) -> int:
        x = (n + 1) * golden % limit
        x = (x ^ x >> 29) * golden % limit
        return (x ^ x >> 29) | 1

    raw += bytes(-len(raw) % 8)
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    return sum(key(i // block) * key(i % block) * (w ^ w >> 29) for i, w in enumerate(words)) % limit


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, 4099])
def test_fingerprint_is_its_formula(count: int) -> None:
    data = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    assert fingerprint(torch.from_numpy(data)) == oracle(data.tobytes())
    padded = torch.from_numpy(np.concatenate([data[:1], data]))
    assert fingerprint(padded[1:]) == oracle(data.tobytes()), "a view at an odd address"


def test_fingerprint_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from precgraph.runtime.vllm import sync

    monkeypatch.setattr(sync, "_BLOCK", 7)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert fingerprint(x) == oracle(x.numpy().tobytes(), 7)
    y = x.clone()
    y[:14], y[14:28] = x[14:28], x[:14]
    assert fingerprint(y) == oracle(y.numpy().tobytes(), 7) != fingerprint(x)


def test_fingerprint_sees_every_bit_and_every_exchange() -> None:
    x = torch.randint(0, 256, (256,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {fingerprint(x)}
    for i in range(256):
        for bit in range(8):
            y = x.clone()
            y[i] ^= 1 << bit
            seen.add(fingerprint(y))
    for a in range(0, 256, 64):
        for b in range(a + 64, 256, 64):
            y = x.clone()
            y[a : a + 64], y[b : b + 64] = x[b : b + 64].clone(), x[a : a + 64].clone()
            seen.add(fingerprint(y))
    assert len(seen) == 1 + 2048 + 6


@pytest.mark.parametrize("largest", [1, 255, 2**40, 2**62])
def test_fingerprint_sees_exchanged_blocks_of_equal_sums(largest: int) -> None:
    """Blocks of the same words in another order: weights that grow evenly with the place take them for each other."""
    words = torch.randint(0, largest + 1, (64,), generator=torch.Generator().manual_seed(0))
    words[0], words[1] = 0, 1
    blocks = [words, words.roll(1), words.flip(0), words.sort().values]
    orders = [torch.cat([blocks[k] for k in order]) for order in itertools.permutations(range(4))]
    assert len({fingerprint(x) for x in orders}) == 24


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_fingerprint_sees_signs_and_inverted_words(dtype: torch.dtype) -> None:
    """Errors that touch the highest bits alone, in two places or in all."""
    words = torch.randint(0, 2**62, (64,), generator=torch.Generator().manual_seed(0))
    width = 8 * dtype.itemsize
    signs = sum(1 << bit for bit in range(width - 1, 64, width)) - (1 << 64)
    made = [words, words ^ signs, ~words]
    for i, j in itertools.combinations_with_replacement(range(64), 2):
        for flipped in (signs, -1):
            y = words.clone()
            y[[i, j]] ^= flipped
            made.append(y)
    assert len({fingerprint(x) for x in made}) == 3 + 2 * 64 * 65 // 2


def rollout_store(name: str, recipe: Recipe, **changes: Any) -> RolloutStore:
    traced = trace(skeleton(config(name, **changes)))
    program = build_lowered(traced.graph, "infer", recipe, "auto", torch.device("cpu"))
    return RolloutStore(traced, program, torch.device("cpu"))


def logits(store: RolloutStore, ids: Tensor) -> Tensor:
    """What the rollout program gives on a store, one sequence."""
    runner = Runner(store.program, store)
    values = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    with torch.no_grad():
        result: Tensor = runner.run({**values, "context": PackedContext((0, ids.shape[1]))}, store.program.outputs)[0]
    return result[0]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(_bytes(a[n]), _bytes(b[n])) for n in a)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("name", CAUSAL_LMS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_becomes_the_trainers_policy(name: str, tied: bool) -> None:
    """From a state_dict in any order, without one master that only a quantised linear would read."""
    model = causal_lm(name, tie_word_embeddings=tied)
    actor = precgraph.compile(model, "train")
    manifest, tensors = policy(actor)
    store = rollout_store(name, Recipe.jet_rl(), tie_word_embeddings=tied)
    with pytest.raises(StaleWeightsError, match="no weights were loaded yet"):
        store.require_fresh()
    weights = list(model.state_dict().items())
    store.load(reversed(weights))
    store.require_fresh()
    assert store.program.graph.digest() == manifest.digest
    mine = wire(store, store.program)
    assert equal(mine, tensors) and describe(mine, 1, manifest.digest) == manifest
    assert equal(wire(*_both(precgraph.compile(actor, "infer"))), tensors)
    meta = {p for p, t in store.masters.items() if t.is_meta}
    assert meta == {n.removesuffix("_scale_inv") for n in tensors if n.endswith("_scale_inv")} and len(meta) == 14
    places = store.addresses()
    store.load(weights)
    assert store.addresses() == places and equal(wire(store, store.program), tensors)


def test_a_full_disk_leaves_the_weights_file_as_it_was(tmp_path: Path, full_disk: Any) -> None:
    actor, path = precgraph.compile(causal_lm("llama"), "train"), tmp_path / "w.safetensors"
    save_weights(actor, path)
    before = path.read_bytes()
    with full_disk(4096), pytest.raises(SyncError, match=r"w\.safetensors: cannot be written: .*File too large"):
        save_weights(actor, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_weights_are_saved_where_a_file_can_be(tmp_path: Path) -> None:
    actor = precgraph.compile(causal_lm("llama"), "train")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for path in ("", None, 7, b"w", "a\0b"):
        with pytest.raises(InputError, match="is not the path of a file; pass one as text or as a Path$"):
            save_weights(actor, path)  # type: ignore[arg-type]
    for path, message in (
        (tmp_path, "is a directory; name a file of weights"),
        (tmp_path / "pipe", "is no regular file; name a file of weights"),
    ):
        with pytest.raises(InputError, match=f"^{path}: {message}"):
            save_weights(actor, path)
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(InputError, match=f"^{folder}: there is no such directory; create it"):
            save_weights(actor, folder / "w.safetensors")
    with pytest.raises(SyncError, match="w: cannot be written: .*; make room, or save where you may write"):
        save_weights(actor, tmp_path / ("w" * 250))  # a name that leaves no room for that of the partial file
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "mine"


def _both(model: Any) -> tuple[Any, Any]:
    return model.precgraph.store, model.precgraph.runner.program


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_installing_copies_bytes(family: str) -> None:
    """What arrives is installed as it is, not quantised again: codes that no weight would give survive."""
    store = rollout_store(family, Recipe.jet_rl())
    store.load(causal_lm(family).state_dict().items())
    actor = precgraph.compile(causal_lm(family, seed=5), "train")
    _, tensors = policy(actor)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = actor(input_ids=ids).logits
    places = store.addresses()
    store.install(tensors, 8)
    assert torch.equal(logits(store, ids), wanted[0])
    tensors = {n: t.clone() for n, t in tensors.items()}
    for name in tensors:
        if name.endswith("_scale_inv"):
            tensors[name] *= 1.37
    store.install(tensors, 9)
    assert store.version == 9 and store.addresses() == places
    assert equal(wire(store, store.program), tensors)


def test_a_policy_is_the_stores_own_memory_padded_columns_too() -> None:
    actor = precgraph.compile(causal_lm("llama"), "train")
    store = actor.precgraph.store
    own = [*store.masters.values(), *(t for pack in store.packs.values() for t in pack.tensors().values())]
    places = {t.untyped_storage().data_ptr() for t in own}
    _, tensors = policy(actor)
    assert {t.untyped_storage().data_ptr() for t in tensors.values()} <= places
    assert not all(t.is_contiguous() for t in tensors.values())


def test_skeletons_have_the_models_own_buffers() -> None:
    model, bones = causal_lm("llama"), skeleton(config("llama"))
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(t, buffers[n]) for n, t in bones.named_buffers())
    assert bones.lm_head.weight is bones.model.embed_tokens.weight  # type: ignore[union-attr]
    assert {n: p.shape for n, p in bones.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    torch.nn.Linear(3, 3)  # what was patched for the construction is back
    assert not torch.nn.Linear(3, 3).weight.is_meta


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_buffer_of_the_checkpoint_is_loaded_and_travels(family: str, tmp_path: Path) -> None:
    """A router's bias: fp32 as transformers loads it, from a file in bf16 too, and no part of the digest."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model = causal_lm(family)
    bias = model.state_dict()[name]
    assert bias.dtype == torch.float32 and bool(bias.any())
    actor = precgraph.compile(model, "train")
    manifest, tensors = policy(actor)
    store = rollout_store(family, Recipe.jet_rl())
    weights = dict(actor.state_dict())
    store.load(weights.items())
    assert store.program.graph.digest() == manifest.digest
    assert torch.equal(tensors[name], bias) and equal(wire(store, store.program), tensors)
    rounded = bias.bfloat16()
    store.load({**weights, name: rounded}.items())
    assert torch.equal(store.masters[name], rounded.float()) and not torch.equal(store.masters[name], bias)
    store.install(tensors, 2)
    assert torch.equal(store.masters[name], bias)
    with pytest.raises(InputError, match="lacks 1 of") as caught:
        store.load((n, t) for n, t in weights.items() if n != name)
    assert caught.value.path == name
    bias += 1.0
    assert actor.precgraph.store.stale  # type: ignore[union-attr, operator]
    actor.sync()  # type: ignore[operator]
    changed, tensors = policy(actor)
    assert (changed.digest, changed.version) == (manifest.digest, manifest.version + 1)
    assert changed.tensors[name].fingerprint != manifest.tensors[name].fingerprint


def test_skeletons_have_the_dtypes_of_from_pretrained(tmp_path: Path) -> None:
    causal_lm("deepseek_v3").save_pretrained(tmp_path)
    loaded, bones = load_model(tmp_path), load_config_model(tmp_path)
    assert {n: t.dtype for n, t in bones.state_dict().items()} == {n: t.dtype for n, t in loaded.state_dict().items()}
    assert {p.device.type for p in bones.parameters()} == {"meta"}
    assert {b.device.type for b in bones.buffers()} == {"cpu"}
    trace(bones)
    assert {p.device.type for p in bones.parameters()} == {"meta"}, "tracing leaves the model as it was"


@pytest.mark.parametrize("fault", ["shape", "dtype", "name", "missing"])
def test_checkpoints_that_do_not_fit(fault: str) -> None:
    weights = dict(causal_lm("qwen2").state_dict())
    name = "model.layers.0.self_attn.q_proj.bias"
    if fault == "shape":
        weights[name] = weights[name][:-1]
    elif fault == "dtype":
        weights[name] = weights[name].float()
    elif fault == "name":
        weights["module." + name] = weights.pop(name)
    else:
        del weights[name]
    store = rollout_store("qwen2", Recipe.jet_rl())
    messages = {"shape": r"bfloat16\[127\]", "dtype": r"float32\[128\]", "name": "no parameter", "missing": "lacks 1"}
    with pytest.raises(InputError, match=messages[fault]) as caught:
        store.load(weights.items())
    assert (caught.value.path or "").endswith(name)
    with pytest.raises(StaleWeightsError, match="broke off"):
        store.require_fresh()
    store.load(causal_lm("qwen2").state_dict().items())
    store.require_fresh()


def test_the_bf16_recipe_has_no_scales() -> None:
    model = causal_lm("qwen3")
    _, tensors = policy(precgraph.compile(model, "train", Recipe.bf16()))
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.float32}
    assert [n for n, t in tensors.items() if t.dtype == torch.float32] == ["model.rotary_emb.inv_freq"]
    store = rollout_store("qwen3", Recipe.bf16())
    store.load(model.state_dict().items())
    assert equal(wire(store, store.program), tensors)


# --------------------------------------------------------------------------------------- protocol


def small() -> tuple[dict[str, Tensor], Manifest, Receiver]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    return tensors, describe(tensors, 3, "d"), Receiver("d", tensors)


def test_parts_in_any_order_and_again() -> None:
    tensors, manifest, receiver = small()
    receiver.begin(manifest, 2)
    receiver.update({"b": tensors["b"]})
    with pytest.raises(SyncError, match=r"^a: 1 of 2 tensors did not arrive"):
        receiver.finish()
    receiver.update({"a": tensors["a"]})
    receiver.update({"a": tensors["a"]})
    assert receiver.finish()[1].keys() == {"a", "b"}
    receiver.begin(manifest, 2)
    assert not receiver.staged, "an update that was not finished is dropped by the next"


def test_a_part_with_wrong_tensors_names_the_first_and_stages_none() -> None:
    tensors, manifest, receiver = small()
    receiver.begin(manifest, 2)
    with pytest.raises(SyncError, match="^b: the tensor is not the one"):
        receiver.update({"b": tensors["b"] + 1, "a": tensors["a"] + 1})
    with pytest.raises(SyncError, match="^c: the part holds a tensor that its manifest does not name"):
        receiver.update({"a": tensors["a"], "c": tensors["a"]})
    assert not receiver.staged


def test_manifests_survive_json_and_nothing_else() -> None:
    _, manifest, _ = small()
    data = manifest.to_json()
    assert Manifest.from_json(data) == manifest
    for broken in ({**data, "checksum": "0"}, {**data, "tensors": {}}, {**data, "tensors": [1]}, [], {"protocol": 2}):
        with pytest.raises(SyncError, match="malformed|own checksum"):
            Manifest.from_json(broken)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("version", "1e400"), ("version", "true"), ("version", "-5"), ("version", "3.0"), ("version", '"3"'),
        ("digest", "null"), ("digest", "7"), ("checksum", "null"), ("tensors", "null"), ("protocol", "2.0"),
    ],
)  # fmt: skip
def test_a_manifest_of_other_types_is_malformed(key: str, text: str) -> None:
    data = json.loads(json.dumps(small()[1].to_json()))
    with pytest.raises(SyncError, match=rf"manifest is malformed: .*{key} is "):
        Manifest.from_json({**data, key: json.loads(text)})


@pytest.mark.parametrize(
    ("key", "value"), [("fingerprint", 1e400), ("fingerprint", True), ("shape", "23"), ("dtype", 1)]
)
def test_an_entry_of_other_types_is_malformed(key: str, value: Any) -> None:
    data = json.loads(json.dumps(small()[1].to_json()))
    data["tensors"]["a"][key] = value
    with pytest.raises(SyncError, match=f"manifest is malformed: .*{key} is "):
        Manifest.from_json(data)


def test_updates_out_of_order() -> None:
    tensors, manifest, receiver = small()
    for call in (lambda: receiver.update(tensors), receiver.finish):
        with pytest.raises(SyncError, match="no update has begun"):
            call()
    for entries, message in (
        ({"a": manifest.tensors["a"]}, "^b: the update lacks 1"),
        ({**manifest.tensors, "c": Entry("bfloat16", (1,), 0)}, "^c: the update has 1 tensors that"),
        ({**manifest.tensors, "b": Entry("float32", (4,), 0)}, r"brings float32\[4\], the program reads bfloat16\[4\]"),
    ):
        with pytest.raises(SyncError, match=message):
            receiver.begin(Manifest(3, "d", entries), 2)
