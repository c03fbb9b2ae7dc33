"""A graph as the verifier reads it: records, edges, and which parameters are one tensor."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

from precgraph.errors import CheckError
from precgraph.graph import Parameter, PrecisionGraph, Record

LEAVES = ("parameter", "input")
# IEEE addition and multiplication commute: which operand comes first changes no bit.
_COMMUTATIVE = ("add", "aten.add.Tensor", "aten.mul.Tensor")


class Program:
    """The records of one graph by name, in order, and its *forward*: what the output depends on.

    Raises CheckError if there is nothing to compare: no output, or an output that no operator makes.
    """

    def __init__(self, graph: PrecisionGraph, which: str) -> None:
        records = graph.records()
        outputs = [r.name for r in records if r.op == "output"]
        if len(outputs) != 1:
            raise CheckError(f"the {which} graph has no output", remedy="pass a graph that the pipeline has built")
        self.output = outputs[0]
        self.records: dict[str, Record] = {r.name: r for r in records}
        self.operands: dict[str, dict[str, str]] = {r.name: dict(r.operands) for r in records}
        self.users: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for r in records:
            for place, producer in r.operands:
                self.users[producer].append((r.name, place))
        ancestors = self._ancestors(self.output)
        self.forward = [r.name for r in records if r.name in ancestors]
        self.rest = [r.name for r in records if r.name not in ancestors]
        if not any(map(self.is_operator, self.forward)):
            raise CheckError(f"the {which} graph has no operators", remedy="pass a model's graph")
        self.parameters = graph.parameters
        self.rename(lambda path: path)

    def _ancestors(self, root: str) -> set[str]:
        seen, stack = {root}, [root]
        while stack:
            for producer in self.operands[stack.pop()].values():
                if producer not in seen:
                    seen.add(producer)
                    stack.append(producer)
        return seen

    def is_leaf(self, name: str) -> bool:
        return self.records[name].op in LEAVES

    def is_operator(self, name: str) -> bool:
        return self.records[name].op not in (*LEAVES, "output")

    @property
    def has_backward(self) -> bool:
        return any(r.precision.phase == "backward" for r in self.records.values())

    @property
    def is_lowered(self) -> bool:
        return any(r.precision.numerics is not None for r in self.records.values())

    # ------------------------------------------------------------------------------------ names
    def paths(self) -> set[str]:
        """Every module and parameter path that the forward names."""
        records = [self.records[n] for n in self.forward]
        return {r.precision.module for r in records if r.precision.module and r.parameter is None} | {
            r.parameter for r in records if r.parameter is not None
        }

    def rename(self, canonical: Callable[[str], str]) -> None:
        """From here on compare module and parameter paths as ``canonical`` gives them."""
        self._modules = {r.precision.module: canonical(r.precision.module) for r in self.records.values()}
        self._tensors = {
            path: (canonical(path), frozenset(map(canonical, (path, *p.aliases))))
            for path, p in self.parameters.items()
        }
        self._known = frozenset().union(*(names for _, names in self._tensors.values()))

    def module(self, name: str) -> str:
        """The canonical module path of a node."""
        return self._modules[self.records[name].precision.module]

    def tensor(self, name: str) -> tuple[str, frozenset[str]]:
        """Canonical path of a parameter node and every name of that tensor."""
        path = self.records[name].parameter
        if path not in self._tensors:
            raise CheckError(f"{name} reads {path!r}, which is not among the graph's parameters")
        return self._tensors[path]

    def content(self, name: str) -> str:
        """The hash of the values of a buffer or constant that a node reads; empty where they are not known."""
        return self.tensor_record(name).content

    def tensor_record(self, name: str) -> Parameter:
        """What is known of the tensor that a parameter node reads."""
        return self.parameters[self.records[name].parameter or ""]

    def knows(self, tensor: tuple[str, frozenset[str]]) -> bool:
        """Whether one of the names of a tensor (of another program) is a name here."""
        return not self._known.isdisjoint(tensor[1])

    # ------------------------------------------------------------------------------------ edges
    def commutes(self, name: str) -> bool:
        """Whether the order of this node's two operands changes no bit."""
        record = self.records[name]
        alpha = record.attributes.get("alpha", 1)
        return record.op in _COMMUTATIVE and len(record.operands) == 2 and alpha == 1

    def principal(self, name: str) -> str | None:
        """The producer of the first operand that is not a parameter."""
        producers = list(self.operands[name].values())
        return next((p for p in producers if not self.is_leaf(p)), producers[0] if producers else None)


def canonicalise(train: Program, infer: Program) -> None:
    """Drop a prefix that all paths of one program share (a wrapper), where that makes more paths agree."""
    sides = [(lambda p: p, _without_prefix(program.paths())) for program in (train, infer)]
    best = max(
        ((t, i) for t in sides[0] for i in sides[1]),
        key=lambda pair: len({pair[0](p) for p in train.paths()} & {pair[1](p) for p in infer.paths()}),
    )
    train.rename(best[0])
    infer.rename(best[1])


def _without_prefix(paths: Iterable[str]) -> Callable[[str], str]:
    parts = [p.split(".") for p in paths]
    first, last = min(parts, default=[]), max(parts, default=[])  # what these share, all share
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    prefix = "".join(f"{part}." for part, _ in common)
    return lambda path: path.removeprefix(prefix)


def same_tensor(a: tuple[str, frozenset[str]], b: tuple[str, frozenset[str]]) -> bool:
    """Whether two parameters are one: one canonical name, or the same set of names (another one being canonical)."""
    return a[0] == b[0] or a[1] == b[1]


def describe(program: Program, name: str) -> str:
    """A value in words: the parameter's path, or the operator and its module."""
    record = program.records[name]
    if record.parameter is not None:
        return record.parameter
    if record.op == "input":
        return f"input {name}"
    where = f" of {record.precision.module}" if record.precision.module else ""
    return f"{record.op}{where}"


def lineage(program: Program, name: str) -> str:
    """A value in words, with the nearest value of another module that it is made from."""
    module = program.records[name].precision.module
    above = program.principal(name)
    for _ in range(16):  # a module of one path may be a long program
        if above is not None and program.records[above].precision.module == module:
            above = program.principal(above)
    return describe(program, name) + (f" from {describe(program, above)}" if above is not None else "")
