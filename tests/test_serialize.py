"""Graphs as JSON: the same program back, and nothing but operators of graphs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from precgraph import ops
from precgraph.errors import GraphError
from precgraph.format import Format
from precgraph.graph import Precision, PrecisionGraph, TensorSpec
from precgraph.recipe import Recipe
from precgraph.serialize import function_from_name
from precgraph.verify import check_inclusion
from tests.families import CAUSAL_LMS, PLAIN_MODULES
from tests.surgery import JET, pair, program, raw

MODELS = (*CAUSAL_LMS, *PLAIN_MODULES)


def reload(graph: PrecisionGraph) -> PrecisionGraph:
    """Through text, as a file would."""
    return PrecisionGraph.from_json(json.loads(json.dumps(graph.to_json(), allow_nan=False)))


@pytest.mark.parametrize("recipe", [JET, Recipe.bf16()], ids=lambda r: r.name)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, recipe: Recipe) -> None:
    for graph in (raw(name), program(name, "train", recipe), program(name, "infer", recipe)):
        again = reload(graph)
        assert again.records() == graph.records()
        assert str(again.graph) == str(graph.graph)
        assert again.digest() == graph.digest()
        assert (again.mode, again.family, again.causal_lm) == (graph.mode, graph.family, graph.causal_lm)
        assert (again.recipe, again.passes, again.parameters) == (graph.recipe, graph.passes, graph.parameters)
        assert again.to_json() == graph.to_json()
        for a, b in zip(again, graph, strict=True):
            assert (a.target, a.op, a.meta.get("tensor")) == (b.target, b.op, b.meta.get("tensor"))


@pytest.mark.parametrize("name", MODELS)
def test_reloaded_graphs_can_be_checked(name: str) -> None:
    train, infer = (reload(g) for g in pair(name))
    report = check_inclusion(train, infer)
    assert report.ok
    assert report.compared == len(infer.graph.nodes)


def test_every_kind_of_argument_keeps_its_type() -> None:
    arguments: list[Any] = [
        None, True, 0, 1, -1.5, 1e-300, 2.0, math.inf, -math.inf, "text", [], [1, [2.0]], (), (1, (True,)), {"k": (1,)},
        torch.bfloat16, torch.device("cuda", 1), torch.strided, torch.contiguous_format, Format(), JET.linear.weight,
        ops.AttentionSpec(0.125, 0, 0.0, 3, 4, 2, 32), ops.rms_norm, torch.ops.aten.mul.Tensor,
    ]  # fmt: skip
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(ops.vjp, (arguments, [x]), {"grads": math.inf})
    out = graph.output(call)
    for node in (x, call, out):
        node.meta["precision"] = Precision(Format())
    x.meta["tensor"] = TensorSpec("bfloat16", (1, "T", 8))
    _, again, _ = reload(PrecisionGraph(graph, {})).graph.nodes
    assert list(again.args[0]) == arguments
    assert [type(a) for a in again.args[0]] == [type(a) for a in call.args[0]]  # type: ignore[union-attr]
    assert again.kwargs == call.kwargs


def test_nan_survives() -> None:
    graph = program("mlp", "infer")
    node = next(n for n in graph if n.target is ops.activate)
    node.args = (node.args[0], math.nan)
    again = next(n for n in reload(graph) if n.target is ops.activate)
    assert isinstance(again.args[1], float)
    assert math.isnan(again.args[1])


@pytest.mark.parametrize("name", ["rms_norm", "getitem", "aten.mul.Tensor", "precgraph.attention.default"])
def test_names_of_operators(name: str) -> None:
    assert callable(function_from_name(name))


@pytest.mark.parametrize(
    "name",
    ["os.system", "eval", "aten.mul",
     "aten.nothing.default", "aten.mul.nothing", "aten.__class__.mro", "aten.mul.__call__",
     "prims.mul.default", "precgraph.other.default", "operator.add", "", "aten..", "Format", "aten.mul.Tensor\n"],
)  # fmt: skip
def test_nothing_else_is_an_operator(name: str) -> None:
    with pytest.raises(GraphError, match="not an operator"):
        function_from_name(name)


def test_a_foreign_function_is_not_written() -> None:
    graph = program("mlp", "infer")
    next(n for n in graph if n.target is ops.linear).target = torch.nn.functional.linear  # of the same name
    with pytest.raises(GraphError, match="not precgraph's linear"):
        graph.to_json()


def _drop(data: dict[str, Any], key: str) -> None:
    del data[key]


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = path

    def apply(data: dict[str, Any]) -> None:
        at: Any = data
        for step in way:
            at = at[step]
        at[last] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_set("schema", 99), "schema"),
        (lambda d: _drop(d, "nodes"), "'nodes' is missing"),
        (lambda d: _drop(d["nodes"][3], "precision"), "'precision' is missing"),
        (lambda d: d["nodes"].pop(), "cut short"),
        (lambda d: d["nodes"].clear(), "cut short"),
        (lambda d: d["nodes"].append(d["nodes"][0]), "two nodes"),
        (lambda d: d["nodes"].insert(0, d["nodes"].pop(5)), "no earlier node makes"),
        (_set("nodes", -2, "op", "os.system"), "not an operator"),
        (_set("nodes", -2, "args", 0, {"pickle": "gASV"}), "unknown tag"),
        (_set("nodes", -2, "args", 0, {"node": "x", "float": "1"}), "malformed"),
        (_set("nodes", -2, "args", 0, {"dtype": "nn"}), "malformed"),
        (_set("nodes", -2, "args", 0, {"dtype": "load"}), "malformed"),
        (_set("nodes", -2, "name", "not a name"), "does not allow"),
        (_set("nodes", -2, "precision", "colour", "red"), "colour"),
        (_set("nodes", -2, "precision", "format", {"dtype": "float9"}), "float9"),
        (_set("nodes", -2, "precision", "rules", {"a": 1}), "malformed"),
        (_set("nodes", 1, "target", "nowhere.weight"), "not among the parameters"),
        (_set("mode", 3), "malformed"),
        (_set("nodes", 7, 3), "malformed"),
    ],
)
def test_malformed_data_is_one_clear_error(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    data = copy.deepcopy(program("mlp", "infer").to_json())
    data["nodes"].sort(key=lambda n: n["op"] != "parameter" and n["op"] != "input")
    data["nodes"].sort(key=lambda n: n["op"] != "input")
    PrecisionGraph.from_json(data)
    damage(data)
    with pytest.raises(GraphError, match=message) as error:
        PrecisionGraph.from_json(data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [None, [], "graph", {}, {"schema": "1"}])
def test_other_data_is_no_graph(data: Any) -> None:
    with pytest.raises(GraphError, match="not a precision graph"):
        PrecisionGraph.from_json(data)
