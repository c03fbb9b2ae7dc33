"""Operators that only one of the two programs has, gathered into connected regions: one root cause each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from precgraph.verify.align import Alignment
from precgraph.verify.program import Program


@dataclass
class Region:
    """Training nodes ``ts`` and rollout nodes ``is_`` without counterpart, each in order, that belong together.

    ``sources`` are the aligned values that go in, as training nodes; ``consumers`` the aligned rollout nodes that
    read what comes out.
    """

    only_quantizers: bool = True
    ts: list[str] = field(default_factory=list)
    is_: list[str] = field(default_factory=list)
    sources_t: set[str] = field(default_factory=set)
    sources_i: set[str] = field(default_factory=set)
    consumers: set[str] = field(default_factory=set)

    @property
    def last_t(self) -> str | None:
        return self.ts[-1] if self.ts else None

    @property
    def last_i(self) -> str | None:
        return self.is_[-1] if self.is_ else None


class Regions:
    """The regions of one scope. Union-find over the unaligned operators of both programs."""

    def __init__(
        self, train: Program, infer: Program, alignment: Alignment, ts: Sequence[str], is_: Sequence[str]
    ) -> None:
        self.sides = {"t": train, "i": infer}
        self.alignment = alignment
        open_t = [n for n in ts if n not in alignment.to_infer and not train.is_leaf(n)]
        open_i = [n for n in is_ if n not in alignment.to_train and not infer.is_leaf(n)]
        self.parent: dict[tuple[str, str], tuple[str, str]] = {("t", n): ("t", n) for n in open_t}
        self.parent |= {("i", n): ("i", n) for n in open_i}
        self._join_neighbours()
        self._join_across(is_)
        self.of: dict[tuple[str, str], Region] = {}
        for side, name in self.parent:
            region = self.of.setdefault(self._root((side, name)), Region())
            self._collect(region, side, name)
        self.all = list(self.of.values())

    def explains(self, p: str, q: str) -> bool:
        """Whether an edge that reads ``p`` in training and ``q`` in the rollout differs only by a region between."""
        a, b = self._region("t", p), self._region("i", q)
        if a is None and b is None:
            return False
        if a is not None and b is not None:
            return a is b
        if a is not None:
            return self.alignment.to_train.get(q, "") in a.sources_t
        assert b is not None
        return p in b.sources_i

    def _region(self, side: str, name: str) -> Region | None:
        return self.of.get(self._root((side, name))) if (side, name) in self.parent else None

    def _root(self, x: tuple[str, str]) -> tuple[str, str]:
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def _join(self, x: tuple[str, str], y: tuple[str, str]) -> None:
        if x in self.parent and y in self.parent:
            self.parent[self._root(y)] = self._root(x)

    def _join_neighbours(self) -> None:
        for side, name in self.parent:
            for producer in self.sides[side].operands[name].values():
                self._join((side, name), (side, producer))

    def _join_across(self, is_: Sequence[str]) -> None:
        """Regions that one aligned node reads in one place stand for one another."""
        for i in is_:
            t = self.alignment.to_train.get(i)
            if t is not None:
                ours, theirs = self.sides["t"].operands[t], self.sides["i"].operands[i]
                for place in ours.keys() & theirs.keys():
                    self._join(("t", ours[place]), ("i", theirs[place]))

    def _collect(self, region: Region, side: str, name: str) -> None:
        program = self.sides[side]
        (region.ts if side == "t" else region.is_).append(name)
        region.only_quantizers &= program.records[name].op == "quantize"
        for producer in program.operands[name].values():
            if side == "t":
                region.sources_t.add(producer)
            elif producer in self.alignment.to_train:
                region.sources_i.add(self.alignment.to_train[producer])
        for user, _ in program.users[name]:
            consumer = self.alignment.to_infer.get(user) if side == "t" else user
            if consumer in self.alignment.to_train:
                region.consumers.add(consumer)
