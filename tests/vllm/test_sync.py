"""New weights reach the engine by each route that a CPU has, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import precgraph
from precgraph import Recipe
from precgraph.errors import DigestError, InputError, PrecGraphError, StaleWeightsError, SyncError
from precgraph.runtime.sampling import SamplingParams
from precgraph.runtime.vllm import ipc
from precgraph.runtime.vllm.sync import describe, policy
from tests.vllm.conftest import largest_difference, train_step

pytestmark = pytest.mark.vllm
Make = Callable[..., Any]
PARAMS = SamplingParams(max_tokens=12, temperature=0.7)
# Heads wider than the hidden state; tied weights, with projections that straddle blocks.
FAMILIES = ("qwen3", "llama")


def seen_by_runner(fixture: str) -> pytest.MarkDecorator:
    """Both families, and one of them on both runners: what an update leaves of the key cache is a runner's part."""
    first, *others = FAMILIES
    return pytest.mark.parametrize(fixture, [pytest.param(first, marks=pytest.mark.runner), *others], indirect=True)


# What is refused, or breaks off, before a weight's shape matters.
ANY_FAMILY = pytest.mark.parametrize("apart", FAMILIES[:1], indirect=True)


def addresses(llm: Any) -> dict[str, int]:
    found: dict[str, int] = llm.engine.collective_rpc("precgraph_addresses")[0]["value"]
    return found


def require_served_anew(actor: Any, llm: Any, prompts: list[list[int]], version: int) -> None:
    """The trainer's bits under its version, and no key of the older weights, of which there were; then keys again."""
    samples = llm.generate(prompts[:7], PARAMS)
    assert largest_difference(actor, samples, 0.7) == 0.0
    assert [s.cached_tokens for s in samples] == [0] * 7, "keys of older weights were reused"
    assert {s.weights_version for s in samples} == {version} == {llm.state()["version"]}
    again = llm.generate(prompts[4:7], PARAMS)
    assert all(s.cached_tokens > 0 for s in again) and largest_difference(actor, again, 0.7) == 0.0


@pytest.fixture(scope="module", params=FAMILIES)
def shared(request: pytest.FixtureRequest, checkpoint: Make, start: Make) -> tuple[Any, Any]:
    """An engine on the trainer's own store."""
    model, path = checkpoint(request.param)
    actor = precgraph.compile(model, "train")
    return actor, start(path, actor=actor)


@pytest.fixture(scope="module", params=FAMILIES)
def apart(request: pytest.FixtureRequest, checkpoint: Make, start: Make) -> tuple[Any, Any]:
    """An engine with weights of its own."""
    model, path = checkpoint(request.param)
    actor = precgraph.compile(model, "train")
    return actor, start(path, digest=actor.precgraph.graph.digest())


@seen_by_runner("apart")
def test_vllms_own_loading_is_refused(apart: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """It would put the checkpoint's weights in the place of the trainer's, under their version and on their keys."""
    actor, llm = apart
    train_step(actor, 0)
    actor.sync()
    llm.sync(actor)
    before = llm.state()
    llm.generate(prompts, PARAMS)
    with pytest.raises(SyncError, match=f"would pass for version {before['version']}.*; llm.sync"):
        llm.engine.collective_rpc("reload_weights")
    assert llm.state() == before
    assert largest_difference(actor, llm.generate(prompts, PARAMS), 0.7) == 0.0


def test_a_truncated_checkpoint(checkpoint: Make, start: Make) -> None:
    path = Path(checkpoint("llama")[1])
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=f"{path}: the checkpoint is truncated or damaged.*; restore it"):
        start(path)


# ----------------------------------------------------------------------------------- one process


@seen_by_runner("shared")
def test_the_engine_runs_on_the_trainers_store(shared: tuple[Any, Any], prompts: list[list[int]]) -> None:
    actor, llm = shared
    model = llm.engine.apply_model(lambda m: m)[0]
    assert model.compiled.store is actor.precgraph.store
    before = addresses(llm)
    for seed in range(3):
        assert sum(s.cached_tokens for s in llm.generate(prompts, PARAMS)) > 0  # the last two prompts, in one call
        train_step(actor, seed)
        with pytest.raises(StaleWeightsError, match="actor.sync()"):
            llm.generate(prompts, PARAMS)
        require_served_anew(actor, llm, prompts, actor.sync())
    assert addresses(llm) == before


@seen_by_runner("shared")
def test_old_keys_would_have_shown(shared: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """The test above can fail: with the prefix cache kept, rescoring differs."""
    actor, llm = shared
    llm.generate(prompts, PARAMS)
    train_step(actor, 9)
    llm._served = actor.sync()
    samples = llm.generate(prompts, PARAMS)
    assert sum(s.cached_tokens for s in samples) > 500 and largest_difference(actor, samples, 0.7) > 0.0
    assert llm.sync() == actor.precgraph.store.version
    assert largest_difference(actor, llm.generate(prompts, PARAMS), 0.7) == 0.0


@pytest.mark.parametrize("shared", FAMILIES[:1], indirect=True)
def test_other_models_are_refused(shared: tuple[Any, Any], checkpoint: Callable[..., Any]) -> None:
    with pytest.raises(SyncError, match="runs on its actor's weights"):
        shared[1].sync(precgraph.compile(checkpoint("qwen2")[0], "train"))


# ------------------------------------------------------------------------------- weights of its own


@pytest.fixture
def played_ipc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA IPC without a GPU: a handle is the number of a tensor, which the worker finds by it. Names as they open."""
    tensors: list[torch.Tensor] = []
    opened: list[str] = []

    def handle(name: str, tensor: torch.Tensor) -> list[Any]:
        tensors.append(tensor)
        return [len(tensors) - 1, *[None] * 14]

    def tensor_of(name: str, handle: list[Any]) -> torch.Tensor:
        opened.append(name)
        return tensors[handle[0]]

    monkeypatch.setattr(ipc, "_handle", handle)
    monkeypatch.setattr(ipc, "_open", tensor_of)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return opened


@seen_by_runner("apart")
def test_each_route(apart: tuple[Any, Any], prompts: list[list[int]], tmp_path: Path, played_ipc: list[str]) -> None:
    """A path, a temporary file, IPC and IPC again: the bytes that the trainer runs on, at the addresses they had."""
    from precgraph.vllm import save_weights

    actor, llm = apart
    before = addresses(llm)
    llm.generate(prompts, PARAMS)
    for seed, route in enumerate(("path", "file", "ipc", "ipc")):
        train_step(actor, seed)
        version = actor.sync()
        manifest = save_weights(actor, tmp_path / "w.safetensors")
        assert (llm.sync(tmp_path / "w.safetensors") if route == "path" else llm.sync(actor, route=route)) == version
        assert llm.state() == {"digest": manifest.digest, "version": version, "checksum": manifest.checksum}
        require_served_anew(actor, llm, prompts, version)
    assert addresses(llm) == before
    assert sorted(played_ipc) == sorted(manifest.tensors), "the second update by IPC maps nothing again"
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


@ANY_FAMILY
def test_memory_that_changes_before_it_is_read_is_refused(
    apart: tuple[Any, Any], prompts: list[list[int]], played_ipc: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By IPC the engine reads the trainer's own, after the manifest was made; the old weights go on serving."""
    actor, llm = apart
    llm.sync(actor, route="file")
    params = SamplingParams(max_tokens=6, seed=1)
    before, state = llm.generate(prompts[:3], params), llm.state()
    codes = policy(actor)[1]["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: codes[5, 7].bitwise_xor_(1))
    with pytest.raises(SyncError, match=r"^model.layers.0.mlp.down_proj.weight: .*not the one that the manifest names"):
        llm.sync(actor, route="ipc")
    codes[5, 7] ^= 1
    assert llm.state() == state
    after = llm.generate(prompts[:3], params)
    assert [(s.token_ids, s.logprobs) for s in after] == [(s.token_ids, s.logprobs) for s in before]


# ------------------------------------------------------------------------------------------ files


def test_a_file_holds_fp8_bytes_as_other_stacks_store_them(apart: tuple[Any, Any], tmp_path: Path) -> None:
    from precgraph.vllm import save_weights

    actor, _ = apart
    actor.sync()
    save_weights(actor, tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    master = actor.model.layers[0].mlp.down_proj.weight
    name = "model.layers.0.mlp.down_proj.weight"
    codes, scales = found[name], found[name + "_scale_inv"]
    rows, columns = master.shape
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == master.shape
    assert scales.dtype == torch.float32 and scales.shape == (-(-rows // 128), -(-columns // 128))
    block = master.detach()[:128, :128].float()
    assert torch.equal(scales[0, 0], block.abs().max() / 448)
    assert torch.equal(codes[:128, :128].float(), (block / scales[0, 0]).to(torch.float8_e4m3fn).float())
    assert {t.dtype for t in found.values()} == {torch.float8_e4m3fn, torch.float32, torch.bfloat16}


def test_shards_arrive_in_any_order(apart: tuple[Any, Any], prompts: list[list[int]], tmp_path: Path) -> None:
    from precgraph.vllm import save_weights

    actor, llm = apart
    train_step(actor, 5)
    actor.sync()
    save_weights(actor, tmp_path / "w.safetensors")
    tensors, metadata = _read(tmp_path / "w.safetensors")
    names = sorted(tensors, reverse=True)
    parts = [tmp_path / f"part{i}.safetensors" for i in range(3)]
    for i, part in enumerate(parts):
        save_file({n: tensors[n] for n in names[i::3]}, part, metadata=metadata)
    served = llm.state()
    with pytest.raises(SyncError, match=r"/part0.safetensors and 1 more: \S+: \d+ of \d+ tensors did not arrive"):
        llm.sync(parts[:2])
    assert llm.state() == served
    llm.sync(parts)
    assert largest_difference(actor, llm.generate(prompts[:4], PARAMS), 0.7) == 0.0


# ----------------------------------------------------------------------------------------- faults


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return load_file(path), file.metadata()


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _truncate_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(bytes(data))


def _rewrite(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors, metadata = _read(path)
        manifest = json.loads(metadata["precgraph"])
        change(tensors, manifest)
        save_file(tensors, path, metadata={**metadata, "precgraph": json.dumps(manifest)})

    return apply


def _drop(tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
    tensors.pop("model.norm.weight")


def _lie(tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model.norm.weight"]["fingerprint"] += 1


def _protocol(tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
    manifest["protocol"] = 0


def _no_manifest(path: Path) -> None:
    save_file(load_file(path), path)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "truncated or damaged"),
    "truncated header": (_truncate_header, "truncated or damaged"),
    "absent": (Path.unlink, "no such file"),
    "one bit": (_flip_bit, "is not the one that the manifest names"),
    "a tensor is missing": (_rewrite(_drop), "1 of .* did not arrive"),
    "manifest altered": (_rewrite(_lie), "disagrees with its own checksum"),
    "protocol": (_rewrite(_protocol), "speaks protocol 0"),
    "no manifest": (_no_manifest, "no manifest"),
}


@ANY_FAMILY
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_refused(fault: str, apart: tuple[Any, Any], prompts: list[list[int]], tmp_path: Path) -> None:
    """And the old weights go on serving, bit for bit."""
    from precgraph.vllm import save_weights

    actor, llm = apart
    llm.sync(actor) if actor.sync() else None
    path, params = tmp_path / "w.safetensors", SamplingParams(max_tokens=6, seed=1)
    before, state = llm.generate(prompts[:3], params), llm.state()
    other = precgraph.compile(_changed(actor), "train")
    other.precgraph.store.version = actor.precgraph.store.version + 1
    save_weights(other, path)
    damage, message = FAULTS[fault]
    damage(path)
    with pytest.raises(SyncError, match=rf"^{path}: (\S+: )?.*{message}"):
        llm.sync(path)
    assert llm.state() == state
    after = llm.generate(prompts[:3], params)
    assert [(s.token_ids, s.logprobs) for s in after] == [(s.token_ids, s.logprobs) for s in before]


def _cut(path: Path) -> None:
    os.truncate(path, 5000)


def _overwrite(path: Path) -> None:
    """In place: a map of the file has the new bytes."""
    with path.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(4000))


@ANY_FAMILY
@pytest.mark.parametrize("change", [_cut, _overwrite, Path.unlink])
def test_what_was_checked_is_installed_whatever_becomes_of_the_file(
    change: Callable[[Path], None], apart: tuple[Any, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    from precgraph.vllm import save_weights

    actor, llm = apart
    train_step(actor, 12)
    actor.sync()
    path = tmp_path / "w.safetensors"
    manifest = save_weights(actor, path)
    llm._call("precgraph_begin", manifest.to_json())
    llm._call("precgraph_update_file", str(path))
    change(path)
    assert llm._call("precgraph_finish") == [manifest.checksum]
    save_weights(actor, path)
    llm.sync(path)  # the engine's own account of the version, which the three calls pass by
    assert largest_difference(actor, llm.generate(prompts[:3], PARAMS), 0.7) == 0.0


def _changed(actor: Any, **changes: Any) -> Any:
    """A model like the actor's with other weights."""
    config = type(actor.config)(**{**actor.config.to_dict(), **changes})
    model = type(actor).own_class._from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    return model.eval()


def test_another_programs_weights_are_refused(apart: tuple[Any, Any], tmp_path: Path) -> None:
    from precgraph.vllm import save_weights

    actor, llm = apart
    state = llm.state()
    for other in (
        precgraph.compile(_changed(actor), "train", Recipe.bf16()),
        precgraph.compile(_changed(actor, intermediate_size=384), "train"),
    ):
        with pytest.raises(DigestError, match="the engine runs program"):
            llm.sync(other)
        save_weights(other, tmp_path / "w.safetensors")
        with pytest.raises(DigestError, match="the update is for program"):
            llm.sync(tmp_path / "w.safetensors")
    assert llm.state() == state


def test_another_shape_under_the_right_digest_is_refused(apart: tuple[Any, Any], tmp_path: Path) -> None:
    """A manifest that lies about its program still cannot bring a tensor of another shape."""
    actor, llm = apart
    manifest, found = policy(actor)
    tensors = {n: t.contiguous() for n, t in found.items()}
    tensors["model.norm.weight"] = torch.ones(7, dtype=torch.bfloat16)
    forged, served = describe(tensors, manifest.version + 1, manifest.digest), llm.state()
    save_file(tensors, tmp_path / "w.safetensors", metadata={"precgraph": json.dumps(forged.to_json())})
    with pytest.raises(SyncError, match=r"/w\.safetensors: model.norm.weight: the update brings bfloat16\[7\]"):
        llm.sync(tmp_path / "w.safetensors")
    assert llm.state() == served


@ANY_FAMILY
def test_a_worker_with_other_weights_than_the_first(apart: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, call = apart[1], apart[1]._call
    monkeypatch.setattr(llm, "_call", lambda *args: [*call(*args), {**call(*args)[0], "checksum": 7}])
    with pytest.raises(SyncError, match="the workers differ in their weights; sync again"):
        llm.state()


@ANY_FAMILY
def test_older_weights_are_refused(apart: tuple[Any, Any], tmp_path: Path) -> None:
    from precgraph.vllm import save_weights

    actor, llm = apart
    save_weights(actor, tmp_path / "old.safetensors")
    train_step(actor, 7)
    actor.sync()
    llm.sync(actor)
    served = llm.state()
    with pytest.raises(SyncError, match="is being served"):
        llm.sync(tmp_path / "old.safetensors")
    assert llm.state() == served


@ANY_FAMILY
def test_weights_before_sync_are_refused(apart: tuple[Any, Any]) -> None:
    actor, llm = apart
    train_step(actor, 8)
    with pytest.raises(StaleWeightsError, match="actor.sync()"):
        llm.sync(actor)
    actor.sync()


@ANY_FAMILY
def test_a_request_that_still_runs_is_in_no_updates_way(apart: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """Given to vLLM's engine directly: after the install it would be too late to refuse."""
    from vllm import SamplingParams as VllmParams

    actor, llm = apart
    front = llm.engine.llm_engine
    train_step(actor, 6)
    actor.sync()
    state = llm.state()
    front.add_request("x", {"prompt_token_ids": prompts[1]}, VllmParams(max_tokens=50))
    front.step()
    with pytest.raises(SyncError, match=r"^requests are running \(1\), .*; finish or abort them, then sync$"):
        llm.sync(actor)
    assert llm.state() == state
    front.abort_request(["x"])
    front.step()
    require_served_anew(actor, llm, prompts, llm.sync(actor))


@ANY_FAMILY
def test_an_interrupted_install_serves_nothing(
    apart: tuple[Any, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the checks, a copy that breaks off leaves a mixture: the engine must know."""
    from precgraph.runtime.vllm import weights

    actor, llm = apart
    install, count = weights.install_pack, [0]

    def breaks(*args: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise PrecGraphError("the machine went away")
        install(*args)

    train_step(actor, 4)
    actor.sync()
    monkeypatch.setattr(weights, "install_pack", breaks)
    with pytest.raises(PrecGraphError, match="went away"):
        llm.sync(actor)
    monkeypatch.undo()
    with pytest.raises(StaleWeightsError, match="not complete"):
        llm.generate(prompts[:1], PARAMS)
    assert llm.sync(actor) == actor.precgraph.store.version
    assert largest_difference(actor, llm.generate(prompts[:3], PARAMS), 0.7) == 0.0


@ANY_FAMILY
def test_a_route_that_does_not_exist(apart: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match="route must be"):
        apart[1].sync(apart[0], route="pigeon")
    with pytest.raises(InputError, match="nothing to sync from"):
        apart[1].sync()


@ANY_FAMILY
def test_what_is_no_source(apart: tuple[Any, Any], tmp_path: Path) -> None:
    """Nor what is no file, down to a pipe, of which a reader would wait for ever."""
    llm = apart[1]
    os.mkfifo(tmp_path / "pipe")
    state = llm.state()
    kinds: list[tuple[Any, str]] = [
        ([], "an empty list"), ((), "an empty list"), ({"w"}, "a set"), ((p for p in ["w"]), "a generator"),
        (b"w", "a bytes"), (7, "a int"), (torch.nn.Linear(2, 2), "a Linear"),
    ]  # fmt: skip
    for source, kind in kinds:
        with pytest.raises(InputError, match=f"^the source of a sync is {kind}; pass a compiled model, or the path"):
            llm.sync(source)
    for source in ("", [""], [None], [1], [b"w"], "a\0b"):
        with pytest.raises(InputError, match="is not the path of a file; pass one as text or as a Path$"):
            llm.sync(source)
    for source, what in (
        (tmp_path, "a directory"),
        ("/dev/null", "no regular file"),
        (tmp_path / "pipe", "no regular"),
    ):
        for each in (source, str(source), [source]):
            with pytest.raises(InputError, match=f"^{source}: is {what}"):
                llm.sync(each)
    assert llm.state() == state


@ANY_FAMILY
def test_a_route_where_none_is_taken(apart: tuple[Any, Any], tmp_path: Path) -> None:
    actor, llm = apart
    for route in ("file", "ipc", ""):
        with pytest.raises(InputError, match="^a route goes with a compiled model, to an engine without an actor"):
            llm.sync(tmp_path / "w.safetensors", route=route)
    with pytest.raises(InputError, match="^route must be 'ipc' or 'file', not ''"):
        llm.sync(actor, route="")


@pytest.mark.parametrize("shared", FAMILIES[:1], indirect=True)
def test_an_engine_on_its_actors_weights_takes_no_file_and_no_route(shared: tuple[Any, Any], tmp_path: Path) -> None:
    actor, llm = shared
    actor.sync()
    for source in (None, actor):
        for route in ("file", ""):
            with pytest.raises(InputError, match="^a route goes with a compiled model, to an engine without an actor"):
                llm.sync(source, route=route)
    for source in ("w.safetensors", tmp_path, [tmp_path], 7):
        with pytest.raises(InputError, match=r"its actor's weights, and reads no file; call sync\(\) without a source"):
            llm.sync(source)
    with pytest.raises(InputError, match=r"level 2 would discard the actor's weights; use sleep\(level=1\)"):
        llm.sleep(level=2)
    assert llm.sync(actor) == llm.sync() == actor.precgraph.store.version


@ANY_FAMILY
def test_memory_does_not_grow(apart: tuple[Any, Any]) -> None:
    """Ten syncs: no tensor stays behind."""
    import gc

    actor, llm = apart
    llm.sync(actor)
    gc.collect()
    before = sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor))
    for _ in range(10):
        actor.sync()
        llm.sync(actor)
    gc.collect()
    assert sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)) <= before


def test_a_replaced_parameter_is_not_served(checkpoint: Make, start: Make) -> None:
    """The trainer's store, on which the engine runs, has the old one."""
    model, path = checkpoint("qwen3")
    actor = precgraph.compile(model, "train")
    llm = start(path, actor=actor)
    projection = actor.model.layers[0].mlp.down_proj
    projection.weight = torch.nn.Parameter(-projection.weight)
    for use in (lambda: llm.generate([[1, 2]], PARAMS), llm.sync, actor.sync):
        with pytest.raises(StaleWeightsError, match=r"layers\.0\.mlp\.down_proj\.weight: it was replaced"):
            use()


def test_a_captured_step_does_not_serve_weights_that_are_not_complete() -> None:
    """A graph replays without the model's forward; logits are made in Python at every step."""
    from precgraph.runtime.vllm.model import PrecGraphForCausalLM
    from precgraph.runtime.vllm.sizes import Sizes
    from precgraph.runtime.vllm.weights import RolloutStore

    model, store = PrecGraphForCausalLM.__new__(PrecGraphForCausalLM), RolloutStore.__new__(RolloutStore)
    torch.nn.Module.__init__(model)
    store.invalid = "sleep(level=2) has discarded the weights"
    model.compiled = SimpleNamespace(store=store, logits=lambda hidden: hidden[0])
    model.sizes = Sizes()
    with pytest.raises(StaleWeightsError, match="discarded"):
        model.compute_logits(torch.ones(2, 4))
    store.invalid = None
    assert model.compute_logits(torch.ones(2, 4)).shape == (2, 4)
