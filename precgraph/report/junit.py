"""JUnit XML: a test case for each family of rules that the level compares, and one for each row that fails; rows that
are not proved fail if the check was strict, and are no cases otherwise."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precgraph.report.document import kind, number, rows_of, value_lines, verdict
from precgraph.report.families import FAMILIES, families

# XML 1.0 has no character for these, escaped or not.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(document: Mapping[str, Any]) -> str:
    """The XML text. Suppressed and known rows are skipped cases, so that they stay in sight."""
    name = f"precgraph check, level {document['level']}"
    cases = list(_cases(document))
    suite = ET.Element("testsuite", name=clean(name))
    for case in cases:
        suite.append(case)
    counts = {
        "tests": len(cases), "failures": len(suite.findall("./testcase/failure")), "errors": 0,
        "skipped": len(suite.findall("./testcase/skipped")),
    }  # fmt: skip
    ET.SubElement(suite, "system-out").text = clean(": ".join(verdict(document)))
    root = ET.Element("testsuites", name="precgraph")
    for element in (root, suite):
        element.attrib.update({key: str(value) for key, value in counts.items()})
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _cases(document: Mapping[str, Any]) -> Iterator[ET.Element]:
    failing = ("violation", "not_proved") if document.get("strict") else ("violation",)
    rows = rows_of(document, *failing, "suppressed", "known")
    groups: dict[str, list[dict[str, Any]]] = {key: [] for key in families(document["level"])}
    for row in rows:
        groups.setdefault(row["code"][:3], []).append(row)
    for family, members in groups.items():
        group = f"precgraph.{document['level']}.{family}xx {FAMILIES.get(family, '')}".rstrip()
        if not members:
            yield ET.Element("testcase", classname=group, name="no difference")
        for row in members:
            yield _case(group, row)


def _case(group: str, row: Mapping[str, Any]) -> ET.Element:
    case = ET.Element("testcase", classname=group, name=clean(f"{row['code']} in {row['module'] or 'the model'}"))
    if row["state"] in ("violation", "not_proved"):
        failure = ET.SubElement(case, "failure", type=number(row), message=clean(row["message"]))
        failure.text = clean("\n".join(_lines(row)))
    else:
        ET.SubElement(case, "skipped", message=clean(row.get("reason", "known from the baseline")))
    return case


def _lines(row: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"{row['module'] or '(model)'}  {kind(row)}",
        *value_lines(row),
        f"what to do: {row['remedy']}",
    ]


def clean(text: str) -> str:
    """The text without characters that XML 1.0 cannot hold."""
    return _ILLEGAL.sub("�", text)
