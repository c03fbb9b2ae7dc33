"""Inclusion: nothing on programs of one policy, and for each planted defect the right node, attribute and no more."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from precgraph.errors import CheckError, RecipeError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, annotate, op_name, output_node, precision, with_rules
from precgraph.passes.pipeline import build
from precgraph.recipe import Recipe, SelectRule
from precgraph.trace import trace
from precgraph.verify import Report, align, check_inclusion
from tests.families import CAUSAL_LMS, PLAIN_MODULES
from tests.planted import PLANTED, Cause, Planted
from tests.surgery import JET, find, pair, program, rename, set_argument, set_dtype, swap

MODELS = (*CAUSAL_LMS, *PLAIN_MODULES)
# How another engine might call the same modules.
OTHER_NAMES = (
    (r"^model\.embed_tokens", "tok"), (r"^model\.norm", "final"), (r"^lm_head", "out"), (r"^model\.layers", "blocks"),
    (r"self_attn\.(\w)_proj", r"att.w\1"), (r"self_attn", "att"), (r"mlp\.gate_proj", "ffn.w1"),
    (r"mlp\.up_proj", "ffn.w3"), (r"mlp\.down_proj", "ffn.w2"), (r"mlp", "ffn"), (r"input_layernorm", "ln1"),
    (r"post_attention_layernorm", "ln2"), (r"model\.rotary_emb", "rope"),
)  # fmt: skip


def causes(report: Report) -> frozenset[Cause]:
    return frozenset((f.module, f.op, a) for f in report.violations for a in f.attributes)


# ------------------------------------------------------------------------------------- nothing to find


@pytest.mark.parametrize("recipe", [JET, Recipe.bf16()], ids=lambda r: r.name)
@pytest.mark.parametrize("name", MODELS)
def test_unmutated(name: str, recipe: Recipe) -> None:
    train, infer = program(name, "train", recipe), program(name, "infer", recipe)
    for other in (infer, train.copy()):
        report = check_inclusion(train, other)
        assert report.ok
        assert report.exit_code == 0
        assert report.notes == ()
        assert [f.code for f in report.not_proved] == ["PG904 kernels not compared"]
        assert report.compared == len(infer.graph.nodes)  # every node of the rollout, none of the backward


@pytest.mark.parametrize("name", MODELS)
def test_unmutated_and_lowered(name: str) -> None:
    report = check_inclusion(*pair(name))
    assert report.ok
    assert report.notes == ()
    assert all(f.code.startswith("PG902") for f in report.not_proved)


def test_fused_and_separate_projections_are_one_forward() -> None:
    recipe = replace(JET, linear=replace(JET.linear, fuse_projections=False))
    report = check_inclusion(*pair("llama", recipe))
    assert report.ok
    assert [f.attributes for f in report.notes] == [("linear.fuse_projections",)]


@pytest.mark.parametrize("nth", [0, 1])
def test_the_order_of_an_addition_is_no_difference(nth: int) -> None:
    train, infer = pair("llama")
    swap(infer, "add", "model.layers.1", nth)
    assert check_inclusion(train, infer).ok


def test_what_the_output_does_not_depend_on_is_not_compared() -> None:
    train, infer = pair("mlp")
    with infer.graph.inserting_after(find(infer, "linear", "up")):
        dead = infer.graph.call_function(torch.ops.aten.relu.default, (find(infer, "linear", "up"),))
    dead.meta = dict(find(infer, "linear", "up").meta)
    assert check_inclusion(train, infer).ok


# ----------------------------------------------------------------------------------- planted defects


@pytest.mark.parametrize("defect", PLANTED, ids=lambda d: d.name)
def test_planted(defect: Planted) -> None:
    train, infer = defect.graphs()
    report = check_inclusion(train, infer)
    assert causes(report) == defect.causes
    assert len(report.violations) == defect.count
    assert report.exit_code == 1
    nodes = {r.name: r for r in (*train.records(), *infer.records())}
    for finding in report.violations:
        assert nodes[finding.node].op == finding.op
        assert nodes[finding.node].precision.module == finding.module
        assert finding.train != finding.infer
        assert finding.message
        assert finding.remedy


@pytest.mark.parametrize("defect", [d for d in PLANTED if d.mutate], ids=lambda d: d.name)
def test_planted_in_the_training_graph(defect: Planted) -> None:
    """The other way round it is the same root causes; missing and extra change places."""
    train, infer = defect.graphs()
    opposite = {"missing operator": "extra operator", "extra operator": "missing operator"}
    report = check_inclusion(infer, train)
    assert len(report.violations) == defect.count
    if defect.name not in ("norm left as aten operators", "another operator"):  # there the operator's name differs
        assert causes(report) == {(m, op, opposite.get(a, a)) for m, op, a in defect.causes}


@pytest.mark.parametrize("name", ["qwen3", *PLAIN_MODULES])
def test_any_rule_at_any_node(name: str) -> None:
    """Each operator in turn gets a rule, or another kernel, of its own: one cause, at that node."""
    train, infer = pair(name)
    for node in [n for n in infer if n.op == "call_function"]:
        before = precision(node)
        for attribute, changes in (
            ("rule.planted", {"rules": (*before.rules, ("planted", "yes"))}),
            ("numerics", {"numerics": "planted"}),
            ("accumulate", {"accumulate": "float16"}),
        ):
            annotate(node, **changes)
            (finding,) = check_inclusion(train, infer).violations
            assert (finding.node, finding.attributes) == (node.name, (attribute,))
            node.meta["precision"] = before
    assert check_inclusion(train, infer).ok


@pytest.mark.parametrize("name", ["qwen3", *PLAIN_MODULES])
def test_an_extra_operator_behind_any_node(name: str) -> None:
    """One cause, with the operator's own node, wherever it stands."""
    train, infer = pair(name)
    for node in [n for n in infer if "tensor" in n.meta and n.op != "output"]:
        users = list(node.users)
        with infer.graph.inserting_after(node):
            extra = infer.graph.call_function(torch.ops.aten.neg.default, (node,))
        extra.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, extra)
        (finding,) = check_inclusion(train, infer).violations
        assert (finding.node, finding.attributes) == (extra.name, ("extra operator",))
        extra.replace_all_uses_with(node)
        infer.graph.erase_node(extra)
    assert check_inclusion(train, infer).ok


def test_at_least_twenty_kinds() -> None:
    assert len(PLANTED) >= 20


def test_a_skip_pattern_that_matches_nothing() -> None:
    with pytest.raises(RecipeError, match=r"model\.layers\.\*\.mlp\.down_prj.*did you mean"):
        program("llama", "infer", replace(JET, select=SelectRule(skip=("model.layers.*.mlp.down_prj",))))


def test_bf16_rollout_of_an_fp8_policy() -> None:
    """Every linear is reported as not quantised, among all the rest that torch's own kernels change."""
    report = check_inclusion(program("llama", "train"), program("llama", "infer", Recipe.bf16()))
    linears = [f for f in report.violations if f.op == "linear"]
    assert len(linears) == 14
    assert all({"rule.gemm", "x", "weight"} <= set(f.attributes) for f in linears)


def test_a_rule_in_two_layers_is_two_causes_and_one_row() -> None:
    train, infer = next(d for d in PLANTED if d.name == "one rule in two layers").graphs()
    report = check_inclusion(train, infer)
    assert [f.module for f in report.violations] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    (row,) = report.rows()
    assert (row.module, row.count) == ("model.layers.{0-1}.mlp", 2)
    assert "model.layers.{0-1}.mlp" in str(report)


def test_inherited_nodes_are_counted_once_each() -> None:
    """All that is downstream of the first layer's norm, except the second cause itself."""
    train, infer = pair("llama")
    set_argument(infer, "rms_norm", "model.layers.0.input_layernorm", 2, 1e-5)
    set_argument(infer, "rms_norm", "model.norm", 2, 1e-5)
    first, last = check_inclusion(train, infer).violations
    downstream, roots = set(), [find(infer, "rms_norm", "model.layers.0.input_layernorm")]
    while roots:
        for user in roots.pop().users:
            if user not in downstream:
                downstream.add(user)
                roots.append(user)
    downstream -= {find(infer, "rms_norm", "model.norm"), output_node(infer.graph)}
    assert first.inherited + last.inherited == len(downstream)
    assert last.inherited == 1  # lm_head


def test_a_numerics_id_that_follows_from_a_format_is_no_cause() -> None:
    train, infer = pair("llama", replace(JET, linear=replace(JET.linear, activation=_coarse())))
    for graph, numerics in ((train, "a GEMM"), (infer, "another GEMM for another granularity")):
        for node in graph:
            if op_name(node) == "linear":
                annotate(node, numerics=numerics)
    report = check_inclusion(train, infer)
    assert {a for _, _, a in causes(report)} == {"granularity"}


def test_a_dtype_that_follows_an_operand_is_no_cause() -> None:
    """A residual stream that starts in fp32 stays so in every addition: one cause, where it starts."""
    train, infer = pair("llama")
    set_dtype(infer, "embedding", "model.embed_tokens", "float32")
    annotate(find(infer, "embedding", "model.embed_tokens"), compute=None)
    for layer in (0, 1):
        for nth in (0, 1):
            set_dtype(infer, "add", f"model.layers.{layer}", "float32", nth)
    assert causes(check_inclusion(train, infer)) == {("model.embed_tokens", "embedding", "dtype")}


def test_kernels_of_one_numerics_id_compute_the_same() -> None:
    """How a kernel was asked for matters only as long as the kernels are not known."""
    for lowered in (True, False):
        train, infer = pair("llama") if lowered else (program("llama", "train"), program("llama", "infer"))
        node = find(infer, "split_heads", "model.layers.1.self_attn")
        node.meta["precision"] = with_rules(precision(node), arithmetic="aten")
        expected = set() if lowered else {("model.layers.1.self_attn", "split_heads", "rule.arithmetic")}
        assert causes(check_inclusion(train, infer)) == expected


def _coarse() -> Format:
    assert JET.linear.activation is not None
    return replace(JET.linear.activation, granularity="2x128")


# ------------------------------------------------------------------------------------------- backward


@pytest.mark.parametrize("rule", ["grad_output", "wgrad_grad_output", "wgrad_activation"])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_difference_in_the_backward_is_a_note(rule: str, mode: str) -> None:
    fmt = getattr(JET.linear, rule)
    recipe = replace(JET, linear=replace(JET.linear, **{rule: replace(fmt, amax_floor=1e-4)}))
    report = check_inclusion(program("llama", "train"), program("llama", mode, recipe))
    assert report.ok
    assert report.exit_code == 0
    assert {f.code for f in report.notes} == {"PG901 backward only"}
    if mode == "infer":
        assert [f.attributes for f in report.notes] == [(f"linear.{rule}",)]
    else:
        assert {(f.op, f.attributes) for f in report.notes} == {("quantize", ("amax_floor",))}


def test_a_missing_quantiser_in_one_backward_is_a_note() -> None:
    recipe = replace(JET, linear=replace(JET.linear, grad_output=None))
    report = check_inclusion(program("mlp", "train"), program("mlp", "train", recipe))
    assert report.ok
    assert {(f.module, f.op, f.attributes) for f in report.notes} == {
        (m, "quantize", ("missing operator",)) for m in ("up", "down")
    }


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_renamed_modules_still_match(name: str) -> None:
    train, infer = pair(name)
    report = check_inclusion(train, rename(infer, OTHER_NAMES))
    assert report.ok
    assert report.compared == len(infer.graph.nodes)
    assert {f.code for f in report.not_proved} == {"PG903 other names"}
    for note in report.not_proved:  # paired as the names say, which the checker was not told
        assert _rename_path(note.train[0]) == note.infer[0]


def _rename_path(path: str) -> str:
    for pattern, new in OTHER_NAMES:
        path = re.sub(pattern, new, path)
    return path


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_a_wrapper_around_the_whole_model_is_no_other_name(name: str) -> None:
    train, infer = pair(name)
    report = check_inclusion(train, rename(infer, [("^(?=.)", "language_model.")]))
    assert report.ok
    assert not [f for f in report.not_proved if f.code.startswith("PG903")]


# Without names nothing says which of two alike projections is which; the note on other names says so.
_NAMES_DECIDE = ("key and value weights exchanged", "swapped gate and up", "swapped query and key")


@pytest.mark.parametrize(
    "defect", [d for d in PLANTED if d.mutate and d.name not in _NAMES_DECIDE], ids=lambda d: d.name
)
def test_planted_under_other_names(defect: Planted) -> None:
    """As many causes with the same attributes, found without the help of any name."""
    train, infer = defect.graphs()
    report = check_inclusion(train, rename(infer, OTHER_NAMES))
    assert len(report.violations) == defect.count
    assert {(op, a) for _, op, a in causes(report)} == {(op, a) for _, op, a in defect.causes}


class _Chain(nn.Module):
    """A chain whose ends may differ; the middle is under the module name ``inner``."""

    def __init__(self, first: Callable[[Tensor], Tensor], last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.inner = _Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class _Middle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().cos() * x.exp()


def _chains() -> tuple[PrecisionGraph, PrecisionGraph]:
    x = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    ours, theirs = (trace(_Chain(f, g), (x,)).graph for f, g in ((torch.sigmoid, torch.tanh), (torch.relu, torch.abs)))
    train, infer = (build(g, mode, JET) for g, mode in ((ours, "train"), (theirs, "infer")))
    return train, rename(infer, [("^inner", "other")])


def test_subgraph_matching_between_operators_that_were_replaced() -> None:
    """No name and no neighbour is left to align the middle by: networkx finds it."""
    train, infer = _chains()
    report = check_inclusion(train, infer)
    assert causes(report) == {("", "aten.relu.default", "operator"), ("", "aten.abs.default", "operator")}
    assert report.compared == len(infer.graph.nodes)


def test_subgraph_matching_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too hard to match stays unaligned; here that is everything, and a check of nothing is an error."""
    monkeypatch.setattr(align, "_STEPS", 2)
    with pytest.raises(CheckError, match="no operator in common"):
        check_inclusion(*_chains())


class _Program(nn.Module):
    """A module of one function, so that all its operators have one name."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _constants(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> list[tuple[str, str]]:
    """Both values of each constant of a multiplication, where that is all that differs in it."""
    x = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    train, infer = (build(trace(_Program(f), (x,)).graph, m, JET) for f, m in ((ours, "train"), (theirs, "infer")))
    found = [f for f in check_inclusion(train, infer).violations if f.op == "aten.mul.Tensor"]
    assert all(f.attributes == ("other",) for f in found), found
    return sorted((f.train[0], f.infer[0]) for f in found)


def test_what_only_its_readers_tell_apart_is_not_taken_in_order() -> None:
    def theirs(x: Tensor) -> Tensor:
        second = x.cos() * 5.0
        return x.sin() * 4.0 - second

    assert _constants(lambda x: x.sin() * 2.0 - x.cos() * 3.0, theirs) == [("2.0", "4.0"), ("3.0", "5.0")]


def test_what_nothing_tells_apart_is_taken_in_order() -> None:
    """Both ends are other operators, so there is no neighbour to go by."""
    found = _constants(lambda x: (x.sin() * 2.0 * 3.0).tanh(), lambda x: (x.exp() * 4.0 * 5.0).abs())
    assert found == [("2.0", "4.0"), ("3.0", "5.0")]


# ------------------------------------------------------------------------------------- could not check


def test_nothing_compared_is_an_error() -> None:
    train, infer = pair("mlp")
    empty = PrecisionGraph(fx.Graph(), {})
    identity = infer.copy()
    identity.graph = fx.Graph()
    x = identity.graph.placeholder("x")
    out = identity.graph.output(x)
    for node in (x, out):
        node.meta = dict(infer.placeholders[0].meta)
    other = pair("moe")[1]
    for broken in (empty, identity):
        for graphs in ((train, broken), (broken, infer), (broken, broken)):
            with pytest.raises(CheckError):
                check_inclusion(*graphs)
    assert not check_inclusion(train, other).ok  # a different model is a finding


@pytest.mark.parametrize("which", ["training", "rollout"])
def test_one_lowered_graph_is_an_error(which: str) -> None:
    train, infer = pair("mlp")
    graphs = (train, program("mlp", "infer")) if which == "training" else (program("mlp", "train"), infer)
    with pytest.raises(CheckError, match=f"only the {which} graph is lowered.*lower both"):
        check_inclusion(*graphs)


def test_unknown_row_invariance_is_not_proved_and_names_the_node() -> None:
    report = check_inclusion(*pair("moe"))
    assert report.ok
    assert report.notes == ()
    assert "aten.scatter.src" in {f.op for f in report.not_proved}
    assert {f.code for f in report.not_proved} == {"PG902 row invariance"}
    assert "doctor" not in report.not_proved[0].remedy  # it tests the reference kernels only
    assert "Not proved:\n\nPG902 row invariance" in str(report)
    points = f"{len(report.not_proved)} point{'s' * (len(report.not_proved) != 1)}"
    assert str(report).startswith(f"not proved: {points}; otherwise {report.compared} nodes compared, none differs")
    assert {f["code"] for f in report.to_json()["not_proved"]} == {"PG902 row invariance"}


# ------------------------------------------------------------------------------------------- report


def test_report_as_text_and_data() -> None:
    train, infer = next(d for d in PLANTED if d.name == "eval fork").graphs()
    report = check_inclusion(train, infer)
    text = str(report)
    assert text.startswith("inconsistent: 1 root cause at 14 places in 68 nodes compared; ")
    assert "model.layers.{0-1}.{self_attn.q_proj, self_attn.k_proj, " in text  # all linears in one
    assert "e4m3 1x128" in text
    data = report.to_json()
    assert json.loads(json.dumps(data)) == data
    again = check_inclusion(PrecisionGraph.from_json(train.to_json()), PrecisionGraph.from_json(infer.to_json()))
    (unknown,) = again.not_proved  # data has no kernels
    assert (unknown.code, unknown.op) == ("PG902 row invariance", "graph")
    assert {**again.to_json(), "not_proved": []} == data
    assert len(report.rows()) == 7


# ------------------------------------------------------------------------------------- independence


def test_the_verifier_imports_nothing_from_the_passes() -> None:
    seen: set[str] = set()
    frontier = ["precgraph.verify.inclusion", "precgraph.verify.report", "precgraph.verify"]
    while frontier:
        name = frontier.pop()
        if name not in seen:
            seen.add(name)
            frontier.extend(_imports(name) - seen)
    assert "precgraph.graph" in seen
    assert not [name for name in seen if name.startswith("precgraph.passes")]


def _imports(name: str) -> set[str]:
    """Modules of precgraph that a module's source names in any import, also inside functions."""
    spec = find_spec(name)
    if spec is None or not spec.origin:
        return set()
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    ours = {n for n in found if n.startswith("precgraph.")}
    return {n for n in ours if find_spec(n.rpartition(".")[0]) and _is_module(n)}


def _is_module(name: str) -> bool:
    parent = find_spec(name.rpartition(".")[0])
    if parent is None or parent.submodule_search_locations is None:
        return False
    return find_spec(name) is not None


# ------------------------------------------------------------------------------------------- linear


def _calls(run: Callable[[], Any]) -> int:
    """Python functions called while ``run`` runs."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def _layers_deep(layers: int, recipe: Recipe = JET, mode: str = "infer") -> PrecisionGraph:
    return program("llama", mode, recipe, num_hidden_layers=layers)


@pytest.mark.parametrize("case", ["equal", "a rule in every layer", "every layer skipped", "renamed"])
def test_work_grows_linearly_with_layers(case: str) -> None:
    """From 4 to 8 layers twice the calls are added that are added from 2 to 4."""
    work = []
    for layers in (2, 4, 8):
        train = _layers_deep(layers, mode="train")
        recipe = JET
        if case == "a rule in every layer":
            recipe = replace(JET, linear=replace(JET.linear, activation=_coarse()))
        elif case == "every layer skipped":
            recipe = replace(JET, select=SelectRule(skip=("model.layers.*.mlp.*", "model.layers.*.self_attn.*")))
        infer = _layers_deep(layers, recipe)
        if case == "renamed":
            infer = rename(infer, OTHER_NAMES)
        check_inclusion(train, infer)  # what is done once, such as looking up schemas, is not counted
        work.append(_calls(lambda t=train, i=infer: check_inclusion(t, i)))  # type: ignore[misc]
    assert work[2] - work[1] == pytest.approx(2 * (work[1] - work[0]), rel=0.05)


def test_annotations_are_compared_not_node_names() -> None:
    """A copy whose nodes are called otherwise is the same program."""
    train, infer = pair("llama")
    graph, env = fx.Graph(), {}
    for k, node in enumerate(infer.graph.nodes):
        if node.op == "output":
            new = graph.output(env[node.args[0]])
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            name = node.name if node.op == "placeholder" else f"n{k}"
            new = graph.create_node(node.op, node.target, args, kwargs, name=name)
        new.meta, env[node] = dict(node.meta), new
    assert check_inclusion(train, replace(infer, graph=graph)).ok
    assert precision(output_node(graph)).format == Format.plain("float32")
