"""One self-contained HTML page: no script, no request; whatever a checkpoint or a recipe named is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from precgraph.report import numerics, svg
from precgraph.report.document import cause_lines, difference, kernels, kind, rows_of, verdict
from precgraph.report.terminal import TITLES, summary
from precgraph.verify.report import over_modules
from precgraph.verify.rules import RULES
from precgraph.verify.why import WHY


def render(document: Mapping[str, Any]) -> str:
    """The page's text."""
    word, rest = verdict(document)
    groups = [(state, title, over_modules(rows_of(document, state))) for state, (title, _) in TITLES.items()]
    return str(
        _template().render(
            document=document,
            kind=kind,
            difference=difference,
            word=word,
            rest=rest,
            summary=summary(document),
            measured=numerics.tables(document),
            groups=[group for group in groups if group[2]],
            parts=[(part, svg.draw(part, svg.marks(document))) for part in document.get("parts", [])],
            fixes=_fixes(document),
            rules=_rules(document),
            recipes=recipe_rows(document.get("recipes", {})),
            kernels=kernels(document),
            causes=cause_lines(document),
        )
    )


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    text = files("precgraph.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)


def _fixes(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What to do, each remedy once, with the codes that it is for."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows_of(document, "violation"):
        entry = found.setdefault(row["remedy"], {"remedy": row["remedy"], "codes": {}, "count": 0})
        entry["codes"] |= dict.fromkeys(row["codes"])
        entry["count"] += row["count"]
    return list(found.values())


def _rules(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rules that violations are about, in the order of their codes, as far as this version knows them."""
    wanted = {number for row in rows_of(document, "violation") for number in row["codes"]}
    found = []
    for key, rule in RULES.items():
        if rule.number in wanted:
            why = WHY[key]
            found.append({"code": rule.code, "words": rule.words, **asdict(why)})
    return found


def recipe_rows(recipes: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Keys in which the two recipes differ, with both values; a key that one lacks has an empty value there."""
    sides = [_flat(recipes.get(side) or {}) for side in ("train", "infer")]
    keys = dict.fromkeys([*sides[0], *sides[1]])
    rows = [(key, sides[0].get(key, ""), sides[1].get(key, "")) for key in keys if key != "name"]
    return [row for row in rows if row[1] != row[2]]


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return out
