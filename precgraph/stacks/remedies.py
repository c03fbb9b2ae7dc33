"""What to set where so that two sides agree, and what their skip lists do, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from precgraph.stacks.base import Setting
from precgraph.stacks.pair import Resolved
from precgraph.stacks.settings import FIELDS, Way, ways
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES, Rule, rule_of

_FIRST = ("rule.gemm", "requantize", "scale_dtype", "granularity", "source", "scale_rule", "divide", "amax_floor")
_OFF = {"scale_dtype": "float32", "requantize": "none"}
Sides = tuple[Resolved, Resolved]


def explain(report: Report, sides: Sides, modules: Sequence[str], env: Mapping[str, str]) -> Report:
    """The report with what to set in each stack, and with notes on the patterns of their skip lists; without what
    compile refuses, where it is a stack that serves. ``modules`` and ``env`` are what the sides were resolved with."""
    found = ways(sides, modules, env)
    violations = tuple(replace(f, remedy=_remedy(f, sides, found)) for f in report.violations)
    notes = [note for r, which in zip(sides, ("training", "rollout"), strict=True) for note in _skip_notes(r, which)]
    foreign = sides[1].side.stack is not None
    points = tuple(f.without_refusal() if foreign and f.refused else f for f in report.not_proved)
    return replace(report, violations=violations, notes=(*report.notes, *notes), not_proved=points)


def _remedy(finding: Finding, sides: Sides, found: Sequence[Way]) -> str:
    """What settles everything that differs there: variables, what else the stacks say of each attribute, or, where one
    of them has no such remedy, which side can follow the other."""
    if "rule.gemm" in finding.attributes:
        words = [word for side in sides if (word := _skip_remedy(finding, side))] or _said(finding, "rule.gemm", sides)
        return _plain_side(sides) or "; or ".join(words) or finding.remedy
    settled = [name for name in finding.attributes if found and all(name in _settled(finding, way) for way in found)]
    rest = [name for name in _FIRST if name in finding.attributes and name not in settled]
    said = ["; or ".join(_said(finding, name, sides)) for name in rest]
    if all(said) and len(settled) + len(rest) == len(finding.attributes):
        variables = [", or ".join(_setting(way, sides) for way in found)] if settled else []
        return "; and ".join(dict.fromkeys([*variables, *said]))
    partly = f" ({_or(found)} settles {', '.join(settled)} alone)" if settled else ""
    return _who_can_change(finding, sides) + partly


def _settled(finding: Finding, way: Way) -> frozenset[str]:
    """The attributes of a finding at a quantiser that no longer differ; where activations and weights differ in the
    same ones, those that settle for both."""
    mine = frozenset(FIELDS).intersection(finding.attributes)
    left = [now - then for now, then in zip(way.now, way.then, strict=True) if now == mine]
    return frozenset.intersection(*left) if left else frozenset()


def _setting(way: Way, sides: Sides) -> str:
    remedies = [r for side in sides if side.side.stack for r in side.side.stack.remedies.values()]
    wanted = [r for r in remedies if isinstance(r, Setting) and way.variables.get(r.variable) == r.value]
    return " and ".join(dict.fromkeys(map(str, wanted)))


def _or(found: Sequence[Way]) -> str:
    return " or ".join(" with ".join(f"{name}={value}" for name, value in way.variables.items()) for way in found)


def _said(finding: Finding, name: str, sides: Sides) -> list[str]:
    """What the stacks say of an attribute, variables apart; of two, the side that does more has the switch."""
    values = finding.train[finding.attributes.index(name)], finding.infer[finding.attributes.index(name)]
    if name == "scale_dtype" and "float32" not in values:
        return []  # both are powers of two
    found = []
    for side, value in zip(sides, values, strict=True):
        remedy = side.side.stack.remedies.get(name) if side.side.stack else None
        if isinstance(remedy, str) and value != _OFF.get(name):
            found.append(remedy)
    return list(dict.fromkeys(found))


_FOLLOWS = "name a recipe file as --{}: --fix writes them into it"


def _who_can_change(finding: Finding, sides: Sides) -> str:
    """One recipe for both is for programs that have recipes; beside a stack, which side can follow the other."""
    train, infer = (side.side.stack for side in sides)
    if not rule_of(finding.code).by_recipe or (train is None and infer is None):
        return finding.remedy
    if train is None and infer is not None:
        return f"train by the rules of {infer.title} ({_FOLLOWS.format('train')}), or serve through precgraph's plugin"
    if train is not None and infer is None:
        return f"serve by the rules of {train.title} ({_FOLLOWS.format('infer')}), or train with precgraph"
    assert train is not None and infer is not None
    return (
        f"the trainer of {train.title} and the rollout of {infer.title} each have rules of their own: train with "
        f"precgraph by the latter's ({_FOLLOWS.format('train')}), or serve through its plugin"
    )


def _plain_side(sides: Sides) -> str:
    """What to do if one side quantises nothing at all, and no file speaks of both."""
    plain = [r.recipe.linear.weight is None for r in sides]
    if sum(plain) != 1 or sides[0].side.stack is sides[1].side.stack:
        return ""
    names = [r.side.stack.title if r.side.stack else f"the recipe {r.recipe.name}" for r in sides]
    if plain[0]:
        return f"train in FP8 too: {names[0]} quantises no layer; or {_without_fp8(sides[1], 'infer')}"
    return f"serve in FP8 too: {names[1]} quantises no layer; or {_without_fp8(sides[0], 'train')}"


def _without_fp8(side: Resolved, which: str) -> str:
    return f"switch FP8 off in {side.side.stack.title}" if side.side.stack else f"name bf16 as --{which}"


def _skip_remedy(finding: Finding, side: Resolved) -> str:
    """For a layer that a pattern leaves out without naming it."""
    if side.built is None or side.side.stack is None or "rule.gemm" not in finding.attributes:
        return ""
    for pattern, modules in side.built.skips.accidental().items():
        if finding.module in modules:
            return f"{side.side.stack.title} matches {pattern!r} {side.built.skips.how}: name the layers in full"
    return ""


def _skip_notes(side: Resolved, which: str) -> list[Finding]:
    if side.built is None or side.side.stack is None:
        return []
    skips, title = side.built.skips, side.side.stack.title
    notes = [
        _note(
            RULES["skip pattern"], module, which, pattern,
            f"{title} matches {pattern!r} {skips.how}, so it leaves out layers that it does not name",
        )
        for pattern, modules in skips.accidental().items()
        for module in modules
    ]  # fmt: skip
    if skips.unmatched:
        first = ", ".join(skips.unmatched[:3]) + (", ..." if len(skips.unmatched) > 3 else "")
        unused = f"{title} matches patterns {skips.how}; {len(skips.unmatched)} name no linear layer"
        notes.append(_note(RULES["unused pattern"], "", which, first, unused))
    return notes


def _note(rule: Rule, module: str, which: str, pattern: str, message: str) -> Finding:
    values = (pattern, "") if which == "training" else ("", pattern)
    op = "linear" if module else "recipe"
    return Finding(rule.code, module, "", op, ("pattern",), values[:1], values[1:], message, rule.remedy)
