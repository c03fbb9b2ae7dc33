"""Level graph: recipe files, skip lists and environment variables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from precgraph.checkpoint import Checkpoint
from precgraph.checkpoint.fp8 import CODES
from precgraph.errors import PrecGraphError
from precgraph.fix.environment import environment_file, in_words
from precgraph.fix.plan import Change, Plan
from precgraph.fix.recipe import follow
from precgraph.fix.skips import Place, edited, find_list, rewrite
from precgraph.recipe import Recipe
from precgraph.stacks import Built, Request
from precgraph.stacks.pair import Resolved, Side
from precgraph.stacks.settings import ways
from precgraph.verify.report import Report


def plan_graph(
    report: Report, sides: tuple[Resolved, Resolved], modules: Sequence[str], env: Mapping[str, str], folder: Path
) -> Plan:
    """What makes the two sides of a report agree. ``modules`` are the model's linear layers, ``folder`` is where an
    environment file goes. Nothing is written."""
    plan = Plan()
    if report.ok:
        return plan
    train, infer = sides
    if (path := _recipe_file(infer.side)) is not None:
        _take(plan, follow(path, infer.recipe, train.recipe, other_is_stack=train.side.stack is not None))
    elif not infer.side.path and (path := _recipe_file(train.side)) is not None:
        _take(plan, follow(path, train.recipe, infer.recipe, other_is_stack=infer.side.stack is not None))
    else:
        _fix_skips(plan, report, sides, modules, env)
        _fix_environment(plan, sides, modules, env, folder)
    if not plan.changes:
        plan.by_hand += [f"{f.code}: {f.remedy}" for f in report.violations]
    plan.by_hand = list(dict.fromkeys(plan.by_hand))
    return plan


def _take(plan: Plan, result: Change | str) -> None:
    if isinstance(result, Change):
        plan.changes.append(result)
    else:
        plan.by_hand.append(result)


def _recipe_file(side: Side) -> Path | None:
    path = Path(side.name)
    return path if side.recipe is not None and path.is_file() else None


# ---------------------------------------------------------------------------------------- skip lists


def _fix_skips(
    plan: Plan, report: Report, sides: tuple[Resolved, Resolved], modules: Sequence[str], env: Mapping[str, str]
) -> None:
    """Layers that run in FP8 on one side only: the list of the rollout's stack, else of the trainer's, is edited."""
    gemms = [
        (f.module, f.train[f.attributes.index("rule.gemm")], f.infer[f.attributes.index("rule.gemm")])
        for f in report.violations
        if "rule.gemm" in f.attributes
    ]
    which = 1 if sides[1].side.stack is not None and sides[1].side.path else 0
    side, other = sides[which], sides[1 - which]
    if not gemms or side.built is None or side.side.stack is None or not side.side.path:
        return
    own = [(module, values[which]) for module, *values in gemms]
    unskip = {module for module, value in own if value != "quantized"}
    skip = [module for module, value in own if value == "quantized"]
    if other.recipe.linear.weight is None or side.recipe.linear.weight is None:
        return  # one side has no FP8 at all, which no skip list is about
    _take(plan, _edit(side, unskip, skip, modules, env, ("train", "infer")[which], other.recipe))


def _edit(
    side: Resolved, unskip: set[str], skip: Sequence[str], modules: Sequence[str], env: Mapping[str, str], which: str,
    other: Recipe,
) -> Change | str:  # fmt: skip
    path = Path(side.side.path)
    file = path / "config.json" if path.is_dir() else path
    data = dict(side.side.config or {})
    by_hand = f"{file}: {_names('quantise', sorted(unskip))}{_names('leave out', skip)}"
    place = find_list(data)
    if isinstance(place, str):
        return f"{by_hand} (the file {place})"
    stored = _disagreement(file.parent, data, place, unskip, skip)
    if stored:
        return f"{by_hand} ({stored})"

    def built(entries: Sequence[str]) -> Built:
        stack = side.side.stack
        assert stack is not None
        config = json.loads(json.dumps({k: v for k, v in data.items() if k != "env"}))
        table = config
        for key in place[:-1]:
            table = table[key]
        table[place[-1]] = list(entries)
        merged = {**env, **{str(k): str(v) for k, v in data.get("env", {}).items()}}
        return stack.build(Request(which, tuple(modules), config, merged, side.side.path, other))

    old: Any = data
    for key in place:
        old = old.get(key, [])
    before = set(side.built.skips.by_module) if side.built else set()
    try:
        entries = edited(old, lambda entry: list(built([entry]).skips.by_module), unskip, skip)
        after = set(built(entries).skips.by_module)
    except PrecGraphError as error:
        return f"{by_hand} ({error})"
    if after != (before - unskip) | set(skip):
        return f"{by_hand} (no list of names leaves out exactly these)"
    return rewrite(file, place, entries, f"{file}: {'.'.join(place)} leaves out what the other side leaves out")


def _disagreement(folder: Path, data: Mapping[str, Any], place: Place, unskip: set[str], skip: Sequence[str]) -> str:
    """Why the list of a checkpoint cannot be edited: it says what is stored, which only the files can change."""
    table: Any = data
    for key in place[:-1]:
        table = table[key]
    if "quant_method" not in table:
        return ""  # the engine quantises as it loads
    try:
        entries = Checkpoint(folder).entries
    except PrecGraphError as error:
        return f"whether the weights are stored so cannot be seen: {error}"
    for module in (*sorted(unskip), *skip):
        entry = entries.get(f"{module}.weight")
        wanted = module in unskip
        if entry is None or (entry.dtype in CODES) != wanted:
            found = entry.dtype if entry else "missing"
            return f"{module}.weight is {found} in the checkpoint, so it must be exported again"
    return ""


def _names(verb: str, modules: Sequence[str]) -> str:
    if not modules:
        return ""
    shown = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    return f"{verb} {shown}; "


# --------------------------------------------------------------------------------------- environment


def _fix_environment(
    plan: Plan, sides: tuple[Resolved, Resolved], modules: Sequence[str], env: Mapping[str, str], folder: Path
) -> None:
    found = ways(sides, modules, env)
    if len(found) > 1:
        plan.by_hand.append("set either " + ", or ".join(in_words(way.variables) for way in found))
    elif found and (change := environment_file(folder, found[0].variables)) is not None:
        plan.changes.append(change)
        plan.environment = found[0].variables
