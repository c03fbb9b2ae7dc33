"""Environment variables of stacks under which two sides agree in more: tried, not guessed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from precgraph.errors import PrecGraphError
from precgraph.format import Format
from precgraph.recipe import Recipe
from precgraph.stacks.pair import Resolved, resolve

FIELDS = tuple(f.name for f in fields(Format))
Recipes = tuple[Recipe, Recipe]
Differing = tuple[frozenset[str], frozenset[str]]
"""In which fields the activations of two recipes differ, and in which the weights."""


@dataclass(frozen=True, slots=True)
class Way:
    """Variables to set, and what differs ``now`` and ``then``, when they are set."""

    variables: dict[str, str]
    now: Differing
    then: Differing


def ways(sides: tuple[Resolved, Resolved], modules: Sequence[str], env: Mapping[str, str]) -> list[Way]:
    """The :func:`best` variables of the stacks of two sides for a model whose linear layers are ``modules``."""
    stacks = [r.side.stack for r in sides if r.side.stack]
    candidates = {name: value for stack in stacks for name, value in stack.settings.items()}
    named = [replace(r.side, recipe=None) if r.side.stack else r.side for r in sides]

    def recipes(environment: Mapping[str, str]) -> Recipes:
        train, infer = resolve(named[0], named[1], modules, environment)
        return train.recipe, infer.recipe

    now = differing(sides[0].recipe, sides[1].recipe)
    return [Way(way, now, differing(*recipes({**env, **way}))) for way in best(candidates, env, recipes)]


def best(
    candidates: Mapping[str, str], env: Mapping[str, str], recipes: Callable[[Mapping[str, str]], Recipes]
) -> list[dict[str, str]]:
    """The fewest of ``candidates`` under which the two recipes differ least: none if nothing helps, several where that
    many ways are equally good. ``recipes`` resolves both sides in an environment."""
    tried: list[tuple[int, int, dict[str, str]]] = []
    for count in range(len(candidates) + 1):
        for chosen in itertools.combinations(candidates.items(), count):
            try:
                pair = recipes({**env, **dict(chosen)})
            except PrecGraphError:  # a combination that a stack refuses is no way
                continue
            tried.append((distance(*pair), count, dict(chosen)))
    least = min((t[:2] for t in tried), default=(0, 0))
    return [variables for *cost, variables in tried if tuple(cost) == least and variables]


def differing(train: Recipe, infer: Recipe) -> Differing:
    """The fields of the forward's operands that differ; all of them where one side does not quantise."""
    ours, theirs = train.linear, infer.linear
    return _fields(ours.activation, theirs.activation), _fields(ours.weight, theirs.weight)


def distance(train: Recipe, infer: Recipe) -> int:
    """In how many rules of the forward's operands two recipes differ."""
    return sum(map(len, differing(train, infer)))


def _fields(a: Format | None, b: Format | None) -> frozenset[str]:
    if a is None or b is None:
        return frozenset(FIELDS if a is not b else ())
    return frozenset(name for name in FIELDS if getattr(a, name) != getattr(b, name))
