"""SARIF 2.1.0 (OASIS standard, with errata 01), in the part that code-scanning services read.

A result is a row. What failed is ``kind`` fail and level error; what is not proved is ``open``, notes are
``informational``; suppressed rows carry the reason, and against a baseline every result says whether it is new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from precgraph.report.document import number, value_lines, verdict
from precgraph.verify.report import operator
from precgraph.verify.rules import RULES
from precgraph.verify.why import WHY

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_KINDS = {"violation": "fail", "known": "fail", "suppressed": "fail", "not_proved": "open", "note": "informational"}


def render(document: Mapping[str, Any]) -> dict[str, Any]:
    """The SARIF log of one document."""
    rules = list(_rules())
    index = {rule["id"]: i for i, rule in enumerate(rules)}
    baseline = bool(document["known"] or document["fixed"])
    word, rest = verdict(document)
    results = [_result(row, document, index, baseline) for row in document["rows"]]
    results += [_absent(finding, document, index) for finding in document["fixed"]]
    driver = {
        "name": "precgraph", "version": document["tool"]["version"], "semanticVersion": document["tool"]["version"],
        "rules": rules,
    }  # fmt: skip
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"precgraph/{document['level']}/"},
        "invocations": [
            {"executionSuccessful": True, "exitCode": document["exit_code"], "exitCodeDescription": f"{word}: {rest}"}
        ],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}


def _rules() -> Iterator[dict[str, Any]]:
    for key, rule in RULES.items():
        why = WHY[key]
        text = f"{why.why} {why.effect}".rstrip()
        yield {
            "id": rule.number,
            "name": "".join(word.capitalize() for word in rule.name.split()),
            "shortDescription": {"text": f"{rule.name}: {rule.words}"},
            "fullDescription": {"text": text},
            "help": {"text": f"{text} Example: {why.example} What to do: {rule.remedy}."},
            "defaultConfiguration": {"level": "note" if rule.number.startswith("PG9") else "error"},
        }


def _result(row: Mapping[str, Any], document: Mapping[str, Any], index: Mapping[str, int], baseline: bool) -> Any:
    state = row["state"]
    kind = _KINDS[state]
    result: dict[str, Any] = {
        **_rule(row, index),
        "kind": kind,
        "level": "error" if kind == "fail" else "none",
        "message": {"text": _message(row)},
        "locations": [_location(row["module"], document)],
        "partialFingerprints": {"precgraphRow/v1": _fingerprint(row)},
        "occurrenceCount": row["count"],
        "properties": {"codes": row["codes"], "inherited": row["inherited"], "state": state, "op": row["op"]},
    }
    if state == "suppressed":
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": row["reason"]}]
    if baseline and kind == "fail":
        result["baselineState"] = "unchanged" if state == "known" else "new"
    return result


def _absent(finding: Mapping[str, Any], document: Mapping[str, Any], index: Mapping[str, int]) -> dict[str, Any]:
    """A finding of the baseline that is there no more."""
    return {
        **_rule(finding, index), "kind": "fail", "level": "error", "baselineState": "absent",
        "message": {"text": _message(finding)}, "locations": [_location(finding["module"], document)],
        "partialFingerprints": {"precgraphRow/v1": _fingerprint(finding)},
    }  # fmt: skip


def _rule(finding: Mapping[str, Any], index: Mapping[str, int]) -> dict[str, Any]:
    """The id, and the place in the table if this version still has the rule."""
    code = number(finding)
    return {"ruleId": code, **({"ruleIndex": index[code]} if code in index else {})}


def _message(row: Mapping[str, Any]) -> str:
    lines = [
        f"{row['module'] or 'the model'} ({operator(row)}): {row['message']}",
        *value_lines(row),
        f"What to do: {row['remedy']}",
    ]
    return "\n".join(lines)


def _location(module: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The module, and the file to look at: services show no result that has no file."""
    name = module or "(model)"
    location: dict[str, Any] = {
        "logicalLocations": [{"name": name.rpartition(".")[2] or name, "fullyQualifiedName": name, "kind": "module"}]
    }
    subject = document.get("subject")
    if subject:
        uri = ("file://" if subject.startswith("/") else "") + quote(subject)
        location["physicalLocation"] = {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}
    return location


def _fingerprint(row: Mapping[str, Any]) -> str:
    text = json.dumps([row[key] for key in ("codes", "module", "op", "attributes", "train", "infer")])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
