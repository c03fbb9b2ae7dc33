"""What a check found: findings with codes, identical layers folded, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of difference: its code, the rule in words, and what to do when the two programs differ in it."""

    code: str
    words: str
    remedy: str


_RECIPE = "give both programs one recipe"
RULES: dict[str, Rule] = {
    "granularity": Rule("PG101 granularity", "the block of values that shares one scale", _RECIPE),
    "scale_dtype": Rule("PG102 scale dtype", "what a scale is rounded to before it is used", _RECIPE),
    "scale_rule": Rule("PG103 scale rule", "how a scale is computed from the largest value of a block", _RECIPE),
    "divide": Rule("PG104 division", "true division by the scale, or multiplication by its reciprocal", _RECIPE),
    "amax_floor": Rule("PG105 amax floor", "the least value that a block's maximum is taken to be", _RECIPE),
    "source": Rule("PG106 source dtype", "the dtype that a value is rounded to before it is quantised", _RECIPE),
    "format": Rule("PG107 format", "whether a value is stored quantised, and how", _RECIPE),
    "rule.gemm": Rule(
        "PG108 quantised on one side",
        "whether a linear's GEMM multiplies quantised operands",
        "give both programs the same linear rule and the same select.skip, select.routers and min_features",
    ),
    "requantize": Rule("PG109 quantised twice", "whether codes are quantised again to other scales", _RECIPE),
    "compute": Rule("PG201 compute dtype", "the dtype of the arithmetic", _RECIPE),
    "accumulate": Rule("PG202 accumulation", "the dtype in which products are summed", _RECIPE),
    "dtype": Rule("PG203 dtype", "the dtype that a value is rounded to", _RECIPE),
    "rule": Rule("PG204 numeric rule", "a named choice of the arithmetic: casts, reduction order, rounding", _RECIPE),
    "role": Rule("PG205 role", "what a value is used as", "build both programs from one model with one version"),
    "attribute": Rule("PG301 attribute", "a constant of the operator", "load both programs from one config"),
    "shape": Rule("PG302 shape", "the shape of a parameter", "load both programs from one config"),
    "content": Rule(
        "PG303 buffer values", "the values of a buffer or constant",
        "load both programs from one config; keep buffers as they are",
    ),
    "operand": Rule("PG401 operand", "which value the operator reads", "build both programs from one model"),
    "parameter": Rule(
        "PG402 parameter", "which parameter is read", "tie, load and name parameters alike in both programs"
    ),
    "missing operator": Rule(
        "PG403 missing operator", "an operator of the training forward that the rollout lacks", _RECIPE
    ),
    "extra operator": Rule(
        "PG404 extra operator", "an operator of the rollout that the training forward lacks", _RECIPE
    ),
    "operator": Rule("PG405 other operator", "which operator makes a value", "build both programs from one model"),
    "numerics": Rule(
        "PG501 kernel", "the numerics id of the kernel", "lower both programs for one backend and one device"
    ),
    # Level weights: what is wrong with stored bytes.
    "requantised": Rule(
        "PG601 quantised twice", "whether codes are made from the master, or from a weight that was quantised before",
        "quantise the masters once, by the trainer's recipe",
    ),
    "scale rounded after": Rule(
        "PG602 scale rounded after", "whether a scale is rounded to a power of two before codes are made with it",
        "round first, then quantise",
    ),
    "scale transposed": Rule("PG603 scale transposed", "the order of a scale's two dimensions", "store [N, K] blocks"),
    "scale inverted": Rule(
        "PG604 scale inverted", "whether codes are multiplied by the stored scale, or divided", "store amax / max"
    ),
    "scale in bf16": Rule("PG605 scale in bf16", "the dtype that a scale is stored in", "store fp32 scales"),
    "scale stale": Rule(
        "PG606 stale scale", "whether codes and scales were made together", "quantise again after every update"
    ),
    "block grid": Rule(
        "PG607 block grid", "where blocks start in the parts of a fused weight", "quantise each part on its own"
    ),
    "swapped": Rule("PG608 swapped", "which weight the codes belong to", "correct the names in the exporter"),
    "stale weights": Rule(
        "PG609 stale weights", "which version of the masters was quantised", "export the masters that are served"
    ),
    "damaged": Rule("PG610 damaged bytes", "whether every byte arrived", "copy the file again"),
    "missing scale": Rule("PG611 missing scale", "whether codes have their scale", "export the checkpoint again"),
    "unconsumed scale": Rule(
        "PG612 unconsumed scale", "whether each scale has codes to multiply", "remove it, or store its weight in FP8"
    ),
    "layer precision": Rule(
        "PG613 layer precision", "whether a layer is stored quantised", "give exporter and trainer the same select rule"
    ),
    "skip list": Rule(
        "PG614 skip list", "whether modules_to_not_convert says what is stored", "name the plain layers in full"
    ),
    "missing tensor": Rule("PG615 missing tensor", "whether every tensor is stored", "export the checkpoint again"),
    "unknown tensor": Rule("PG616 unknown tensor", "whether every stored tensor is the model's", "remove it"),
    "missing master": Rule("PG617 missing master", "whether every tensor has a master", "restore the masters"),
    "other bytes": Rule(
        "PG618 other bytes", "the bytes of a tensor that is not quantised", "export the masters that are served"
    ),
    "stored dtype": Rule("PG619 stored dtype", "the dtype of a tensor that is not quantised", _RECIPE),
    "scale value": Rule(
        "PG620 scale value", "whether scales are positive and finite", "look for NaN or zero blocks in the exporter"
    ),
    "scale shape": Rule("PG621 scale shape", "how many scales a weight has, and of which dtype", "store [N, K] blocks"),
    "codes transposed": Rule("PG622 codes transposed", "the order of a weight's two dimensions", "store [N, K]"),
    "other weights": Rule(
        "PG699 unexplained", "whether the weight is the master's at all", "name the masters that it was made from"
    ),
    "backward": Rule(
        "PG901 backward only", "a rule of the backward, which no forward value depends on", "none is needed"
    ),
    "row_invariant": Rule(
        "PG902 row invariance",
        "whether a token's result is independent of the tokens beside it",
        "replace the operator by one with an exact kernel",
    ),
    "renamed": Rule(
        "PG903 other names",
        "parameters that were matched by structure because their names differ",
        "compare the weights too: --level weights",
    ),
    "skip pattern": Rule(
        "PG905 skip pattern", "whether a skip list leaves out only layers that it names", "name the layers in full"
    ),
    "unused pattern": Rule(
        "PG906 unused pattern", "whether each pattern of a skip list names a linear layer", "correct or remove it"
    ),
    "not_lowered": Rule(
        "PG904 kernels not compared", "which kernels run the two programs", "lower both, then check"
    ),
    "no content": Rule(
        "PG907 buffer values unknown",
        "a buffer or constant without values (meta device)",
        "check the models with their values loaded",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One root cause (or note): at which node, every attribute that differs there, and both values of each.

    ``node`` is the node's name in the rollout graph, or in the training graph where the rollout has none;
    ``inherited`` counts the nodes downstream that differ only because this one does.
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


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a check: ``violations`` are root causes, ``notes`` change no bit of the rollout.

    ``ok`` means that nothing that was compared differs. ``not_proved`` lists what the rollout's bits may depend on and
    the check could not decide: row invariance of kernels, parameters matched by structure because their names differ,
    buffers without values, kernels of graphs that are not lowered. A proof is ``ok`` with nothing in that list.
    ``compared`` counts what was compared, the ``unit`` being nodes of the rollout's graph, or stored tensors.
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
        """0 consistent, 1 inconsistent. (2, could not check, is an error and has no report.)"""
        return 0 if self.ok else 1

    def rows(self) -> list[Row]:
        """Violations, then notes, like ones folded, in the order in which the program meets them first."""
        return [*_fold(self.violations, True), *_fold(self.notes, False)]

    def open_rows(self) -> list[Row]:
        """What is not proved, folded in the same way."""
        return _fold(self.not_proved, False)

    def to_json(self) -> dict[str, Any]:
        """Plain data, the same for the same graphs."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "compared": self.compared,
            "violations": [_plain(f) for f in self.violations],
            "not_proved": [_plain(f) for f in self.not_proved],
            "notes": [_plain(f) for f in self.notes],
        }

    def __str__(self) -> str:
        if self.ok:
            open_points = f"; {len(self.not_proved)} points not proved" if self.not_proved else ""
            lines = [f"consistent: {self.compared} {self.unit} compared, none differs{open_points}"]
        else:
            causes, inherited = len(self.violations), sum(f.inherited for f in self.violations)
            lines = [
                f"inconsistent: {causes} root cause{'s' * (causes != 1)} in {self.compared} {self.unit} compared; "
                f"{inherited} more {self.unit} only inherit {'them' if causes != 1 else 'it'}"
            ]
        for row in self.rows():
            lines += ["", *_text(row, "" if row.violation else "note: ", remedy=row.violation)]
        if self.not_proved:
            lines += ["", "Not proved:"]
        for row in self.open_rows():
            lines += ["", *_text(row, "", remedy=True)]
        return "\n".join(lines)


def rule(attribute: str) -> Rule:
    """The rule that an attribute of a node belongs to."""
    if attribute in RULES:
        return RULES[attribute]
    return RULES["rule" if attribute.startswith("rule.") else "attribute"]


def _text(row: Row, prefix: str, *, remedy: bool) -> Iterator[str]:
    where = f"{row.module or '(model)'}  {row.op}" + (f"  ({row.count} nodes)" if row.count > 1 else "")
    yield f"{prefix}{row.code}  {where}"
    width = max(map(len, row.attributes), default=0)
    for attribute, train, infer in zip(row.attributes, row.train, row.infer, strict=True):
        yield f"    {attribute:<{width}}  train {train}  |  infer {infer}"
    yield f"    {row.message}"
    if row.inherited:
        yield f"    {row.inherited} more nodes only inherit this"
    if remedy:
        yield f"    remedy: {row.remedy}"


def _plain(finding: Finding) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(finding).items()}


# ------------------------------------------------------------------------------------------- folding


def _fold(findings: Iterable[Finding], violation: bool) -> list[Row]:
    groups: dict[tuple[Any, ...], list[tuple[int | None, Finding]]] = {}
    for finding in findings:
        number, key = _masked(finding)
        groups.setdefault(key, []).append((number, finding))
    return [_row(key, members, violation) for key, members in groups.items()]


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
    return (int(number) if number else None), (*key, finding.remedy)


def _row(key: tuple[Any, ...], members: list[tuple[int | None, Finding]], violation: bool) -> Row:
    code, module, op, attributes, train, infer, message, remedy = key
    layers = sorted({n for n, _ in members if n is not None})
    name = _ranges(layers) if len(layers) > 1 else "".join(map(str, layers))
    fill = "{" + name + "}" if len(layers) > 1 else name

    def unmask(text: str) -> str:
        return text.replace("{}", fill)

    return Row(
        violation, code, unmask(module), op, attributes, tuple(map(unmask, train)), tuple(map(unmask, infer)),
        unmask(message), remedy, len(members), sum(f.inherited for _, f in members),
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
