"""Suppressions with a reason, and baselines: what still fails, what is accepted, what is unused, what is fixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from precgraph.cli import app
from precgraph.errors import InputError
from precgraph.report import build
from precgraph.report.suppress import Suppression, find, judge, read
from precgraph.verify.report import Report
from precgraph.verify.rules import RULES
from tests.reports import HOSTILE, document, finding, graph_context

pytestmark = pytest.mark.usefixtures("traced_once")
FLOOR = RULES["amax_floor"].code
DIVIDE = RULES["divide"].code


def entry(code: str = "PG105", module: str = "model.layers.*.mlp", reason: str = "why", level: str = "") -> Suppression:
    return Suppression(code, module, reason, level)


# ----------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "module", "covers"),
    [
        ("model.layers.*.mlp", "model.layers.3.mlp", True), ("model.layers.*.mlp", "model.layers.3.mlp.up_proj", False),
        ("model.layers.*.mlp", "model.layers.3.x.mlp", False), ("mlp.gate", "mlp.gate_proj", False),
        ("mlp.gate*", "mlp.gate_proj", True), ("mlp.gate*", "mlp.gate.x", False), ("**", "", True), ("**", "a.b", True),
        ("*", "", True), ("*", "a", True), ("*", "a.b", False), ("", "", True), ("", "a", False),
        ("**.mlp", "mlp", True), ("**.mlp", "a.b.mlp", True), ("**.mlp", "a.bmlp", False), ("a.**", "a", True),
        ("a.**", "a.b.c", True), ("a.**", "ab", False), ("a.**.c", "a.c", True), ("a.**.c", "a.b.b.c", True),
        ("a.**.c", "a.bc", False), ("a.?", "a.b", True), ("a.?", "a.bc", False), ("a.b", "a+b", False),
        ("(", "(", True), ("model.层.*", "model.层.é", True), ("*", HOSTILE[1].replace(".", "_"), True),
    ],
)  # fmt: skip
def test_patterns(pattern: str, module: str, covers: bool) -> None:
    assert entry(module=pattern).covers(module) is covers


def test_a_pattern_is_no_regular_expression_that_can_hang() -> None:
    assert not entry(module="*a" * 25).covers("a" * 60 + "b")
    assert not entry(module="**.a." * 40 + "b").covers("a." * 80 + "c")
    assert not entry(module="(a+)+$").covers("a" * 40)


# ------------------------------------------------------------------------------------------- judging


def test_what_is_suppressed_stays_in_sight_and_does_not_fail() -> None:
    data = document(finding(), suppressions=[entry()])
    assert data["exit_code"] == 0 and data["ok"] is True and data["violations"] == []
    (kept,) = data["suppressed"]
    assert (kept["code"], kept["reason"]) == (FLOOR, "why")
    (row,) = data["rows"]
    assert (row["state"], row["reason"]) == ("suppressed", "why")


@pytest.mark.parametrize("other", [entry("PG104"), entry(module="model.layers.*"), entry(level="weights")])
def test_another_code_module_or_level_suppresses_nothing(other: Suppression) -> None:
    data = document(finding(), suppressions=[other])
    assert data["exit_code"] == 1
    assert FLOOR in [f["code"] for f in data["violations"]]
    assert data["suppressed"] == []


def test_a_finding_of_two_rules_needs_both_suppressed() -> None:
    both = finding(
        attributes=("amax_floor", "divide"), train=("1", "true"), infer=("2", "reciprocal"), codes=(FLOOR, DIVIDE)
    )
    one = judge([both], [entry()], "graph")
    assert one.open == (both,) and not one.suppressed
    assert not one.unused  # it is about a finding that is there
    two = judge([both], [entry(), entry("PG104", reason="and this")], "graph")
    assert not two.open and two.suppressed == ((both, "why; and this"),)


def test_an_unused_one_is_a_finding_that_fails() -> None:
    data = document(suppressions=[entry(reason="old story")])
    assert data["exit_code"] == 1
    (unused,) = data["violations"]
    assert (unused["code"], unused["train"]) == ("PG001 unused suppression", ["PG105 model.layers.*.mlp"])
    assert "old story" in unused["message"]


def test_the_first_of_two_that_cover_is_used_and_the_other_is_not() -> None:
    judged = judge([finding()], [entry(), entry(module="**", reason="all")], "graph")
    assert judged.suppressed[0][1] == "why"
    assert [f.module for f in judged.unused] == ["**"]


@pytest.mark.parametrize(
    ("code", "level", "unused"),
    [
        ("PG606", "graph", 0), ("PG606", "weights", 1), ("PG202", "weights", 0), ("PG202", "graph", 1),
        ("PG105", "weights", 1),
    ],
)  # fmt: skip
def test_an_entry_is_unused_only_where_its_code_can_occur(code: str, level: str, unused: int) -> None:
    assert len(judge([], [entry(code)], level).unused) == unused
    assert len(judge([], [entry(code, level=level)], level).unused) == 1
    assert len(judge([], [entry(code, level="other")], level).unused) == 0


def test_layers_with_one_reason_fold_and_others_do_not() -> None:
    found = [finding(module=f"model.layers.{n}.mlp") for n in range(4)]
    data = document(*found, suppressions=[entry(module="model.layers.3.mlp", reason="last"), entry()])
    rows = [(r["module"], r["reason"], r["count"]) for r in data["rows"]]
    assert rows == [("model.layers.{0-2}.mlp", "why", 3), ("model.layers.3.mlp", "last", 1)]


def test_notes_are_no_matter_of_suppressions() -> None:
    data = document(notes=(finding("backward", ""),), not_proved=(finding("row_invariant", ""),), suppressions=[])
    assert data["exit_code"] == 0 and len(data["notes"]) == len(data["not_proved"]) == 1


# ------------------------------------------------------------------------------------------- reading


def test_both_files_are_found_and_read(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    table = '[[{}suppressions]]\ncode = "pg105"\nmodule = "**"\nreason = " engine, issue 7 "\n'
    shared = tmp_path / "pyproject.toml"
    shared.write_text("[tool.ruff]\nline-length = 100\n")
    assert find(tmp_path) is None
    shared.write_text("[tool.ruff]\nline-length = 100\n" + table.format("tool.precgraph."))
    assert find(tmp_path) == shared
    assert read(shared) == (Suppression("PG105", "**", "engine, issue 7"),)
    own = tmp_path / "precgraph.toml"
    own.write_text(table.format("") + 'level = "weights"\n')
    assert find(tmp_path) == own
    assert read(own) == (Suppression("PG105", "**", "engine, issue 7", "weights"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("code = 'PG105'\nmodule = 'x'", "suppression 1 has no reason"),
        ("code = 'PG105'\nmodule = 'x'\nreason = '  '", "suppression 1 has no reason"),
        ("code = 'PG105'\nreason = 'x'", "suppression 1 has no module"), ("module = 'x'\nreason = 'x'", "has no code"),
        ("code = 'PG1055'\nmodule = 'x'\nreason = 'x'", "no rule has the code 'PG1055'; did you mean PG105?"),
        ("code = 'PG901'\nmodule = 'x'\nreason = 'x'", "PG901 never fails"),
        ("code = 'PG001'\nmodule = 'x'\nreason = 'x'", "PG001 never fails a check by itself, or is about"),
        ("code = 'PG105'\nmodul = 'x'\nreason = 'x'", "unknown key 'modul'"),
        ("code = 105\nmodule = 'x'\nreason = 'x'", "code must be a string"), ("code = ", "is not valid TOML"),
        ("code = 'PG105'\nmodule = 'x'\nreason = 'x'\nlevel = 'grpah'", "suppression 1: no level is called 'grpah'"),
    ],
)  # fmt: skip
def test_an_entry_that_is_not_whole_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[[suppressions]]\n" + text)
    with pytest.raises(InputError, match="own.toml") as error:
        read(path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_other_shapes_of_the_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    one = "[[suppressions]]\ncode = 'PG105'\nmodule = 'x'\nreason = 'x'\n"
    for text, words in (
        ("suppressions = 1", "must be tables"), ("suppressions = [1]", "must be tables"),
        ("[[supressions]]\n", "unknown key 'supressions'"), (one + one, "two suppressions are the same"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            read(path)
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none.toml")
    path = tmp_path / "pyproject.toml"
    for text, words in (("tool = 3", "'tool' is no table"), ("[tool]\nprecgraph = 3", "'precgraph' is no table")):
        path.write_text(text)
        for reading in (read, lambda p: find(p.parent)):
            with pytest.raises(InputError, match=words):
                reading(path)


# ------------------------------------------------------------------------------------------ baseline


def test_only_what_the_baseline_lacks_fails() -> None:
    old, new = finding(module="a"), finding(module="b")
    data = document(old, new, baseline=document(old, finding(module="c")))
    assert data["exit_code"] == 1
    names = {key: [f["module"] for f in data[key]] for key in ("violations", "known", "fixed")}
    assert names == {"violations": ["b"], "known": ["a"], "fixed": ["c"]}
    assert document(old, baseline=document(old))["exit_code"] == 0


def test_one_more_of_the_same_fails() -> None:
    data = document(finding(), finding(node="second"), baseline=document(finding()))
    assert (len(data["violations"]), len(data["known"])) == (1, 1)


def test_another_value_in_the_same_place_is_new() -> None:
    data = document(finding(infer=("1e-5",)), baseline=document(finding()))
    assert (len(data["violations"]), len(data["fixed"])) == (1, 1)


def test_a_baseline_remembers_what_it_had_accepted() -> None:
    first = document(finding(), suppressions=[entry()])
    second = document(finding(), baseline=first)  # the suppression is gone, and the finding is no news
    assert second["exit_code"] == 0 and len(second["known"]) == 1
    third = document(finding(), baseline=second)
    assert third["exit_code"] == 0 and len(third["known"]) == 1
    assert document(baseline=first)["fixed"][0].keys() == second["known"][0].keys()


def test_a_baseline_of_another_level_is_refused() -> None:
    weights = {
        "level": "weights", "model": "m", "sides": {"train": "a", "infer": "b"}, "checkpoint": "c", "recipe": {},
        "compared": {"tensors": 1, "quantized": 1, "bytes": 1},
    }  # fmt: skip
    with pytest.raises(InputError, match="the baseline is of level weights"):
        build(Report(1), graph_context(), baseline=build(Report(1), weights))


# ----------------------------------------------------------------------------------- the command line


@pytest.fixture
def check(
    config_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """``precgraph check`` of weights with two floors, in an empty folder; the result and its document."""
    monkeypatch.chdir(tmp_path)
    llama = str(config_folder("llama"))
    CliRunner().invoke(app, ["recipe", "jet_rl", "-o", "mine.toml"])
    text = Path("mine.toml").read_text()
    head, table, rest = text.partition("[linear.weight]")
    Path("mine.toml").write_text(head + table + rest.replace("amax_floor = 1e-12", "amax_floor = 0.001", 1))

    def run(*args: object) -> tuple[Result, dict[str, Any]]:
        options = [str(a) for a in args]
        result = CliRunner().invoke(app, ["check", llama, "--infer", "mine.toml", "-o", "out.json", *options])
        return result, json.loads(Path("out.json").read_text()) if result.exit_code < 2 else {}

    return run


def test_suppressions_and_baseline_of_a_real_check(check: Callable[..., tuple[Result, dict[str, Any]]]) -> None:
    failing, first = check()
    assert failing.exit_code == 1 and {f["code"] for f in first["violations"]} == {FLOOR}
    assert len(first["violations"]) == 14
    Path("base.json").write_text(json.dumps(first))
    known, data = check("--baseline", "base.json")
    assert known.exit_code == 0 and len(data["known"]) == 14
    assert "accepted: 14 known from the baseline" in known.stdout
    text = '[[suppressions]]\ncode = "PG105"\nmodule = "model.layers.{}.**"\nreason = "floor of the engine"\n'
    Path("precgraph.toml").write_text(text.format(0))
    half, data = check()
    assert half.exit_code == 1 and (len(data["violations"]), len(data["suppressed"])) == (7, 7)
    Path("precgraph.toml").write_text(text.format("*"))
    accepted, data = check()
    assert accepted.exit_code == 0 and len(data["suppressed"]) == 14
    assert "floor of the" in accepted.stdout
    Path("precgraph.toml").write_text(text.format("*") + text.format(9).replace("PG105", "PG104"))
    unused, data = check()
    assert unused.exit_code == 1 and [f["code"] for f in data["violations"]] == ["PG001 unused suppression"]
    assert "unclean: nothing else differs" in unused.stdout
    Path("precgraph.toml").write_text("[[suppressions]]\n")
    bad, _ = check()
    assert bad.exit_code == 2 and bad.stdout == "" and "has no code" in bad.stderr
    Path("precgraph.toml").unlink()
    Path("base.json").write_text("{}")
    assert check("--baseline", "base.json")[0].exit_code == 2
