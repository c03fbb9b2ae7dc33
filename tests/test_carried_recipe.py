"""The recipe that a checkpoint brings: an export's, or one in its config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from precgraph.checkpoint import export
from precgraph.checkpoint.carried import carried_recipe
from precgraph.errors import RecipeError
from precgraph.recipe import Recipe
from tests.families import causal_lm, config_json
from tests.test_cli import run

POWERS = replace(
    Recipe.jet_rl(),
    linear=replace(
        Recipe.jet_rl().linear,
        **{k: replace(getattr(Recipe.jet_rl().linear, k), scale_dtype="ue8m0") for k in ("activation", "weight")},
    ),
)


def digest(*arguments: object) -> str:
    result = run("digest", *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout).strip()


def test_an_exports(tmp_path: Path) -> None:
    """What lies in the directory is what ``digest`` and ``show`` take, unless they are told another."""
    folder = tmp_path / "fp8"
    export(causal_lm("llama"), folder, POWERS)
    assert carried_recipe(folder) == carried_recipe(folder / "config.json") == POWERS
    own = digest(folder)
    assert own == digest(folder, "--recipe", folder / "precgraph_recipe.toml") != digest(folder, "--recipe", "jet_rl")
    shown = [run("show", folder, *more).stdout for more in ((), ("--recipe", "jet_rl"))]
    assert "ue8m0" in shown[0] and "ue8m0" not in shown[1]


@pytest.mark.parametrize("carried", ["bf16", Recipe.bf16().to_dict(), None])
def test_one_in_config_json(carried: object, tmp_path: Path) -> None:
    config = config_json("llama")
    if carried is not None:
        config["precgraph"] = carried
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = carried_recipe(tmp_path)
    assert found == (Recipe.bf16() if carried else None)
    assert digest(tmp_path) == digest(tmp_path, "--recipe", "bf16" if carried else "jet_rl")


def test_what_is_no_recipe(tmp_path: Path) -> None:
    config = config_json("llama")
    (tmp_path / "config.json").write_text(json.dumps(config | {"precgraph": 3}))
    with pytest.raises(RecipeError, match="must be a preset's name or a table of rules, not 3"):
        carried_recipe(tmp_path)
    assert run("digest", tmp_path).exit_code == 2
