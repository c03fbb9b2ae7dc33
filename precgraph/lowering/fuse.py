"""Fusion: nodes that share ``precision.fusion`` run as one call where a backend has a kernel for their group.

The graph stays as it is, and so do its numerics ids: a fused kernel gives each node's value bit for bit, by a test.
Whether a group is fused is decided per block, among the nodes that the block keeps: a forward without a backward
makes no copies for one, and its fused quantiser leaves them out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from precgraph.errors import GraphError
from precgraph.graph import op_name, precision


@dataclass(frozen=True, slots=True)
class Of:
    """What ``node``'s own kernel would get as its argument number ``index``."""

    node: fx.Node
    index: int


@dataclass(frozen=True, slots=True)
class Fused:
    """A call that makes several values: ``run(*args)`` returns those of ``outputs``, in order.

    ``args`` holds :class:`Of`, lists of them and constants.
    """

    run: Callable[..., Sequence[Any]]
    args: tuple[Any, ...]
    outputs: tuple[fx.Node, ...]


# Members in order, and those whose values are read outside; None if the kernel does not serve this group.
Match = Callable[[Sequence[fx.Node], frozenset[fx.Node]], Fused | None]


@dataclass(frozen=True, slots=True)
class Fusion:
    """A fused kernel of a backend. It is asked only for groups all of whose nodes that backend serves."""

    name: str
    backend: str
    match: Match


_FUSIONS: list[Fusion] = []


def register_fusion(*fusions: Fusion) -> None:
    """Add records; the first that matches a group serves it."""
    _FUSIONS.extend(fusions)


@dataclass(frozen=True, slots=True)
class Unit:
    """What becomes one step: a node alone, or a group with its fused call."""

    nodes: tuple[fx.Node, ...]
    fused: Fused | None = None

    @property
    def name(self) -> str:
        """The node, or the group."""
        return self.nodes[0].name if self.fused is None else str(precision(self.nodes[0]).fusion)

    @property
    def makes(self) -> tuple[str, ...]:
        """Names of the values that it makes."""
        return tuple(n.name for n in (self.nodes if self.fused is None else self.fused.outputs))


def units(nodes: Sequence[fx.Node], outputs: Iterable[str]) -> list[Unit]:
    """``nodes``, which are in order and all needed for ``outputs``, as units in an order that their edges allow."""
    groups: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if precision(node).fusion:
            groups.setdefault(str(precision(node).fusion), []).append(node)
    wanted = frozenset(outputs)
    unit_of: dict[fx.Node, Unit] = {}
    for members in groups.values():
        fused = _fused(members, nodes, wanted)
        if fused:
            unit_of.update(dict.fromkeys(members, Unit(tuple(members), fused)))
    for node in nodes:
        unit_of.setdefault(node, Unit((node,)))
    return _ordered(nodes, unit_of)


def _fused(members: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: frozenset[str]) -> Fused | None:
    """The first fused kernel that serves the group."""
    if len(members) == 1:
        return None
    served_by = {n.meta["kernel"].backend for n in members if op_name(n) != "getitem"}
    inside, kept = set(members), set(nodes)
    escaping = frozenset(
        n for n in members if n.name in outputs or any(u in kept and u not in inside for u in n.users)
    )  # fmt: skip
    for fusion in _FUSIONS:
        if served_by == {fusion.backend}:
            fused = fusion.match(members, escaping)
            if fused and escaping <= set(fused.outputs):
                return fused
    return None


def _ordered(nodes: Sequence[fx.Node], unit_of: Mapping[fx.Node, Unit]) -> list[Unit]:
    """Units so that each comes after what it reads, otherwise as early as its first node."""
    place: dict[int, int] = {}
    for index, node in enumerate(nodes):
        place.setdefault(id(unit_of[node]), index)
    todo = {id(u): u for u in unit_of.values()}
    needs = {
        key: {id(unit_of[a]) for n in unit.nodes for a in n.all_input_nodes if a in unit_of} - {key}
        for key, unit in todo.items()
    }  # fmt: skip
    readers: dict[int, list[int]] = {key: [] for key in todo}
    for key, sources in needs.items():
        for source in sources:
            readers[source].append(key)
    ready = [(place[key], key) for key, sources in needs.items() if not sources]
    heapq.heapify(ready)
    order: list[Unit] = []
    while ready:
        _, key = heapq.heappop(ready)
        order.append(todo[key])
        for reader in readers[key]:
            needs[reader].discard(key)
            if not needs[reader]:
                heapq.heappush(ready, (place[reader], reader))
    if len(order) != len(todo):
        stuck = next(todo[key].name for key, sources in needs.items() if sources)
        raise GraphError(f"the fusion group {stuck} needs a value that is made from its own")
    return order
