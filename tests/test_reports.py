"""The document of a check, its schema, and the formats that are made from it."""

from __future__ import annotations

import copy
import io
import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from rich.console import Console
from typer.testing import CliRunner, Result

from precgraph import PrecisionGraph, Recipe
from precgraph.checking import lowered
from precgraph.cli import app
from precgraph.errors import CheckError, InputError
from precgraph.passes.pipeline import build as passes
from precgraph.report import build, github, html, junit, layer, load, sarif, schema, svg, verdict
from precgraph.report.document import cause_lines
from precgraph.report.html import recipe_rows
from precgraph.report.layer import drawn_parts
from precgraph.report.layout import layout
from precgraph.report.suppress import Suppression
from precgraph.report.terminal import show
from precgraph.trace import trace
from precgraph.verify import check_inclusion
from precgraph.verify.report import Report, over_modules
from precgraph.verify.rules import RULES, rule_of
from precgraph.verify.why import WHY
from tests.families import meta_lm
from tests.reports import HOSTILE, document, finding, graph_context, hostile_document
from tests.surgery import remove, set_argument, set_dtype, set_rule

ROOT = Path(__file__).parents[1]
SUPPRESSED = Suppression("PG105", "model.layers.0.**", "known in the engine")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def valid(data: dict[str, Any]) -> dict[str, Any]:
    Draft202012Validator(schema()).validate(data)
    return data


def printed(data: dict[str, Any], width: int) -> str:
    out = Console(file=io.StringIO(), width=width)
    show(data, out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def everything() -> dict[str, Any]:
    """A document with a row in each state."""
    old = document(finding("compute", "model.norm"), finding("divide", "gone"))
    return document(
        finding(), finding("compute", "model.norm"), finding("granularity", "model.layers.1.mlp"),
        notes=(finding("backward", ""),), not_proved=(finding("row_invariant", ""),),
        suppressions=(SUPPRESSED,), baseline=old,
    )  # fmt: skip


# -------------------------------------------------------------------------------- document and schema


def test_the_schema_is_one_and_every_document_fits_it() -> None:
    Draft202012Validator.check_schema(schema())
    assert json.loads(run("schema").stdout) == schema()
    for data in (document(), document(finding()), everything(), hostile_document()):
        valid(json.loads(json.dumps(data)))
    states = [row["state"] for row in everything()["rows"]]
    assert states == ["violation", "suppressed", "known", "not_proved", "note"]


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": 1}, {"exit_code": 2}, {"ok": False}, {"schema": 2}, {"level": ""}, {"compared": {}},
        {"rows": None}, {"violations": [{"code": "PG105"}]}, {"recipes": {}},
        {"tool": {"name": "other", "version": "1"}},
    ],
)  # fmt: skip
def test_what_does_not_follow_is_refused(change: dict[str, Any]) -> None:
    data = valid(document())
    with pytest.raises(ValidationError):
        valid({**data, **change})


def test_a_failing_document_cannot_say_zero() -> None:
    data = valid(document(finding()))
    for change in ({"exit_code": 0}, {"ok": True}, {"ok": True, "exit_code": 0}, {"violations": []}):
        with pytest.raises(ValidationError):
            valid({**data, **change})


@pytest.mark.parametrize("key", ["violations", "rows"])
def test_what_is_found_has_a_code(key: str) -> None:
    data = copy.deepcopy(document(finding()))
    data[key][0]["codes"] = []
    with pytest.raises(ValidationError):
        valid(data)


@pytest.mark.parametrize("compared", [0, -1])
def test_nothing_compared_is_no_document(compared: int) -> None:
    with pytest.raises(CheckError, match="nothing was compared"):
        build(Report(compared), graph_context())


def test_fingerprints_say_what_differs_and_not_where_it_stands() -> None:
    marks = [f["fingerprint"] for f in document(finding(), finding(node="other"), finding(message="x"))["violations"]]
    assert marks == [marks[0], f"{marks[0]}.2", f"{marks[0]}.3"]
    changes = [
        {"module": "m"}, {"op": "linear"}, {"train": ("2",)}, {"infer": ("2",)}, {"attributes": ("x",)},
        {"codes": (RULES["amax_floor"].code, RULES["divide"].code)},
    ]  # fmt: skip
    others = {document(finding(**c))["violations"][0]["fingerprint"] for c in changes}
    assert len(others | {marks[0]}) == len(changes) + 1


def test_verdicts() -> None:
    unused = Suppression("PG103", "x", "why")
    open_point = (finding("row_invariant", ""),)
    cases = {
        ("consistent", "inside the training forward"): document(),
        ("not proved", "1 point; the rest of the rollout's program is"): document(not_proved=open_point),
        ("not proved", "1 point, which fails under --strict; the rest"): document(not_proved=open_point, strict=True),
        ("not proved", "1 point; 1 suppressed, and no other difference"): document(
            finding(), not_proved=open_point, suppressions=(SUPPRESSED,)
        ),
        ("inconsistent", "inherit a difference; not proved: 1 point"): document(finding(), not_proved=open_point),
        ("unclean", "1 unused suppression; not proved: 1 point"): document(
            not_proved=open_point, suppressions=(unused,)
        ),
        ("inconsistent", "1 root cause at 1 node;"): document(finding()),
        ("inconsistent", "1 root cause at 2 nodes; 7 more nodes only"): document(
            finding(inherited=3), finding(module="model.layers.1.mlp", inherited=4)
        ),
        ("inconsistent", "2 root causes at 2 nodes; 0 more"): document(finding(), finding(op="linear")),
        ("accepted", "1 suppressed, and no other difference"): document(finding(), suppressions=(SUPPRESSED,)),
        ("accepted", "1 known from the baseline"): document(finding(), baseline=document(finding())),
        ("consistent", "1 of the baseline is fixed"): document(baseline=document(finding())),
        ("unclean", "nothing else differs; 1 unused suppression"): document(suppressions=(unused,)),
        ("inconsistent", "1 unused suppression"): document(finding(), suppressions=(unused,)),
    }
    for (word, words), data in cases.items():
        assert verdict(data)[0] == word
        assert words in verdict(data)[1]
        assert valid(data)["exit_code"] == (word in ("inconsistent", "unclean") or "--strict" in words)


def test_every_format_follows_strict() -> None:
    """What is not proved fails, and a document that says otherwise is refused."""
    points = (finding("row_invariant", "model.norm"),)
    lax, strict = (valid(document(not_proved=points, strict=each)) for each in (False, True))
    for data, fails in ((lax, False), (strict, True)):
        assert (data["ok"], data["exit_code"]) == (not fails, fails)
        lines = list(github.render(data))
        assert [line.split(" ")[0] for line in lines] == (["::error"] * 2 if fails else ["::notice", "::warning"])
        assert ET.fromstring(junit.render(data)).get("failures") == str(int(fails))
        (ran,) = sarif.render(data)["runs"]
        assert ran["invocations"][0]["exitCode"] == fails and ran["results"][0]["kind"] == "open"
        assert f'class="verdict not_proved{" fails" if fails else ""}"' in html.render(data)
    for change in ({"ok": True, "exit_code": 0}, {"strict": False}, {"not_proved": []}):
        with pytest.raises(ValidationError):
            valid({**strict, **change})
    valid({key: value for key, value in lax.items() if key != "strict"})  # as earlier versions wrote it
    assert valid(document(strict=True))["ok"] is True


def test_causes_are_counted_as_a_person_counts_them() -> None:
    """By rule, operator and attributes; neither by layer nor by module, and without what the settings are wrong in."""
    many = [finding("scale_dtype", f"model.layers.{n}.mlp", attributes=("scale_dtype", "divide"),
                    train=("a", "b"), infer=("c", "d"), inherited=n,
                    codes=(RULES["scale_dtype"].code, RULES["divide"].code)) for n in range(3)]  # fmt: skip
    alone = finding("scale_dtype", "model.layers.0.self_attn")
    unused = Suppression("PG103", "x", "why")
    data = valid(document(*many, alone, finding("operator"), suppressions=(unused,)))
    assert data["causes"] == [
        {"code": "PG102 scale dtype", "codes": ["PG102", "PG104"], "op": "quantize",
         "attributes": ["scale_dtype", "divide"], "count": 3, "inherited": 3},
        {"code": "PG102 scale dtype", "codes": ["PG102"], "op": "quantize", "attributes": ["scale_dtype"],
         "count": 1, "inherited": 0},
        {"code": "PG405 other operator", "codes": ["PG405"], "op": "quantize", "attributes": ["operator"],
         "count": 1, "inherited": 0},
    ]  # fmt: skip
    lines = [
        "PG102 scale dtype (scale_dtype, divide): 3 × quantize",
        "PG102 scale dtype: 1 × quantize",
        "PG405 other operator: 1 × quantize",
    ]
    assert cause_lines(data) == lines
    first, *rest = printed(data, 160).splitlines()
    assert first.startswith("inconsistent: 3 root causes at 5 nodes; 3 more nodes only inherit a difference; 1 unused")
    assert [line.strip() for line in rest[:3]] == lines
    with pytest.raises(ValidationError):
        valid({**data, "causes": [{**data["causes"][0], "count": 0}]})
    valid({key: value for key, value in data.items() if key != "causes"})  # as earlier versions wrote it


def test_people_read_rows_that_are_alike_over_modules_as_one() -> None:
    """By prefix and ends; data keeps a row for each, and what they quantise, which keeps rows apart."""
    ends = ("self_attn.q_proj", "mlp", "mlp.up_proj")
    alike = [
        finding("divide", f"model.layers.{n}.{end}", quantises="weight", inherited=1) for n in (0, 1) for end in ends
    ]
    activation = finding("divide", "model.layers.0.mlp", quantises="activation")
    data = valid(document(*alike, activation, finding("divide", "")))
    assert not any("." in f["fingerprint"] for f in data["violations"])  # a weight's is not the activation's
    assert [(r["module"], r.get("quantises"), r["count"]) for r in data["rows"]] == [
        ("model.layers.{0-1}.self_attn.q_proj", "weight", 2), ("model.layers.{0-1}.mlp", "weight", 2),
        ("model.layers.{0-1}.mlp.up_proj", "weight", 2), ("model.layers.0.mlp", "activation", 1), ("", None, 1),
    ]  # fmt: skip
    one = over_modules(data["rows"])
    assert [(row["module"], row["count"], row["inherited"]) for row in one] == [
        ("model.layers.{0-1}.{self_attn.q_proj, mlp, mlp.up_proj}", 6, 6), ("model.layers.0.mlp", 1, 0), ("", 1, 0)
    ]  # fmt: skip
    for text in (" ".join(shown.split()) for shown in (printed(data, 200), html.render(data))):
        assert "model.layers.{0-1}.{self_attn.q_proj, mlp, mlp.up_proj}" in text
        assert "6 × quantize (weight)" in text and "quantize (activation)" in text
    many = over_modules([{**one[0], "module": f"a.m{i}"} for i in range(14)])
    assert [row["module"] for row in many] == [f"a.{{{', '.join(f'm{i}' for i in range(12))}, 2 more, see --json}}"]
    assert [r["module"] for r in over_modules([{**one[0], "module": m} for m in ("", "a.b")])] == ["{(model), a.b}"]


def test_a_difference_says_what_is_quantised() -> None:
    e4m3 = Recipe.jet_rl()
    rounded = replace(e4m3.linear.activation, scale_dtype="ue8m0"), replace(e4m3.linear.weight, scale_dtype="ue8m0")
    other = replace(e4m3, linear=replace(e4m3.linear, activation=rounded[0], weight=rounded[1]))
    traced = trace(meta_lm("llama"))
    report = check_inclusion(lowered(traced, "train", e4m3), lowered(traced, "infer", other))
    wgrad = replace(e4m3.linear, wgrad_activation=replace(e4m3.linear.wgrad_activation, scale_dtype="ue8m0"))
    trains = [passes(traced.graph, "train", r, recompute="none") for r in (e4m3, replace(e4m3, linear=wgrad))]
    assert {(f.op, f.quantises) for f in check_inclusion(*trains).notes} == {("quantize", "activation")}  # saved ones
    assert {(f.op, f.quantises) for f in report.violations} == {("quantize", "activation"), ("quantize", "weight")}
    assert Counter(f.quantises for f in report.violations) == {"activation": 8, "weight": 14}


def test_what_runs_another_engine_is_not_said() -> None:
    """The kernels that its rules were lowered to run nothing there."""
    stack = {"stack": "vllm", "version": "1", "config": "", "skipped": [], "taken_from_the_other_side": [],
             "not_modelled": "norms"}  # fmt: skip
    for stacks, ours in (({"train": None, "infer": stack}, False), ({"train": stack, "infer": None}, True)):
        data = document(context={"stacks": stacks})
        for text in (printed(data, 160), html.render(data)):
            assert ("What runs the rollout" in text) == ours


def test_the_table_of_rules_is_sorted_and_every_rule_has_what_why_example_and_remedy() -> None:
    numbers, names = [r.number for r in RULES.values()], [r.name for r in RULES.values()]
    assert all(re.fullmatch(r"PG\d{3}", number) for number in numbers)
    assert numbers == sorted(set(numbers)), "a number twice, or out of order"
    # By the rules that a weight is quantised by (PG109), and by what its stored bytes show (PG601).
    assert [n for n, count in Counter(names).items() if count > 1] == ["quantised twice"]
    assert WHY.keys() == RULES.keys()
    for key, rule in RULES.items():
        assert rule.words and rule.remedy, key
        assert WHY[key].why and WHY[key].example, key
        assert rule_of(rule.code) is rule


# ------------------------------------------------------------------------------------------- reading


def test_reading_a_report_again_gives_its_exit_code_and_formats(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for data, code in ((document(), 0), (document(finding()), 1), (everything(), 1)):
        path.write_text(json.dumps(data))
        names = {k: tmp_path / f"r.{k}" for k in ("html", "sarif", "junit")}
        result = run("report", path, *(x for k, p in names.items() for x in (f"--{k}", p)), "--github")
        assert result.exit_code == code, result.output
        assert names["html"].read_text() == html.render(data)
        assert json.loads(names["sarif"].read_text()) == json.loads(json.dumps(sarif.render(data)))
        assert names["junit"].read_text() == junit.render(data)
        assert [line for line in result.stdout.splitlines() if line.startswith("::")] == list(github.render(data))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not valid JSON"), ("{", "is not valid JSON"), ("[" * 100_000, "is not valid JSON"),
        ('{"schema": NaN}', "NaN is not a JSON number"), ("[]", "is no report of schema 1"),
        ("{}", "is no report of schema 1"), (json.dumps({**document(), "exit_code": 1}), "at exit_code"),
        (json.dumps({**document(), "rows": ["x" * 1000]}), "at rows/0"),
        (json.dumps(document(finding()))[:-1] + ', "violations": [], "ok": true, "exit_code": 0}', "is there twice"),
        (json.dumps(document(finding())).replace('"train": ["1', '"train": ["more", "1', 1), "its two values"),
    ],
)  # fmt: skip
def test_what_is_no_report_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        load(path)
    result = run("report", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and len(result.stderr) < 500


def test_help_does_not_wait_for_reports() -> None:
    code = "import sys, precgraph.cli\nprint([m for m in sys.modules if m.startswith('precgraph.report')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_reports_need_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(everything()))
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom precgraph.cli import app\n"
        f"args = ['report', {str(path)!r}, '--html', {str(tmp_path / 'x.html')!r}]\n"
        "print(CliRunner().invoke(app, args).exit_code, CliRunner().invoke(app, ['schema']).exit_code)\n"
        "print(sorted({'torch', 'transformers', 'networkx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["1 0", "[]"]


# ------------------------------------------------------------------------------------------ terminal


def test_a_terminal_shows_hostile_names_on_lines_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    old = document(*(finding(module=name) for name in HOSTILE))
    for data in (hostile_document(), document(baseline=old)):
        path.write_text(json.dumps(data))
        text = run("report", path).stdout
        assert "\x1b" not in text and "\x00" not in text
        assert not [line for line in text.splitlines() if line.lstrip().startswith("::")]
        assert "<script>alert(1)</script>" in text


def shown(data: dict[str, Any], width: int) -> str:
    """What a terminal of that width shows, without whitespace: lines of text, then each column of a table."""
    lines = printed(data, width).splitlines()
    assert max(map(len, lines)) <= width
    cells = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    columns = ["".join(column) for column in itertools.zip_longest(*cells, fillvalue="")]
    return "".join("".join([*(line for line in lines if not line.startswith("│")), *columns]).split())


@pytest.mark.parametrize("width", [160, 60])  # a table, and blocks
def test_every_code_that_a_suppression_has_to_cover_is_shown(width: int) -> None:
    rules = ("PG103", "PG104")
    text = shown(document(finding(codes=rules)), width)
    assert all(code in text for code in rules)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 160])
def test_no_text_is_cropped(width: int) -> None:
    module = "model.layers.0.mlp.experts.gate_up_projection_of_a_long_name"
    many = tuple(finding(key, module, node=str(i), train=("x" * 40,)) for i, key in enumerate(RULES))
    accepted = finding("compute", "model.layers.0.norm", train=("[bold]" * 9,))
    reason = "a reason [that] is long enough to be folded, and longer than the column of what is to be done"
    suppressions = (Suppression("PG201", "model.layers.0.norm", reason),)
    data = document(*many, accepted, not_proved=many[:3], notes=many[3:9], suppressions=suppressions)
    assert data["suppressed"]
    text = shown(data, width)
    for row in data["rows"]:
        for value in (row["remedy"] if "reason" not in row else reason, row["module"], *row["train"], row["code"]):
            assert "".join(value.split()) in text, value
    (row,) = [row for row in data["rows"] if row["state"] == "suppressed"]
    assert row["module"] == accepted.module


# -------------------------------------------------------------------------------------------- github


def test_annotations() -> None:
    lines = list(github.render(document(finding(module="a:b,c"), finding("backward", ""), notes=())))
    words = "inconsistent: 2 root causes at 2 nodes; 0 more nodes only inherit a difference"
    assert lines[0] == f"::error title=precgraph check::{words}"
    assert lines[1].startswith("::error title=PG105 amax floor in a%3Ab%2Cc::differs in the least value")
    assert "%0Aamax_floor: train 1e-10 | infer 0.0001%0Awhat to do: give both" in lines[1]
    kinds = [line.split(" ")[0] for line in github.render(everything())]
    assert kinds == ["::error", "::error", "::warning", "::notice", "::warning", "::notice"]


def test_no_name_starts_a_command_of_its_own() -> None:
    lines = list(github.render(hostile_document()))
    assert len(lines) == 1 + len(HOSTILE)
    for line in lines:
        assert "\n" not in line and "\r" not in line
        title = line.split("::")[1]
        assert title.startswith("error title=") and ":" not in title and "," not in title
    # What GitHub reads back is what was meant.
    body = lines[2].split("::", 2)[2].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    assert HOSTILE[1] in body or HOSTILE[0] in body


# --------------------------------------------------------------------------------------------- sarif


def test_sarif() -> None:
    log = sarif.render(valid(everything()))
    assert log["version"] == "2.1.0"
    (run_,) = log["runs"]
    rules = run_["tool"]["driver"]["rules"]
    assert [r["id"] for r in rules] == [r.number for r in RULES.values()]
    assert all(r["fullDescription"]["text"] and r["help"]["text"] for r in rules)
    results = {(r["properties"]["state"] if "properties" in r else "fixed"): r for r in run_["results"]}
    for result in run_["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert (result["kind"] == "fail") == (result["level"] != "none")  # section 3.27.10
        assert result["message"]["text"]
    assert results["suppressed"]["suppressions"] == [
        {"kind": "external", "status": "accepted", "justification": "known in the engine"}
    ]
    states = {key: r.get("baselineState") for key, r in results.items()}
    assert states == {
        "violation": "new", "suppressed": "new", "known": "unchanged", "fixed": "absent", "not_proved": None,
        "note": None,
    }  # fmt: skip
    assert run_["invocations"][0]["exitCode"] == 1
    assert "baselineState" not in sarif.render(document(finding()))["runs"][0]["results"][0]


def test_sarif_locations() -> None:
    data = document(finding(), context={"subject": "my models/config.json"})
    (location,) = sarif.render(data)["runs"][0]["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "my%20models/config.json"
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "model.layers.0.mlp"
    uris = [
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for r in sarif.render(hostile_document())["runs"][0]["results"]
    ]
    assert all("\n" not in uri and " " not in uri for uri in uris)


def test_a_code_that_this_version_lacks_is_still_shown() -> None:
    data = copy.deepcopy(document(finding()))
    for entry in (*data["violations"], *data["rows"]):
        entry |= {"code": "PG799 later", "codes": ["PG799"]}
    (result,) = sarif.render(valid(data))["runs"][0]["results"]
    assert result["ruleId"] == "PG799" and "ruleIndex" not in result
    assert "PG799 later" in html.render(data)
    assert "PG7xx" in junit.render(data)


# --------------------------------------------------------------------------------------------- junit


def test_junit() -> None:
    root = ET.fromstring(junit.render(everything()))
    (suite,) = root
    cases = suite.findall("testcase")
    assert suite.attrib["tests"] == root.attrib["tests"] == str(len(cases))
    assert root.attrib["failures"] == "1" and root.attrib["skipped"] == "2"
    (failure,) = suite.findall("testcase/failure")
    assert failure.attrib["type"] == "PG101" and "what to do: give both programs one recipe" in str(failure.text)
    groups = [c.attrib["classname"] for c in cases]
    assert [g[:22] for g in groups] == [f"precgraph.graph.PG{n}xx "[:22] for n in (0, 1, 1, 2, 3, 4, 5)]
    empty = ET.fromstring(junit.render(document()))
    assert empty.attrib["failures"] == "0" and int(empty.attrib["tests"]) == 6


def test_junit_of_hostile_names_is_xml_and_keeps_them() -> None:
    root = ET.fromstring(junit.render(hostile_document()))
    names = [c.attrib["name"] for c in root.iter("testcase") if c.find("failure") is not None]
    assert [n.split(" in ", 1)[1] for n in names][:7] == HOSTILE[:7]
    assert "\x00" not in "".join(names)


# ---------------------------------------------------------------------------------------------- html


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_asks_for_nothing_and_runs_nothing() -> None:
    page = Page(html.render(hostile_document()))
    forbidden = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "use", "image"}
    assert not forbidden & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "href", "xlink:href", "style")
        assert "url(" not in (value or "")
    policy = next(v for n, v in page.attributes if n == "content" and v and "default-src" in v)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_the_page_shows_hostile_names_as_text() -> None:
    page = Page(html.render(hostile_document()))
    for name in (HOSTILE[0], HOSTILE[3], HOSTILE[4], HOSTILE[5], HOSTILE[6], HOSTILE[8]):
        assert name in page.text
    assert page.tags.count("tr") >= len(HOSTILE)


def test_the_page_has_everything() -> None:
    data = everything()
    data["recipes"] = {"train": {"linear": {"weight": {"amax_floor": 0.0}}, "name": "a"}, "infer": {"name": "b"}}
    text = " ".join(Page(html.render(data)).text.split())
    for words in (
        "inconsistent", "Differences (1)", "PG101 granularity: 1 × quantize",
        "Suppressed (1)", "known in the engine", "Known from the baseline (1)",
        "Notes: nothing that", "Not proved: what", "Fixed since the baseline (1)", "How to fix it",
        "PG101 granularity", "Values of one block share a scale.", "Where the recipes differ",
        "linear.weight.amax_floor",
        "What runs the rollout",
    ):  # fmt: skip
        assert words in text, words
    assert "Differences" not in html.render(document())


def test_rows_of_recipes() -> None:
    recipes = {
        "train": {"name": "a", "linear": {"x": 1, "skip": ["p", "q"]}},
        "infer": {"name": "b", "linear": {"x": 2}},
    }
    assert recipe_rows(recipes) == [("linear.x", "1", "2"), ("linear.skip", "p, q", "")]
    assert recipe_rows({"train": {"a": 1}, "infer": {"a": 1}}) == []


# ------------------------------------------------------------------------------------------- drawing


def test_edges_go_down_and_boxes_do_not_overlap() -> None:
    names = [f"n{i}" for i in range(12)]
    pairs = "0-5 0-1 1-2 2-3 3-4 4-5 6-4 7-4 0-8 8-9 9-5 10-2 5-11 0-11"
    edges = [(f"n{a}", f"n{b}") for a, _, b in (pair.partition("-") for pair in pairs.split())]
    plan = layout(names, edges, (100, 40), (10, 30), 8)
    assert set(plan.places) == set(names)
    for a, b in edges:
        assert plan.places[a][1] + 40 < plan.places[b][1]
        assert [y for _, y in plan.routes[a, b]] == sorted({y for _, y in plan.routes[a, b]})
    for i, a in enumerate(names):
        (x1, y1) = plan.places[a]
        assert x1 >= 0 and x1 + 100 <= plan.width and y1 + 40 <= plan.height
        for b in names[i + 1 :]:
            (x2, y2) = plan.places[b]
            assert y1 != y2 or abs(x1 - x2) >= 100
    # n6, n7 and n10 read nothing, so each stands right above what reads it.
    assert plan.places["n6"][1] == plan.places["n7"][1] == plan.places["n3"][1]
    assert plan.places["n10"][1] == plan.places["n1"][1]


def test_a_chain_is_a_straight_line() -> None:
    plan = layout(["a", "b", "c"], [("a", "b"), ("b", "c")], (100, 40), (10, 30), 8)
    assert len({x for x, _ in plan.places.values()}) == 1
    assert layout([], [], (100, 40), (10, 30), 8).places == {}


def test_a_long_edge_does_not_cross_a_box() -> None:
    names = ["a", "b", "c", "d", "e"]
    plan = layout(names, [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("a", "e")], (100, 40), (10, 30), 8)
    for x, _ in plan.routes["a", "e"][1:-1]:
        assert all(not left <= x <= left + 100 for left, _ in (plan.places[n] for n in "bcd"))


# ------------------------------------------------------------------------------- parts of real graphs


@pytest.fixture(scope="module")
def graphs() -> tuple[PrecisionGraph, PrecisionGraph]:
    traced = trace(meta_lm("llama"))
    train, infer = (lowered(traced, mode, Recipe.jet_rl(), "reference") for mode in ("train", "infer"))
    return train, infer


def drawn(train: PrecisionGraph, infer: PrecisionGraph) -> tuple[list[dict[str, Any]], dict[str, svg.Mark], str]:
    """The parts, the marks of their nodes, and the page."""
    report = check_inclusion(train, infer)
    data = build(report, graph_context(parts=drawn_parts(train, infer, report)))
    valid(json.loads(json.dumps(data)))
    return data["parts"], svg.marks(data), html.render(data)


def test_a_consistent_program_shows_its_first_layer(graphs: tuple[PrecisionGraph, PrecisionGraph]) -> None:
    ((part,), marks, page) = drawn(*graphs)
    assert (part["segment"], part["layers"], part["left_out"]) == ("model.layers.0", 2, 0)
    inside = [n for n in part["nodes"] if not n["outside"]]
    records = [r for r in graphs[1].records() if r.precision.segment == "model.layers.0" and r.parameter is None]
    assert [n["name"] for n in inside] == [r.name for r in records]
    edges = {(p, r.name, place) for r in records for place, p in r.operands if not p.startswith("model_")}
    assert set(map(tuple, part["edges"])) == edges
    assert not marks and page.count("<rect") == len(part["nodes"])


def test_the_layer_with_the_difference_is_drawn_and_marked(graphs: tuple[PrecisionGraph, PrecisionGraph]) -> None:
    infer = graphs[1].copy()
    set_rule(infer, "rms_norm", "model.layers.1.input_layernorm", cast="after_weight")
    set_dtype(infer, "rms_norm", "model.norm", "float16")
    parts, marks, page = drawn(graphs[0], infer)
    assert [p["segment"] for p in parts] == ["model.layers.1", "head"]
    places = {n["name"]: n["module"] for p in parts for n in p["nodes"] if n["name"] in marks}
    assert sorted(places.values()) == ["model.layers.1.input_layernorm", "model.norm"]
    assert page.count('class="node violation"') == 2


def test_an_operator_that_the_rollout_lacks_is_drawn_between_its_neighbours(
    graphs: tuple[PrecisionGraph, PrecisionGraph],
) -> None:
    infer = graphs[1].copy()
    remove(infer, "quantize", "model.layers.1.mlp")
    ((part,), marks, page) = drawn(graphs[0], infer)
    (lacking,) = [n for n in part["nodes"] if n["side"] == "train"]
    assert lacking["name"] in marks and lacking["module"] == "model.layers.1.mlp"
    ops = {n["name"]: n["op"] for n in part["nodes"]}
    assert [ops[a] for a, b, _ in part["edges"] if b == lacking["name"]] == ["gated"]
    assert [ops[b] for a, b, _ in part["edges"] if a == lacking["name"]] == ["linear"]
    assert page.count('class="node violation"') == 1


def test_a_part_that_is_too_large_keeps_what_is_marked(
    graphs: tuple[PrecisionGraph, PrecisionGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "MOST", 5)
    infer = graphs[1].copy()
    set_argument(infer, "gated", "model.layers.1.mlp", 2, "gelu")
    ((part,), marks, _) = drawn(graphs[0], infer)
    inside = {n["name"] for n in part["nodes"] if not n["outside"]}
    assert len(inside) == 5 and set(marks) <= inside and part["left_out"] > 0
