"""A recipe file that follows the other side's recipe: keys are set one by one, so that comments and order stay."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import tomlkit

from precgraph.errors import RecipeError
from precgraph.fix.plan import Change
from precgraph.recipe import BACKWARD_RULES, Recipe

_MAY_DIFFER = {("name",), *BACKWARD_RULES}
# What a stack's recipe says; the rest of it is compared as if it were equal.
_OF_STACKS = {("linear", "activation"), ("linear", "weight"), ("select",)}


def follow(path: Path, recipe: Recipe, other: Recipe, *, other_is_stack: bool) -> Change | str:
    """The change that gives the recipe in ``path`` the forward rules of ``other``, or why there is none.

    Of a stack's recipe only what the stack itself says is taken over.
    """
    text = path.read_text(encoding="utf-8")
    wanted = recipe.to_dict()
    _take(wanted, recipe.to_dict(), other.to_dict(), (), other_is_stack)
    document = tomlkit.parse(text)
    keys = list(_set(document, recipe.to_dict(), wanted, ""))
    if not keys:
        return f"{path}: no key of the recipe is the cause"
    after = tomlkit.dumps(document)
    try:
        written = Recipe.from_dict(tomllib.loads(after))
    except RecipeError as error:
        return f"{path}: the other side's rules cannot be written here one by one ({error})"
    if written.to_dict() != wanted:
        return f"{path}: the file's form is not understood; set {', '.join(keys)} as on the other side"
    changed = ", ".join(f"{key} {_at(recipe.to_dict(), key)} -> {_at(wanted, key)}" for key in keys)
    return Change(path, text, after, f"{path}: {changed}, as on the other side")


def _at(table: Any, key: str) -> str:
    """The value of a dotted key, as TOML has it; "absent" if there is none."""
    for part in key.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    return "absent" if table is None else tomlkit.item(table, _parent=tomlkit.array()).as_string()


def _take(wanted: dict[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any], at: Any, stack: bool) -> None:
    for key in dict.fromkeys([*ours, *theirs]):
        here = (*at, key)
        if here in _MAY_DIFFER:
            continue
        inside = any(here[: len(p)] == p[: len(here)] for p in _OF_STACKS)
        if stack and not inside:
            continue
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            _take(wanted[key], a, b, here, stack)
        elif b is None:
            wanted.pop(key, None)
        else:
            wanted[key] = b


def _set(table: MutableMapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Iterator[str]:
    """Bring ``table`` from ``old`` to ``new``; yields the keys that were set or removed."""
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if a == b:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            if key in table:
                yield from _set(table[key], a, b, f"{path}{key}.")
            else:  # a table that is absent stands for its defaults, and so would not once it is there
                table[key] = b
                yield path + key
        else:
            if b is None:
                table.pop(key, None)
            else:
                table[key] = b
            yield path + key
