"""The recipe that a checkpoint brings along: an export's own, or the one that its config.json carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precgraph.errors import RecipeError
from precgraph.loading import find
from precgraph.recipe import Recipe
from precgraph.tables import read_table

RECIPE = "precgraph_recipe.toml"  # of an export
KEY = "precgraph"  # of a config.json, and of the tables that vLLM hands to its plugin


def carried_recipe(model: str | Path) -> Recipe | None:
    """The recipe in the directory of MODEL, or under ``precgraph`` in its config.json; None where it brings none.

    Raises what :meth:`Recipe.load` does, and RecipeError for a value of config.json that is no recipe.
    """
    source = find(model)
    file = source.config.with_name(RECIPE)
    if file.is_file():
        return Recipe.load(file)
    carried = None if source.gguf else read_table(source.config).get(KEY)
    return None if carried is None else read_carried(carried)


def read_carried(carried: Any) -> Recipe:
    """A preset's name, or the rules as a table; RecipeError for anything else."""
    if isinstance(carried, str):
        return Recipe.preset(carried)
    if not isinstance(carried, Mapping):
        raise RecipeError(f"{KEY!r} in the model's config must be a preset's name or a table of rules, not {carried!r}")
    return Recipe.from_dict(carried)
