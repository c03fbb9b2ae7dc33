"""Graphs as text and dot, without the command line."""

from __future__ import annotations

import re

import pytest

from precgraph import InputError, Recipe
from precgraph.checking import lowered
from precgraph.graph import PrecisionGraph
from precgraph.render import groups, render_dot, render_text
from precgraph.trace import trace
from tests.families import meta_lm, plain_module


@pytest.fixture(scope="module")
def graph() -> PrecisionGraph:
    return lowered(trace(meta_lm("qwen2", num_hidden_layers=4)), "train", Recipe.jet_rl())


def test_every_node_is_in_one_group(graph: PrecisionGraph) -> None:
    whole = groups(graph, fold=False)
    assert [r.name for g in whole for r in g.records] == [n.name for n in graph]
    folded = groups(graph)
    assert sum(len(g.records) * max(1, len(g.layers)) for g in folded) == len(graph.graph.nodes)
    assert [g.title for g in folded if len(g.layers) > 1] == [
        f"model.layers.0-3 (4 alike), {kind}" for kind in ("parameters", "forward", "backward")
    ]


def test_the_lowest_layer_stands_for_the_others(graph: PrecisionGraph) -> None:
    folded = {g.kind: g for g in groups(graph) if g.layers}
    for kind, group in folded.items():
        alone = [g for g in groups(graph, fold=False) if g.kind == kind and g.layers == (0,)]
        assert [r.name for r in group.records] == [r.name for g in alone for r in g.records]


def test_columns_line_up_within_a_group(graph: PrecisionGraph) -> None:
    lines = render_text(graph, layer=2)
    start = lines.index("== model.layers.2, parameters") + 1
    rows = lines[start : lines.index("", start)]
    assert len({line.index("bf16 [") for line in rows}) == 1
    assert any(line.lstrip().startswith(".mlp.gate_proj.weight  ") for line in rows)


def test_unaligned_text_does_not_move_when_a_neighbour_grows(graph: PrecisionGraph) -> None:
    for line in render_text(graph, align=False):
        assert "   " not in line.strip()


def test_formats_accumulation_and_what_is_saved_are_in_the_text(graph: PrecisionGraph) -> None:
    lines = [re.split(r"\s{2,}", line.strip()) for line in render_text(graph)]
    (weight,) = [c for c in lines if c[0].endswith("= quantize(.mlp.up_proj.weight)")]
    assert weight[1:7] == ["e4m3 128x128 [256, 128]", "fp32/-", "reference.quantize.v1", "weight", "-", "refresh"]
    gemms = [c for c in lines if re.match(r"linear_\d+ = linear\(", c[0])]
    assert len(gemms) == 7
    assert all(c[2] == "-/fp32" and c[3] == "reference.linear.fp8_exact_groups" for c in gemms)
    saved = [c for c in lines if c[5:7] == ["saved", "forward"] and "= linear(" in c[0]]
    assert [c[7] for c in saved] == [".mlp.gate_proj", ".mlp.up_proj"]
    again = [c for c in lines if c[-1].endswith("(made again for the backward)") and "= quantize(" in c[0]]
    assert [c[1].partition(" [")[0] for c in again] == ["e4m3 128x1"] * 4
    assert all(c[5:7] == ["-", "backward"] for c in again)


def test_a_plain_module_has_no_layers_to_fold_or_to_pick() -> None:
    model, inputs = plain_module("custom_norm")
    graph = lowered(trace(model, inputs), "train", Recipe.jet_rl())
    text = "\n".join(render_text(graph))
    assert "aten.abs.default" in text
    assert "== model, forward" in text
    with pytest.raises(InputError, match="no layer 0; leave --layer out"):
        render_text(graph, layer=0)


def test_dot_draws_every_edge_once(graph: PrecisionGraph) -> None:
    text = "\n".join(render_dot(graph, fold=False))
    edges = re.findall(r'^  "([^"]+)" -> "([^"]+)" \[', text, re.MULTILINE)
    wanted = [(producer, r.name) for r in graph.records() for _, producer in r.operands]
    assert sorted(edges) == sorted(wanted)
    assert text.count("subgraph cluster_") == len(groups(graph, fold=False))


def test_dot_labels_are_escaped(graph: PrecisionGraph) -> None:
    odd = graph.copy()
    odd.family = 'a "quoted\\name"'
    first = render_dot(odd)[0]
    assert first == r'digraph "a \"quoted\\name\"" {'
    (node,) = [line for line in render_dot(odd) if line.startswith('    "embedding_1"')]
    assert r"\n" in node
    assert "\n" not in node
