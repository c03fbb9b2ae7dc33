"""Level weights: each kind of fault, planted in an exported checkpoint, is found and named, and nothing else is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

from precgraph import CheckError, Format, InputError, NonFiniteError, UnsupportedModelError
from precgraph.checkpoint import Checkpoint, Fp8Checkpoint, Selection, export, quantize_tiled, select
from precgraph.cli import app
from precgraph.loading import load_config_model, load_model
from precgraph.quantizer import QTensor, dequantize
from precgraph.recipe import Recipe
from precgraph.report import load
from precgraph.verify import Report
from precgraph.verify.weights import check_weights
from tests.families import causal_lm
from tests.test_loading import small_gguf

JET = Format(dtype="float8_e4m3fn", granularity="128x128")
SCALE = "_scale_inv"
SKIP = "quantization_config"
FIRST = "model.layers.1."
UP, DOWN = f"{FIRST}mlp.up_proj.weight", f"{FIRST}mlp.down_proj.weight"
Tensors = dict[str, Tensor]
Plant = Callable[[Tensors, Tensors, dict[str, Any]], object]  # stored tensors, masters, config


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32 masters of a tiny tied Llama, values that bf16 does not hold, and one block of UP that is nearly zero.

    Few values show how they were divided: DOWN is drawn again until some do.
    """
    folder = tmp_path_factory.mktemp("masters")
    model = causal_lm("llama").float()
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 2**-9 * torch.rand(p.shape, generator=random))
        model.get_parameter(UP)[:128, :128] *= 1e-6
        down = model.get_parameter(DOWN)
        while any(same(down, JET, rule(**r)) for r in ({"divide": "reciprocal"}, {"scale_rule": "max/amax"})):
            down.copy_(torch.randn(down.shape, generator=random) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(masters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "fp8"
    export(masters, folder, Recipe.jet_rl())
    return folder


@pytest.fixture(scope="module")
def selection(masters: Path) -> Selection:
    return select(load_config_model(masters), Recipe.jet_rl())


def put(name: str, fmt: Format) -> Plant:
    """One weight by another rule."""

    def plant(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
        stored[name], stored[name + SCALE] = quantize_tiled(masters[name], fmt)

    return plant


def scale(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda stored, *_: stored.update({name + SCALE: change(stored[name + SCALE]).contiguous()})


def _up_to_powers(s: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(s)))


def same(weight: Tensor, a: Format, b: Format) -> bool:
    """Whether two rules give one weight the same bytes."""
    (codes, scales), (others, other_scales) = (quantize_tiled(weight.detach(), fmt) for fmt in (a, b))
    return torch.equal(codes.view(torch.uint8), others.view(torch.uint8)) and torch.equal(scales, other_scales)


def rule(**fields: Any) -> Format:
    return replace(JET, **fields)


def faults(layer: str) -> dict[str, tuple[Plant, set[tuple[str, str]]]]:
    """What to plant in the weights of a layer, and the findings that name it."""
    q, k, v, o = (f"{layer}self_attn.{p}_proj.weight" for p in "qkvo")  # 192x192, 96x192, 96x192, 192x192
    gate, up, down = (f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down"))  # 320x192, 320x192, 192x320
    norm = f"{layer}input_layernorm.weight"

    def through_bf16(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
        first = rule(source="float32")
        codes, scales = quantize_tiled(masters[down], first)
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, -codes.shape[1] % 128, 0, -codes.shape[0] % 128))
        q = QTensor(codes.view(torch.float8_e4m3fn), scales, masters[down].shape, first)
        stored[down], stored[down + SCALE] = quantize_tiled(dequantize(q, torch.bfloat16), JET)

    def fused_grid(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
        """q, k and v in one tensor: k starts in the middle of a block."""
        codes, _ = quantize_tiled(torch.cat([masters[n] for n in (q, k, v)]), JET)
        start = masters[q].shape[0]
        assert start % 128
        stored[k] = codes[start : start + masters[k].shape[0]].contiguous()

    def swap(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
        for end in ("", SCALE):
            stored[q + end], stored[o + end] = stored[o + end], stored[q + end]

    def flip(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
        stored[down].view(torch.uint8)[100, 300] ^= 1

    def plain(listed: bool) -> Plant:
        def plant(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
            del stored[down + SCALE]
            stored[down] = masters[down].bfloat16()
            if listed:
                config[SKIP]["modules_to_not_convert"].append(down.removesuffix(".weight"))

        return plant

    def made_of(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
        def plant(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
            noise = torch.randn(masters[down].shape, generator=torch.Generator().manual_seed(1))
            stored[down], stored[down + SCALE] = quantize_tiled(change(masters[down].float(), noise), JET)

        return plant

    def skip_prefix(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
        config[SKIP]["modules_to_not_convert"].append(f"{layer}mlp.gate")  # a router's name, say

    def transposed(stored: Tensors, masters: Tensors, config: dict[str, Any]) -> None:
        stored[q], stored[q + SCALE] = quantize_tiled(masters[q].t(), JET)

    online = rule(divide="reciprocal", amax_floor=1e-4, requantize="ue8m0")
    head = "lm_head.weight_scale_inv"
    return {
        "fp32 source": (put(down, rule(source="float32")), {("PG106", down)}),
        "amax*(1/448)": (put(down, rule(scale_rule="amax*(1/max)")), {("PG103", down)}),
        "inverse kept": (put(down, rule(scale_rule="max/amax")), {("PG103", down)}),
        "reciprocal": (put(down, rule(divide="reciprocal")), {("PG104", down)}),
        "floor": (put(up, rule(amax_floor=1e-4)), {("PG105", up)}),
        "powers of two": (put(down, rule(scale_dtype="ue8m0")), {("PG102", down)}),
        "online engine": (put(up, online), {("PG104", up)}),
        "requantised": (put(down, rule(requantize="ue8m0")), {("PG109", down)}),
        "quantised twice": (through_bf16, {("PG601", down)}),
        "rounded after": (scale(down, _up_to_powers), {("PG602", down)}),
        "transposed scale": (scale(up, lambda s: s.t()), {("PG603", up)}),
        "transposed square scale": (scale(q, lambda s: s.t()), {("PG603", q)}),
        "inverted scale": (scale(down, lambda s: 1 / s), {("PG604", down)}),
        "bf16 scale": (scale(down, lambda s: s.bfloat16()), {("PG605", down)}),
        "stale scale": (scale(down, lambda s: s * 1.01), {("PG606", down)}),
        "block grid": (fused_grid, {("PG607", k)}),
        "swapped weights": (swap, {("PG608", q), ("PG608", o)}),
        "swapped codes": (lambda s, *_: s.update({q: s[o].clone()}), {("PG608", q)}),
        "stale weights": (made_of(lambda w, noise: w * (1 + 0.1 * noise)), {("PG609", down)}),
        "damaged byte": (flip, {("PG610", down)}),
        "missing scale": (lambda s, *_: s.pop(down + SCALE), {("PG611", down)}),
        "unconsumed scale": (lambda s, *_: s.update({head: torch.ones(1)}), {("PG612", head)}),
        "plain layer": (plain(listed=True), {("PG613", down)}),
        "plain layer, not listed": (plain(listed=False), {("PG613", down), ("PG614", down)}),
        "skip list": (skip_prefix, {("PG614", gate)}),
        "missing tensor": (lambda s, *_: s.pop(norm), {("PG615", norm)}),
        "unknown tensor": (lambda s, *_: s.update({"extra.weight": torch.ones(1)}), {("PG616", "extra.weight")}),
        "another norm": (lambda s, *_: s.update({norm: s[norm] + 1}), {("PG618", norm)}),
        "fp32 norm": (lambda s, *_: s.update({norm: s[norm].float()}), {("PG619", norm)}),
        "scale of zero": (scale(down, lambda s: s * 0), {("PG620", down)}),
        "scale of NaN": (scale(down, lambda s: s * float("nan")), {("PG620", down)}),
        "scale per row": (scale(down, lambda s: s.repeat(2, 1)), {("PG621", down)}),
        "transposed codes": (transposed, {("PG622", q)}),
        "other weights": (made_of(lambda _, noise: noise), {("PG699", down)}),
        "e5m2": (put(down, rule(dtype="float8_e5m2")), {("PG203", down)}),
    }


FAULTS = faults(FIRST)
# What SmolLM2's bf16 weights cannot show: fp32 masters, blocks of zeros. Its 30 layers take one fault each.
NOT_IN_BF16 = ("fp32 source", "floor", "online engine", "quantised twice", "plain layer")


def planted(plant: Plant, masters: Path, exported: Path, folder: Path) -> Path:
    stored, config = load_file(exported / "model.safetensors"), json.loads((exported / "config.json").read_text())
    plant(stored, load_file(masters / "model.safetensors"), config)
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def outcome(masters: Path, stored: Path, selection: Selection) -> Report:
    return check_weights(Checkpoint(masters), Fp8Checkpoint(stored), selection, threads=1)


def codes(report: Report) -> set[tuple[str, str]]:
    return {(f.code.split()[0], f.node) for f in report.violations}


def test_an_export_is_what_the_rule_makes(masters: Path, exported: Path, selection: Selection) -> None:
    report = outcome(masters, exported, selection)
    assert report.ok and report.exit_code == 0
    assert report.compared == len(selection.shapes) - len(selection.tied)
    assert str(report) == f"consistent: {report.compared} tensors compared, none differs"


def test_tensors_that_only_the_masters_have_are_named(
    masters: Path, exported: Path, selection: Selection, tmp_path: Path
) -> None:
    """But for what transformers does not read either, on whichever side it is stored."""
    extra = f"{FIRST}self_attn.q_norm.weight"
    stale = f"{FIRST}self_attn.rotary_emb.inv_freq"

    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        stored |= {"model.layers.9.mtp.weight": torch.ones(1)}

    ours = {**load_file(masters / "model.safetensors"), extra: torch.ones(4), stale: torch.ones(4)}
    (tmp_path / "more").mkdir()
    save_file(ours, tmp_path / "more" / "model.safetensors")
    (tmp_path / "more" / "config.json").write_text((masters / "config.json").read_text())
    ignoring = replace(selection, ignores=lambda name: "mtp" in name or selection.ignores(name))
    report = outcome(tmp_path / "more", planted(plant, masters, exported, tmp_path / "x"), ignoring)
    assert codes(report) == {("PG616", extra)}
    assert report.violations[0].train == ("stored",)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_tied_head_that_is_stored_is_compared_with_what_it_is_tied_to(
    change: float, masters: Path, exported: Path, selection: Selection, tmp_path: Path
) -> None:
    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + change

    report = outcome(masters, planted(plant, masters, exported, tmp_path / "x"), selection)
    assert codes(report) == ({("PG618", "lm_head.weight")} if change else set())


def test_masters_in_fp8_are_none(exported: Path, selection: Selection) -> None:
    with pytest.raises(UnsupportedModelError, match="is stored in F8_E4M3, so these are no masters"):
        outcome(exported, exported, selection)


def test_what_is_wrong_with_a_tensor_is_shown(masters: Path, exported: Path, tmp_path: Path) -> None:
    """In words: the code's name says it already, and need not stand beside it again."""
    plant, _ = FAULTS["damaged byte"]
    bad = planted(plant, masters, exported, tmp_path / "x")
    args = ["check", str(masters), "--level", "weights", "--infer", str(bad), "--html", str(tmp_path / "r.html")]
    shown = CliRunner().invoke(app, args).stdout
    for text in (shown, (tmp_path / "r.html").read_text()):
        assert "1 of 61440 codes" in text


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault: str, masters: Path, exported: Path, selection: Selection, tmp_path: Path) -> None:
    plant, wanted = FAULTS[fault]
    report = outcome(masters, planted(plant, masters, exported, tmp_path / "x"), selection)
    assert codes(report) == wanted, str(report)
    assert report.exit_code == 1
    for finding in report.violations:
        assert finding.message and finding.remedy and len(finding.attributes) == len(finding.train)


@pytest.mark.parametrize("side", ["rollout", "masters"])
def test_what_was_allocated_and_never_written(
    side: str, masters: Path, exported: Path, selection: Selection, tmp_path: Path
) -> None:
    """A weight with its scales, codes alone, a norm: zeros, beside a name of the file."""
    up, down, norm = (f"{FIRST}{n}.weight" for n in ("mlp.up_proj", "mlp.down_proj", "input_layernorm"))

    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        for name in (up, up + SCALE, down, norm):
            if name in stored:
                stored[name] = torch.zeros_like(stored[name].float()).to(stored[name].dtype)

    if side == "rollout":
        report = outcome(masters, planted(plant, masters, exported, tmp_path / "x"), selection)
        said, values = "nothing of it is written in model.safetensors", (("values",), ("zeros",))
    else:
        report = outcome(planted(plant, masters, masters, tmp_path / "x"), exported, selection)
        said, values = "nothing of the master is written in model.safetensors", (("zeros",), ("values",))
    assert codes(report) == {("PG623", up), ("PG623", down), ("PG623", norm)}
    assert {(f.message, (f.train, f.infer)) for f in report.violations} == {(said, values)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("right", [True, False])
def test_masters_that_cannot_be_quantised_are_named(
    value: float, right: bool, masters: Path, exported: Path, selection: Selection, tmp_path: Path
) -> None:
    """In the last tile, and whether or not what is stored agrees up to there."""
    name = f"{FIRST}mlp.up_proj.weight"

    def spoil(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        stored[name][-1, -1] = value
        stored[name][0, 0] += 0.0 if right else 1.0

    bad = planted(spoil, masters, masters, tmp_path / "x")
    with pytest.raises(NonFiniteError, match=f"{name}: holds NaN or infinity as bfloat16"):
        outcome(bad, exported, selection)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_plain_tensor_that_is_not_finite_is_named(
    value: float, masters: Path, exported: Path, selection: Selection, tmp_path: Path
) -> None:
    """In the masters whatever is stored, equal bytes among it; in what is stored it is in the words."""
    norm = f"{FIRST}input_layernorm.weight"

    def spoil(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        stored[norm][3] = value

    stored = planted(spoil, masters, exported, tmp_path / "fp8")
    with pytest.raises(NonFiniteError, match=f"{norm}: holds NaN or infinity as bfloat16; restore it"):
        outcome(planted(spoil, masters, masters, tmp_path / "masters"), stored, selection)
    report = outcome(masters, stored, selection)
    assert codes(report) == {("PG618", norm)}
    assert report.violations[0].message == "1 of its values are not equal, and it holds NaN or infinity"


def test_codes_of_nan_are_damage(masters: Path, exported: Path, selection: Selection, tmp_path: Path) -> None:
    name = f"{FIRST}mlp.up_proj.weight"

    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        stored[name].view(torch.uint8)[:, :64] = 0x7F

    report = outcome(masters, planted(plant, masters, exported, tmp_path / "x"), selection)
    assert codes(report) == {("PG610", name)}
    assert report.violations[0].message == f"{320 * 64} of {320 * 192} codes are NaN, which no finite weight becomes"


def test_an_engines_rules_are_all_listed(masters: Path, exported: Path, selection: Selection, tmp_path: Path) -> None:
    fmt = rule(divide="reciprocal", amax_floor=1e-4, requantize="ue8m0")
    (finding,) = outcome(masters, planted(put(UP, fmt), masters, exported, tmp_path / "x"), selection).violations
    assert dict(zip(finding.attributes, finding.infer, strict=True)) == {
        "divide": "reciprocal", "amax_floor": "0.0001", "requantize": "ue8m0",
    }  # fmt: skip


def test_one_rule_in_every_layer_is_one_row_a_projection(
    masters: Path, exported: Path, selection: Selection, tmp_path: Path
) -> None:
    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        for name in selection.quantized:
            put(name, rule(scale_rule="amax*(1/max)"))(stored, ours, config)

    report = outcome(masters, planted(plant, masters, exported, tmp_path / "x"), selection)
    assert {code for code, _ in codes(report)} == {"PG103"}
    assert len(report.rows()) == len({f.module.split(".", 3)[3] for f in report.violations})
    assert {row.module for row in report.rows()} >= {f"model.layers.{{0-1}}.mlp.{n}_proj" for n in ("gate", "down")}


def test_another_block_size_is_one_finding(masters: Path, exported: Path, selection: Selection, tmp_path: Path) -> None:
    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        config[SKIP]["weight_block_size"] = [64, 128]
        for name in selection.quantized:
            put(name, rule(granularity="64x128"))(stored, ours, config)

    report = outcome(masters, planted(plant, masters, exported, tmp_path / "x"), selection)
    assert codes(report) == {("PG101", "")}


def test_nothing_in_common_is_no_verdict(masters: Path, exported: Path, selection: Selection, tmp_path: Path) -> None:
    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        renamed = {f"policy.{k}": v for k, v in stored.items()}
        stored.clear()
        stored.update(renamed)

    folder = planted(plant, masters, exported, tmp_path / "x")
    with pytest.raises(CheckError, match="no tensor in common"):
        outcome(masters, folder, selection)


def test_the_command(masters: Path, exported: Path, tmp_path: Path) -> None:
    def run(*args: object) -> Any:
        return CliRunner().invoke(app, ["check", str(masters), "--level", "weights", *map(str, args)])

    good = run("--infer", exported, "--json")
    assert good.exit_code == 0 and json.loads(good.stdout)["ok"] is True
    bad = planted(put(DOWN, rule(source="float32")), masters, exported, tmp_path / "x")
    shown = run("--infer", bad)
    assert shown.exit_code == 1 and "PG106" in shown.stdout and "inconsistent" in shown.stdout
    (bad / "model.safetensors").write_bytes(b"x" * 100)
    broken = run("--infer", bad)
    assert broken.exit_code == 2 and "not a whole safetensors file" in broken.stderr


def test_a_stack_may_be_the_training_side(masters: Path, tmp_path: Path) -> None:
    """What DeepGEMM's casts would make is consistent with that stack, and not with the default recipe."""
    recipe = Recipe.jet_rl()
    weight = rule(amax_floor=1e-4, divide="reciprocal")
    export(masters, tmp_path / "fp8", replace(recipe, linear=replace(recipe.linear, weight=weight)))

    def run(train: str) -> Any:
        return CliRunner().invoke(
            app, ["check", str(masters), "--level", "weights", "--train", train, "--infer", str(tmp_path / "fp8")]
        )

    assert run("jet_rl").exit_code == 1
    shown = run("deep_gemm")
    assert shown.exit_code == 0, shown.output


@pytest.mark.slow
def test_every_fault_in_smollm2(smollm2: PreTrainedModel, tmp_path: Path) -> None:
    """A real model, whose 576 and 192 rows are not whole blocks: one fault a layer, and all other weights are right."""
    masters = tmp_path / "masters"
    masters.mkdir()
    state = {k: v for k, v in smollm2.state_dict().items() if k != "lm_head.weight"}
    save_file(state, masters / "model.safetensors")
    plain = {k: v for k, v in smollm2.config.to_dict().items() if k != "quantization_config"}
    (masters / "config.json").write_text(json.dumps({**plain, "architectures": ["LlamaForCausalLM"]}))
    export(masters, tmp_path / "fp8", Recipe.jet_rl())
    wanted: set[tuple[str, str]] = set()
    plants = []
    for layer, name in enumerate(n for n in FAULTS if n not in NOT_IN_BF16):
        plant, found = faults(f"model.layers.{layer}.")[name]
        plants.append(plant)
        wanted |= found

    def all_of_them(*sides: Any) -> None:
        for plant in plants:
            plant(*sides)

    bad = planted(all_of_them, masters, tmp_path / "fp8", tmp_path / "bad")
    selection = select(load_config_model(masters), Recipe.jet_rl())
    assert len(selection.quantized) == 210 and len(plants) == 30
    assert codes(outcome(masters, bad, selection)) == wanted


def test_a_skip_list_that_says_otherwise_is_mended(masters: Path, exported: Path, tmp_path: Path) -> None:
    def run(folder: Path, *args: object) -> Any:
        options = ["--level", "weights", "--infer", folder, *args]
        return CliRunner().invoke(app, ["check", str(masters), *map(str, options)])

    def plant(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        config[SKIP]["modules_to_not_convert"].append("mlp.down_proj")  # all of which are in FP8

    bad = planted(plant, masters, exported, tmp_path / "x")
    before = (bad / "config.json").read_text()
    shown = run(bad, "--diff")
    assert shown.exit_code == 1 and '"mlp.down_proj"' in shown.stdout
    assert (bad / "config.json").read_text() == before
    result = run(bad, "--fix", "-o", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "r.json")["compared"]["tensors"] > 0
    right = json.loads((exported / "config.json").read_text())[SKIP]["modules_to_not_convert"]
    assert json.loads((bad / "config.json").read_text())[SKIP]["modules_to_not_convert"] == right

    def plain(stored: Tensors, ours: Tensors, config: dict[str, Any]) -> None:
        stored[UP] = ours[UP].bfloat16()  # of another precision, and not named either
        del stored[f"{UP}_scale_inv"]

    third = planted(plain, masters, exported, tmp_path / "z")
    assert run(third, "--fix", "-o", tmp_path / "r.json").exit_code == 1
    assert {f["code"] for f in load(tmp_path / "r.json")["violations"]} == {"PG613 layer precision"}
    wanted = sorted([*right, UP.removesuffix(".weight")])
    assert sorted(json.loads((third / "config.json").read_text())[SKIP]["modules_to_not_convert"]) == wanted

    other = planted(put(DOWN, rule(source="float32")), masters, exported, tmp_path / "y")
    kept = (other / "config.json").read_text()
    unfixed = run(other, "--fix")
    assert unfixed.exit_code == 1 and "by hand: PG106" in unfixed.stderr
    assert (other / "config.json").read_text() == kept


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 0.5}, {"rope_parameters": {"rope_theta": 17.0, "rope_type": "default"}},
        {"num_hidden_layers": 1}, {"hidden_act": "gelu"}, {"max_position_embeddings": 4096},
    ],
)  # fmt: skip
def test_what_a_checkpoints_own_config_describes_is_compared_too(
    masters: Path, exported: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Its weights are right, and its config says what is computed with them. Positions alone change no program."""
    shutil.copytree(exported, tmp_path / "fp8")
    path = tmp_path / "fp8" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    same_program = "max_position_embeddings" in change
    for level, exit_code in (("graph", 1), ("weights", 2), ("numerics", 2)):
        train = "jet_rl" if level == "weights" else "vllm"
        args = ["check", str(masters), "--level", level, "--train", train, "--infer", str(tmp_path / "fp8")]
        result = CliRunner().invoke(app, args)
        assert result.exit_code == (0 if same_program else exit_code), (level, result.output)
        assert ("describes another program" in result.stderr) == (exit_code == 2 and not same_program)
        assert ("PG910 not captured" in result.stdout) == (level == "numerics" and same_program)  # its bytes


def test_masters_in_a_gguf(tmp_path: Path) -> None:
    """Its own export has every byte; one code more is found, and where."""
    small_gguf(tmp_path / "tiny.gguf")
    export(load_model(tmp_path / "tiny.gguf"), tmp_path / "fp8", Recipe.jet_rl())  # its tokenizer is no real one
    arguments = ["check", str(tmp_path / "tiny.gguf"), "--level", "weights", "--infer", str(tmp_path / "fp8"), "--json"]
    fine = CliRunner().invoke(app, arguments)
    assert fine.exit_code == 0, fine.output
    # 7 linears a layer in FP8 with a scale each, 2 norms a layer, the last norm and the tied embedding
    assert json.loads(fine.stdout)["compared"]["tensors"] == 2 * (7 + 2) + 2
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    stored[DOWN].view(torch.uint8)[3, 5] ^= 1
    save_file(stored, tmp_path / "fp8" / "model.safetensors")
    wrong = CliRunner().invoke(app, arguments)
    assert wrong.exit_code == 1, wrong.output
    assert {f["module"] for f in json.loads(wrong.stdout)["violations"]} == {DOWN.removesuffix(".weight")}


def test_a_file_is_no_directory_of_masters(tmp_path: Path, exported: Path) -> None:
    with pytest.raises(InputError, match="is a file; pass the directory of a checkpoint's safetensors"):
        Checkpoint(exported / "config.json")
