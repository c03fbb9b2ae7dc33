"""FP8 checkpoints: the bytes of the training forward out and in again, what stock loaders make of them, refusals."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from typer.testing import CliRunner

import precgraph
from precgraph import Format, InputError, NonFiniteError, RecipeError, UnsupportedModelError
from precgraph.checkpoint import Checkpoint, Fp8Checkpoint, Selection, export, quantize_tiled, whole
from precgraph.checkpoint.export import _require_served
from precgraph.cli import app
from precgraph.quantizer import QTensor, dequantize, quantize
from precgraph.recipe import Recipe, SelectRule
from precgraph.stored import StoredWeights
from tests.families import CAUSAL_LMS, causal_lm, config_json

BLOCKS = Format(dtype="float8_e4m3fn", granularity="128x128")
LINEAR = re.compile(r"(q|k|v|o|gate|up|down)_proj\.weight$")


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    causal_lm(name).save_pretrained(folder / "masters", **options)
    return folder / "masters"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Masters and their export, which tests copy and must leave as they are."""
    folder = tmp_path_factory.mktemp("llama")
    export(saved(folder), folder / "fp8", Recipe.jet_rl())
    return folder


def changed(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of an exported checkpoint whose tensors ``change`` has changed."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def assert_same(q: QTensor, wanted: QTensor) -> None:
    assert torch.equal(q.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(q.scales, wanted.scales)
    assert (q.shape, q.format) == (wanted.shape, wanted.format)


# -------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_reading_back_gives_the_bytes_of_the_quantiser(name: str, tmp_path: Path) -> None:
    model = causal_lm(name)
    export(model, tmp_path / "fp8", Recipe.jet_rl())
    masters = dict(model.named_parameters())
    read = dict(Fp8Checkpoint(tmp_path / "fp8").items())
    assert read.keys() == masters.keys()
    for key, value in read.items():
        if LINEAR.search(key):
            assert isinstance(value, QTensor)
            assert_same(value, quantize(masters[key], BLOCKS))
        else:
            assert isinstance(value, torch.Tensor) and torch.equal(value, masters[key])


def test_the_trainers_weights_are_what_is_exported(tmp_path: Path) -> None:
    actor = precgraph.compile(causal_lm("llama"), "train")
    with torch.no_grad():
        for p in actor.parameters():
            p.mul_(1.0 + 2**-5)
    actor.sync()
    export(actor, tmp_path / "fp8", Recipe.jet_rl())
    checkpoint = Fp8Checkpoint(tmp_path / "fp8")
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    seen = 0
    for key, pack in actor.precgraph.store.packs.items():
        if key.path in checkpoint.weights:
            read, wanted = checkpoint.qtensor(key.path), pack.tensors()
            assert torch.equal(read.codes.view(torch.uint8), wanted["codes"].view(torch.uint8))
            assert torch.equal(read.scales, wanted["scales"])
            seen += 1
    assert seen == len(checkpoint.weights) == 14


def test_without_a_recipe_it_is_the_one_that_the_model_was_compiled_with(tmp_path: Path) -> None:
    own = replace(Recipe.jet_rl(), select=SelectRule(skip=("model.layers.1.mlp.down_proj",)))
    for name, model, recipe in (
        ("own", precgraph.compile(causal_lm("llama"), "train", own), own),
        ("plain", causal_lm("llama"), Recipe.jet_rl()),
    ):
        export(model, tmp_path / name)
        assert Recipe.load(tmp_path / name / "precgraph_recipe.toml") == recipe
        assert len(Fp8Checkpoint(tmp_path / name).weights) == 14 - len(recipe.select.skip)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 4500), (192, 576)])
@pytest.mark.parametrize("granularity", ["128x128", "64x128"])
def test_tiles_give_what_the_whole_gives(shape: tuple[int, int], granularity: str) -> None:
    fmt = replace(BLOCKS, granularity=granularity)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_tiled(w, fmt)
    whole = quantize(w, fmt)
    cut = whole.codes.view(torch.uint8)[: shape[0], : shape[1]]
    assert torch.equal(codes.view(torch.uint8), cut) and torch.equal(scales, whole.scales)


def test_sharded_fp32_masters_make_the_same_checkpoint(tmp_path: Path, llama: Path) -> None:
    """fp32 masters whose values are bf16: source rounding is exact, so the bytes are those of the bf16 checkpoint."""
    masters = tmp_path / "masters"
    causal_lm("llama").float().save_pretrained(masters, max_shard_size="500KB")
    (masters / "tokenizer.json").write_text("{}")
    done = export(masters, tmp_path / "fp8", Recipe.jet_rl())
    one, many = Fp8Checkpoint(llama / "fp8"), Fp8Checkpoint(tmp_path / "fp8")
    assert done.shards == len(many.shards) > 1
    assert (tmp_path / "fp8" / "tokenizer.json").read_text() == "{}"
    assert {n: (e.dtype, e.shape) for n, e in one.entries.items()} == {
        n: (e.dtype, e.shape) for n, e in many.entries.items()
    }
    for name, entry in one.entries.items():
        bytes_of = [c.read(name).contiguous().view(torch.uint8) for c in (one, many)]
        assert torch.equal(*bytes_of), (name, entry)


def test_layout_is_hugging_faces(llama: Path) -> None:
    checkpoint = Fp8Checkpoint(llama / "fp8")
    assert checkpoint.config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint
    for name in checkpoint.weights:
        n, k = checkpoint.entries[name].shape
        scale = checkpoint.entries[name + "_scale_inv"]
        assert (scale.dtype, scale.shape) == ("F32", (-(-n // 128), -(-k // 128)))
    assert Recipe.load(llama / "fp8" / "precgraph_recipe.toml") == Recipe.jet_rl()


def test_what_the_recipe_leaves_out_stays_and_is_listed(tmp_path: Path) -> None:
    recipe = replace(Recipe.jet_rl(), select=SelectRule(skip=("model.layers.1.mlp.down_proj",)))
    model = causal_lm("llama")
    export(model, tmp_path / "fp8", recipe)
    checkpoint = Fp8Checkpoint(tmp_path / "fp8")
    assert checkpoint.quantization.skip == ("lm_head", "model.layers.1.mlp.down_proj")
    kept = checkpoint.read("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(kept, model.get_parameter("model.layers.1.mlp.down_proj.weight"))
    assert len(checkpoint.weights) == 13


def test_a_skip_list_that_stock_loaders_would_misread_is_refused() -> None:
    """``mlp.gate`` as transformers matches it, at the start of the name, also means ``mlp.gate_proj``."""
    names = ("m.mlp.gate_proj.weight", "m.mlp.up_proj.weight")
    selection = Selection(BLOCKS, frozenset(names), {"m.mlp.gate": "router"}, {}, dict.fromkeys(names, (8, 8)), {})
    with pytest.raises(RecipeError, match="'m.mlp.gate' is left out and 'm.mlp.gate_proj' is not"):
        _require_served(selection)


# -------------------------------------------------------------------------- stock loaders


@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    """On a CPU transformers multiplies codes by scales and rounds to its dtype. Widths here are whole blocks or one."""
    model = causal_lm(name, hidden_size=256, intermediate_size=384)
    export(model, tmp_path / "fp8", Recipe.jet_rl())
    parsed = FineGrainedFP8Config.from_dict(Checkpoint(tmp_path / "fp8").config["quantization_config"])
    assert list(parsed.weight_block_size) == [128, 128] and parsed.activation_scheme == "dynamic"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    found = dict(loaded.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    for key, value in Fp8Checkpoint(tmp_path / "fp8").items():
        wanted = dequantize(value) if isinstance(value, QTensor) else value
        assert torch.equal(found[key].to(torch.bfloat16), wanted.to(torch.bfloat16)), key


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("size", [128, [128], [128, 128], (128, 128)])
def test_block_sizes_that_occur(size: object) -> None:
    stored = StoredWeights.of({"quantization_config": {"quant_method": "fp8", "weight_block_size": size}})
    assert stored.require_fp8().block == (128, 128)


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ({"quant_method": "gptq"}, UnsupportedModelError, "gptq"),
        ({"quant_method": "fp8"}, UnsupportedModelError, "no weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, InputError, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, InputError, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128] * 3}, InputError, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": True}, InputError, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [True, True]}, InputError, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128, "activation_scheme": "x"}, UnsupportedModelError, "'x'"),
        ({"quant_method": "fp8", "weight_block_size": 128, "modules_to_not_convert": "x"}, InputError, "list of names"),
        (None, InputError, "no quantization_config"),
    ],
)  # fmt: skip
def test_quantization_configs_that_are_refused(table: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        StoredWeights.of({"quantization_config": table}).require_fp8()


WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(WEIGHT + "_scale_inv"), "up_proj.weight_scale_inv' is not there"),
        (lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(1)}), "nothing uses the scale"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.bfloat16)}), "nothing uses the scale: its weight is BF16"),
        (lambda t: t.update({WEIGHT + "_scale_inv": torch.ones(2, 3)}), "is [2, 3], not [3, 2]"),
        (lambda t: t.update({WEIGHT + "_scale_inv": torch.ones(3, 2, dtype=torch.int32)}), "the scale is I32"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, tmp_path: Path, llama: Path
) -> None:
    checkpoint = Fp8Checkpoint(changed(llama / "fp8", tmp_path / "bad", change))
    with pytest.raises(InputError, match=re.escape(words)):
        dict(checkpoint.items())


def test_scales_in_bf16_are_read(tmp_path: Path, llama: Path) -> None:
    name = WEIGHT + "_scale_inv"
    folder = changed(llama / "fp8", tmp_path / "b", lambda t: t.update({name: t[name].bfloat16()}))
    assert torch.equal(
        Fp8Checkpoint(folder).scale(WEIGHT), Fp8Checkpoint(llama / "fp8").scale(WEIGHT).bfloat16().float()
    )


def _index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    change(data["weight_map"])
    path.write_text(json.dumps(data))


def _truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, "is not a whole safetensors file"),
        (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "which is not there"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "no model.safetensors.index.json"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is not valid JSON"),
        (lambda f: _index(f, lambda m: m.pop(WEIGHT)), "the index says nothing"),
        (lambda f: _index(f, lambda m: m.update({"x": m[WEIGHT]})), "'x' is in no file"),
        (lambda f: _index(f, lambda m: m.update({WEIGHT: "../model.safetensors"})), "not a safetensors file of this"),
        (lambda f: [p.rename(p.with_suffix(".bin")) for p in f.glob("model*")], "pickled weights"),
    ],
)
def test_damaged_checkpoints(damage: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, max_shard_size="500KB")
    damage(folder)
    with pytest.raises(InputError, match=words):
        Checkpoint(folder)


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    model = causal_lm("llama")
    with torch.no_grad():
        model.get_parameter(WEIGHT)[3, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=WEIGHT):
        export(model, tmp_path / "fp8", Recipe.jet_rl())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_the_umask_says_who_may_read_an_export(tmp_path: Path, mask: int, mode: int) -> None:
    """safetensors makes files for their owner alone, and a server is often another user."""
    before = os.umask(mask)
    try:
        with whole(tmp_path / "out") as folder:
            save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
            (folder / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {
        "model.safetensors": mode, "config.json": mode,
    }  # fmt: skip


def test_masters_of_zeros(tmp_path: Path) -> None:
    """Some may be meant, and are said; a checkpoint of nothing else was never written."""
    model = causal_lm("llama")
    with torch.no_grad():
        model.get_parameter(WEIGHT).zero_()
    model.save_pretrained(tmp_path / "some")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "some"), "-o", str(tmp_path / "fp8")])
    assert result.exit_code == 0 and f"1 of the weights are all zero, {WEIGHT} first" in result.stdout
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(InputError, match="all 14 weights to quantise are zero"):
        export(model, tmp_path / "nothing", Recipe.jet_rl())
    assert not (tmp_path / "nothing").exists()


def test_exports_that_are_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        export(llama / "masters", llama / "fp8", Recipe.jet_rl())
    with pytest.raises(UnsupportedModelError, match="stored quantised .FP8, blocks of 128x128., and masters"):
        export(llama / "fp8", tmp_path / "again", Recipe.jet_rl())
    with pytest.raises(RecipeError, match="quantises no weights"):
        export(llama / "masters", tmp_path / "plain", Recipe.bf16())
    with pytest.raises(InputError, match="has no weights here"):
        (tmp_path / "config.json").write_text(json.dumps(config_json("llama")))
        export(tmp_path / "config.json", tmp_path / "c", Recipe.jet_rl())


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    masters = saved(tmp_path)
    tensors = load_file(masters / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, masters / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="lm_head.weight: is tied to 'model.embed_tokens.weight'"):
        export(masters, tmp_path / "fp8", Recipe.jet_rl())


def test_the_command(tmp_path: Path, llama: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(llama / "masters"), "-o", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["quantized"], data["files"], data["ragged"]) == (14, 1, 14)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (llama / "fp8" / "model.safetensors").read_bytes()
    again = CliRunner().invoke(app, ["export", str(llama / "masters"), "-o", str(tmp_path / "out")])
    assert again.exit_code == 2 and "exists already" in again.stderr


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(sys.modules["precgraph.checkpoint.export"], "save_file", fail)
    with pytest.raises(InputError, match="cannot be written.*No space left"):
        export(causal_lm("llama"), tmp_path / "fp8", Recipe.jet_rl())
    assert not list(tmp_path.iterdir())
