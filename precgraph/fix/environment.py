"""Environment variables under which two stacks agree in more: tried, not guessed, and written to their own file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from precgraph.errors import PrecGraphError
from precgraph.fix.plan import Change
from precgraph.format import Format
from precgraph.recipe import Recipe

FILE = Path("precgraph.env")


def best(
    candidates: Mapping[str, str], env: Mapping[str, str], recipes: Callable[[Mapping[str, str]], tuple[Recipe, Recipe]]
) -> dict[str, str] | str:
    """The fewest of ``candidates`` under which the two recipes differ least, empty if none helps; or, where two ways
    are equally good, words that name both.

    ``recipes`` resolves both sides in an environment.
    """
    tried: list[tuple[int, int, dict[str, str]]] = []
    for count in range(len(candidates) + 1):
        for chosen in itertools.combinations(candidates.items(), count):
            try:
                pair = recipes({**env, **dict(chosen)})
            except PrecGraphError:  # a combination that a stack refuses is no way
                continue
            tried.append((distance(*pair), count, dict(chosen)))
    if not tried:
        return {}
    least = min(t[:2] for t in tried)
    ways = [t[2] for t in tried if t[:2] == least]
    if len(ways) > 1:
        return "set either " + ", or ".join(_words(way) for way in ways)
    return ways[0]


def distance(train: Recipe, infer: Recipe) -> int:
    """In how many rules of the forward's operands two recipes differ."""
    count = 0
    for a, b in ((train.linear.activation, infer.linear.activation), (train.linear.weight, infer.linear.weight)):
        if a is None or b is None:
            count += (a is not b) * len(Format.__dataclass_fields__)
        else:
            count += sum(getattr(a, name) != getattr(b, name) for name in Format.__dataclass_fields__)
    return count


def environment_file(folder: Path, variables: Mapping[str, str]) -> Change | None:
    """The change of :data:`FILE` that sets ``variables``; other lines stay. None if they are all there."""
    path = folder / FILE
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = before.splitlines()
    for name, value in variables.items():
        line = f"{name}={value}"
        places = [i for i, old in enumerate(lines) if re.match(rf"\s*(export\s+)?{name}\s*=", old)]
        for i in places:
            lines[i] = line
        if not places:
            lines.append(line)
    after = "\n".join(lines) + "\n"
    words = f"{path}: {_words(variables)}; start both sides in this environment (set -a; . ./{FILE}; set +a)"
    return None if after == before else Change(path, before, after, words, "wrote")


def _words(variables: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    return " and ".join(f"{name}={value}" for name, value in dict(variables).items())
