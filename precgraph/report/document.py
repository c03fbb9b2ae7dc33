"""The JSON document of a check: the normative result, which the exit code and all other formats follow from."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import precgraph
from precgraph import strict_json
from precgraph.errors import CheckError, InputError
from precgraph.report.suppress import Suppression, judge
from precgraph.verify.report import Finding, Report, causes, counted, fold, operator, plain
from precgraph.verify.rules import RULES

SCHEMA = 1
STATES = ("violation", "suppressed", "known", "not_proved", "note")
UNUSED = RULES["unused suppression"].code
_ROW_KEYS = ("code", "codes", "module", "op", "attributes", "train", "infer", "message", "remedy", "count", "inherited")


def build(
    report: Report,
    context: Mapping[str, Any],
    *,
    suppressions: Sequence[Suppression] = (),
    baseline: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """The document of a report.

    ``context`` has "level" and what else belongs to that level (model, sides, recipes, compared ...). Violations that a
    suppression covers go to "suppressed", those that ``baseline`` (an earlier document) has too to "known"; only what
    is left in "violations" fails, and with ``strict`` what is in "not_proved", which nothing accepts. CheckError:
    nothing was compared; InputError: the baseline is of another level.
    """
    if report.compared <= 0:
        raise CheckError("nothing was compared, which proves nothing", remedy="pass two programs of one model")
    level = str(context["level"])
    judged = judge(report.violations, suppressions, level)
    state = {
        "violation": _numbered([*judged.open, *judged.unused]),
        "suppressed": _numbered([f for f, _ in judged.suppressed]),
        "known": [],
        "not_proved": _numbered(report.not_proved),
        "note": _numbered(report.notes),
    }
    reasons = [reason for _, reason in judged.suppressed]
    fixed: list[dict[str, Any]] = []
    if baseline is not None:
        if baseline["level"] != level:
            raise InputError(
                f"the baseline is of level {baseline['level']}, and this check of level {level}",
                remedy="write one with -o at this level",
            )
        old = {f["fingerprint"]: f for f in findings_of(baseline)}
        state["known"] = [(f, mark) for f, mark in state["violation"] if mark in old]
        state["violation"] = [(f, mark) for f, mark in state["violation"] if mark not in old]
        now = {mark for key in ("violation", "suppressed", "known") for _, mark in state[key]}
        fixed = [{k: v for k, v in f.items() if k != "reason"} for mark, f in old.items() if mark not in now]
    failing = bool(state["violation"] or (strict and state["not_proved"]))
    return {
        "schema": SCHEMA,
        "tool": {"name": "precgraph", "version": precgraph.__version__},
        **context,
        "strict": strict,
        "ok": not failing,
        "exit_code": int(failing),
        "causes": causes(plain(f) for f, _ in state["violation"] if f.code != UNUSED),
        "violations": [_finding(f, mark) for f, mark in state["violation"]],
        "suppressed": [
            {**_finding(f, mark), "reason": reason}
            for (f, mark), reason in zip(state["suppressed"], reasons, strict=True)
        ],
        "known": [_finding(f, mark) for f, mark in state["known"]],
        "fixed": fixed,
        "not_proved": [_finding(f, mark) for f, mark in state["not_proved"]],
        "notes": [_finding(f, mark) for f, mark in state["note"]],
        "rows": list(_rows({k: [f for f, _ in v] for k, v in state.items()}, reasons)),
    }


def findings_of(document: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Every finding that failed, or would have without a suppression or baseline."""
    for key in ("violations", "suppressed", "known"):
        yield from document[key]


def rows_of(document: Mapping[str, Any], *states: str) -> list[dict[str, Any]]:
    """The folded rows in these states."""
    return [row for row in document["rows"] if row["state"] in states]


def number(finding: Mapping[str, Any]) -> str:
    """The code of a finding or row without its name: "PG105"."""
    return str(finding["codes"][0])


def value_lines(row: Mapping[str, Any]) -> list[str]:
    """What differs, an attribute a line, with both values."""
    columns = zip(row["attributes"], row["train"], row["infer"], strict=True)
    return [f"{name}: train {train} | infer {infer}" for name, train, infer in columns]


def difference(row: Mapping[str, Any]) -> list[str]:
    """What differs, in the words beside both values: the attributes, or the message where a stored tensor's one
    attribute is only the code's name again."""
    named = row["attributes"] and not row["code"].startswith("PG6")
    return list(row["attributes"]) if named else [row["message"]]


def kind(row: Mapping[str, Any]) -> str:
    """The operator, what it quantises if it does, and how many of them the row stands for."""
    return f"{row['count']} × {operator(row)}" if row["count"] > 1 else operator(row)


def cause_lines(document: Mapping[str, Any]) -> list[str]:
    """The causes of the verdict, one a line, with the number of their nodes."""
    return [
        f"{cause['code']}{_named(cause)}: {cause['count']} × {cause['op']}"
        for cause in causes(f for f in document["violations"] if f["code"] != UNUSED)
    ]


def _named(cause: Mapping[str, Any]) -> str:
    """The attributes, where they say more than the code does."""
    names = [a for a in cause["attributes"] if RULES.get(a) is None or RULES[a].code != cause["code"]]
    return f" ({', '.join(cause['attributes'])})" if names else ""


def kernels(document: Mapping[str, Any]) -> Mapping[str, int]:
    """How many nodes each kernel runs, of a rollout that is our program. Another engine has kernels of its own, and
    those that its rules were lowered to for the check run nothing there."""
    foreign = document.get("stacks", {}).get("infer") is not None
    found: Mapping[str, int] = {} if foreign else document["compared"].get("kernels", {})
    return found


def how_many(compared: Mapping[str, Any]) -> str:
    """What was compared, in the unit that the level counts: "62 values", "1 module"."""
    unit = next(unit for unit in ("values", "modules", "facts") if unit in compared)
    return f"{compared[unit]} {unit[:-1] if compared[unit] == 1 else unit}"


def refused(document: Mapping[str, Any]) -> list[str]:
    """The operators of points for which ``precgraph.compile`` refuses the rollout's program."""
    return list(dict.fromkeys(f["op"] for f in document["not_proved"] if f.get("refused")))


def verdict(document: Mapping[str, Any]) -> tuple[str, str]:
    """The finding (consistent, not proved, accepted, unclean, inconsistent) and the rest of the sentence.

    Where nothing fails or is unused and a point is not proved, that is the finding, whatever is accepted.
    """
    failing = [f for f in document["violations"] if f["code"] != UNUSED]
    unused = len(document["violations"]) - len(failing)
    accepted = [
        f"{len(document[key])} {words}"
        for key, words in (("suppressed", "suppressed"), ("known", "known from the baseline"))
        if document[key]
    ]
    points = counted(len(document["not_proved"]), "point") if document["not_proved"] else ""
    if failing:
        inherited = sum(f["inherited"] for f in failing)
        places = counted(len(failing), {"weights": "tensor", "env": "fact"}.get(document["level"], "node"))
        parts = [f"{counted(len(causes(failing)), 'root cause')} at {places}"]
        if document["level"] not in ("weights", "env"):  # which have no nodes
            parts.append(f"{inherited} more nodes only inherit a difference")
        parts += accepted
        word = "inconsistent"
    elif unused:
        word, parts = "unclean", ["nothing else differs", *accepted]
    elif accepted:
        word, parts = "accepted", [f"{' and '.join(accepted)}, and no other difference"]
    else:
        proof = {
            "graph": f"the {'rest of the ' if points else ''}rollout's program is inside the training forward",
            "weights": f"every byte is what {document.get('sides', {}).get('train')} makes of the masters",
        }
        word = "consistent"
        parts = [proof.get(str(document["level"])) or f"{how_many(document['compared'])} compared, and none differs"]
        if document["compared"].get("linears") and not document["compared"]["quantized_linears"]:
            parts.insert(0, "NO LINEAR LAYER IS QUANTISED on either side, so nothing was proved of FP8")
    if unused:
        parts.append(f"{unused} unused {'suppression' if unused == 1 else 'suppressions'}")
    if document["fixed"]:
        parts.append(f"{len(document['fixed'])} of the baseline {'is' if len(document['fixed']) == 1 else 'are'} fixed")
    if points:
        if document.get("strict"):
            points += f", which {'fails' if len(document['not_proved']) == 1 else 'fail'} under --strict"
        if failing or unused:
            parts.append(f"not proved: {points}")
        else:
            word, parts = "not proved", [points, *parts]
    return word, "; ".join(parts)


def one_line(text: str) -> str:
    """The text on one line without control characters: names of a checkpoint reach terminals and logs of CI."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


# ------------------------------------------------------------------------------------------ parts


def _finding(finding: Finding, mark: str) -> dict[str, Any]:
    return {**plain(finding), "fingerprint": mark}


def _numbered(findings: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """Findings with their fingerprints: what differs, where and how, but no names of nodes. Equal ones count up."""
    seen: Counter[str] = Counter()
    out = []
    for f in findings:
        text = json.dumps([f.numbers(), f.module, operator(plain(f)), f.attributes, f.train, f.infer])
        mark = hashlib.sha256(text.encode()).hexdigest()[:20]
        seen[mark] += 1
        out.append((f, mark if seen[mark] == 1 else f"{mark}.{seen[mark]}"))
    return out


def _rows(state: Mapping[str, Sequence[Finding]], reasons: Sequence[str]) -> Iterable[dict[str, Any]]:
    for name in STATES:
        groups: dict[str | None, list[Finding]] = {}
        for i, finding in enumerate(state[name]):
            groups.setdefault(reasons[i] if name == "suppressed" else None, []).append(finding)
        for reason, members in groups.items():
            for row in fold(members, name == "violation"):
                values = {key: getattr(row, key) for key in _ROW_KEYS}
                data = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
                data |= {"quantises": row.quantises} if row.quantises else {}
                yield {"state": name, **data, **({} if reason is None else {"reason": reason})}


# ----------------------------------------------------------------------------------------- reading


@cache
def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a document."""
    text = files("precgraph.report").joinpath(f"schema-{SCHEMA}.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def load(path: Path) -> dict[str, Any]:
    """Read a document that ``check -o`` wrote. InputError: it cannot be read, or does not fit the schema."""
    data = strict_json.read(path)
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema()).iter_errors(data))
    if error is not None:
        where = "/".join(map(str, error.absolute_path)) or "the top"
        words = error.message if len(error.message) <= 120 else error.message[:117] + "..."
        raise InputError(
            f"is no report of schema {SCHEMA}: at {where}: {words}", path=str(path),
            remedy="write one with precgraph check -o",
        )  # fmt: skip
    states = ("violations", "suppressed", "known", "fixed", "not_proved", "notes", "rows")
    for where, f in ((f"{key}/{i}", f) for key in states for i, f in enumerate(data[key])):
        if not len(f["attributes"]) == len(f["train"]) == len(f["infer"]):
            raise InputError(f"at {where}: not each attribute has its two values", path=str(path))
    return cast("dict[str, Any]", data)
