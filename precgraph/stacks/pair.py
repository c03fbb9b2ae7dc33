"""Two sides of a check, each a recipe or a stack with its configuration, resolved for one model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precgraph import ops
from precgraph.errors import InputError, RecipeError
from precgraph.graph import PrecisionGraph, precision
from precgraph.passes.raise_ops import raise_ops
from precgraph.passes.rewrite import is_call
from precgraph.recipe import LINEAR_FORMATS, PRESETS, Recipe
from precgraph.stacks import ALIASES, NOT_MODELLED, STACKS, Built, Request, Stack, find, get
from precgraph.stacks.keys import Keys, keys_of
from precgraph.tables import read_table


@dataclass(frozen=True, slots=True)
class Side:
    """One side as it was named: a ``recipe``, or a ``stack`` with its parsed ``config`` read at ``path``, and which
    ``keys`` of that it reads."""

    name: str
    recipe: Recipe | None = None
    stack: Stack | None = None
    config: Mapping[str, Any] | None = None
    path: str = ""
    keys: Keys | None = None

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint that the side serves, if it names one: where a config.json of a model is."""
        own = Path(self.path).is_dir() or Path(self.path).name == "config.json"
        return self.path if own and "model_type" in (self.config or {}) else None


@dataclass(frozen=True, slots=True)
class Resolved:
    """One side for one model: its recipe, and what its stack says of it."""

    side: Side
    recipe: Recipe
    built: Built | None = None

    def to_json(self) -> dict[str, Any] | None:
        """The stack, its version and what is not known; None for a recipe."""
        stack, built = self.side.stack, self.built
        if stack is None or built is None:
            return None
        return {
            "stack": stack.name, "version": stack.version, "config": self.side.path, "unknown": list(stack.unknown),
            "skipped": sorted(built.skips.by_module), "taken_from_the_other_side": list(built.assumed),
            "not_modelled": NOT_MODELLED, "keys": self.side.keys and str(self.side.keys),
        }  # fmt: skip


def parse(spec: str) -> Side:
    """What ``--train`` or ``--infer`` names: a preset, a recipe file, ``STACK``, ``STACK:FILE`` or a checkpoint's
    directory, which vLLM serves. Errors are RecipeError or InputError and name the file."""
    name, colon, path = spec.partition(":")
    stack = find(name)
    if stack is None and colon and not Path(spec).exists():
        stack = get(name)
    if stack is not None:
        return _configured(spec, stack, path) if colon else Side(spec, stack=stack, config={})
    if Path(spec).is_dir():
        return _configured(spec, get("vllm"), spec)
    is_file = spec.endswith(".toml") or "/" in spec or Path(spec).is_file()
    if not is_file and spec not in PRESETS:
        close = difflib.get_close_matches(spec, [*PRESETS, *STACKS, *ALIASES], n=1, cutoff=0.7)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        known = f"presets: {', '.join(PRESETS)}; stacks: {', '.join([*STACKS, *ALIASES])}"
        raise RecipeError(
            f"no preset or stack is called {spec!r}{hint}", remedy=f"{known}; or name a file or directory"
        )
    return Side(spec, Recipe.load(spec) if is_file else Recipe.preset(spec))


def resolve_for(raw: PrecisionGraph, named: tuple[Side, Side], env: Mapping[str, str]) -> tuple[Resolved, Resolved]:
    """Both sides for a traced model."""
    return resolve(*named, linear_modules(raw) if any(side.stack for side in named) else (), env)


def resolve(train: Side, infer: Side, modules: Sequence[str], env: Mapping[str, str]) -> tuple[Resolved, Resolved]:
    """Both recipes for a model whose linear layers are ``modules``. A field that one stack's source does not settle is
    taken from the other side; so is, beside a recipe, every rule that no stack's recipe models."""
    first = _resolve(train, "train", modules, env, None)
    second = _resolve(infer, "infer", modules, env, first.recipe)
    if first.built and first.built.assumed:
        first = _resolve(train, "train", modules, env, second.recipe)
        second = _resolve(infer, "infer", modules, env, first.recipe)
    if first.built and not second.built:
        first = replace(first, recipe=_modelled(first.recipe, second.recipe))
    elif second.built and not first.built:
        second = replace(second, recipe=_modelled(second.recipe, first.recipe))
    return first, second


def _modelled(stack: Recipe, other: Recipe) -> Recipe:
    """``stack`` with what its stack says, formats and layers left out, and ``other``'s rules for everything else."""
    formats = {name: getattr(stack.linear, name) for name in LINEAR_FORMATS}
    return replace(other, name=stack.name, linear=replace(other.linear, **formats), select=stack.select)


def linear_modules(raw: PrecisionGraph) -> tuple[str, ...]:
    """Paths of a traced model's linear layers, in program order, without the head; experts by their 3-D weights."""
    graph = raise_ops(raw.copy())
    return tuple(dict.fromkeys(precision(n).module for n in graph if is_call(n, ops.linear, ops.expert_linear)))


def _resolve(side: Side, which: str, modules: Sequence[str], env: Mapping[str, str], other: Recipe | None) -> Resolved:
    if side.recipe is not None or side.stack is None:
        assert side.recipe is not None
        return Resolved(side, side.recipe)
    config = dict(side.config or {})
    own = config.pop("env", {})
    if not isinstance(own, Mapping):
        raise InputError("env must be a table of environment variables", path=side.path)
    merged = {**env, **{str(k): str(v) for k, v in own.items()}}
    built = side.stack.build(Request(which, tuple(modules), config, merged, side.path, other))
    return Resolved(side, built.recipe, built)


def _configured(spec: str, stack: Stack, path: str) -> Side:
    file = Path(path)
    config = read_table(file / "config.json" if file.is_dir() else file)
    return Side(spec, stack=stack, config=config, path=path, keys=keys_of(stack, config, path))
