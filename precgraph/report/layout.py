"""Places for the nodes of a graph in a layered drawing (Sugiyama, Tagawa and Toda 1981), from top to bottom.

Layers are longest paths; a node without operands stands right above what reads it. An edge over several layers goes
through a narrow place of its own in each. Within a layer, places are ordered by the mean place of their neighbours,
some sweeps down and up, and then move towards them as far as their neighbours leave room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SWEEPS = 8
Edge = tuple[str, str]
Slot = str | tuple[str, str, int]  # a node, or the place of an edge (from, to) in a layer


@dataclass(slots=True)
class Layout:
    """``places`` are the left upper corners of nodes, ``routes`` the middles through which each edge goes."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    routes: dict[Edge, list[tuple[int, int]]] = field(default_factory=dict)
    width: int = 0
    height: int = 0


def layout(
    names: Sequence[str], edges: Sequence[Edge], size: tuple[int, int], gap: tuple[int, int], lane: int
) -> Layout:
    """Lay out nodes of one ``size``, with ``gap`` to the right and below; edges that pass a layer get ``lane`` pixels.

    ``edges`` must not have a cycle.
    """
    edges = list(dict.fromkeys(edges))
    depth = _depths(names, edges)
    layers: list[list[Slot]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in names:
        layers[depth[name]].append(name)
    above: dict[Slot, list[Slot]] = defaultdict(list)
    below: dict[Slot, list[Slot]] = defaultdict(list)
    chains: dict[Edge, list[Slot]] = {}
    for a, b in edges:
        lanes: list[Slot] = [(a, b, d) for d in range(depth[a] + 1, depth[b])]
        for d, slot in enumerate(lanes, depth[a] + 1):
            layers[d].append(slot)
        chain: list[Slot] = [a, *lanes, b]
        chains[a, b] = chain
        for p, q in pairwise(chain):
            below[p].append(q)
            above[q].append(p)
    _order(layers, above, below)

    def width(slot: Slot) -> int:
        return size[0] if isinstance(slot, str) else lane

    middle = _middles(layers, above, below, width, gap[0])
    left = min((x - width(s) / 2 for s, x in middle.items()), default=0) - gap[0]
    out = Layout(height=len(layers) * (size[1] + gap[1]) - gap[1] + 2 * gap[0])
    rows = {slot: gap[0] + d * (size[1] + gap[1]) for d, layer in enumerate(layers) for slot in layer}
    for slot, x in middle.items():
        out.width = max(out.width, round(x - left + width(slot) / 2) + gap[0])
        if isinstance(slot, str):
            out.places[slot] = round(x - left - size[0] / 2), rows[slot]
    for edge, chain in chains.items():
        out.routes[edge] = [(round(middle[s] - left), rows[s] + size[1] // 2) for s in chain]
    return out


def _depths(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    above, below = defaultdict(list), defaultdict(list)
    waiting = dict.fromkeys(names, 0)
    for a, b in edges:
        above[b].append(a)
        below[a].append(b)
        waiting[b] += 1
    depth: dict[str, int] = {}
    ready = [n for n in names if not waiting[n]]
    while ready:
        name = ready.pop()
        depth[name] = max((depth[p] + 1 for p in above[name]), default=0)
        for user in below[name]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    for name in names:
        if not above[name] and below[name]:
            depth[name] = min(depth[user] for user in below[name]) - 1
    lowest = min(depth.values(), default=0)
    return {name: d - lowest for name, d in depth.items()}


def _order(
    layers: Sequence[list[Slot]], above: Mapping[Slot, Sequence[Slot]], below: Mapping[Slot, Sequence[Slot]]
) -> None:
    """Sort each layer by the mean place of the neighbours in the one before, down and up in turn."""
    place = {s: (i + 0.5) / len(layer) for layer in layers for i, s in enumerate(layer)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        for layer in layers if down else reversed(layers):
            key = {s: _mean([place[n] for n in near.get(s, ())], place[s]) for s in layer}
            layer.sort(key=key.__getitem__)
            place |= {s: (i + 0.5) / len(layer) for i, s in enumerate(layer)}


def _middles(
    layers: Sequence[Sequence[Slot]],
    above: Mapping[Slot, Sequence[Slot]],
    below: Mapping[Slot, Sequence[Slot]],
    width: Callable[[Slot], int],
    gap: int,
) -> dict[Slot, float]:
    """Middles of all slots: each towards the mean of its neighbours, in order and without overlap."""
    x: dict[Slot, float] = {}
    for layer in layers:
        total = sum(width(s) + gap for s in layer)
        at = -total / 2
        for s in layer:
            x[s] = at + (width(s) + gap) / 2
            at += width(s) + gap
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        for layer in layers if down else list(reversed(layers)):
            wanted = [_mean([x[n] for n in near.get(s, ())], x[s]) for s in layer]
            half = [(width(s) + gap) / 2 for s in layer]
            x |= dict(zip(layer, _apart(wanted, half), strict=True))
    return x


def _apart(wanted: Sequence[float], half: Sequence[float]) -> list[float]:
    """Places in order, no two closer than their halves, with the least sum of squares from ``wanted``.

    Pool adjacent violators: what would overlap becomes one block at the mean of what its members want.
    """
    offsets, at = [], 0.0
    for i, h in enumerate(half):
        at += h + (half[i - 1] if i else 0.0)
        offsets.append(at)
    blocks: list[list[float]] = []  # each [sum, count]
    for w, o in zip(wanted, offsets, strict=True):
        blocks.append([w - o, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    bases = [total / count for total, count in blocks for _ in range(int(count))]
    return [b + o for b, o in zip(bases, offsets, strict=True)]


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
