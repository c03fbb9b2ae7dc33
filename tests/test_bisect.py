"""Bisection: a part that is the only difference owns all of the mismatch, and all parts together are the other side."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from precgraph.bisect import Bisection, Names, Part, Substitute, bisect
from precgraph.cli import app
from precgraph.errors import LoweringError
from precgraph.probe import Pair, load_pair
from precgraph.recipe import LinearRule, Recipe, SelectRule
from precgraph.verify.numerics import LogProbs
from tests.families import VOCABULARY, causal_lm

JET = Recipe.jet_rl()
IDS = torch.randint(0, VOCABULARY, (24,), generator=torch.Generator().manual_seed(1))
LINEARS = {*(f"model.layers.*.self_attn.{p}_proj" for p in "qkvo"),
           *(f"model.layers.*.mlp.{p}_proj" for p in ("gate", "up", "down"))}  # fmt: skip


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """A pair of programs of the tiny Llama, by recipes."""
    folder = tmp_path_factory.mktemp("bisect")
    causal_lm("llama").save_pretrained(folder / "model")
    made: dict[str, Pair] = {}

    def pair(train: Recipe, infer: Recipe) -> Pair:
        key = repr((train, infer))
        if key not in made:
            for name, recipe in (("t", train), ("i", infer)):
                recipe.save(folder / f"{name}.toml")
            sides = [str(folder / f"{n}.toml") for n in "ti"]
            made[key] = load_pair(str(folder / "model"), *sides, "reference", {}, lambda _: None)
        return made[key]

    return pair


PLAIN = replace(JET, name="plain", linear=LinearRule(None, None, None, None, None))
ONE = "model.layers.1.mlp.down_proj"


def test_one_skipped_layer_owns_everything(make: Callable[..., Pair]) -> None:
    """Roles, layers and modules: what differs is one selection, in one layer, in one module."""
    pair = make(JET, replace(JET, select=SelectRule(skip=(ONE,))))
    for by, name in (("roles", "select"), ("layers", "model.layers.1"), ("modules", "model.layers.*.mlp.down_proj")):
        result = bisect(pair, IDS, by)
        assert result.total.k3 > 0
        (part,) = result.parts
        assert (part.name, part.share) == (name, 1.0)
        assert part.without is not None
        assert (part.without.differing, part.without.k3) == (0, 0.0)
        assert "independently" in result.interaction()


def test_every_linear_owns_a_share_and_together_they_own_all(make: Callable[..., Pair]) -> None:
    """All kinds of modules given back at once are the training side's program: its log-probabilities, bit for bit."""
    pair = make(PLAIN, JET)
    result = bisect(pair, IDS, "modules")
    assert {p.name for p in result.parts} == LINEARS
    assert all(p.without is not None and p.without.differing > 0 for p in result.parts)
    assert [p.share for p in result.parts] == sorted((p.share for p in result.parts), reverse=True)
    wanted, given = pair.run("train", IDS), Substitute(pair, Names(pair), LINEARS, IDS)
    for index in range(len(wanted.segments)):
        wanted.segment(index, lambda _, value: value)
        given.run.segment(index, given)
    assert not given.left
    ours, theirs = wanted.live[wanted.program.outputs[0]], given.run.live[given.run.program.outputs[0]]
    assert torch.equal(ours, theirs)


def test_a_module_given_back_is_a_program_with_that_module_skipped(make: Callable[..., Pair]) -> None:
    """An independent way to the same number: a recipe that leaves these layers out of FP8."""
    result = bisect(make(PLAIN, JET), IDS, "modules")
    part = next(p for p in result.parts if p.name == "model.layers.*.self_attn.o_proj")
    skipped = make(PLAIN, replace(JET, select=SelectRule(skip=("model.layers.*.self_attn.o_proj",))))
    assert bisect(skipped, IDS, "roles").total == part.without


def test_a_layer_given_back_is_a_program_with_that_layer_skipped(make: Callable[..., Pair]) -> None:
    result = bisect(make(PLAIN, JET), IDS, "layers")
    assert {p.name for p in result.parts} == {"model.layers.0", "model.layers.1"}
    part = next(p for p in result.parts if p.name == "model.layers.0")
    every = (
        (f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"),
        (f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
    skipped = make(PLAIN, replace(JET, select=SelectRule(skip=tuple(n for group in every for n in group))))
    assert bisect(skipped, IDS, "roles").total == part.without


def test_roles_that_cannot_go_alone_go_together(make: Callable[..., Pair]) -> None:
    """A GEMM takes one kind of scales: activations and weights are given back together, and are all that differs."""
    assert JET.linear.activation is not None
    assert JET.linear.weight is not None
    powers = {k: replace(getattr(JET.linear, k), scale_dtype="ue8m0") for k in ("activation", "weight")}
    result = bisect(make(JET, replace(JET, linear=replace(JET.linear, **powers))), IDS, "roles")
    (part,) = result.parts
    assert (part.name, part.share) == ("activation + weight", 1.0)


def test_rules_that_one_kernel_has_together_are_given_back_together(make: Callable[..., Pair]) -> None:
    """No kernel has Hugging Face's norm in our arithmetic, or ours in its: an independent program has the number."""
    plain = Recipe.bf16()
    result = bisect(make(plain, JET), IDS, "roles")
    assert {p.name for p in result.parts} == {"activation + weight", "arithmetic + lm_head + norm"}
    part = next(p for p in result.parts if p.name.startswith("arithmetic"))
    given = replace(JET, arithmetic=plain.arithmetic, lm_head=plain.lm_head, norm=plain.norm)
    assert bisect(make(plain, given), IDS, "layers").total == part.without


def test_why_a_role_cannot_go_alone_is_readable(make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of a node is no sentence."""
    pair = make(JET, replace(JET, select=SelectRule(skip=(ONE,))))

    def none(*_: Any) -> Any:
        raise LoweringError(
            "no kernel of reference serves linear making bf16 (compute float32, {'gemm': 'plain'}) from bf16"
        )

    monkeypatch.setattr("precgraph.bisect.lowered", none)
    (part,) = bisect(pair, IDS, "roles").parts
    assert part.problem == (
        "cannot be given back alone: no kernel of reference serves linear making bf16 so, "
        "beside the rollout's other rules"
    )


def test_two_roles_share_the_mismatch(make: Callable[..., Pair]) -> None:
    assert JET.linear.activation is not None
    assert JET.linear.weight is not None
    other = {
        "activation": replace(JET.linear.activation, divide="reciprocal"),
        "weight": replace(JET.linear.weight, scale_rule="amax*(1/max)"),
    }
    result = bisect(make(JET, replace(JET, linear=replace(JET.linear, **other))), IDS, "roles")
    assert {p.name for p in result.parts} == {"activation", "weight"}
    assert all(p.without is not None and p.without.k3 > 0 for p in result.parts)
    # Without the weights' rule only the activations' is left, and the other way round: as programs of their own.
    alone = make(JET, replace(JET, linear=replace(JET.linear, activation=other["activation"])))
    left = next(p for p in result.parts if p.name == "weight").without
    assert bisect(alone, IDS, "layers").total == left


def test_equal_programs_have_nothing_to_share_out(make: Callable[..., Pair]) -> None:
    for by in ("roles", "layers", "modules"):
        result = bisect(make(JET, JET), IDS, by)
        assert result.parts == ()
        assert result.total.differing == 0
        assert "nothing to share out" in result.interaction()


def test_interaction_in_words() -> None:
    total = LogProbs(10, 10, 0.1, 0.2, 1.0)

    def words(*shares: float) -> str:
        return Bisection("roles", total, tuple(Part("x", total, s) for s in shares)).interaction()

    assert "97%" in words(0.5, 0.47) and "independently" in words(0.5, 0.47)
    assert "overlap" in words(0.9, 0.8)
    assert "several parts at once" in words(0.2)
    assert "balance" in words(1.3, -0.3) and "cancel" in words(1.3, -0.3)
    assert "no fractions" in words(4.0, -0.3) and "cancel" in words(4.0, -0.3)


def test_command_line(tmp_path: Path) -> None:
    causal_lm("llama").save_pretrained(tmp_path / "model")
    replace(JET, select=SelectRule(skip=(ONE,))).save(tmp_path / "r.toml")
    sides = ("--train", "jet_rl", "--infer", str(tmp_path / "r.toml"))

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["bisect", str(tmp_path / "model"), *sides, *args])

    result = run("--tokens", "12", "--by", "layers", "-o", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    shown = re.sub(" +", " ", result.stdout)
    assert "│ (none: the rollout as it is) │ │" in shown and "│ model.layers.1 │ 100.0% │" in shown
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["total"]["tokens"] == 11
    assert [(p["name"], p["share"]) for p in data["parts"]] == [("model.layers.1", 1.0)]
    for bad in (("--by", "layer"), ("--tokens", "1")):
        result = run(*bad)
        assert (result.exit_code, result.stdout) == (2, "")
