"""A lowered graph as straight-line programs, one forward and one backward per segment.

A segment (embedding, each layer, head) is the unit of autograd and profiling; a forward without gradients runs all but
the head as one block (:attr:`Program.body`). A :class:`Block` is a list of steps with one kernel call each, cut down to
what its outputs need: a forward whose saved values nobody wants makes none, a backward the gradients that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx

from precgraph import ops
from precgraph.errors import NonFiniteError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, annotate, op_name, output_node, precision
from precgraph.lowering.fuse import Of, Unit, units
from precgraph.lowering.registry import Kernel, Pack
from precgraph.quantizer import QTensor

Values = dict[str, Any]
Read = Callable[[Values], Any]
Observe = Callable[[str, Any], Any]  # is shown each value by name and returns the one to go on with
Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of that name, in place of an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class PackKey:
    """A weight as a kernel family keeps it: master's path, format (None: as it is) and layout.

    Weights of one ``group`` (the fusion group of their linears) are made together, in the order of ``place``, for
    layouts that can be.
    """

    path: str
    format: Format | None
    pack: type[Pack]
    group: str = ""
    place: int = 0

    def __str__(self) -> str:
        return f"{self.path}@{self.format or 'plain'}@{self.pack.__name__}" + (f"@{self.group}" if self.group else "")


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel call; ``free`` names the values that nothing reads afterwards.

    Its result is the value called ``name``, or, for a fused call, the values called ``outputs``.
    """

    name: str
    module: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    free: tuple[str, ...]
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """Steps that turn ``inputs`` into ``outputs``; both are names of values."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]

    def run(self, values: Values, *, checked: bool = False, observe: Observe | None = None) -> tuple[Any, ...]:
        """Run on ``values``, which holds the inputs and is used up. ``checked``: NonFiniteError names the node.

        ``observe`` is called with each value as soon as it is made; what it returns takes the value's place.
        """
        for step, args, kwargs in self._calls:
            result = step.run(*[read(values) for read in args], **{k: read(values) for k, read in kwargs.items()})
            if checked:
                _require_finite(step, result)
            if step.outputs:
                values.update(zip(step.outputs, result, strict=True))
            else:
                values[step.name] = result
            if observe is not None:
                for name in step.outputs or (step.name,):
                    values[name] = observe(name, values[name])
            for name in step.free:
                del values[name]
        return tuple(values[name] for name in self.outputs)

    @cached_property
    def _calls(self) -> list[tuple[Step, list[Read], dict[str, Read]]]:
        """Each step with what reads its arguments. Found once: few tokens wait for the host to launch their kernels."""
        return [(s, [_reader(a) for a in s.args], {k: _reader(v) for k, v in s.kwargs.items()}) for s in self.steps]


def _reader(argument: Any) -> Read:
    """What gives an argument with the values in place of the references in it; lists and dicts anew at each call."""
    if isinstance(argument, Ref):
        return itemgetter(argument.name)
    if isinstance(argument, list | tuple):
        parts = [_reader(a) for a in argument]
        return lambda values: [read(values) for read in parts]
    if isinstance(argument, dict):
        named = {k: _reader(v) for k, v in argument.items()}
        return lambda values: {k: read(values) for k, read in named.items()}
    return lambda values: argument


def _require_finite(step: Step, result: Any) -> None:
    if -torch.inf in step.args:  # a mask, as a router's of the groups that it leaves out
        return
    for part in result if isinstance(result, tuple | list) else (result,):
        stored = part.scales if isinstance(part, QTensor) else part
        if isinstance(stored, Tensor) and stored.is_floating_point() and not torch.isfinite(stored).all():
            raise NonFiniteError(
                f"node {step.name} made NaN or infinity", path=step.module,
                remedy="look at its inputs, first of all the weights",
            )  # fmt: skip


@dataclass
class Segment:
    """The nodes of one segment and the values at its border.

    ``inputs`` come from earlier segments or from the caller, ``outputs`` are read by later ones; ``parameters`` are
    the masters that get gradients here; ``gradients`` names, per differentiable value at the border, its gradient.
    """

    name: str
    nodes: list[fx.Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: Mapping[str, str]
    sinks: Mapping[str, tuple[str, ...]]
    _forward: dict[tuple[Names, Names], tuple[Block, tuple[str, ...]]] = field(default_factory=dict)
    _again: dict[tuple[Names, Names], Block] = field(default_factory=dict)
    _backward: dict[Names, Block] = field(default_factory=dict)

    def forward(self, wanted: Names = frozenset(), checkpoint: Names = frozenset()) -> tuple[Block, tuple[str, ...]]:
        """The forward that also keeps what the gradients of ``wanted`` need, and the names of what it keeps.

        Not kept is what :meth:`again` makes for the modules of ``checkpoint``.
        """
        if (wanted, checkpoint) not in self._forward:
            nodes, again = self._nodes("forward"), self.again(wanted, checkpoint)
            needed = {*self.backward(wanted).inputs, *again.inputs}.difference(again.outputs)
            saved = tuple(sorted(needed.intersection((*self.inputs, *(n.name for n in nodes)))))
            self._forward[wanted, checkpoint] = block_of(nodes, (*self.outputs, *saved)), saved
        return self._forward[wanted, checkpoint]

    def again(self, wanted: Names, checkpoint: Names) -> Block:
        """Makes what the gradients of ``wanted`` need of the modules of ``checkpoint``, from the rest that they need.

        A module is given by its path; the segment's own name stands for all of it.
        """
        if (wanted, checkpoint) not in self._again:
            nodes, needed = self._nodes("forward"), set(self.backward(wanted).inputs)
            inside = [n.name for n in nodes if self.name in checkpoint or _is_inside(n, checkpoint)]
            made = needed.intersection(inside)
            self._again[wanted, checkpoint] = block_of([n for n in nodes if n.name not in needed - made], sorted(made))
        return self._again[wanted, checkpoint]

    def backward(self, wanted: Names) -> Block:
        """The backward that makes the gradients of ``wanted``: parameter paths and names of inputs.

        Its outputs are, per wanted name in sorted order, all contributions to that gradient.
        """
        if wanted not in self._backward:
            outputs = [g for name in sorted(wanted) for g in self.contributions(name)]
            self._backward[wanted] = block_of(self._nodes("backward"), outputs)
        return self._backward[wanted]

    def _nodes(self, phase: str) -> list[fx.Node]:
        return [n for n in self.nodes if _phase(n) == phase]

    def contributions(self, name: str) -> tuple[str, ...]:
        """Names of the gradients that add up to the gradient of a parameter or input."""
        return self.sinks.get(name, ()) or ((self.gradients[name],) if name in self.gradients else ())


@dataclass(frozen=True)
class Program:
    """Segments in order; ``packs`` are the weights that the store must hold, ``inputs`` and ``outputs`` the borders."""

    graph: PrecisionGraph
    segments: tuple[Segment, ...]
    packs: frozenset[PackKey]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """The graph's, computed once: a lowered graph does not change."""
        return self.graph.digest()

    def kernels(self) -> dict[str, Kernel]:
        """The kernel of every node, by node name."""
        return {n.name: n.meta["kernel"] for n in self.graph if "kernel" in n.meta}

    @cached_property
    def body(self) -> Block:
        """The forward of all segments but the last as one block, whose kernels may fuse across segments."""
        nodes = [n for segment in self.segments[:-1] for n in segment.nodes if _phase(n) == "forward"]
        return block_of(nodes, self.segments[-1].inputs)

    def weights(self, segment: Segment) -> dict[str, PackKey]:
        """The packed weights that a segment's forward reads, by the nodes that they stand for."""
        forward = {n for n in segment.nodes if _phase(n) == "forward" and n.meta["kernel"].pack is not None}
        operands = ((n, a) for n in segment.nodes if n in forward for a in n.args[1:2] if isinstance(a, fx.Node))
        return {a.name: key for n, a in operands if (key := _pack_key(n, 1, a))}


def build_program(graph: PrecisionGraph) -> Program:
    """Cut a lowered graph into segments."""
    _merge_if_entangled(graph)
    nodes = [
        n for n in graph if n.op == "call_function" and _phase(n) != "refresh" and n.target is not ops.accumulate_grad
    ]
    by_segment: dict[str, list[fx.Node]] = {}
    for node in nodes:
        by_segment.setdefault(precision(node).segment, []).append(node)
    result = output_node(graph.graph).args[0]
    outputs = tuple(n.name for n in (result if isinstance(result, tuple) else (result,)) if isinstance(n, fx.Node))
    sinks = _sinks(graph)
    segments = tuple(_segment(name, members, outputs, sinks.get(name, {})) for name, members in by_segment.items())
    packs = frozenset(key for n in nodes for key in _pack_keys(n))
    inputs = tuple(n.name for n in graph.placeholders if _phase(n) == "forward")
    return Program(graph, segments, packs, inputs, outputs)


def _merge_if_entangled(graph: PrecisionGraph) -> None:
    """Where a differentiable value is read by two later segments, segments cannot run their backward in turn."""
    for node in graph:
        if node.op == "call_function" and _phase(node) == "forward":
            readers = {precision(u).segment for u in node.users if u.op == "call_function" and _phase(u) == "forward"}
            if len(readers - {precision(node).segment}) > 1 and "gradient" in node.meta:
                for other in graph:
                    annotate(other, segment="model")
                return


def _sinks(graph: PrecisionGraph) -> dict[str, dict[str, tuple[str, ...]]]:
    """Per segment: the gradients that its sinks add to each parameter (by path) and input (by name)."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for node in graph:
        if node.target is ops.accumulate_grad:
            target, grad = node.all_input_nodes
            key = str(target.target) if target.op == "get_attr" else target.name
            sinks = found.setdefault(precision(node).segment, {})
            sinks[key] = (*sinks.get(key, ()), grad.name)
    return found


def _segment(
    name: str, nodes: list[fx.Node], outputs: tuple[str, ...], sinks: Mapping[str, tuple[str, ...]]
) -> Segment:
    forward = [n for n in nodes if _phase(n) == "forward"]
    own = {n.name for n in forward}
    entering = {
        a.name: a for n in nodes for a in n.all_input_nodes
        if a.name not in own and _phase(a) == "forward" and a.op in ("call_function", "placeholder")
    }  # fmt: skip
    leaving = [n for n in forward if n.name in outputs or _read_later(n)]
    gradients = {v.name: v.meta["gradient"] for v in (*entering.values(), *leaving) if "gradient" in v.meta}
    inputs = {a.name for n in nodes for a in n.all_input_nodes if a.op == "placeholder"}
    parameters = tuple(k for k in sinks if k not in inputs)
    return Segment(name, nodes, tuple(entering), tuple(n.name for n in leaving), parameters, gradients, sinks)


def _read_later(node: fx.Node) -> bool:
    """Whether another segment's forward reads the value."""
    readers = [u for u in node.users if u.op == "call_function" and _phase(u) == "forward"]
    return any(precision(u).segment != precision(node).segment for u in readers)


def _phase(node: fx.Node) -> str:
    return precision(node).phase


def _is_inside(node: fx.Node, modules: Iterable[str]) -> bool:
    return any(f"{precision(node).module}.".startswith(f"{path}.") for path in modules)


# ------------------------------------------------------------------------------------------ blocks


def block_of(nodes: list[fx.Node], outputs: Iterable[str]) -> Block:
    """The steps among ``nodes`` that ``outputs`` need; an input may be an output too."""
    outputs = tuple(outputs)
    needed = set(outputs)
    kept: list[fx.Node] = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed.update(_reads(node))
    kept.reverse()
    calls = units(kept, outputs)
    made = {name for unit in calls for name in unit.makes}
    last = {name: unit.name for unit in calls for name in _unit_reads(unit)}
    inputs = tuple(sorted({*last, *outputs} - made))
    free: dict[str, list[str]] = {}
    for name, reader in last.items():
        if name in made and name not in outputs:
            free.setdefault(reader, []).append(name)
    return Block(inputs, outputs, tuple(_step(unit, tuple(free.get(unit.name, ()))) for unit in calls))


def _step(unit: Unit, free: tuple[str, ...]) -> Step:
    node = unit.nodes[0]
    if unit.fused is not None:
        args = tuple(_resolve(a) for a in unit.fused.args)
        return Step(unit.name, precision(node).module, unit.fused.run, args, {}, free, unit.makes)
    kernel: Kernel = node.meta["kernel"]
    args = tuple(_argument(node, i, a) for i, a in enumerate(node.args))
    kwargs = {k: _argument(node, None, v) for k, v in node.kwargs.items()}
    if kernel.context:
        kwargs["context"] = Ref("context")
    return Step(node.name, precision(node).module, kernel.run, args, kwargs, free)


def _resolve(argument: Any) -> Any:
    """An argument of a fused call."""
    if isinstance(argument, Of):
        return _argument(argument.node, argument.index, argument.node.args[argument.index])
    if isinstance(argument, list | tuple):
        return [_resolve(a) for a in argument]
    return argument


def _argument(node: fx.Node, position: int | None, value: Any) -> Any:
    if isinstance(value, fx.Node):
        key = _pack_key(node, position, value)
        return Ref(str(key) if key else value.name)
    if isinstance(value, list | tuple):
        return [_argument(node, position, v) for v in value]
    if isinstance(value, dict):
        return {k: _argument(node, None, v) for k, v in value.items()}
    return value


def _reads(node: fx.Node) -> list[str]:
    """Names of what a node's own step reads, the context and packed weights included."""
    arguments = [_argument(node, i, a) for i, a in enumerate(node.args)]
    named = {k: _argument(node, None, v) for k, v in node.kwargs.items()}
    return [*(["context"] if node.meta["kernel"].context else []), *_refs([arguments, named])]


def _unit_reads(unit: Unit) -> list[str]:
    return _reads(unit.nodes[0]) if unit.fused is None else _refs(_resolve(unit.fused.args))


def _refs(value: Any) -> list[str]:
    """Names of the references in an argument."""
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, dict):
        value = list(value.values())
    return [name for v in value for name in _refs(v)] if isinstance(value, list | tuple) else []


def _pack_key(node: fx.Node, position: int | None, value: fx.Node) -> PackKey | None:
    """The packed weight that stands for operand ``value``: the second argument of linears and of their DGrad."""
    kernel: Kernel = node.meta["kernel"]
    if kernel.pack is None or position != 1:
        return None
    if value.op == "get_attr":
        return PackKey(str(value.target), None, kernel.pack)
    source = value.args[0]
    assert op_name(value) == "quantize" and isinstance(source, fx.Node)
    return PackKey(str(source.target), precision(value).format, kernel.pack, *_group(value, kernel.pack))


def _group(weight: fx.Node, pack: type[Pack]) -> tuple[str, int]:
    """The projection group whose linear reads a quantised weight, and its place there; for packs made in groups."""
    reader = next((u for u in weight.users if u.target is ops.linear), None)
    if reader is None or not precision(reader).fusion or not hasattr(pack, "create_group"):
        return "", 0
    fusion, x = precision(reader).fusion, reader.args[0]
    assert fusion is not None and isinstance(x, fx.Node)
    return fusion, [u for u in x.users if u.target is ops.linear and precision(u).fusion == fusion].index(reader)


def _pack_keys(node: fx.Node) -> list[PackKey]:
    weights = node.args[1] if node.meta["kernel"].pack and len(node.args) > 1 else ()
    operands = weights if isinstance(weights, list | tuple) else (weights,)
    find = partial(_pack_key, node, 1)
    return [key for key in map(find, (w for w in operands if isinstance(w, fx.Node))) if key]
