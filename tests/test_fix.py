"""``check --fix`` and ``--diff``: what is edited, what stays as it was, and what is left to a person."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from typer.testing import CliRunner, Result

from precgraph import Recipe
from precgraph.cli import app
from precgraph.errors import InputError
from precgraph.fix.environment import environment_file
from precgraph.fix.plan import Change, Plan
from precgraph.fix.recipe import follow
from precgraph.fix.skips import edited, find_list, rewrite
from precgraph.stacks import STACKS
from precgraph.stacks.settings import best, distance

COMMENTED = """# our recipe
name = "mine"  # a name

[linear]
accumulate = "float32"
weight = { dtype = "float8_e4m3fn", granularity = "128x128", amax_floor = 1e-4 }  # as our kernel does

# activations
[linear.activation]
granularity = "1x128"   # by token
dtype = "float8_e4m3fn"

[gradient]
edge = "bfloat16"
"""


pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(scope="module")
def llama(config_folder: Callable[[str], Path]) -> str:
    return str(config_folder("llama"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for stack in STACKS.values():
        for name in stack.settings:
            monkeypatch.delenv(name, raising=False)
    return tmp_path


def check(*args: object) -> Result:
    return CliRunner().invoke(app, ["check", *(str(a) for a in args)])


def online(**quantization: Any) -> dict[str, Any]:
    """An engine's arguments, quantising online."""
    return {"quantization": "fp8_per_block", "quantization_config": quantization}


# ------------------------------------------------------------------------------------------- recipes


def test_a_recipe_file_follows_and_keeps_its_comments(llama: str, folder: Path) -> None:
    path = folder / "mine.toml"
    path.write_text(COMMENTED)
    shown = check(llama, "--infer", path, "--diff")
    assert shown.exit_code == 1
    assert path.read_text() == COMMENTED
    assert "\n-weight = { dtype" in shown.stdout and "\n+weight = { dtype" in shown.stdout
    assert shown.stdout.startswith("--- ")
    *_, last, verdict = shown.stdout.splitlines()
    assert verdict.startswith("inconsistent: 1 root cause at 14 nodes; ") and last[0] in " +-", "nothing in between"
    fixed = check(llama, "--infer", path, "--fix")
    assert fixed.exit_code == 0, fixed.output
    assert "consistent: the rollout's program" in fixed.stdout
    words = f"fixed {path}: linear.weight.amax_floor 0.0001 -> 1e-12, as on the other side"
    assert words in " ".join(fixed.stderr.split())
    text = path.read_text()
    assert Recipe.load(path).linear.weight == Recipe.jet_rl().linear.weight
    assert text.replace("amax_floor = 1e-12", "amax_floor = 1e-4") == COMMENTED
    again = check(llama, "--infer", path, "--fix")
    assert again.exit_code == 0 and "fixed" not in again.stderr and path.read_text() == text


def test_the_training_file_follows_a_rollout_that_has_none(llama: str, folder: Path) -> None:
    path = folder / "mine.toml"
    Recipe.jet_rl().save(path)
    path.write_text(path.read_text().replace("[linear.weight]", "[linear.weight] # as our kernel does"))
    fixed = check(llama, "--train", path, "--infer", "vllm", "--fix")
    assert fixed.exit_code == 0, fixed.output
    recipe = Recipe.load(path)
    assert recipe.linear.weight is not None and recipe.linear.weight.requantize == "ue8m0"
    assert "# as our kernel does" in path.read_text() and not Path("precgraph.env").exists()


def test_a_file_that_no_kernel_serves_then_is_put_back(llama: str, folder: Path) -> None:
    path = folder / "mine.toml"
    without = Recipe.bf16().to_dict()
    path.write_text(tomlkit.dumps(without))  # no FP8, so no formats of the backward either
    result = check(llama, "--train", path, "--infer", "vllm", "--fix")
    assert result.exit_code == 2
    assert "no kernel of reference serves" in result.stderr.splitlines()[-1]
    assert path.read_text() == tomlkit.dumps(without)


def test_rules_that_no_forward_value_depends_on_stay(folder: Path) -> None:
    path = folder / "mine.toml"
    Recipe.jet_rl().save(path)
    other = Recipe.jet_rl().to_dict()
    other["name"], other["gradient"]["edge"], other["linear"]["grad_output"]["dtype"] = "x", "float32", "float8_e5m2"
    assert isinstance(follow(path, Recipe.load(path), Recipe.from_dict(other), other_is_stack=False), str)


def test_of_a_stack_only_what_it_says_is_taken(folder: Path) -> None:
    path = folder / "mine.toml"
    mine = {**Recipe.jet_rl().to_dict()}
    mine["norm"]["reduction"] = "aten"
    Recipe.from_dict(mine).save(path)
    other = Recipe.jet_rl().to_dict()
    other["linear"]["weight"]["amax_floor"] = 1e-4
    change = follow(path, Recipe.load(path), Recipe.from_dict(other), other_is_stack=True)
    assert isinstance(change, Change)
    written = Recipe.from_dict(tomlkit.parse(change.after).unwrap())
    assert written.norm.reduction == "aten" and written.linear.weight != Recipe.load(path).linear.weight
    change = follow(path, Recipe.load(path), Recipe.from_dict(other), other_is_stack=False)
    assert isinstance(change, Change) and "norm.reduction" in change.words


@pytest.mark.parametrize("other", [Recipe.bf16(), Recipe.jet_rl()])
def test_tables_come_and_go(other: Recipe, folder: Path) -> None:
    path = folder / "mine.toml"
    path.write_text('name = "bare"\n' if other.linear.weight is None else '[linear]\naccumulate = "float32"\n')
    recipe = Recipe.load(path)
    change = follow(path, recipe, other, other_is_stack=False)
    assert isinstance(change, Change), change
    written = Recipe.from_dict(tomlkit.parse(change.after).unwrap())
    assert written.linear.weight == other.linear.weight and written.norm == other.norm
    assert written.lm_head == other.lm_head and written.arithmetic == other.arithmetic


# ---------------------------------------------------------------------------------------- skip lists


def test_a_pattern_that_hits_too_much_becomes_the_names(llama: str, folder: Path) -> None:
    path = folder / "engine.json"
    text = json.dumps(online(ignore=["re:.*mlp.gate", "lm_head", "re:.*layers.0.self_attn.o_proj"]), indent=4)
    path.write_text(text)
    recipe = Recipe.jet_rl().to_dict()
    recipe["select"]["skip"] = ["model.layers.0.self_attn.o_proj"]
    Recipe.from_dict(recipe).save("mine.toml")
    shown = check(llama, "--train", "mine.toml", "--infer", f"vllm:{path}", "--diff")
    assert path.read_text() == text
    assert '-            "re:.*mlp.gate"' in shown.stdout
    check(llama, "--train", "mine.toml", "--infer", f"vllm:{path}", "--fix", "-o", "out.json")
    data = json.loads(path.read_text())
    assert data == online(ignore=["lm_head", "re:.*layers.0.self_attn.o_proj"])
    assert path.read_text() == json.dumps(data, indent=4)
    left = json.loads(Path("out.json").read_text())["violations"]
    assert left and not [f for f in left if "rule.gemm" in f["attributes"]]


def test_layers_that_only_the_trainer_leaves_out_are_named(llama: str, folder: Path) -> None:
    recipe = Recipe.jet_rl().to_dict()
    recipe["select"]["skip"] = ["model.layers.1.mlp.down_proj"]
    Recipe.from_dict(recipe).save("mine.toml")
    path = folder / "engine.toml"
    top = '# engine\nquantization = "fp8_per_block"  # online\n'
    path.write_text(top + '[quantization_config]\nlinear = "fp8_per_block"\n')
    check(llama, "--train", "mine.toml", "--infer", f"vllm:{path}", "--fix")
    text = path.read_text()
    assert tomlkit.parse(text)["quantization_config"]["ignore"] == ["model.layers.1.mlp.down_proj"]  # type: ignore[index]
    assert text.startswith(top)


def test_half_of_a_fused_layer_is_left_to_a_person(llama: str, folder: Path) -> None:
    recipe = Recipe.jet_rl().to_dict()
    recipe["select"]["skip"] = ["model.layers.1.mlp.up_proj"]
    Recipe.from_dict(recipe).save("mine.toml")
    path = folder / "engine.json"
    path.write_text(json.dumps(online(ignore=[])))
    before = path.read_text()
    result = check(llama, "--train", "mine.toml", "--infer", f"vllm:{path}", "--fix")
    assert result.exit_code == 1 and path.read_text() == before
    assert "by hand" in result.stderr and "runs them as one layer" in " ".join(result.stderr.split())


def test_yaml_is_not_edited(llama: str, folder: Path) -> None:
    path = folder / "engine.yaml"
    text = "quantization: fp8_per_block  # online\nquantization_config:\n  ignore: ['re:.*mlp.gate']\n"
    path.write_text(text)
    result = check(llama, "--infer", f"vllm:{path}", "--fix")
    assert path.read_text() == text
    assert f"by hand: {path}: set quantization_config.ignore to []" in result.stderr


def test_a_checkpoint_without_its_weights_is_not_edited(llama: str, folder: Path) -> None:
    data = json.loads((Path(llama) / "config.json").read_text())
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    data["quantization_config"] = {**stored, "modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}
    path = folder / "fp8"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(data))
    result = check(llama, "--infer", path, "--fix")
    assert result.exit_code == 1 and json.loads((path / "config.json").read_text()) == data
    assert "whether the weights are stored so cannot be seen" in " ".join(result.stderr.split())


def test_lists() -> None:
    hits = {"a*": ["a1", "a2"], "b": ["b"], "none": []}.__getitem__
    assert edited(["a*", "b", "none"], hits, {"a1"}, ["c"]) == ["a2", "b", "none", "c"]
    assert edited(["a*"], hits, set(), []) == ["a*"]
    assert find_list({"quantization_config": {"ignore": []}}) == ("quantization_config", "ignore")
    assert find_list({"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}})[-1] == "modules_to_not_convert"
    assert find_list({"quantization_config": {"ignore": [], "ignored_layers": []}}) == "has more than one skip list"
    assert find_list({"x": 1}) == find_list({"quantization_config": 3}) == "has no quantization_config"


def test_a_json_file_with_a_key_twice_is_not_touched(folder: Path) -> None:
    path = folder / "c.json"
    path.write_text('{"quantization_config": {"ignore": ["a"], "ignore": ["b"]}}')
    result = rewrite(path, ("quantization_config", "ignore"), ["c"], "")
    assert isinstance(result, str) and "is there twice" in result and '["c"]' in result


def test_json_keeps_its_form(folder: Path) -> None:
    path = folder / "c.json"
    for text in (
        '{\n  "é": 1e-06,\n  "quantization_config": {\n    "ignore": [\n      "a"\n    ]\n  }\n}\n',
        '{"quantization_config": {"ignore": ["a"]}, "x": [1, 2.5, null]}',
    ):
        path.write_text(text)
        change = rewrite(path, ("quantization_config", "ignore"), ["b"], "")
        assert isinstance(change, Change) and change.after == text.replace('"a"', '"b"')


# --------------------------------------------------------------------------------------- environment


def test_settings_are_those_that_remedies_name() -> None:
    assert STACKS["vllm"].settings == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert str(STACKS["vllm"].remedies["requantize"]) == "set VLLM_USE_DEEP_GEMM_E8M0=0 for vLLM"
    assert STACKS["nemo_rl"].settings == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}  # Megatron's
    assert STACKS["slime"].settings == STACKS["deep_gemm"].settings == {}


@pytest.mark.parametrize("name", STACKS)
def test_no_setting_is_words_alone(name: str) -> None:
    """Which --fix would not see."""
    stack = STACKS[name]
    assert stack.settings.keys() <= set(stack.variables)
    words = [remedy for remedy in stack.remedies.values() if isinstance(remedy, str)]
    assert not [text for text in words if re.search(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*\s*=", text)]


def test_an_environment_file_for_the_rollout(llama: str) -> None:
    Path("precgraph.env").write_text("# ours\nHOME_OF=x\nexport VLLM_USE_DEEP_GEMM_E8M0 = 1\n")
    shown = check(llama, "--train", "deep_gemm", "--infer", "vllm", "--diff")
    assert "-export VLLM_USE_DEEP_GEMM_E8M0 = 1\n+VLLM_USE_DEEP_GEMM_E8M0=0\n" in shown.stdout
    fixed = check(llama, "--train", "deep_gemm", "--infer", "vllm", "--fix")
    assert Path("precgraph.env").read_text() == "# ours\nHOME_OF=x\nVLLM_USE_DEEP_GEMM_E8M0=0\n"
    assert fixed.exit_code == 1  # a file is not yet an environment
    both = fixed.output  # stdout and stderr as they came
    assert fixed.stdout.startswith("inconsistent: ") and len(fixed.stdout.splitlines()) == 1  # no table of this one
    words = " ".join(fixed.stderr.split())
    written = Path("precgraph.env").resolve()
    assert words.startswith(f"wrote {written}: VLLM_USE_DEEP_GEMM_E8M0=0; start both sides in this environment ")
    assert f"(set -a; . {written}; set +a)" in words
    assert "fixed" not in words
    there = CliRunner(env={"VLLM_USE_DEEP_GEMM_E8M0": "0"}).invoke(
        app, ["check", llama, "--train", "deep_gemm", "--infer", "vllm", "--json"]
    )
    left = json.loads(there.stdout)["violations"]
    assert len(json.loads(there.stdout)["causes"]) == 1 and {code for f in left for code in f["codes"]} == {
        "PG103",
        "PG104",
        "PG105",
    }
    remedies = dict.fromkeys(f["remedy"] for f in left)
    assert fixed.stderr.splitlines()[1:-1] == [
        "precgraph.env settles PG102 scale dtype, PG109 quantised twice",
        "left in that environment: 1 root cause, by what no variable settles: PG103 scale rule, PG104 division, "
        "PG105 amax floor",
        *(f"by hand: {remedy}" for remedy in remedies),
    ]
    assert fixed.stderr.splitlines()[-1].startswith("the verdict here, ")
    assert both.index("wrote ") < both.index("by hand: ") < both.index("the verdict here") < both.index("inconsistent")


def test_the_fewest_variables_that_help_and_no_guess() -> None:
    jet, other = Recipe.jet_rl(), Recipe.jet_rl().to_dict()
    other["linear"]["weight"]["amax_floor"] = 0.5
    far = Recipe.from_dict(other)
    assert (distance(jet, jet), distance(jet, far)) == (0, 1)

    def recipes(env: Any) -> tuple[Recipe, Recipe]:
        return (jet, jet) if env.get("A") == "1" or env.get("B") == "1" else (jet, far)

    assert best({"A": "1"}, {}, recipes) == [{"A": "1"}]
    assert best({"C": "1"}, {}, recipes) == []
    assert best({"A": "1", "C": "1"}, {}, recipes) == [{"A": "1"}]
    assert best({"A": "1", "B": "1"}, {}, recipes) == [{"A": "1"}, {"B": "1"}]
    assert best({"B": "1"}, {"A": "1"}, recipes) == []


def test_an_environment_file_that_says_it_all_is_left_alone(folder: Path) -> None:
    (folder / "precgraph.env").write_text("A=1\n")
    assert environment_file(folder, {"A": "1"}) is None
    change = environment_file(folder, {"B": "0"})
    assert change is not None and change.after == "A=1\nB=0\n"


# ----------------------------------------------------------------------------------------- the plan


def test_a_file_that_changed_meanwhile_is_not_written(folder: Path) -> None:
    first, second = folder / "a", folder / "b"
    first.write_text("1")
    second.write_text("changed")
    plan = Plan([Change(first, "1", "2", ""), Change(second, "1", "2", "")])
    with pytest.raises(InputError, match="b: has changed since it was read"):
        plan.apply()
    assert first.read_text() == "1"


def test_writing_keeps_links_and_modes(folder: Path) -> None:
    real, link = folder / "real", folder / "link"
    real.write_text("1")
    real.chmod(0o640)
    link.symlink_to(real)
    Plan([Change(link, "1", "2", "")]).apply()
    assert real.read_text() == "2" and link.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in folder.iterdir()) == ["link", "real"]


def test_options_that_exclude_each_other(llama: str) -> None:
    assert check(llama, "--diff", "--json").exit_code == 2
    words = "--fix is for levels graph and weights, not for level numerics; leave it out"
    assert words in check(llama, "--level", "numerics", "--fix").stderr
    consistent = check(llama, "--fix")
    assert consistent.exit_code == 0 and consistent.stderr == ""
    plain = check(llama, "--train", "bf16", "--fix")  # two presets: there is no file
    assert plain.exit_code == 1 and plain.stderr.startswith("by hand: PG")
