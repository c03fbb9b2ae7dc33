"""Experts in FP8 checkpoints: one by one under the names of published ones, the trainer's bytes out and in again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import precgraph
from precgraph import Format, Recipe, RecipeError, UnsupportedModelError
from precgraph.checkpoint import Checkpoint, Fp8Checkpoint, Selection, export, layout, select
from precgraph.loading import load_config_model
from precgraph.quantizer import QTensor, dequantize, quantize
from precgraph.recipe import SelectRule
from precgraph.verify import Report
from precgraph.verify.weights import check_weights
from tests.families import causal_lm, meta_lm

BLOCKS = Format(dtype="float8_e4m3fn", granularity="128x128")
WIDTHS: dict[str, dict[str, int]] = {  # of experts: whole blocks, as all published ones have
    "qwen3_moe": {"moe_intermediate_size": 128},
    "mixtral": {"intermediate_size": 256},
    "deepseek_v2": {"moe_intermediate_size": 128},
    "deepseek_v3": {"moe_intermediate_size": 256},
}
# By hand: where a published checkpoint has the first layer of experts, names of gate, up and down, and the router.
NAMES = {
    "qwen3_moe": ("model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj"), "model.layers.0.mlp.gate"),
    "mixtral": ("model.layers.0.block_sparse_moe", ("w1", "w3", "w2"), "model.layers.0.block_sparse_moe.gate"),
    "deepseek_v2": ("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj"), "model.layers.1.mlp.gate"),
    "deepseek_v3": ("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj"), "model.layers.1.mlp.gate"),
}


def lm(family: str) -> Any:
    return causal_lm(family, **WIDTHS[family])


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family, and a directory with its masters (in two files and more) and their export."""
    folder = tmp_path_factory.mktemp(request.param)
    lm(request.param).save_pretrained(folder / "masters", max_shard_size="600KB")
    export(folder / "masters", folder / "fp8", Recipe.jet_rl())
    return request.param, folder


def experts_of(model: Any) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, C] and down [E, C, I] of the first layer of experts."""
    found = {n.rpartition(".")[2]: p for n, p in reversed(list(model.named_parameters())) if ".mlp.experts." in n}
    return found["gate_up_proj"], found["down_proj"]


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("ragged", [True, False])
def test_the_layout_is_what_transformers_writes(family: str, ragged: bool, tmp_path: Path) -> None:
    model = causal_lm(family) if ragged else lm(family)
    model.save_pretrained(tmp_path)
    written, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    found = layout(model)
    assert written.keys() == found.keys() - (model.all_tied_weights_keys or {}).keys()
    assert list(layout(meta_lm(family)).keys()) == list(layout(causal_lm(family)).keys())
    for name, tensor in written.items():
        part = found[name]
        assert torch.equal(part.of(state[part.path]), tensor), name
        assert part.shape(tuple(state[part.path].shape)) == tuple(tensor.shape)


def test_experts_have_the_bytes_of_the_trainer(made: tuple[str, Path]) -> None:
    family, folder = made
    model, checkpoint = lm(family), Fp8Checkpoint(folder / "fp8")
    assert len(checkpoint.shards) > 1
    where, (gate, up, down), router = NAMES[family]
    gate_up, down_proj = experts_of(model)
    width = gate_up.shape[1] // 2
    read = dict(checkpoint.items())
    for e in range(len(gate_up)):
        whole = quantize(gate_up[e], BLOCKS)
        parts = {gate: slice(0, width), up: slice(width, 2 * width)}
        for leaf, rows in parts.items():
            q = read[f"{where}.experts.{e}.{leaf}.weight"]
            assert isinstance(q, QTensor) and q.shape == (width, gate_up.shape[2])
            assert torch.equal(q.codes.view(torch.uint8), whole.codes[rows].view(torch.uint8))
            assert torch.equal(q.scales, whole.scales[rows.start // 128 : rows.stop // 128])
        q = read[f"{where}.experts.{e}.{down}.weight"]
        wanted = quantize(down_proj[e], BLOCKS)
        assert isinstance(q, QTensor) and torch.equal(q.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(q.scales, wanted.scales)
    assert checkpoint.entries[f"{where}.experts.0.{gate}.weight_scale_inv"].dtype == "F32"
    kept = checkpoint.entries[f"{router}.weight"]
    assert kept.dtype == "BF16"
    assert {router, router.replace("block_sparse_moe", "mlp"), "lm_head"} <= set(checkpoint.quantization.skip)


def test_memory_and_files_give_the_same_bytes(made: tuple[str, Path], tmp_path: Path) -> None:
    """From a compiled model too, whose packs hold the same codes."""
    family, folder = made
    actor = precgraph.compile(lm(family), "train")
    export(actor, tmp_path / "fp8", Recipe.jet_rl())
    one, other = Fp8Checkpoint(tmp_path / "fp8"), Fp8Checkpoint(folder / "fp8")
    assert one.entries.keys() == other.entries.keys()
    for name in one:
        assert torch.equal(*(c.read(name).contiguous().view(torch.uint8) for c in (one, other))), name
    packs = {k.path: p.tensors() for k, p in actor.precgraph.store.packs.items() if k.format is not None}
    seen = 0
    for name, part in layout(actor).items():
        if part.expert is not None:
            rows, columns = one.entries[name].shape
            codes = packs[part.path]["codes"][part.expert, slice(*part.rows), :columns].view(torch.uint8)
            assert torch.equal(one.read(name).view(torch.uint8), codes[:rows])
            seen += 1
    assert seen >= 3 * 4


def test_transformers_loads_it(made: tuple[str, Path], tmp_path: Path) -> None:
    """On a CPU it dequantises. Hidden sizes of whole blocks: it takes the size of a block to be rows / blocks."""
    family, _ = made
    model = causal_lm(family, hidden_size=128, **WIDTHS[family], **_WHOLE.get(family, {}))
    export(model, tmp_path / "fp8", Recipe.jet_rl())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16).state_dict()
    read, parts = dict(Fp8Checkpoint(tmp_path / "fp8").items()), layout(model)
    assert loaded.keys() == model.state_dict().keys()
    for name, value in read.items():
        wanted = dequantize(value) if isinstance(value, QTensor) else value
        found = parts[name].of(loaded[parts[name].path])
        assert torch.equal(found.to(torch.bfloat16), wanted.to(torch.bfloat16)), name


_WHOLE: dict[str, dict[str, int]] = {
    "qwen3_moe": {"intermediate_size": 256},
    "deepseek_v2": {"intermediate_size": 256, "qk_rope_head_dim": 32, "kv_lora_rank": 96, "v_head_dim": 32},
    "deepseek_v3": {"intermediate_size": 256, "qk_rope_head_dim": 32, "kv_lora_rank": 96, "v_head_dim": 32},
}


# ---------------------------------------------------------------------------------- level weights


@pytest.fixture(scope="module")
def selection(made: tuple[str, Path]) -> Selection:
    return select(load_config_model(made[1] / "masters"), Recipe.jet_rl())


def planted(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The export with one fault, in one file."""
    stored: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        stored |= load_file(file)
    change(stored)
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def outcome(folder: Path, stored: Path, selection: Selection) -> Report:
    return check_weights(Checkpoint(folder / "masters"), Fp8Checkpoint(stored), selection, threads=1)


def found(report: Report) -> set[tuple[str, str]]:
    return {(f.code.split()[0], f.node) for f in report.violations}


def test_an_export_is_what_the_rule_makes(made: tuple[str, Path], selection: Selection) -> None:
    report = outcome(made[1], made[1] / "fp8", selection)
    assert report.ok, str(report)
    assert report.compared == len(selection.shapes) - len(selection.tied)


@pytest.mark.parametrize(
    "fault", ["stale", "transposed", "swapped", "missing", "bf16 expert", "fp8 router", "powers of two"]
)
def test_faults_in_experts_are_named(
    fault: str, made: tuple[str, Path], selection: Selection, tmp_path: Path
) -> None:  # fmt: skip
    family, folder = made
    where, (_, up, down), router = NAMES[family]
    one, other = (f"{where}.experts.{e}.{down}.weight" for e in (2, 3))
    third = f"{where}.experts.1.{up}.weight"
    scale = one + "_scale_inv"
    masters = Checkpoint(folder / "masters")

    def change(stored: dict[str, Tensor]) -> None:
        match fault:
            case "stale":
                stored[scale] = stored[scale] * 1.01
            case "transposed":
                stored[scale] = stored[scale].t()
            case "swapped":
                stored[one], stored[other] = stored[other], stored[one]
            case "missing":
                del stored[scale]
            case "bf16 expert":
                stored[one] = masters.read(one)
                del stored[scale]
            case "fp8 router":
                q = quantize(masters.read(f"{router}.weight"), BLOCKS)
                stored[f"{router}.weight"] = q.codes[: q.shape[0], : q.shape[1]]
                stored[f"{router}.weight_scale_inv"] = q.scales
            case "powers of two":
                q = quantize(masters.read(third), replace(BLOCKS, scale_dtype="ue8m0"))
                stored[third], stored[third + "_scale_inv"] = q.codes[:, : q.shape[1]], q.scales

    report = outcome(folder, planted(folder / "fp8", tmp_path / "bad", change), selection)
    square = tuple(-(-n // 128) for n in masters.entries[one].shape)
    wanted = {
        "stale": {("PG606", one)},
        # A row or column of scales looks transposed in its shape; one block alone is the same either way.
        "transposed": {("PG603", one)} if max(square) > 1 else set(),
        "swapped": {("PG608", one), ("PG608", other)},
        "missing": {("PG611", one)},
        "bf16 expert": {("PG613", one), ("PG614", one)},
        "fp8 router": {("PG613", f"{router}.weight"), ("PG614", f"{router}.weight")},
        "powers of two": {("PG102", third)},
    }[fault]
    assert found(report) == wanted, str(report)


def test_left_out_experts_stay_and_are_listed(tmp_path: Path) -> None:
    model = causal_lm("qwen3_moe")  # 96 wide: they could not be exported in FP8
    names = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")
    recipe = replace(Recipe.jet_rl(), select=SelectRule(skip=names))
    export(model, tmp_path / "fp8", recipe)
    checkpoint = Fp8Checkpoint(tmp_path / "fp8")
    assert "model.layers.0.mlp.experts" in checkpoint.quantization.skip
    assert checkpoint.entries["model.layers.0.mlp.experts.17.up_proj.weight"].dtype == "BF16"
    model.save_pretrained(tmp_path / "masters")
    selection = select(model, recipe)
    assert outcome(tmp_path, tmp_path / "fp8", selection).ok
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].remove("model.layers.0.mlp.experts")
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    report = outcome(tmp_path, tmp_path / "fp8", selection)
    assert {f.code.split()[0] for f in report.violations} == {"PG614"} and len(report.violations) == 3 * 18


def test_a_routers_pattern_hits_neither_experts_nor_dense_layers(made: tuple[str, Path], selection: Selection) -> None:
    """``mlp.gate`` in full names the router alone, beside ``experts.N.gate_proj`` and a dense layer's ``gate_proj``."""
    from precgraph.verify.weights import skips

    _, (gate, _, _), router = NAMES[made[0]]
    linear = [n.removesuffix(".weight") for n in selection.quantized]
    assert any(f".{gate}" in m and ".experts." in m for m in linear)
    assert not [m for m in linear if skips(router, m)] and skips(router, router)


# -------------------------------------------------------------------------------------- refusals


def test_experts_that_share_a_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"experts.0.up_proj.weight: its 96 rows share a block of 128"):
        export(causal_lm("qwen3_moe"), tmp_path / "fp8", Recipe.jet_rl())
    assert not list(tmp_path.iterdir())


def test_experts_that_are_left_out_in_part_are_refused(tmp_path: Path) -> None:
    recipe = replace(Recipe.jet_rl(), select=SelectRule(skip=("model.layers.0.mlp.experts.down_proj",)))
    with pytest.raises(RecipeError, match="model.layers.0.mlp.experts: the recipe quantises some linears"):
        export(lm("qwen3_moe"), tmp_path / "fp8", recipe)


def test_a_routers_bias_keeps_its_dtype(tmp_path: Path) -> None:
    """DeepSeek-V3's correction is fp32 in checkpoints; rounding it would change which experts are chosen."""
    model = lm("deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.linspace(0.1, 0.9, 16)
    model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
    model.save_pretrained(tmp_path / "masters")
    export(tmp_path / "masters", tmp_path / "fp8", Recipe.jet_rl())
    assert torch.equal(Fp8Checkpoint(tmp_path / "fp8").read(name), bias)
    assert outcome(tmp_path, tmp_path / "fp8", select(load_config_model(tmp_path / "masters"), Recipe.jet_rl())).ok


def test_layers_that_transformers_does_not_read_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's layer 61 predicts a second token; no model has it."""
    lm("deepseek_v3").save_pretrained(tmp_path / "masters")
    file = tmp_path / "masters" / "model.safetensors"
    save_file({**load_file(file), "model.layers.61.eh_proj.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    export(tmp_path / "masters", tmp_path / "fp8", Recipe.jet_rl())
    assert not [n for n in Fp8Checkpoint(tmp_path / "fp8") if ".61." in n]
