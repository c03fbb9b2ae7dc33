"""Fusion groups: what the pass names, and that a fused step gives the bits of its nodes, whatever the block keeps."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx

import precgraph
from precgraph import ops
from precgraph.errors import GraphError, LoweringError
from precgraph.format import Format
from precgraph.graph import Precision, PrecisionGraph, annotate, op_name, precision
from precgraph.lowering import fuse, registry
from precgraph.lowering.fuse import Fused, Fusion, Of
from precgraph.lowering.program import Program
from precgraph.passes.fuse_quantize import fuse_quantize
from tests.families import causal_lm

FORWARD = {"norm", "gated", "rotated", "projections"}
BACKWARD = {
    "rotated",
    "rotated_backward",
    "norm_backward",
    "gated_backward",
    "gradients",
    "wgrads",
    "twins",
}


def kind(group: str) -> str:
    """``norm`` of ``model.layers.0.input_layernorm.norm(rms_norm)``; a projection group is named after its modules."""
    return group.partition("(")[0].rpartition(".")[2] if "(" in group else "projections"


def own_kernels(members: Sequence[fx.Node], escaping: frozenset[fx.Node]) -> Fused:
    """A fused kernel for any group: the members' own kernels, one after the other."""
    plan: list[tuple[fx.Node, list[Any]]] = []
    values: list[Any] = []
    for node in members:
        places: list[Any] = []
        for index, value in enumerate(node.args):
            if value in members:
                places.append(value)
            else:
                places.append(len(values))
                values.append(Of(node, index))
        plan.append((node, places))
    outputs = tuple(n for n in members if n in escaping)

    def run(*given: Any) -> list[Any]:
        made: dict[fx.Node, Any] = {}
        for node, places in plan:
            args = [made[p] if isinstance(p, fx.Node) else given[p] for p in places]
            made[node] = node.meta["kernel"].run(*args)
        return [made[n] for n in outputs]

    return Fused(run, tuple(values), outputs)


def fused_kinds(program: Program, phase: str) -> Counter[str]:
    """The fused steps of the blocks that a full training step runs."""
    found: Counter[str] = Counter()
    for segment in program.segments:
        wanted = frozenset((*segment.parameters, *(n for n in segment.inputs if n in segment.gradients)))
        block = segment.forward(wanted)[0] if phase == "forward" else segment.backward(wanted)
        found.update(kind(step.name) for step in block.steps if step.outputs)
    return found


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("checkpoint", ["nothing", "layers", "modules"])
def test_fused_programs_give_the_same_bits(name: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(900, (2, 70), generator=torch.Generator().manual_seed(0))

    def step() -> tuple[Any, Any]:
        actor = precgraph.compile(causal_lm(name), "train")
        if checkpoint == "layers":
            actor.gradient_checkpointing_enable()
        if checkpoint == "modules":
            for module in (m for layer in actor.model.layers for m in layer.children()):
                module.gradient_checkpointing = True
        out = actor(ids, labels=ids)
        out.loss.backward()
        rollout = precgraph.compile(actor, "infer")
        assert torch.equal(rollout(ids).logits, out.logits)
        return actor, out.logits

    plain, logits = step()
    assert not fused_kinds(plain.precgraph.runner.program, "forward")
    monkeypatch.setattr(fuse, "_FUSIONS", [Fusion("any", "reference", own_kernels)])
    fused, again = step()
    assert torch.equal(logits, again)
    for (path, p), q in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), path
    without = set() if name == "qwen3" else {"rotated_backward"}  # only Qwen3 norms its heads
    without |= {"rotated"} if name == "qwen2" else set()  # and only Qwen2 keeps q and k rotated: it adds biases
    program = fused.precgraph.runner.program
    assert set(fused_kinds(program, "forward")) == FORWARD
    assert set(fused_kinds(program, "backward")) == BACKWARD - without


def groups_of(graph: PrecisionGraph) -> dict[str, list[fx.Node]]:
    groups: dict[str, list[fx.Node]] = {}
    for node in graph:
        if precision(node).fusion:
            groups.setdefault(str(precision(node).fusion), []).append(node)
    return groups


def rotations_of(graph: PrecisionGraph) -> list[set[fx.Node]]:
    return [set(members) for group, members in groups_of(graph).items() if kind(group) == "rotated"]


@pytest.mark.parametrize("name", ["qwen3", "llama", "phi3", "olmo2", "gemma3", "deepseek_v3", "deepseek_v2"])
def test_q_and_k_of_an_attention_rotate_together(name: str) -> None:
    """Forward and again backward; DeepSeek turns a part of each head, in another shape, and joins it to the rest."""
    graph = precgraph.compile(causal_lm(name), "train").precgraph.graph
    readers = [n for n in graph if n.target in (ops.attention, ops.attention_backward)]
    right = []
    for reader in readers if not name.startswith("deepseek") else []:
        turns = {n for n in reader.all_input_nodes if n.target is ops.rope}
        assert len(turns) == 2
        norms = {n.args[0] for n in turns} if name == "qwen3" else set()
        assert all(op_name(n) == "rms_norm" for n in norms)
        right.append(turns | norms)
    assert len(readers) == 4 and rotations_of(graph) == right


def other_tables(turn: fx.Node) -> None:
    x, cos, sin = turn.args
    turn.args = (x, sin, cos)


def other_eps(turn: fx.Node) -> None:
    turn.args[0].update_arg(2, 1e-3)


def other_arithmetic(turn: fx.Node) -> None:
    annotate(turn, compute="float32")


def other_segment(turn: fx.Node) -> None:
    for node in (turn, turn.args[0]):
        annotate(node, segment="elsewhere")


@pytest.mark.parametrize("change", [other_tables, other_eps, other_arithmetic, other_segment])
def test_rotations_that_one_call_cannot_make_keep_to_their_norms(change: Callable[[fx.Node], None]) -> None:
    graph = precgraph.compile(causal_lm("qwen3"), "infer").precgraph.graph
    turns = [n for n in graph if n.target is ops.rope]
    for turn in turns[1::2]:
        change(turn)
    for node in graph:
        annotate(node, fusion=None)
    assert rotations_of(fuse_quantize(graph)) == [{turn.args[0], turn} for turn in turns]


def test_groups_lie_in_one_segment_and_phase() -> None:
    """But for the add that ends a layer: it is in the group of the next layer's norm."""
    graph = precgraph.compile(causal_lm("qwen3"), "train").precgraph.graph
    apart = []
    for members in groups_of(graph).values():
        assert len({precision(n).phase for n in members}) == 1
        segments = [precision(n).segment for n in members]
        if len(set(segments)) > 1:
            apart.append((segments[0], op_name(members[0]), set(segments[1:])))
    segments = [s for s in graph.segments() if s != "embed"]
    assert apart == [(a, "add", {b}) for a, b in pairwise(segments)]


def test_a_rollout_adds_and_norms_in_one_call_across_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body is one block, in which the last add alone has no norm to go with: that is in the head."""
    monkeypatch.setattr(fuse, "_FUSIONS", [Fusion("any", "reference", own_kernels)])
    program = precgraph.compile(causal_lm("qwen3"), "infer").precgraph.runner.program
    ops_of = {n.name: op_name(n) for n in program.graph}
    by_segment = [step for segment in program.segments for step in segment.forward()[0].steps]
    alone = [[s.name for s in steps if ops_of.get(s.name) == "add"] for steps in (by_segment, program.body.steps)]
    assert len(alone[0]) == len(program.segments) - 2 and alone[1] == list(program.body.outputs)


def test_a_group_that_reads_itself_through_another_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(ops.add, (x, x))
    between = graph.call_function(operator.neg, (first,))
    last = graph.call_function(ops.add, (between, x))
    kernel = registry.Kernel("add", "reference", ops.add, "aten.add", lambda _: True)
    for node, group in ((first, "loop"), (between, None), (last, "loop")):
        node.meta.update(precision=Precision(Format(), fusion=group), kernel=kernel)
    monkeypatch.setattr(fuse, "_FUSIONS", [Fusion("any", "reference", own_kernels)])
    with pytest.raises(GraphError, match="loop"):
        fuse.units([first, between, last], [last.name])


def test_a_backend_that_cannot_run_says_why() -> None:
    """Nothing falls back: a named backend that cannot run here is an error with the remedy."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("this machine may have the backend")
    for backend in set(registry.BACKENDS) - {"reference"}:
        with pytest.raises(LoweringError, match="9.0|triton"):
            precgraph.compile(causal_lm("qwen3"), "train", backend=backend)
    with pytest.raises(LoweringError, match="choose auto or one of"):
        precgraph.compile(causal_lm("qwen3"), "train", backend="cutlass")
