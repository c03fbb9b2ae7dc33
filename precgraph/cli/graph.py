"""``precgraph check --level graph``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from precgraph.cli.console import progress
from precgraph.cli.model import trace_model
from precgraph.cli.results import Output
from precgraph.errors import PrecGraphError

if TYPE_CHECKING:
    from precgraph.fix import Plan
    from precgraph.graph import PrecisionGraph, Record
    from precgraph.verify import Report


def check_programs(model: str, train: str, infer: str, backend: str, output: Output) -> int:
    """Compare the rollout's program with the training forward; the exit code."""
    report, context, plan = _graphs(model, train, infer, backend, os.environ)
    there: list[str] = []  # in the environment that was written
    if mended := output.mend(plan):
        try:
            report, context, _ = _graphs(model, train, infer, backend, os.environ)
            if mended.environment:
                in_it = _graphs(model, train, infer, backend, {**os.environ, **mended.environment})
                there = _there(output.document(report, context), output.document(*in_it[:2]))
        except PrecGraphError:  # no kernel, for one: then the files were better before
            mended.undo()
            raise
    for line in there:
        typer.echo(line, err=True)
    return output.conclude(report, context, brief=bool(there))


def _there(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """What the variables of the environment file settle, by the documents of both environments, and what to do about
    the rest, which no variable does: as many nodes may differ, each in fewer rules. The last line leads over to the
    verdict."""
    from precgraph.fix.environment import FILE
    from precgraph.report import one_line
    from precgraph.verify.report import counted
    from precgraph.verify.rules import rule

    before, after = (
        dict.fromkeys(rule(a).code for finding in document["violations"] for a in finding["attributes"])
        for document in (here, there)
    )
    settled = ", ".join(code for code in before if code not in after) or "some of the differences"
    left = len(there["causes"])
    rest = f"{counted(left, 'root cause')}, by what no variable settles: {', '.join(after)}" if left else "nothing"
    remedies = dict.fromkeys(f["remedy"] for f in there["violations"])
    return [
        f"{FILE} settles {settled}",
        f"left in that environment: {rest}",
        *(one_line(f"by hand: {remedy}") for remedy in remedies),
        "the verdict here, where the variables are not yet set (without --fix: with its tables):",
    ]


def _graphs(
    model: str, train: str, infer: str, backend: str, env: Mapping[str, str]
) -> tuple[Report, dict[str, Any], Callable[[], Plan]]:
    """The report of level graph in an environment, what its document says besides, and what could mend it."""
    with progress() as step:
        step("reading the recipes")
        from precgraph.stacks.pair import linear_modules, parse, resolve_for
        from precgraph.stacks.remedies import explain
        from precgraph.verify.rules import RULES

        named = parse(train), parse(infer)
        step("starting torch")
        from precgraph.checking import check as compare
        from precgraph.checking import lowered, trace_served
        from precgraph.loading import find, stored_weights

        source = find(model)
        stored = stored_weights(source)
        stored.require_readable()
        built, traced = trace_model(source, step)
        from precgraph.lowering.lower import backend_name, target
        from precgraph.report.layer import drawn_parts

        device = target(traced.tensors.values())
        sides = resolve_for(traced.graph, named, env)
        recipes = sides[0].recipe, sides[1].recipe
        paths = dict.fromkeys(side.checkpoint for side in named)
        own = {path: trace_served(built, traced, path) if path else None for path in paths}
        step("building the training program")
        train_graph = lowered(own[named[0].checkpoint] or traced, "train", recipes[0], backend, device)
        step("building the rollout program")
        infer_graph = lowered(own[named[1].checkpoint] or traced, "infer", recipes[1], backend, device)
        step("comparing")
        modules = linear_modules(traced.graph)
        report = explain(compare(train_graph, infer_graph), sides, modules, env)
        if stored.fp8 and not any(side.checkpoint for side in named):
            report = report.with_weights_open(
                RULES["stored quantised"],
                f"{model} is stored in {stored}: neither side reads these codes",
                f"what vLLM makes of them: --infer {model}",
            )
        context = {
            "level": "graph",
            "model": model,
            "sides": {"train": train, "infer": infer},
            "family": traced.graph.family,
            "backend": backend_name(backend, device),
            "device": device.type,
            "recipes": {"train": recipes[0].to_dict(), "infer": recipes[1].to_dict()},
            "stacks": {"train": sides[0].to_json(), "infer": sides[1].to_json()},
            "digests": {"train": train_graph.digest(), "infer": infer_graph.digest()},
            "compared": _compared(report, train_graph, infer_graph),
            "parts": drawn_parts(train_graph, infer_graph, report),
        }

    def plan() -> Plan:
        from precgraph.fix import plan_graph

        return plan_graph(report, sides, modules, env, Path())

    return report, context, plan


def _compared(report: Report, train: PrecisionGraph, infer: PrecisionGraph) -> dict[str, Any]:
    """What the verdict rests on: nodes, linears of both sides, and how many nodes of the rollout each kernel runs, by
    numerics id."""
    rollout = _forward(infer)
    return {
        "nodes": report.compared,
        **_linears(rollout),
        "train": _linears(_forward(train)),
        "kernels": dict(sorted(Counter(str(r.precision.numerics) for r in rollout).items())),
    }


def _linears(forward: Sequence[Record]) -> dict[str, int]:
    """How many linear layers a forward has, and how many of them are quantised."""
    linears = [r for r in forward if r.op == "linear"]
    return {
        "linears": len(linears),
        "quantized_linears": sum(r.precision.rule("gemm") == "quantized" for r in linears),
    }


def _forward(graph: PrecisionGraph) -> list[Record]:
    return [r for r in graph.records() if r.precision.phase == "forward" and r.precision.numerics]
