"""Which node of the rollout stands for which node of the training graph.

Names first (module path and operator), then the graph's own structure from the nodes already aligned, and networkx
subgraph matching for what is then still left. Alignment decides what is compared with what, never what is equal: a
pair that differs stays a pair. Every step but the last looks at each node and edge a fixed number of times.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx
from networkx.algorithms.isomorphism import DiGraphMatcher

from precgraph.verify.program import Program, same_tensor

# Subgraph matching takes exponential time in the worst case. A piece that is larger, or that takes more steps, is left
# unaligned, and so reported.
_LARGEST_PIECE = 48
_STEPS = 20_000


@dataclass
class Alignment:
    """Pairs of node names, both ways; ``by_structure`` are rollout nodes whose names did not decide it."""

    to_infer: dict[str, str] = field(default_factory=dict)
    to_train: dict[str, str] = field(default_factory=dict)
    by_structure: set[str] = field(default_factory=set)

    def pair(self, t: str, i: str) -> None:
        self.to_infer[t] = i
        self.to_train[i] = t


class Aligner:
    """Aligns one scope (the forward, or the rest) on top of what an earlier scope has aligned."""

    def __init__(
        self, train: Program, infer: Program, alignment: Alignment, ts: Sequence[str], is_: Sequence[str]
    ) -> None:
        self.train, self.infer, self.alignment = train, infer, alignment
        self.ts, self.is_ = ts, is_
        self.t_scope, self.i_scope = set(ts), set(is_)

    def run(self) -> None:
        """The surest evidence first: no pass takes a pair apart, so a wrong one stays, and leads later passes astray.

        A pass assumes that the pairs before it are right, and leaves open what it cannot tell apart.
        """
        # By name. Nothing is assumed but the names themselves; then, of one module, that what reads the same and does
        # the same is one node, and that what one node reads in the same place is one node. Order alone would pair what
        # a program has swapped, so it gets only what its neighbours do not tell apart.
        self._leaves()
        self._unique()
        self._downstream(named=True)
        self._upstream(named=True)
        self._ordinals()
        # By structure, across modules of other names, and marked as such. Upwards first: a reader is known by all its
        # operands, and only from their readers are renamed parameters found, and values behind an operator that one
        # side lacks. What is then found downwards has operands of its own: upwards again.
        self._upstream(named=False)
        self._downstream(named=False)
        self._upstream(named=False)
        # What is still open: pieces that are alike in themselves, with no pair to go by (that takes time, so few should
        # be left); then operators that are not alike, where only what is around them can be.
        self._subgraphs()
        self._replaced()

    # ------------------------------------------------------------------------------------ what is left
    def _open_t(self, name: str) -> bool:
        return name in self.t_scope and name not in self.alignment.to_infer

    def _open_i(self, name: str) -> bool:
        return name in self.i_scope and name not in self.alignment.to_train

    def _left(self) -> tuple[list[str], list[str]]:
        return [n for n in self.ts if self._open_t(n)], [n for n in self.is_ if self._open_i(n)]

    def _pair_by_structure(self, t: str, i: str) -> None:
        self.alignment.pair(t, i)
        self.alignment.by_structure.add(i)

    # ------------------------------------------------------------------------------------ by name
    def _leaves(self) -> None:
        """The output, inputs by name, parameters by any of a tensor's names."""
        if self.train.output in self.t_scope and self.infer.output in self.i_scope:
            self.alignment.pair(self.train.output, self.infer.output)
        by_name: dict[Hashable, list[str]] = defaultdict(list)
        for t in reversed(self.ts):
            for key in self._leaf_keys(self.train, t):
                by_name[key].append(t)
        for i in self.is_:
            for key in self._leaf_keys(self.infer, i):
                candidates = by_name[key]
                while candidates and not self._open_t(candidates[-1]):
                    candidates.pop()
                if candidates and self._open_i(i):
                    self.alignment.pair(candidates.pop(), i)

    @staticmethod
    def _leaf_keys(program: Program, name: str) -> list[Hashable]:
        op = program.records[name].op
        if op == "input":
            return [("input", name)]
        return list(program.tensor(name)) if op == "parameter" else []

    def _unique(self) -> None:
        """What one module has one of in both graphs."""
        for ts, is_ in self._of_one_name():
            if len(ts) == len(is_) == 1:
                self.alignment.pair(ts[0], is_[0])

    def _ordinals(self) -> None:
        """What one module has as often in both graphs and nothing else tells apart: in order."""
        for ts, is_ in self._of_one_name():
            if len(ts) == len(is_):
                for t, i in zip(ts, is_, strict=True):
                    self.alignment.pair(t, i)

    def _of_one_name(self) -> Iterator[tuple[list[str], list[str]]]:
        """What is left of one module, operator and phase in both graphs, without leaves."""
        ours, theirs = (_group(program, left) for program, left in self._sides(*self._left()))
        yield from ((ours[key], members) for key, members in theirs.items() if key in ours)

    # ------------------------------------------------------------------------------------ by structure
    def _operand_key(self, program: Program, name: str) -> tuple[tuple[str, str], ...] | None:
        """Operands as ``(place, training node)``, or None while one of them is not aligned."""
        pairs = []
        for place, producer in program.operands[name].items():
            known = producer if program is self.train else self.alignment.to_train.get(producer)
            if known is None:
                return None
            pairs.append(("" if program.commutes(name) else place, known))
        return tuple(sorted(pairs)) or None

    def _reading_key(self, program: Program, name: str, named: bool) -> Hashable:
        """The operator, its operands, and its module if ``named``; None while an operand is not aligned."""
        operands = self._operand_key(program, name)
        return operands and (program.module(name) if named else "", program.records[name].op, operands)

    def _downstream(self, *, named: bool) -> None:
        """In program order: what does the same to the same operands, if it occurs equally often in both graphs."""
        left_t, left_i = self._left()
        repeats = [Counter(self._own_key(p, n) for n in left) for p, left in self._sides(left_t, left_i)]
        candidates: dict[Hashable, list[str]] = defaultdict(list)
        for t in reversed(left_t):
            candidates[self._reading_key(self.train, t, named), self._attributes(self.train, t)].append(t)
        pair = self.alignment.pair if named else self._pair_by_structure
        for i in left_i:
            k = self._reading_key(self.infer, i, named)
            found = candidates.get((k, self._attributes(self.infer, i)), []) if k is not None else []
            while found and not self._open_t(found[-1]):
                found.pop()
            if not found:
                continue
            if repeats[0][self._own_key(self.train, found[-1])] == repeats[1][self._own_key(self.infer, i)]:
                pair(found.pop(), i)

    def _sides(self, left_t: list[str], left_i: list[str]) -> tuple[tuple[Program, list[str]], ...]:
        return (self.train, left_t), (self.infer, left_i)

    def _own_key(self, program: Program, name: str) -> Hashable:
        """What a node does, in terms of its own graph."""
        r = program.records[name]
        return r.op, r.precision.module, r.operands, self._attributes(program, name)

    @staticmethod
    def _attributes(program: Program, name: str) -> str:
        return json.dumps(dict(program.records[name].attributes), sort_keys=True)

    def _upstream(self, *, named: bool) -> None:
        """In reverse order: the producers that aligned nodes read in the same place, if they are one operator.

        Where they are not, one of them may be an extra operator: then what it reads is tried in its stead.
        """
        for i in reversed(self.is_):
            t = self.alignment.to_train.get(i)
            if t is None:
                continue
            for p, q in self._places(t, i):
                self._try(p, q, named)
                if not named:
                    p2, q2 = self.train.principal(p), self.infer.principal(q)
                    if self._open_i(q) and q2 is not None:
                        self._try(p, q2, named)
                    if self._open_t(p) and p2 is not None:
                        self._try(p2, q, named)

    def _places(self, t: str, i: str) -> Iterable[tuple[str, str]]:
        ours, theirs = self.train.operands[t], self.infer.operands[i]
        yield from ((producer, theirs[place]) for place, producer in ours.items() if place in theirs)
        if self.train.commutes(t) and self.infer.commutes(i):
            yield from zip(ours.values(), reversed(theirs.values()), strict=True)

    def _try(self, t: str, i: str, named: bool) -> None:
        if not self._open_t(t) or not self._open_i(i):
            return
        a, b = self.train.records[t], self.infer.records[i]
        if a.op != b.op or (named and self.train.module(t) != self.infer.module(i)):
            return
        if named:
            if not self.train.is_leaf(t):
                self.alignment.pair(t, i)
        elif a.op != "parameter" or self._may_be_renamed(t, i):
            self._pair_by_structure(t, i)

    def _may_be_renamed(self, t: str, i: str) -> bool:
        """Whether two parameters of different names can be one: neither name is a name in the other program."""
        a, b = self.train.tensor(t), self.infer.tensor(i)
        return same_tensor(a, b) or not (self.train.knows(b) or self.infer.knows(a))

    # ------------------------------------------------------------------------------------ what is still left
    def _subgraphs(self) -> None:
        """networkx subgraph matching of each connected piece that is left, by local signature without module path."""
        ours, theirs = (self._view(p, left) for p, left in self._sides(*self._left()))
        shared = {x for _, x in ours.nodes(data="label")} & {x for _, x in theirs.nodes(data="label")}
        for view in (ours, theirs):
            view.remove_nodes_from([n for n, label in view.nodes(data="label") if label not in shared])
        by_label: dict[str, list[str]] = defaultdict(list)
        for t, label in ours.nodes(data="label"):
            by_label[label].append(t)
        for piece in list(nx.weakly_connected_components(theirs)):
            wanted = theirs.subgraph(piece)
            labels = {label for _, label in wanted.nodes(data="label")}
            candidates = [t for label in labels for t in by_label[label] if self._open_t(t)]
            if 1 < len(piece) <= _LARGEST_PIECE and len(piece) <= len(candidates) <= 4 * _LARGEST_PIECE:
                self._match(ours.subgraph(candidates), wanted)

    def _match(self, ours: nx.DiGraph, theirs: nx.DiGraph) -> None:
        def same(a: dict[str, object], b: dict[str, object]) -> bool:
            return a == b

        matcher = _BoundedMatcher(ours, theirs, node_match=same, edge_match=same)
        try:
            found = matcher.subgraph_is_isomorphic()
        except _TooManyStepsError:
            return
        if found:
            for t, i in matcher.mapping.items():
                self._pair_by_structure(t, i)

    def _view(self, program: Program, names: Sequence[str]) -> nx.DiGraph:
        view = nx.DiGraph()
        inside = set(names)
        for name in names:
            r = program.records[name]
            label = (r.op, r.precision.format.to_dict(), r.precision.compute, r.tensor and r.tensor.shape)
            view.add_node(name, label=json.dumps([*label, self._attributes(program, name)]))
            for place, producer in program.operands[name].items():
                if producer in inside:
                    places = view.edges.get((producer, name), {}).get("places", ())
                    view.add_edge(producer, name, places=(*places, place))
        return view

    def _replaced(self) -> None:
        """Different operators that read the same values and are read in the same place are one node, changed."""
        for i in reversed(self.is_):
            t = self.alignment.to_train.get(i)
            if t is None:
                continue
            for p, q in self._places(t, i):
                if self._open_t(p) and self._open_i(q) and not self.train.is_leaf(p) and not self.infer.is_leaf(q):
                    read = {self.alignment.to_train.get(x) for x in self.infer.operands[q].values()}
                    if read and read == set(self.train.operands[p].values()):
                        self.alignment.pair(p, q)


class _TooManyStepsError(Exception):
    pass


class _BoundedMatcher(DiGraphMatcher):  # type: ignore[misc]
    """networkx's matcher, which gives up after ``_STEPS`` candidate pairs."""

    steps = 0

    def syntactic_feasibility(self, t: str, i: str) -> bool:
        self.steps += 1
        if self.steps > _STEPS:
            raise _TooManyStepsError
        return bool(super().syntactic_feasibility(t, i))


def _group(program: Program, names: Iterable[str]) -> dict[Hashable, list[str]]:
    """Nodes by module, operator and phase, in program order; no leaves."""
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        r = program.records[name]
        if not program.is_leaf(name):
            groups.setdefault((program.module(name), r.op, r.precision.phase), []).append(name)
    return groups
