"""Two sides of a check, each a recipe or a stack with its configuration, resolved for one model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precgraph import ops
from precgraph.errors import InputError, RecipeError
from precgraph.graph import PrecisionGraph, precision
from precgraph.passes.raise_ops import raise_ops
from precgraph.passes.rewrite import is_call
from precgraph.recipe import LINEAR_FORMATS, PRESETS, Recipe
from precgraph.stacks import ALIASES, NOT_MODELLED, STACKS, Built, Request, Stack, find, get
from precgraph.stacks.keys import Keys, keys_of
from precgraph.tables import read_table
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES, Rule, rule_of


@dataclass(frozen=True, slots=True)
class Side:
    """One side as it was named: a ``recipe``, or a ``stack`` with its parsed ``config`` read at ``path``, and which
    ``keys`` of that it reads."""

    name: str
    recipe: Recipe | None = None
    stack: Stack | None = None
    config: Mapping[str, Any] | None = None
    path: str = ""
    keys: Keys | None = None

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint that the side serves, if it names one: where a config.json of a model is."""
        own = Path(self.path).is_dir() or Path(self.path).name == "config.json"
        return self.path if own and "model_type" in (self.config or {}) else None


@dataclass(frozen=True, slots=True)
class Resolved:
    """One side for one model: its recipe, and what its stack says of it."""

    side: Side
    recipe: Recipe
    built: Built | None = None

    def to_json(self) -> dict[str, Any] | None:
        """The stack, its version and what is not known; None for a recipe."""
        stack, built = self.side.stack, self.built
        if stack is None or built is None:
            return None
        return {
            "stack": stack.name, "version": stack.version, "config": self.side.path, "unknown": list(stack.unknown),
            "skipped": sorted(built.skips.by_module), "taken_from_the_other_side": list(built.assumed),
            "not_modelled": NOT_MODELLED, "keys": self.side.keys and str(self.side.keys),
        }  # fmt: skip


def parse(spec: str) -> Side:
    """What ``--train`` or ``--infer`` names: a preset, a recipe file, ``STACK``, ``STACK:FILE`` or a checkpoint's
    directory, which vLLM serves. Errors are RecipeError or InputError and name the file."""
    name, colon, path = spec.partition(":")
    stack = find(name)
    if stack is None and colon and not Path(spec).exists():
        stack = get(name)
    if stack is not None:
        return _configured(spec, stack, path) if colon else Side(spec, stack=stack, config={})
    if Path(spec).is_dir():
        return _configured(spec, get("vllm"), spec)
    is_file = spec.endswith(".toml") or "/" in spec or Path(spec).is_file()
    if not is_file and spec not in PRESETS:
        close = difflib.get_close_matches(spec, [*PRESETS, *STACKS, *ALIASES], n=1, cutoff=0.7)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        known = f"presets: {', '.join(PRESETS)}; stacks: {', '.join([*STACKS, *ALIASES])}"
        raise RecipeError(
            f"no preset or stack is called {spec!r}{hint}", remedy=f"{known}; or name a file or directory"
        )
    return Side(spec, Recipe.load(spec) if is_file else Recipe.preset(spec))


def resolve_for(raw: PrecisionGraph, named: tuple[Side, Side], env: Mapping[str, str]) -> tuple[Resolved, Resolved]:
    """Both sides for a traced model."""
    return resolve(*named, linear_modules(raw) if any(side.stack for side in named) else (), env)


def resolve(train: Side, infer: Side, modules: Sequence[str], env: Mapping[str, str]) -> tuple[Resolved, Resolved]:
    """Both recipes for a model whose linear layers are ``modules``. A field that one stack's source does not settle is
    taken from the other side; so is, beside a recipe, every rule that no stack's recipe models."""
    first = _resolve(train, "train", modules, env, None)
    second = _resolve(infer, "infer", modules, env, first.recipe)
    if first.built and first.built.assumed:
        first = _resolve(train, "train", modules, env, second.recipe)
        second = _resolve(infer, "infer", modules, env, first.recipe)
    if first.built and not second.built:
        first = replace(first, recipe=_modelled(first.recipe, second.recipe))
    elif second.built and not first.built:
        second = replace(second, recipe=_modelled(second.recipe, first.recipe))
    return first, second


def _modelled(stack: Recipe, other: Recipe) -> Recipe:
    """``stack`` with what its stack says, formats and layers left out, and ``other``'s rules for everything else."""
    formats = {name: getattr(stack.linear, name) for name in LINEAR_FORMATS}
    return replace(other, name=stack.name, linear=replace(other.linear, **formats), select=stack.select)


def linear_modules(raw: PrecisionGraph) -> tuple[str, ...]:
    """Paths of a traced model's linear layers, in program order, without the head; experts by their 3-D weights."""
    graph = raise_ops(raw.copy())
    return tuple(dict.fromkeys(precision(n).module for n in graph if is_call(n, ops.linear, ops.expert_linear)))


def explain(report: Report, train: Resolved, infer: Resolved) -> Report:
    """The report with what to set in each stack, and with notes on the patterns of their skip lists."""
    violations = tuple(replace(f, remedy=_remedy(f, (train, infer))) for f in report.violations)
    notes = [note for r, which in ((train, "training"), (infer, "rollout")) for note in _skip_notes(r, which)]
    return replace(report, violations=violations, notes=(*report.notes, *notes))


def _resolve(side: Side, which: str, modules: Sequence[str], env: Mapping[str, str], other: Recipe | None) -> Resolved:
    if side.recipe is not None or side.stack is None:
        assert side.recipe is not None
        return Resolved(side, side.recipe)
    config = dict(side.config or {})
    own = config.pop("env", {})
    if not isinstance(own, Mapping):
        raise InputError("env must be a table of environment variables", path=side.path)
    merged = {**env, **{str(k): str(v) for k, v in own.items()}}
    built = side.stack.build(Request(which, tuple(modules), config, merged, side.path, other))
    return Resolved(side, built.recipe, built)


def _configured(spec: str, stack: Stack, path: str) -> Side:
    file = Path(path)
    config = read_table(file / "config.json" if file.is_dir() else file)
    return Side(spec, stack=stack, config=config, path=path, keys=keys_of(stack, config, path))


# ---------------------------------------------------------------------------------------- in words


# A finding names everything that differs at a node; its remedy is about the first of these that does.
_FIRST = ("rule.gemm", "requantize", "scale_dtype", "granularity", "source", "scale_rule", "divide", "amax_floor")
_OFF = {"scale_dtype": "float32", "requantize": "none"}


def _remedy(finding: Finding, sides: tuple[Resolved, Resolved]) -> str:
    """What the stacks say of what differs first; the finding's own remedy if they say nothing."""
    if "rule.gemm" in finding.attributes and (word := _plain_side(sides)):
        return word
    words = [word for side in sides if (word := _skip_remedy(finding, side))]
    values = {n: (t, i) for n, t, i in zip(finding.attributes, finding.train, finding.infer, strict=True)}
    for name in _FIRST:
        if words or name not in values:
            continue
        if name == "scale_dtype" and "float32" not in values[name]:
            continue  # both are powers of two
        for side, value in zip(sides, values[name], strict=True):
            remedies = side.side.stack.remedies if side.side.stack else {}
            if name in remedies and value != _OFF.get(name):  # the side that does more has the switch
                words.append(str(remedies[name]))
    return "; or ".join(dict.fromkeys(words)) or _who_can_change(finding, sides)


_FOLLOWS = "name a recipe file as --{}: --fix writes them into it"


def _who_can_change(finding: Finding, sides: tuple[Resolved, Resolved]) -> str:
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


def _plain_side(sides: tuple[Resolved, Resolved]) -> str:
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
