"""Stacks as recipes: the rules of each, pairs of them, field bugs from configurations alone, the stacks' own code."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from typer.testing import CliRunner

import precgraph
from precgraph import Recipe
from precgraph.checking import lowered
from precgraph.cli import app
from precgraph.errors import InputError, NonFiniteError, PrecGraphError, RecipeError
from precgraph.format import Format
from precgraph.quantizer import quantize
from precgraph.recipe import LINEAR_FORMATS, AttentionRule, LinearRule, NormRule
from precgraph.stacks import STACKS, Request, find, get
from precgraph.stacks.matching import exact, path, regex_or_glob, skips, substring
from precgraph.stacks.pair import Side, linear_modules, parse, resolve
from precgraph.stacks.remedies import explain
from precgraph.trace import trace
from precgraph.verify import Report, check_inclusion
from precgraph.verify.rules import RULES
from precgraph.verify.why import WHY
from tests.families import causal_lm, config_json, meta_lm

ROOT = Path(__file__).parents[1]
LAYERS = 2
TRACED = trace(meta_lm("llama"))
MODULES = linear_modules(TRACED.graph)
NO_ENV: Mapping[str, str] = {}


def formats(name: str, side: str = "train", env: Mapping[str, str] = NO_ENV, **options: Any) -> tuple[Format, Format]:
    """Activation and weight of a stack with this configuration."""
    linear = get(name).build(Request(side, MODULES, options, env)).recipe.linear
    assert linear.activation is not None
    assert linear.weight is not None
    return linear.activation, linear.weight


def check(train: str | Side, infer: str | Side, env: Mapping[str, str] = NO_ENV) -> Report:
    """What ``precgraph check`` reports for the tiny Llama."""
    named = [parse(side) if isinstance(side, str) else side for side in (train, infer)]
    sides = resolve(named[0], named[1], MODULES, env)
    graphs = [lowered(TRACED, mode, side.recipe) for mode, side in zip(("train", "infer"), sides, strict=True)]
    return explain(check_inclusion(graphs[0], graphs[1]), sides, MODULES, env)


def stack(name: str, **options: Any) -> Side:
    return Side(name, stack=get(name), config=options)


def differing(report: Report, weights: bool) -> set[str]:
    """Attributes of the quantisers of weights, or of activations, that differ."""
    found = [f for f in report.violations if f.op == "quantize"]
    return {a for f in found if f.module.endswith("_proj") == weights for a in f.attributes}


def test_linear_modules_are_those_of_the_model() -> None:
    leaves = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    leaves += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert sorted(MODULES) == sorted(f"model.layers.{n}.{leaf}" for n in range(LAYERS) for leaf in leaves)


# ------------------------------------------------------------------------------- the table of rules

# amax floor, scale, how codes are made, powers of two. Activations first.
TABLE: dict[str, tuple[tuple[float, str, str, bool], tuple[float, str, str, bool]]] = {
    "deep_gemm": ((1e-4, "amax/max", "reciprocal", False), (1e-4, "amax/max", "reciprocal", False)),
    "vllm": ((1e-10, "amax*(1/max)", "true", True), (1e-4, "amax/max", "reciprocal", True)),
    "torchao": ((1e-12, "max/amax", "true", False), (1e-12, "max/amax", "true", False)),
    "transformer_engine": ((0.0, "max/amax", "true", True), (0.0, "max/amax", "true", True)),
}


@pytest.mark.parametrize("name", TABLE)
def test_default_rules(name: str) -> None:
    for fmt, (floor, rule, divide, power) in zip(formats(name), TABLE[name], strict=True):
        assert (fmt.amax_floor, fmt.scale_rule, fmt.divide, fmt.powers_of_two) == (floor, rule, divide, power)
    twice = [fmt.requantize for fmt in formats(name)]
    assert twice == (["none", "ue8m0"] if name == "vllm" else ["none", "none"])


# What differs between two stacks, weights then activations: from the table, by hand.
_RULES = {"scale_rule", "divide", "amax_floor"}
PAIRS: dict[tuple[str, str], tuple[set[str], set[str]]] = {
    ("deep_gemm", "vllm"): ({"requantize"}, {"scale_dtype", *_RULES}),
    ("deep_gemm", "torchao"): (_RULES, _RULES),
    ("deep_gemm", "transformer_engine"): ({"scale_dtype", *_RULES}, {"scale_dtype", *_RULES}),
    ("vllm", "torchao"): ({"requantize", *_RULES}, {"scale_dtype", "scale_rule", "amax_floor"}),
    ("vllm", "transformer_engine"): (
        {"requantize", "scale_dtype", *_RULES}, {"scale_dtype", "scale_rule", "amax_floor"},
    ),
    ("torchao", "transformer_engine"): ({"scale_dtype", "amax_floor"}, {"scale_dtype", "amax_floor"}),
}  # fmt: skip


@pytest.mark.parametrize(("train", "infer"), list(itertools.permutations(TABLE, 2)))
def test_golden_findings_of_every_pair(train: str, infer: str) -> None:
    report = check(train, infer)
    weights, activations = PAIRS.get((train, infer)) or PAIRS[infer, train]
    assert differing(report, weights=True) == weights
    assert differing(report, weights=False) == activations
    assert sum(f.module.endswith("_proj") for f in report.violations) >= len(MODULES)
    assert {f.op for f in report.violations} == {"quantize"}, "a stack's recipe says something of other operators"


@pytest.mark.parametrize("name", TABLE)
def test_a_stack_agrees_with_itself(name: str) -> None:
    report = check(name, name)
    assert report.ok, str(report)
    assert not report.notes


def test_with_fp32_scales_everywhere_what_is_left_is_the_rule() -> None:
    env = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    report = check("te", "vllm", env)
    assert differing(report, weights=True) == _RULES
    assert differing(report, weights=False) == {"scale_rule", "amax_floor"}
    for f in report.violations:  # of the division of weights nothing is said, so one side has to take the other's rules
        wanted = "each have rules of their own" if "divide" in f.attributes else "TransformerEngine has no switch"
        assert wanted in f.remedy and "FP32_SCALES" not in f.remedy


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_says_where_it_was_read_and_what_is_open(name: str) -> None:
    entry = STACKS[name]
    assert entry.version
    assert entry.sources
    assert entry.unknown
    assert set(entry.remedies) <= set(RULES)
    for side in ("train", "infer"):
        assert isinstance(entry.build(Request(side, MODULES)).recipe, Recipe)
    for other in STACKS:  # whatever the other side is, both recipes exist
        resolve(parse(name), parse(other), MODULES, {})


def test_names_and_aliases() -> None:
    assert find("te") is find("transformer-engine") is STACKS["transformer_engine"]
    assert find("jet_rl") is None
    with pytest.raises(RecipeError, match="did you mean 'vllm'"):
        get("vlm")
    with pytest.raises(RecipeError, match=r"'nope'; stacks: vllm, .*; for short: te \(transformer_engine\)"):
        get("nope")
    with pytest.raises(RecipeError, match="no preset or stack is called 'trl'.*presets: jet_rl, bf16; stacks: vllm, "):
        parse("trl")


def test_what_is_missing_is_said_before_anything_is_read() -> None:
    weights = run("check", "m", "--level", "weights")
    assert weights.exit_code == 2
    assert "--infer is required at level weights: the FP8 checkpoint's directory" in weights.stderr
    verdict = run("rule", "AU103")
    assert verdict.exit_code == 2
    assert "docs/checkpoints.md" in verdict.stderr


# ------------------------------------------------------------------------- field bugs, from configs


def _moe_like(report: Report) -> set[str]:
    return {f.module.rpartition(".")[2] for f in report.violations if "rule.gemm" in f.attributes}


@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        (
            "vllm", {"quantization_config": {"linear": "fp8_per_block", "ignore": ["re:.*mlp.gate"]}},
            "regular expression",
        ),
        (
            "sglang_substring",
            {"quantization_config": {
                "quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["mlp.gate", "mlp.up_proj"]}},
            "as a substring",
        ),
    ],
)  # fmt: skip
def test_a_routers_pattern_that_hits_gate_proj(name: str, options: dict[str, Any], how: str) -> None:
    report = check(stack("deep_gemm"), stack(name, **options))
    found = [f for f in report.violations if "rule.gemm" in f.attributes]
    assert {f.module for f in found} >= {f"model.layers.{n}.mlp.gate_proj" for n in range(LAYERS)}
    (row,) = [r for r in report.rows() if r.violation and r.module.endswith("mlp.gate_proj") and r.op == "linear"]
    assert row.code.startswith("PG108")
    assert row.count == LAYERS
    assert how in row.remedy
    assert "name the layers in full" in row.remedy
    notes = [r for r in report.rows() if r.code.startswith("PG905") and r.module.endswith("mlp.gate_proj")]
    assert [r.count for r in notes] == [LAYERS]


def test_the_same_pattern_matched_by_components_hits_nothing() -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["mlp.gate"]}
    for name in ("sglang", "vllm"):
        report = check("deep_gemm", stack(name, quantization_config=stored))
        assert not _moe_like(report)
        assert [n.code for n in report.notes if n.code.startswith("PG906")] == ["PG906 unused pattern"]


@pytest.mark.parametrize("name", ["vllm", "sglang", "sglang_substring"])
def test_the_head_is_a_layer_that_a_pattern_may_name(name: str) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "lm_haed"]}
    report = check("deep_gemm", stack(name, quantization_config=stored))
    assert [n.infer for n in report.notes if n.code.startswith("PG906")] == [("lm_haed",)]


def test_substrings_in_nemo_rl() -> None:
    cfg = {"precision": "fp8", "quantization_ignored_layer_kws": ["mlp.gate", "mlp.up"]}
    report = check("deep_gemm", stack("nemo_rl", policy={"generation": {"vllm_cfg": cfg}}))
    assert _moe_like(report) == {"gate_proj", "up_proj"}


def test_fp32_masters_against_bf16_rounded_ones() -> None:
    report = check(stack("deep_gemm", weight_dtype="float32"), "deep_gemm")
    assert [f.attributes for f in report.violations] == [("source",)] * len(MODULES)
    assert {f.code for f in report.violations} == {"PG106 source dtype"}
    assert all("cast the weights to bf16" in f.remedy for f in report.violations)


@pytest.mark.parametrize(
    ("train", "infer", "words"),
    [
        ("jet_rl", "vllm", "train by the rules of vLLM (name a recipe file as --train: --fix writes them into it)"),
        ("deep_gemm", "jet_rl", "serve by the rules of DeepGEMM's casts (name a recipe file as --infer: --fix"),
        ("deep_gemm", "vllm", "the trainer of DeepGEMM's casts and the rollout of vLLM each have rules of their own"),
    ],
)
def test_beside_a_stack_the_remedy_says_which_side_can_change(train: str, infer: str, words: str) -> None:
    """One recipe for both is no remedy for what has no recipe."""
    env = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    remedies = {f.remedy for f in check(train, infer, env).violations}
    assert any(words in remedy for remedy in remedies), remedies
    assert not any("one recipe" in remedy for remedy in remedies)


def test_requantised_weights_and_the_power_of_two_default(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})
    report = check("deep_gemm", str(tmp_path))
    weights = [f for f in report.violations if "requantize" in f.attributes]
    assert {f.module for f in weights} == set(MODULES)
    assert all(f.attributes == ("requantize",) for f in weights), "how the stored weights were rounded is not known"
    activations = [f for f in report.violations if "scale_dtype" in f.attributes]
    assert len(activations) == 4 * LAYERS
    assert all("VLLM_USE_DEEP_GEMM_E8M0=0" in f.remedy for f in (*weights, *activations))
    quiet = check("deep_gemm", str(tmp_path), {"VLLM_USE_DEEP_GEMM_E8M0": "0"})
    assert differing(quiet, weights=True) == set()
    assert differing(quiet, weights=False) == _RULES


@pytest.mark.parametrize("train", ["jet_rl", "deep_gemm", "te"])
def test_a_variable_is_the_remedy_where_it_settles_all_that_differs(train: str, tmp_path: Path) -> None:
    """Elsewhere the words say what it leaves, or what else is to be done."""
    checkpoint(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})
    seen: Counter[str] = Counter()
    for infer in ("vllm", str(tmp_path)):
        findings = check(train, infer).violations
        text = " ".join(f.remedy for f in findings)
        env = dict(re.findall(r"(NVTE_FP8_BLOCK_SCALING_FP32_SCALES|VLLM_USE_DEEP_GEMM_E8M0)=(\d)", text))
        left = {f.module: set(f.attributes) for f in check(train, infer, env).violations}
        for f in findings:
            gone = set(f.attributes) - left.get(f.module, set())
            alone = re.search(r"settles (.*) alone\)", f.remedy)
            if f.remedy.startswith("set ") and "; and " not in f.remedy:
                seen["all"] += 1
                assert gone == set(f.attributes)
            elif f.remedy.startswith("set "):
                seen["and more"] += 1
                assert gone and left[f.module]
            else:
                seen["some" if gone else "none"] += 1
                assert gone == (set(alone[1].split(", ")) if alone else set()) and left[f.module]
    assert seen["some"] or seen["and more"]
    assert seen["all"]


def test_an_engine_in_another_dtype() -> None:
    report = check("deep_gemm", stack("vllm", quantization="fp8_per_block", dtype="float16"))
    assert "source" in differing(report, weights=False)


def test_the_floor_of_a_variable_that_only_one_half_reads() -> None:
    env = {"NVTE_FP8_BLOCK_AMAX_EPSILON": "1e-4", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert "amax_floor" not in differing(check("skyrl", "skyrl", env), weights=True)
    unset = check("skyrl", "skyrl", {"VLLM_USE_DEEP_GEMM_E8M0": "0"})
    assert "amax_floor" in differing(unset, weights=True)


@pytest.mark.parametrize("name", ["vllm", "sglang", "te"])
def test_what_no_stack_says_is_no_finding_against_hugging_face(name: str) -> None:
    plain = {"dtype": "bfloat16"} if name == "vllm" else {"architectures": ["LlamaForCausalLM"]}
    if name != "te":  # whose recipe is FP8 always
        assert check("bf16", stack(name, **plain)).ok
        assert check(stack(name, **plain), "bf16").ok
    for report in (check("bf16", name), check(name, "bf16")):
        assert {f.code for f in report.violations} == {"PG108 quantised on one side"}
        assert {f.module for f in report.violations} == set(MODULES)
        (remedy,) = {f.remedy for f in report.violations}
        assert "in FP8 too: the recipe bf16 quantises no layer; or switch FP8 off in " in remedy
    mine = replace(Recipe.jet_rl(), norm=NormRule(compute="bfloat16"), attention=AttentionRule(softmax="bfloat16"))
    ours, theirs = resolve(Side("mine", mine), parse(name), MODULES, NO_ENV)
    assert replace(theirs.recipe, name="jet_rl", linear=mine.linear) == mine == ours.recipe
    assert theirs.recipe.linear.activation != mine.linear.activation


def test_the_formats_of_a_linear_rule_are_named() -> None:
    kinds = get_type_hints(LinearRule)
    assert [name for name in kinds if kinds[name] == Format | None] == list(LINEAR_FORMATS)


def test_a_recipe_is_turned_off_by_naming_another() -> None:
    plain = stack("vllm", dtype="bfloat16")
    for report, which in ((check("jet_rl", plain), "train"), (check(plain, "jet_rl"), "infer")):
        (remedy,) = {f.remedy for f in report.violations}
        assert remedy.endswith(f"vLLM quantises no layer; or name bf16 as --{which}")


def test_fp8_layers_in_the_arithmetic_of_torch_run() -> None:
    recipe = replace(Recipe.bf16(), linear=Recipe.jet_rl().linear)
    ids = torch.arange(12)[None]
    plain = causal_lm("llama")(input_ids=ids).logits
    actor = precgraph.compile(causal_lm("llama"), "train", recipe)
    rollout = precgraph.compile(causal_lm("llama"), "infer", recipe)
    out = actor(input_ids=ids, labels=ids)
    out.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in actor.parameters())
    assert torch.equal(out.logits, rollout(input_ids=ids).logits)
    assert not torch.equal(out.logits, plain)
    assert torch.nn.functional.cosine_similarity(out.logits.float(), plain.float(), dim=-1).min() > 0.98


def test_a_bf16_trainer_and_an_fp8_rollout_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref:\n  actor: {strategy: fsdp}\n  rollout: {name: vllm, quantization: fp8}\n")
    report = check(f"verl:{file}", f"verl:{file}")
    assert len([f for f in report.violations if "rule.gemm" in f.attributes]) == len(MODULES)
    file.write_text("actor_rollout_ref:\n  actor: {strategy: fsdp}\n  rollout: {name: vllm}\n")
    assert check(f"verl:{file}", f"verl:{file}").ok


def test_megatrons_layers_at_the_ends() -> None:
    args = {"--fp8-format": "hybrid", "--fp8-recipe": "blockwise", "--first-last-layers-bf16": True}
    report = check(stack("megatron", **args), "te")
    assert len([f for f in report.violations if "rule.gemm" in f.attributes]) == len(MODULES)  # two layers, both ends
    built = get("megatron").build(Request("train", MODULES, {**args, "num_layers_at_end_in_bf16": 0}))
    assert set(built.recipe.select.skip) == {m for m in MODULES if ".0." in m}
    assert built.recipe.linear.grad_output == Format("float8_e5m2", "1x128", "ue8m0", "max/amax", amax_floor=0.0)


# ---------------------------------------------------------------------------------------- matching


def test_how_each_stack_matches() -> None:
    gate = "model.layers.0.mlp.gate_proj"
    assert substring("mlp.gate", gate)
    assert regex_or_glob("re:.*mlp.gate", gate)
    assert not regex_or_glob("re:.*mlp\\.gate$", gate)
    assert regex_or_glob("*gate_proj", gate)
    assert not path("mlp.gate", gate)
    assert path("mlp.gate_proj", gate)
    assert exact(gate, gate)
    assert not exact("gate_proj", gate)


def test_layers_that_an_engine_fuses_are_left_out_together() -> None:
    both = skips(["model.layers.0.mlp.gate_up_proj"], MODULES, exact)
    assert set(both.by_module) == {f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up")}
    assert not both.accidental()
    with pytest.raises(RecipeError, match="up_proj is not, but the engine runs them as one layer"):
        skips(["model.layers.0.mlp.gate_proj"], MODULES, exact)


# ------------------------------------------------------------------------------------- bad configs


ODD: list[Any] = ["x", "", [], ["x"], [1], [[]], {}, {"a": 1}, -1, 3, 1.5, True, None, math.nan, 10**400]


def nested(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("side", ["train", "infer"])
def test_values_of_another_kind_are_no_bugs(name: str, side: str) -> None:
    """Any value, at each key that a stack reads and at each table around it, is a recipe or an error that says so."""
    on = {"fp8": "e4m3", "fp8_recipe": "blockwise", "first_last_layers_bf16": True}
    for key in STACKS[name].keys:
        words = key.split(".")
        for count, value in itertools.product(range(1, len(words) + 1), ODD):
            for base in ({}, {"quantization": "fp8_per_block"}, on):
                request = Request(side, MODULES, {**base, **nested(words[:count], value)}, {}, "x.yaml")
                with contextlib.suppress(PrecGraphError):
                    STACKS[name].build(request)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("te", "amax_epsilon: abc", "amax_epsilon = 'abc' is no number"),
        ("te", 'use_f32_scales: "false"', "use_f32_scales = 'false' is neither true nor false"),
        ("sglang", "quantization_config: {quant_method: fp8, weight_block_size: [128, 128], ignored_layers: 3}",
         "ignored_layers = 3 is no list of names"),
        ("vllm", "{quantization: fp8_per_block, dtype: [bfloat16]}", "dtype = ['bfloat16'] is no name"),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_named(name: str, line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(line)
    with pytest.raises((RecipeError, InputError), match=re.escape(words)) as error:
        resolve(parse(f"{name}:{tmp_path / 'x.yaml'}"), parse("jet_rl"), MODULES, {})
    assert str(tmp_path) in str(error.value)


def checkpoint(folder: Path, quantization: Any) -> None:
    data = {**config_json("llama"), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is not modelled"),
        ({"quant_method": "fp8"}, "one scale a tensor"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "not two sizes, and the engine takes no other"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "not two sizes, and the engine takes no other"),
        ({"quant_method": "fp8", "weight_block_size": [True, True]}, "is not one or two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": "all"}, "write a list of strings"),
    ],
)
def test_checkpoints_that_are_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    checkpoint(tmp_path, quantization)
    with pytest.raises(PrecGraphError, match=message) as error:
        check("te", str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_files_that_are_refused(tmp_path: Path) -> None:
    for name, text, message in (
        ("a.yaml", "a: [", "is not valid YAML"), ("a.json", "{", "is not valid JSON"),
        ("a.toml", "=", "is not valid TOML"), ("b.yaml", "- 1", "holds no table"),
        ("a.txt", "", "is no configuration file"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=message):
            parse(f"vllm:{tmp_path / name}")
    with pytest.raises(InputError, match="cannot be read"):
        parse("vllm:no.json")
    with pytest.raises(RecipeError, match="neither 0 nor 1"):
        check("te", "vllm", {"VLLM_USE_DEEP_GEMM_E8M0": "yes"})
    with pytest.raises(RecipeError, match="no modelled option"):
        check(stack("te", margin=1), "vllm")


# ------------------------------------------------------------------------------- keys that are read


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "near"),
    [
        ("vllm", "quantizaton: fp8_per_block", "quantization"),
        ("vllm", "dtype: bfloat16\nquantisation_config: {quant_method: fp8}", "quantization_config"),
        ("vllm", "quantization_config: {quant_method: fp8, weight_block_sizes: [128, 128]}",
         "quantization_config.weight_block_size"),
        ("sglang", "model_type: llama\nquantizationconfig: {}", "quantization_config"),
        ("verl", "rollout: {quantizaton: fp8}", "rollout.quantization"),
        ("verl", "actor_rollout_ref: {rollot: {quantization: fp8}}", "actor_rollout_ref.rollout"),
        ("megatron", "--fp8-fromat: e4m3", "fp8_format"),
        ("slime", "rolout_fp8: false", "rollout_fp8"),
        ("nemo_rl", "policy: {generation: {vllm_cfg: {precison: fp8}}}", "policy.generation.vllm_cfg.precision"),
        ("te", "ampax_epsilon: 0.1", "amax_epsilon"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_no_bf16_rollout(tmp_path: Path, name: str, text: str, near: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{near}'") as error:
        parse(f"{name}:{write(tmp_path / 'typo.yaml', text)}")
    assert "typo.yaml" in str(error.value)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("text", ["", "x: 1", "env: {A: 1}"])
def test_a_file_of_which_nothing_is_read(tmp_path: Path, name: str, text: str) -> None:
    file = write(tmp_path / "junk.yaml", text)
    with pytest.raises(InputError, match="has no key that .* is read by") as error:
        parse(f"{name}:{file}")
    assert STACKS[name].keys[0] in str(error.value)


@pytest.mark.parametrize("name", STACKS)
def test_every_key_of_a_stack_is_read(tmp_path: Path, name: str) -> None:
    for key in STACKS[name].keys:
        config: Any = 1
        for part in reversed(key.split(".")):
            config = {part: config}
        side = parse(f"{name}:{write(tmp_path / 'one.json', json.dumps(config))}")
        assert side.keys is not None
        assert side.keys.read == (key,)
    for variable in STACKS[name].variables:
        side = parse(f"{name}:{write(tmp_path / 'env.json', json.dumps({'env': {variable: '1'}}))}")
        assert side.keys is not None
        assert side.keys.read == (f"env.{variable}",)


def test_other_settings_are_counted(tmp_path: Path) -> None:
    text = """
actor_rollout_ref:
  actor: {strategy: fsdp, optim: {lr: 1.0e-6}}
  ref: {megatron: {override_transformer_config: {fp8_recipe: blockwise}}}
  rollout: {name: vllm, quantization: fp8, quantization_config_file: null, gpu_memory_utilization: 0.5}
data: {train_batch_size: 8}
"""
    side = parse(f"verl:{write(tmp_path / 'verl.yaml', text)}")
    assert side.keys is not None
    root = "actor_rollout_ref"
    assert side.keys.read == tuple(
        f"{root}.{key}" for key in ("actor.strategy", "rollout.name", "rollout.quantization")
    )
    assert side.keys.unread == 5
    assert side.keys.numeric == (
        f"{root}.ref.megatron.override_transformer_config.fp8_recipe",
        f"{root}.rollout.quantization_config_file",
    )
    parse(f"megatron:{write(tmp_path / 'args.yaml', 'fp8-format: e4m3' + chr(10) + 'fp4-format: e2m1')}")
    with pytest.raises(InputError, match="rollout must be a table, not 'fp8'"):
        parse(f"verl:{write(tmp_path / 'flat.yaml', 'rollout: fp8')}")


# ------------------------------------------------------------------------------------ command line


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def test_check_stacks_on_the_command_line(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    result = run("check", tmp_path, "--train", "te", "--infer", tmp_path, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["stacks"]["train"]["stack"] == "transformer_engine"
    assert data["stacks"]["infer"]["taken_from_the_other_side"][0] == "weight.scale_rule"
    text = run("check", tmp_path, "--train", "te", "--infer", tmp_path).stdout
    assert "not known, so taken from the other side" in text
    assert "Not compared: norms" in text
    assert run("check", tmp_path, "--train", "te", "--infer", "te").exit_code == 0


def test_a_check_builds_and_traces_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, *modules: str) -> None:
        real = getattr(sys.modules[modules[0]], name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return real(*args, **options)

        for module in modules:
            monkeypatch.setattr(sys.modules[module], name, call)

    counted("load_config_model", "precgraph.loading", "precgraph.checking")
    counted("trace", "precgraph.trace", "precgraph.checking")
    model, same, other = (tmp_path / name for name in ("model", "same", "other"))
    for folder in (model, same, other):
        folder.mkdir()
        checkpoint(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    write(other / "config.json", json.dumps(json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 0.5}))
    for sides, built, traced in (((same, same), 2, 1), ((same, other), 3, 2), ((other, other), 2, 2)):
        calls.clear()
        assert run("check", model, "--train", sides[0], "--infer", sides[1]).exit_code == (sides[0] != sides[1])
        assert calls == {"load_config_model": built, "trace": traced}


def test_what_was_read_of_a_file_and_that_nothing_is_quantised(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    checkpoint(model, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    plain = f"vllm:{write(tmp_path / 'plain.yaml', 'dtype: bfloat16' + chr(10) + 'max_model_len: 64')}"
    result = run("check", model, "--train", plain, "--infer", plain)
    assert result.exit_code == 0, result.output
    assert "keys read: dtype, not read: 1 other" in result.stdout
    text = " ".join(result.stdout.split())
    assert text.startswith("not proved: 1 point;") and " NO LINEAR LAYER IS QUANTISED on either side" in text
    assert "NO LINEAR" not in run("check", model).stdout
    junk = run("check", model, "--train", plain, "--infer", f"vllm:{write(tmp_path / 'junk.yaml', 'x: 1')}")
    assert junk.exit_code == 2
    assert not junk.stdout


def test_the_list_of_stacks() -> None:
    data = json.loads(run("stacks", "--json").stdout)
    assert [s["name"] for s in data["stacks"]] == list(STACKS)
    vllm = data["stacks"][0]["rules"]["infer"]["weight"]
    assert (vllm["requantize"], vllm["amax_floor"]) == ("ue8m0", 1e-4)
    table = run("stacks").stdout
    assert all(name in table for name in STACKS)
    one = run("stacks", "vllm").stdout
    assert "VLLM_USE_DEEP_GEMM_E8M0" in one
    assert run("stacks", "vlm").exit_code == 2


def test_rules_are_explained_without_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom precgraph.cli import app\n"
        "print(CliRunner().invoke(app, ['rule', 'PG106']).output)\n"
        "print(sorted({'torch', 'transformers', 'networkx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "PG106 source dtype" in done.stdout
    assert "1388 of 65536 codes" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_code_answers() -> None:
    for key, rule in RULES.items():
        data = json.loads(run("rule", rule.number, "--json").stdout)
        assert (data["name"], data["what"], data["remedy"]) == (rule.name, rule.words, rule.remedy)
        assert (data["why"], data["effect"], data["example"]) == astuple(WHY[key])
    assert run("rule", "scale rule").exit_code == 0
    several = json.loads(run("rule", "scale", "--json").stdout)["rules"]
    assert [r["name"] for r in several] == [r.name for r in RULES.values() if "scale" in r.name]
    words = run("rule", "scale").stdout
    assert len(several) > 3 and all(f"{r['code']} {r['name']}" in words for r in several)
    assert json.loads(run("rule", "granul", "--json").stdout)["code"] == "PG101"
    assert "did you mean PG103?" in run("rule", "PG1103").stderr
    assert len(json.loads(run("rule", "--json").stdout)["rules"]) == len(RULES)


# ------------------------------------------------------------------------------ the stacks' own code

SHAPES = [(1, 128), (256, 384), (128, 1024)]


def _inputs(rows: int, columns: int) -> list[torch.Tensor]:
    """bf16 of several sizes: blocks of zeros, tiny and subnormal values, the largest finite one, outliers, ties."""
    made = torch.Generator().manual_seed(rows * columns)
    smooth = torch.randn(rows, columns, generator=made)
    wild = smooth * 2.0 ** torch.randint(-30, 12, (rows, columns), generator=made)
    holes = smooth.clone()
    holes[:, :128] = 0
    outlier = smooth.clone()
    outlier[::3, ::7] = 3e4
    # Halfway between codes once the scale is a power of two: 448 in each block, and odd multiples of half a step.
    ties = torch.randint(-31, 32, (rows, columns), generator=made) * 8.0 + 4.0
    ties[:, ::64] = 448.0
    largest = torch.sign(smooth) * torch.finfo(torch.bfloat16).max
    made_of = (smooth, wild, holes, smooth * 1e-13, smooth * 1e-39, outlier, ties, largest, torch.zeros_like(smooth))
    return [t.bfloat16().contiguous() for t in made_of]


def _poisoned(rows: int, columns: int, value: float) -> torch.Tensor:
    """One block with a NaN or infinity, the others without."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 5] = value
    return x


def _same_but_for_the_poisoned_block(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, fmt: Format) -> None:
    """A non-finite value stays in its own block in both; what stands there is not defined, and ours refuses it."""
    q, (r, c) = quantize(x, fmt), fmt.block
    theirs, clean = scales.float().reshape(q.scales.shape), torch.ones_like(q.scales, dtype=torch.bool)
    clean[3 // r, 5 // c] = False
    assert torch.equal(q.scales[clean], theirs[clean])
    wide = clean.repeat_interleave(r, 0).repeat_interleave(c, 1)[: x.shape[0], : x.shape[1]]
    ours, others = (t[: x.shape[0], : x.shape[1]].contiguous().view(torch.uint8) for t in (q.codes, codes))
    assert torch.equal(ours[wide], others[wide])
    assert not bool(torch.isfinite(q.scales[~clean]).all())
    with pytest.raises(NonFiniteError):
        quantize(x, fmt, checked=True)


def _same(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, fmt: Format) -> None:
    q = quantize(x, fmt)
    assert torch.equal(q.scales, scales.float().reshape(q.scales.shape))
    assert torch.equal(q.codes[: x.shape[0], : x.shape[1]].view(torch.uint8), codes.contiguous().view(torch.uint8))


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or importlib.util.find_spec("triton") is None,
    reason="needs torchao, which needs triton to import its kernels (`make test-torchao` has both)",
)
def test_torchaos_own_quantisers_give_our_bytes() -> None:
    from torchao.prototype.blockwise_fp8_training import kernels

    activation, weight = formats("torchao")
    for rows, columns in SHAPES:
        for x in _inputs(rows, columns):
            _same(*kernels.torch_blockwise_scale_act_quant_lhs(x), x, activation)
            if rows % 128 == 0:
                _same(*kernels.torch_blockwise_scale_weight_quant(x), x, weight)
    for value in (float("nan"), float("inf")):
        x = _poisoned(128, 256, value)
        _same_but_for_the_poisoned_block(*kernels.torch_blockwise_scale_act_quant_lhs(x), x, activation)
        _same_but_for_the_poisoned_block(*kernels.torch_blockwise_scale_weight_quant(x), x, weight)


@pytest.mark.vllm
def test_vllms_own_quantisers_give_our_bytes() -> None:
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    cast = getattr(deep_gemm.per_block_cast_to_fp8, "_torchdynamo_orig_callable", deep_gemm.per_block_cast_to_fp8)
    _, twice = formats("vllm", "infer")
    _, once = formats("vllm", "infer", {"VLLM_USE_DEEP_GEMM_E8M0": "0"})
    for rows, columns in SHAPES[1:]:
        for x in _inputs(rows, columns):
            codes, scales = cast(x, [128, 128], False)
            _same(codes, scales, x, once)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(deep_gemm, "per_block_cast_to_fp8", cast)
                utils.requant_weight_ue8m0_inplace(codes, scales, (128, 128))
            _same(codes, scales, x, twice)
    for value in (float("nan"), float("inf")):
        x = _poisoned(256, 256, value)
        _same_but_for_the_poisoned_block(*cast(x, [128, 128], False), x, once)


@pytest.mark.vllm
def test_vllms_fallback_for_activations_is_another_rule_and_known() -> None:
    """Where its CUDA kernel cannot run, vLLM divides by 448 and bounds the scale instead of the largest value."""
    module = pytest.importorskip("vllm.model_executor.layers.quantization.input_quant_fp8")
    stack, _ = formats("vllm", "infer", {"VLLM_USE_DEEP_GEMM_E8M0": "0"})
    fallback = replace(stack, scale_rule="amax/max", amax_floor=448 / (448 * 512))
    settings = SimpleNamespace(group_size=128, use_ue8m0=False, column_major_scales=False)
    for rows, columns in SHAPES:
        for x in _inputs(rows, columns):
            codes, scales = module.QuantFP8._quantize_group_native(settings, x)
            _same(codes, scales, x, fallback)
    assert quantize(x + 1e-6, stack).scales.ne(quantize(x + 1e-6, fallback).scales).any()


@pytest.mark.vllm
def test_vllms_own_skip_lists_agree_with_ours() -> None:
    theirs = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils").is_layer_skipped
    ignore = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.utils").should_ignore_layer
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    wholes = {m.replace("gate_proj", "gate_up_proj").replace("q_proj", "qkv_proj") for m in MODULES}
    wholes = {w for w in wholes if w.rpartition(".")[2] not in ("k_proj", "v_proj", "up_proj")}
    lists = [
        ["mlp.gate"], ["model.layers.0.mlp.gate_up_proj"], ["model.layers.1.self_attn.o_proj"], ["re:.*mlp.gate"],
        ["re:.*mlp\\.gate$"], ["*.down_proj"], [f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up")],
    ]  # fmt: skip
    for patterns in lists:
        for matcher, answer in (
            (exact, lambda w, p: theirs(w, p, fused)),
            (regex_or_glob, lambda w, p: ignore(w, p, fused, use_fnmatch=True)),
        ):
            ours = skips(patterns, MODULES, matcher).by_module
            for whole in wholes:
                parent, _, leaf = whole.rpartition(".")
                parts = [f"{parent}.{part}" for part in fused.get(leaf, [leaf])]
                assert all(part in ours for part in parts) == answer(whole, patterns), (whole, patterns)
