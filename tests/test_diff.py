"""``precgraph diff``: two graphs, or two reports."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from precgraph import Recipe
from precgraph.checking import lowered
from precgraph.cli import app
from precgraph.recipe import SelectRule
from precgraph.report.suppress import Suppression
from precgraph.trace import Trace, trace
from tests.families import meta_lm
from tests.reports import HOSTILE, document, finding, hostile_document


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["diff", *(str(a) for a in args)])


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to(name: str, data: Any) -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return to


@pytest.fixture(scope="module")
def traced() -> Trace:
    return trace(meta_lm("llama"))


@pytest.fixture(scope="module")
def graph(traced: Trace) -> dict[str, Any]:
    return lowered(traced, "infer", Recipe.jet_rl(), "reference").to_json()


@pytest.fixture(scope="module")
def train(traced: Trace) -> dict[str, Any]:
    return lowered(traced, "train", Recipe.jet_rl(), "reference").to_json()


def renamed(graph: dict[str, Any]) -> dict[str, Any]:
    """A copy whose nodes have other names everywhere, in the names of fusion groups too."""
    other = copy.deepcopy(graph)
    names = {row["name"]: f"n{k}" for k, row in enumerate(reversed(other["nodes"]))}

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(v) for v in value]
        if isinstance(value, dict):
            return {key: names[v] if key == "node" else walk(v) for key, v in value.items()}
        return value

    for row in other["nodes"]:
        row["name"], row["args"], row["kwargs"] = names[row["name"]], walk(row["args"]), walk(row["kwargs"])
        row["precision"]["fusion"] = re.sub(
            r"\((\w+)\)$", lambda found: f"({names[found[1]]})", row["precision"]["fusion"] or ""
        ) or None  # fmt: skip
    return other


def row_of(graph: dict[str, Any], op: str, module: str) -> dict[str, Any]:
    """The first node of an operator in a module."""
    return next(n for n in graph["nodes"] if (n["op"], n["precision"]["module"]) == (op, module))


# ------------------------------------------------------------------------------------------- reports


def test_equal_reports(write: Any) -> None:
    data = hostile_document()
    result = run(write("a", data), write("b", copy.deepcopy(data)))
    assert (result.exit_code, result.stdout) == (0, "equal: the two reports differ in nothing\n")


def test_findings_that_came_went_and_were_accepted(write: Any) -> None:
    old = document(finding(module="gone"), finding(module="kept"), finding(module="accepted"))
    new = document(
        finding(module="kept"), finding(module="accepted"), finding(module="new"),
        suppressions=[Suppression("PG105", "accepted", "why")], notes=(finding("backward", "later"),),
    )  # fmt: skip
    a, b = write("a", old), write("b", new)
    result = run(a, b, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert [[f["module"] for f in data[key]] for key in ("new", "fixed", "notes_new")] == [["new"], ["gone"], ["later"]]
    (moved,) = data["moved"]
    assert (moved["finding"]["module"], moved["a"], moved["b"]) == ("accepted", "failing", "suppressed")
    text = run(a, b).stdout
    assert "1 new, 1 fixed, 1 in another state" in text
    assert "failing -> suppressed: PG105 amax floor  accepted" in text
    back = json.loads(run(b, a, "--json").stdout)
    assert [f["module"] for f in back["new"]] == ["gone"]


def test_reports_whose_findings_are_equal_may_differ_in_all_else(write: Any) -> None:
    """In what was measured, for one: of equal programs that run on other weights."""
    one = document(finding())
    measured = [{**one, "numerics": {"logprobs": {"mean": mean, "largest": 0.5}}} for mean in (0.25, 0.125)]
    result = run(*(write(str(i), data) for i, data in enumerate(measured)), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["fields"] == {"numerics.logprobs.mean": [0.25, 0.125]}
    kernels = [{**one, "kernels": counts} for counts in ({"aten.add": 2, "aten.mul": 1}, {"aten.mul": 1})]
    assert "aten.add: 2 -> absent" in run(*(write(str(i), data) for i, data in enumerate(kernels))).stdout
    assert run(write("a", one), write("b", one)).exit_code == 0


def test_what_became_known_is_a_count(write: Any) -> None:
    """The others are listed, and all with --verbose."""
    old = document(*(finding(module=f"model.layers.{n}.mlp", quantises="weight") for n in range(50)))
    many = [finding(module=f"model.layers.{n}.mlp", quantises="weight") for n in range(1, 50)]
    a = write("a", old)
    b = write("b", document(*many, *(finding(module=f"new.{n}") for n in range(45)), baseline=old))
    lines = run(a, b).stdout.splitlines()
    assert sum(line.startswith("new: PG105 amax floor  new.") for line in lines) == 40
    assert "... and 5 more lines (--verbose shows all)" in lines
    assert "fixed: PG105 amax floor  model.layers.0.mlp  quantize (weight)  amax_floor 1e-10 | 0.0001" in lines
    assert "known now, of the baseline: 49 (--verbose lists them)" in lines
    assert not any(line.startswith("failing -> known") for line in lines)
    assert lines[-1] == "45 new, 1 fixed, 49 in another state"
    lines = run(a, b, "--verbose").stdout.splitlines()
    assert [sum(line.startswith(word) for line in lines) for word in ("new: ", "failing -> known: ", "... and")] == [
        45, 49, 0
    ]  # fmt: skip
    assert not any("--verbose" in line for line in lines)
    assert sum(line.startswith("known -> failing: ") for line in run(b, a).stdout.splitlines()) == 40  # these fail now


def test_a_strict_report_that_fails_is_not_equal_to_one_that_passes(write: Any) -> None:
    """Nor does one that was written before there was such an option differ from one without it."""
    data = document()
    result = run(write("a", data), write("b", data | {"strict": True}))
    assert (result.exit_code, "strict: False -> True" in result.stdout) == (1, True)
    older = {k: v for k, v in data.items() if k != "strict"}
    assert run(write("a", older), write("b", data | {"strict": False})).exit_code == 0


def test_other_digests_are_a_difference_even_without_findings(write: Any) -> None:
    result = run(write("a", document()), write("b", document(context={"digests": {"train": "1", "infer": "3"}})))
    assert result.exit_code == 1
    assert "digests.infer: 2 -> 3" in result.stdout


def test_hostile_names_stay_on_their_line(write: Any) -> None:
    result = run(write("a", document()), write("b", hostile_document()))
    assert result.exit_code == 1
    assert sum(line.startswith("new: ") for line in result.stdout.splitlines()) == len(HOSTILE)
    assert "\x1b" not in result.stdout and not any(line.startswith("::") for line in result.stdout.splitlines())


# -------------------------------------------------------------------------------------------- graphs


def test_equal_graphs(write: Any, graph: dict[str, Any]) -> None:
    result = run(write("a", graph), write("b", graph))
    assert (result.exit_code, result.stdout) == (0, "equal: the two graphs differ in nothing\n")


def test_a_planted_difference_is_the_only_one(write: Any, graph: dict[str, Any]) -> None:
    other = copy.deepcopy(graph)
    node = next(n for n in other["nodes"] if n["op"] == "rms_norm")
    node["precision"]["compute"] = "bfloat16"
    result = run(write("a", graph), write("b", other), "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    (changed,) = data["changed"]
    assert changed == {
        "name": node["name"], "name_a": node["name"], "op": "rms_norm", "module": "model.layers.0.input_layernorm",
        "fields": {"precision.compute": ["float32", "bfloat16"]},
    }  # fmt: skip
    assert not data["only_a"] and not data["only_b"] and not data["parameters"] and not data["fields"]


def test_two_recipes_differ_in_the_quantisers_of_weights(write: Any, graph: dict[str, Any], traced: Trace) -> None:
    data = Recipe.jet_rl().to_dict()
    data["linear"]["weight"]["amax_floor"] = 1e-4
    other = lowered(traced, "infer", Recipe.from_dict(data), "reference").to_json()
    found = json.loads(run(write("a", graph), write("b", other), "--json").stdout)
    assert found["fields"] == {"recipe.linear.weight.amax_floor": [1e-12, 1e-4]}
    assert len(found["changed"]) == 14
    assert {n["op"] for n in found["changed"]} == {"quantize"}
    text = run(write("a", graph), write("b", other)).stdout
    assert "14 nodes differ, 0 only in A, 0 only in B" in text
    assert "precision.format.amax_floor: 1e-12 -> 0.0001" in text


def test_a_layer_left_out_is_what_differs_at_that_layer(write: Any, train: dict[str, Any], traced: Trace) -> None:
    """Its quantisers (of x, weight and dy, and of both operands of WGrad) go, and all later ones get other numbers."""
    down = "model.layers.0.mlp.down_proj"
    recipe = replace(Recipe.jet_rl(), select=SelectRule(skip=(down,)))
    other = lowered(traced, "train", recipe, "reference").to_json()
    result = run(write("a", train), write("b", other), "--json")
    found = json.loads(result.stdout)
    assert len(found["only_a"]) == len(train["nodes"]) - len(other["nodes"]) == 5
    assert not found["only_b"] and not found["parameters"] and not found["order"]
    assert {n["op"] for n in found["only_a"]} == {"quantize"}
    assert {n["module"] for n in found["only_a"] + found["changed"]} == {down, "model.layers.0.mlp"}
    changed = {n["op"]: n["fields"] for n in found["changed"]}
    assert sorted(n["op"] for n in found["changed"]) == ["gated", "gated", "linear", "linear_dgrad", "linear_wgrad"]
    assert changed["gated"].keys() == {"precision.fusion"}
    assert changed["linear"]["precision.rules.gemm"] == ["quantized", "plain"]
    quantised, weight = changed["linear"]["arguments.weight"]
    assert (quantised.endswith(f" (quantize of {down})"), weight) == (True, f"{down}.weight")
    assert "5 nodes differ, 5 only in A, 0 only in B" in run(write("a", train), write("b", other)).stdout


def test_names_of_nodes_are_no_difference(write: Any, train: dict[str, Any]) -> None:
    other = renamed(train)
    assert not {n["name"] for n in train["nodes"]} & {n["name"] for n in other["nodes"]}
    result = run(write("a", train), write("b", other))
    assert (result.exit_code, result.stdout) == (0, "equal: the two graphs differ in nothing\n")


@pytest.mark.parametrize("to", ["model.layers.1.mlp", "model.elsewhere"])
def test_a_node_in_another_module_is_the_only_difference(write: Any, train: dict[str, Any], to: str) -> None:
    """Also where that module has such a node already."""
    old, other = row_of(train, "gated", "model.layers.0.mlp"), renamed(train)
    new = row_of(other, "gated", "model.layers.0.mlp")
    new["precision"]["module"] = to
    found = json.loads(run(write("a", train), write("b", other), "--json").stdout)
    fields = {"precision.module": ["model.layers.0.mlp", to]}
    assert found["changed"] == [
        {"name": new["name"], "name_a": old["name"], "op": "gated", "module": to, "fields": fields}
    ]
    assert not found["only_a"] and not found["only_b"]
    assert f"differs: {old['name']} -> {new['name']}  gated  {to}" in run(write("a", train), write("b", other)).stdout


def test_an_edge_is_what_it_comes_from(write: Any, graph: dict[str, Any]) -> None:
    """A quantiser that nothing reads any more is still a node of both."""
    out = "model.layers.0.self_attn.o_proj"
    other = renamed(graph)
    old, linear = row_of(graph, "linear", out), row_of(other, "linear", out)
    quantiser = next(n for n in other["nodes"] if {"node": n["name"]} == linear["args"][0])
    linear["args"][0] = quantiser["args"][0]
    found = json.loads(run(write("a", graph), write("b", other), "--json").stdout)
    (changed,) = found["changed"]
    assert (changed["name_a"], changed["name"]) == (old["name"], linear["name"])
    assert changed["fields"] == {
        "arguments.x": [
            f"{old['args'][0]['node']} (quantize of model.layers.0.self_attn)",
            f"{linear['args'][0]['node']} (getitem of model.layers.0.self_attn)",
        ]
    }
    assert not found["only_a"] and not found["only_b"]


def test_a_constant_that_json_has_no_number_for(write: Any, graph: dict[str, Any]) -> None:
    other = copy.deepcopy(graph)
    norm = next(n for n in other["nodes"] if n["op"] == "rms_norm")
    eps = norm["args"][2]
    norm["args"][2] = {"float": "inf"}
    (changed,) = json.loads(run(write("a", graph), write("b", other), "--json").stdout)["changed"]
    assert changed["fields"] == {"arguments.eps": [eps, "Infinity"]}


def test_nodes_of_one_side_and_another_mode(write: Any, graph: dict[str, Any], train: dict[str, Any]) -> None:
    found = json.loads(run(write("a", graph), write("b", train), "--json").stdout)
    assert found["fields"]["mode"] == ["infer", "train"]
    assert len(found["only_b"]) > 0
    assert len(train["nodes"]) - len(graph["nodes"]) == len(found["only_b"]) - len(found["only_a"])
    assert {key for n in found["changed"] for key in n["fields"]} == {"precision.saved", "precision.cache"}


# ----------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_compared_is_one_line(write: Any, graph: dict[str, Any]) -> None:
    report, half = document(), {**graph, "nodes": graph["nodes"][:-1]}
    other = {**report, "level": "env", "compared": {"facts": 1}}
    for a, b, words in (
        (report, graph, "is a graph, and"), (report, "{", "is not valid JSON"), ([], report, "is neither a graph nor"),
        (half, graph, "the data is cut short"), ({**graph, "schema": 9}, graph, "not a precision graph of schema"),
        ({**report, "exit_code": 1}, report, "is no report of schema"), (report, other, "levels graph and env"),
    ):  # fmt: skip
        result = run(write("a", a), write("b", b))
        assert result.exit_code == 2, words
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert words in line
    assert run(write("a", report), "no/such.json").exit_code == 2
