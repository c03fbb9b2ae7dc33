"""What a check found: findings with codes, identical layers folded, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from precgraph.verify.rules import Rule

SCHEMA = 1
NAMED = 12  # modules of one row by name, where people read it

# How the message of a point ends for which compile refuses the rollout's program (PrecisionGraph.refused).
REFUSED = "precgraph.compile refuses this program"


@dataclass(frozen=True, slots=True)
class Finding:
    """Where a difference begins (or a note): the node, every attribute that differs there, and both values of each.

    ``node`` is the node's name in the rollout graph, or in the training graph where the rollout has none;
    ``inherited`` counts the nodes downstream that differ only because this one does; ``codes`` are those of the
    attributes, one each, where they are not all ``code``; ``refused`` says that precgraph.compile refuses the rollout's
    program for it; ``quantises`` says of a quantiser what it quantises: activation, weight or gradient.
    """

    code: str
    module: str
    node: str
    op: str
    attributes: tuple[str, ...]
    train: tuple[str, ...]
    infer: tuple[str, ...]
    message: str
    remedy: str
    inherited: int = 0
    codes: tuple[str, ...] = ()
    refused: bool = False
    quantises: str = ""

    def with_refusal(self) -> Finding:
        """This point as one for which compile refuses the program, which its message says too."""
        return replace(self, message=f"{self.message}; {REFUSED}", refused=True)

    def without_refusal(self) -> Finding:
        """This point where another engine runs the rollout, which compile is not asked for."""
        return replace(self, message=self.message.removesuffix(f"; {REFUSED}"), refused=False)

    def numbers(self) -> tuple[str, ...]:
        """Every code that the finding has to do with, without its name: ``("PG103", "PG105")``."""
        return tuple(dict.fromkeys(code.partition(" ")[0] for code in (self.code, *self.codes)))


@dataclass(frozen=True, slots=True)
class Row:
    """Findings that are alike in several layers, as one: ``module`` is such as ``model.layers.{0-29}.mlp``."""

    violation: bool
    code: str
    module: str
    op: str
    attributes: tuple[str, ...]
    train: tuple[str, ...]
    infer: tuple[str, ...]
    message: str
    remedy: str
    count: int
    inherited: int
    codes: tuple[str, ...] = ()
    quantises: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a check: ``violations`` are where differences begin, ``notes`` change no bit of the rollout.

    ``ok`` means that nothing that was compared differs. ``not_proved`` lists what the rollout's bits may depend on and
    the check could not decide: row invariance of kernels, parameters matched by structure because their names differ,
    buffers without values, kernels of graphs that are not lowered. A proof is ``ok`` with nothing in that list.
    ``compared`` counts what was compared, the ``unit`` being nodes of the rollout's graph, their values, modules,
    stored tensors, or facts of two machines.
    """

    compared: int
    violations: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    unit: str = "nodes"
    not_proved: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing that was compared differs; see ``not_proved`` for what could not be compared."""
        return not self.violations

    @property
    def exit_code(self) -> int:
        """0 nothing differs, 1 inconsistent. (2, could not check, is an error and has no report.)"""
        return 0 if self.ok else 1

    def with_weights_open(self, rule: Rule, words: str, remedy: str) -> Report:
        """This report, with a point that is not proved of stored weights, which are no node of a graph."""
        point = Finding(rule.code, "", "", "weights", (), (), (), words, remedy)
        return replace(self, not_proved=(*self.not_proved, point))

    def rows(self) -> list[Row]:
        """Violations, then notes, like ones folded, in the order in which the program meets them first."""
        return [*fold(self.violations, True), *fold(self.notes, False)]

    def open_rows(self) -> list[Row]:
        """What is not proved, folded in the same way."""
        return fold(self.not_proved, False)

    def to_json(self) -> dict[str, Any]:
        """Plain data, the same for the same graphs."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "compared": self.compared,
            "violations": [plain(f) for f in self.violations],
            "not_proved": [plain(f) for f in self.not_proved],
            "notes": [plain(f) for f in self.notes],
        }

    def __str__(self) -> str:
        if self.ok:
            points = f"not proved: {counted(len(self.not_proved), 'point')}; otherwise " if self.not_proved else ""
            lines = [f"{points or 'consistent: '}{self.compared} {self.unit} compared, none differs"]
        else:
            found = causes(map(plain, self.violations))
            inherited = sum(f.inherited for f in self.violations)
            lines = [
                f"inconsistent: {counted(len(found), 'root cause')} at {counted(len(self.violations), 'place')} in "
                f"{self.compared} {self.unit} compared; {inherited} more {self.unit} only inherit "
                f"{'them' if len(found) != 1 else 'it'}"
            ]
        for row in over_modules(map(asdict, self.rows())):
            lines += ["", *_text(row, "" if row["violation"] else "note: ", remedy=row["violation"])]
        if self.not_proved:
            lines += ["", "Not proved:"]
        for row in over_modules(map(asdict, self.open_rows())):
            lines += ["", *_text(row, "", remedy=True)]
        return "\n".join(lines)


def _text(row: Mapping[str, Any], prefix: str, *, remedy: bool) -> Iterator[str]:
    count = f"  ({row['count']} nodes)" if row["count"] > 1 else ""
    yield f"{prefix}{row['code']}  {row['module'] or '(model)'}  {operator(row)}{count}"
    width = max(map(len, row["attributes"]), default=0)
    for attribute, train, infer in zip(row["attributes"], row["train"], row["infer"], strict=True):
        yield f"    {attribute:<{width}}  train {train}  |  infer {infer}"
    yield f"    {row['message']}"
    if row["inherited"]:
        yield f"    {row['inherited']} more nodes only inherit this"
    if remedy:
        yield f"    remedy: {row['remedy']}"


def operator(row: Mapping[str, Any]) -> str:
    """The operator of a finding or row, and of a quantiser what it quantises."""
    return f"{row['op']} ({row['quantises']})" if row.get("quantises") else str(row["op"])


def plain(finding: Finding) -> dict[str, Any]:
    """A finding as JSON data; ``refused`` and ``quantises`` are there only where they say something."""
    data = asdict(finding) | {"codes": finding.numbers()}
    for name in ("refused", "quantises"):
        if not data[name]:
            del data[name]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}


# ------------------------------------------------------------------------------------------- folding


def causes(findings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Findings as JSON data, counted as a person would: what differs by one rule in the same attributes of an operator
    is one cause, at however many nodes of however many layers. In the order of their first findings."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for f in findings:
        what = {"code": f["code"], "codes": [*f["codes"]], "op": f["op"], "attributes": [*f["attributes"]]}
        key = (f["code"], *f["codes"], f["op"], *f["attributes"])
        cause = groups.setdefault(key, {**what, "count": 0, "inherited": 0})
        cause["count"] += 1
        cause["inherited"] += f["inherited"]
    return list(groups.values())


def counted(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def fold(findings: Iterable[Finding], violation: bool) -> list[Row]:
    """Findings that differ in nothing but the number of their layer, as one row each."""
    groups: dict[tuple[Any, ...], list[tuple[int | None, Finding]]] = {}
    for finding in findings:
        number, key = _masked(finding)
        groups.setdefault(key, []).append((number, finding))
    return [_row(key, members, violation) for key, members in groups.items()]


def over_modules(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for people: those that differ in nothing but their modules as one, ``module`` being such as
    ``model.layers.{0-29}.{self_attn.q_proj, mlp.up_proj}``."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        alike = [(key, value) for key, value in row.items() if key not in ("module", "count", "inherited")]
        groups.setdefault(repr(alike), []).append(row)
    return [
        {
            **members[0], "module": _joined([row["module"] for row in members]),
            "count": sum(row["count"] for row in members), "inherited": sum(row["inherited"] for row in members),
        }
        for members in groups.values()
    ]  # fmt: skip


def _joined(modules: Sequence[str]) -> str:
    """Several paths as one, by what they begin with; ``NAMED`` of them by name."""
    if len(set(modules)) == 1:
        return modules[0]
    paths = [module.split(".") for module in modules]
    columns = zip(*(path[:-1] for path in paths), strict=False)
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    ends = list(dict.fromkeys(".".join(path[len(shared) :]) or "(model)" for path in paths))
    more = [f"{len(ends) - NAMED} more, see --json"] if len(ends) > NAMED else []
    return ".".join([*shared, "{" + ", ".join([*ends[:NAMED], *more]) + "}"])


def masked(module: str) -> str:
    """``model.layers.3.mlp`` as ``model.layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _masked(finding: Finding) -> tuple[int | None, tuple[Any, ...]]:
    """The layer's number and everything that alike findings of other layers share, the number replaced by {}."""
    found = re.search(r"(?:^|\.)(\d+)(?=\.|$)", finding.module)
    number = found[1] if found else None
    before = finding.module[: found.start(1)] if found else ""
    layer = re.compile(rf"(?<![\w.]){re.escape(before)}{number}(?=\.[A-Za-z_]|$|[ ,)])")

    def mask(text: str) -> str:
        return layer.sub(before + "{}", text) if number and before else text

    values = tuple(tuple(map(mask, v)) for v in (finding.train, finding.infer))
    key = (finding.code, mask(finding.module), finding.op, finding.attributes, *values, mask(finding.message))
    return (int(number) if number else None), (*key, finding.remedy, finding.numbers(), finding.quantises)


def _row(key: tuple[Any, ...], members: list[tuple[int | None, Finding]], violation: bool) -> Row:
    code, module, op, attributes, train, infer, message, remedy, codes, quantises = key
    layers = sorted({n for n, _ in members if n is not None})
    name = _ranges(layers) if len(layers) > 1 else "".join(map(str, layers))
    fill = "{" + name + "}" if len(layers) > 1 else name

    def unmask(text: str) -> str:
        return text.replace("{}", fill)

    return Row(
        violation, code, unmask(module), op, attributes, tuple(map(unmask, train)), tuple(map(unmask, infer)),
        unmask(message), remedy, len(members), sum(f.inherited for _, f in members), codes,
        quantises,
    )  # fmt: skip


def _ranges(numbers: list[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
