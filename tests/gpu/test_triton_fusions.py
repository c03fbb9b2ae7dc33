"""What the Triton backend fuses in a training backward: the calls of a lowered Qwen3, and that their bits are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from precgraph.graph import op_name
from precgraph.lowering import registry
from precgraph.lowering.lower import lower
from precgraph.lowering.program import Block, Program, Ref, Step, build_program
from precgraph.lowering.triton import kernels
from precgraph.passes.pipeline import build
from precgraph.quantizer import QTensor
from precgraph.recipe import Recipe
from precgraph.trace import trace
from tests.families import meta_lm
from tests.gpu.device import DEVICE, KERNELS
from tests.gpu.same import same_bits

pytestmark = KERNELS

LAYER = "model.layers.1"


@cache
def program() -> Program:
    """Lowered for Triton, on whatever device."""
    graph = build(trace(meta_lm("qwen3")).graph, "train", Recipe.jet_rl())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "unavailable", lambda name, device: None)
        return build_program(lower(graph, "triton", torch.device(DEVICE)))


def backward(*without: str) -> Block:
    """A layer's backward, which makes all gradients but those of parameters whose path has one of these parts."""
    segment = next(s for s in program().segments if s.name == LAYER)
    wanted = (*segment.parameters, *(n for n in segment.inputs if n in segment.gradients))
    return segment.backward(frozenset(n for n in wanted if not any(part in n for part in without)))


def only(block: Block, run: Callable[..., Any]) -> Step:
    (step,) = (s for s in block.steps if s.run is run)
    return step


def by_node(step: Step, values: dict[str, Any]) -> dict[str, Any]:
    """What the nodes of a fused step make, one after the other."""
    made = dict(values)
    for node in program().graph:
        inputs = [a.name for a in node.all_input_nodes]
        group = step.name if node.op == "call_function" and str(node.meta["precision"].fusion) == step.name else None
        if group is not None and all(name in made for name in inputs):
            args = [made[a.name] if hasattr(a, "name") else a for a in node.args]
            made[node.name] = node.meta["kernel"].run(*args)
    return {name: made[name] for name in step.outputs}


def assert_bits(made: Any, right: Any) -> None:
    if isinstance(right, QTensor):
        assert same_bits(made.codes, right.codes) and same_bits(made.scales, right.scales)
    else:
        assert same_bits(made, right)


def assert_fused(step: Step, values: dict[str, Tensor]) -> None:
    """A step gives each of its outputs the bits of the node's own kernels."""
    args = [values[a.name] if isinstance(a, Ref) else a for a in step.args]
    right = by_node(step, values)
    for name, made in zip(step.outputs, step.run(*args), strict=True):
        assert_bits(made, right[name])


def operands(step: Step, *shape: int) -> dict[str, Tensor]:
    """Values for what a step reads, of this shape."""
    return {a.name: torch.randn(shape, device=DEVICE).bfloat16() for a in step.args if isinstance(a, Ref)}


ops_of = cache(lambda: {n.name: op_name(n) for n in program().graph})


@pytest.mark.parametrize(
    ("frozen", "outputs"), [((), 5), (("gate_proj", "up_proj"), 3), (("down_proj",), 4), (("_proj",), 2)]
)
def test_a_gated_unit_is_read_once(frozen: tuple[str, ...], outputs: int) -> None:
    """Its gradients along rows and along tokens, and the unit along tokens, as far as the block needs them."""
    block = backward(*frozen)
    step = only(block, kernels._run_gated_backward)
    assert len(step.outputs) == outputs
    assert not [s for s in block.steps if s.run in (kernels._run_gated,) or ops_of().get(s.name) == "gated"]
    assert_fused(step, operands(step, 1, 130, 288))


@pytest.mark.parametrize(("frozen", "outputs"), [((), 3), (("norm",), 2), (("_proj",), 2)])
def test_the_root_of_a_norm_is_made_once(frozen: tuple[str, ...], outputs: int) -> None:
    """Of both norms before projections: gradients and the norm along tokens, as far as the block needs them."""
    block = backward(*frozen)
    steps = [s for s in block.steps if s.run is kernels._run_norm_backward]
    assert [len(s.outputs) for s in steps] == [outputs, outputs]
    assert not [s for s in block.steps if s.run is kernels._run_norm]
    for step in steps:
        gains = {step.args[2].name: torch.rand(128, device=DEVICE).bfloat16()}
        assert_fused(step, operands(step, 1, 35, 128) | gains)


def test_a_norm_whose_input_needs_no_gradient() -> None:
    """Then there is no sum with the residual's gradient."""
    segment = next(s for s in program().segments if s.name == LAYER)
    block = segment.backward(frozenset(segment.parameters))
    assert [len(s.outputs) for s in block.steps if s.run is kernels._run_norm_backward] == [3, 2]
    assert not [s for s in block.steps if s.run is kernels._run_norm]


def test_the_unit_comes_between_dgrad_and_wgrad() -> None:
    """WGrad of down_proj waits for the kernel that DGrad of down_proj feeds."""
    block = backward()
    at = block.steps.index(only(block, kernels._run_gated_backward))
    down = [i for i, s in enumerate(block.steps) if s.module.endswith("down_proj")]
    made = {i: ops_of().get(block.steps[i].name) for i in down}
    assert [op for i, op in made.items() if i < at and op] == ["linear_dgrad"]
    assert [op for i, op in made.items() if i > at] == ["linear_wgrad"]
