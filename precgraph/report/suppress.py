"""Suppressions: violations that a person has accepted, each with the reason.

In ``precgraph.toml``::

    [[suppressions]]
    code = "PG105"
    module = "model.layers.*.mlp.**"
    reason = "the engine's floor is fixed in its next release, issue 17"

or under ``[[tool.precgraph.suppressions]]`` in ``pyproject.toml``. In ``module``, ``*`` stands for any run of
characters within one component, ``**`` for any number of components.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import operator
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precgraph.errors import InputError
from precgraph.report.families import LEVELS, families
from precgraph.strict_json import sound
from precgraph.verify.report import Finding
from precgraph.verify.rules import RULES

KEYS = ("code", "module", "reason", "level")


@dataclass(frozen=True, slots=True)
class Suppression:
    """One entry: a code (``PG105``), a pattern of module paths, why, and the level it is for (empty: every level)."""

    code: str
    module: str
    reason: str
    level: str = ""

    def covers(self, module: str) -> bool:
        """Whether the pattern names this module."""
        return _matches(self.module.split("."), module.split("."))


@dataclass(frozen=True, slots=True)
class Judged:
    """Violations after suppression: those that still fail, those that are accepted and why, and a violation for each
    entry that covers nothing."""

    open: tuple[Finding, ...]
    suppressed: tuple[tuple[Finding, str], ...]
    unused: tuple[Finding, ...]


def judge(violations: Sequence[Finding], suppressions: Sequence[Suppression], level: str) -> Judged:
    """Apply suppressions. A finding with several codes is accepted only if every one of them is covered."""
    entries = [s for s in suppressions if s.level in ("", level)]
    used: set[Suppression] = set()
    still, accepted = [], []
    for finding in violations:
        hits = {}
        for number in finding.numbers():
            hit = next((s for s in entries if s.code == number and s.covers(finding.module)), None)
            if hit is not None:
                hits[number] = hit
        used |= set(hits.values())
        if len(hits) == len(finding.numbers()):
            accepted.append((finding, "; ".join(dict.fromkeys(s.reason for s in hits.values()))))
        else:
            still.append(finding)
    unused = [_unused(s) for s in entries if s not in used and _can_occur(s, level)]
    return Judged(tuple(still), tuple(accepted), tuple(unused))


def _can_occur(entry: Suppression, level: str) -> bool:
    """Whether a level can find a code at all; an entry that names the level says so itself."""
    return bool(entry.level) or entry.code[:3] in families(level)


def _unused(entry: Suppression) -> Finding:
    rule = RULES["unused suppression"]
    return Finding(
        rule.code, entry.module, "", "suppression", ("suppression",), (f"{entry.code} {entry.module}",), ("",),
        f"no violation has this code and module; its reason was: {entry.reason}", rule.remedy,
    )  # fmt: skip


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Component by component, as a recipe's skip patterns, but for ``**``. Quadratic at worst, whatever the pattern."""
    reached = [True] + [False] * len(parts)  # after how many parts the pattern so far can end
    for word in pattern:
        if word == "**":
            reached = list(itertools.accumulate(reached, operator.or_))
        else:
            steps = zip(reached, parts, strict=False)
            reached = [False, *(before and fnmatch.fnmatchcase(part, word) for before, part in steps)]
    return reached[-1]


# ----------------------------------------------------------------------------------------- reading


def find(folder: Path) -> Path | None:
    """The file with suppressions of a folder: ``precgraph.toml``, else a ``pyproject.toml`` with our table."""
    own, shared = folder / "precgraph.toml", folder / "pyproject.toml"
    if own.is_file():
        return own
    if shared.is_file() and "suppressions" in _table(shared):
        return shared
    return None


def read(path: Path) -> tuple[Suppression, ...]:
    """The suppressions of a file. InputError: it cannot be read, an entry without a reason, an unknown key or code."""
    entries = _table(path).get("suppressions", [])
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        raise InputError("suppressions must be tables, [[suppressions]]", path=str(path))
    found = tuple(_entry(path, i, e) for i, e in enumerate(entries, 1))
    if len(set(found)) != len(found):
        raise InputError("two suppressions are the same", path=str(path), remedy="remove one")
    return found


def _table(path: Path) -> Mapping[str, Any]:
    """Our part of a TOML file."""
    try:
        data: Mapping[str, Any] = sound(tomllib.loads, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except ValueError as error:  # of TOML, of UTF-8
        raise InputError(f"is not valid TOML: {error}", path=str(path)) from None
    for name in ("tool", "precgraph") if path.name == "pyproject.toml" else ():
        data = data.get(name, {})
        if not isinstance(data, Mapping):
            raise InputError(f"{name!r} is no table", path=str(path), remedy="write [[tool.precgraph.suppressions]]")
    unknown = sorted(data.keys() - {"suppressions"})
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}", path=str(path), remedy="write [[suppressions]] tables")
    return data


def _entry(path: Path, number: int, data: Mapping[str, Any]) -> Suppression:
    where = f"suppression {number}"
    for key, value in data.items():
        if key not in KEYS:
            raise InputError(f"{where}: unknown key {key!r}", path=str(path), remedy=f"keys: {', '.join(KEYS)}")
        if not isinstance(value, str):
            raise InputError(f"{where}: {key} must be a string", path=str(path))
    for key in KEYS[:3]:
        if not data.get(key, "").strip() and not (key == "module" and "module" in data):
            raise InputError(f"{where} has no {key}", path=str(path), remedy=f'write {key} = "..."')
    known = [rule.number for rule in RULES.values()]
    code = data["code"].strip().upper()
    if code not in known:
        close = difflib.get_close_matches(code, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"{where}: no rule has the code {data['code']!r}{hint}", path=str(path))
    if code.startswith("PG9") or code == RULES["unused suppression"].number:
        raise InputError(f"{where}: {code} never fails a check by itself, or is about suppressions", path=str(path))
    level = data.get("level", "")
    if level and level not in LEVELS:  # it would never apply, and never be called unused
        raise InputError(
            f"{where}: no level is called {level!r}", path=str(path), remedy=f"levels: {', '.join(LEVELS)}"
        )
    return Suppression(code, data["module"], data["reason"].strip(), level)
