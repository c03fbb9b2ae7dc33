"""``precgraph check``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precgraph.cli import results
from precgraph.cli.console import choose, guarded, progress, require_place
from precgraph.cli.model import MODEL, SIDE_HELP, Backend, trace_model
from precgraph.errors import InputError, PrecGraphError

if TYPE_CHECKING:
    from precgraph.fix import Plan
    from precgraph.graph import PrecisionGraph
    from precgraph.verify import Report

LEVELS = ("graph", "weights", "numerics", "env")


@guarded
def check(
    model: Annotated[str, MODEL],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="[OTHER]",
            help="Level env: MODEL and OTHER are records of two machines. Level numerics: two captures.",
            show_default=False,
        ),
    ] = None,
    train: Annotated[str, typer.Option(metavar="SPEC", help=f"Training side. {SIDE_HELP}")] = "jet_rl",
    infer: Annotated[str, typer.Option(metavar="SPEC", help="Rollout side, in the same way.")] = "jet_rl",
    backend: Backend = "auto",
    level: Annotated[
        str,
        typer.Option(
            help="graph: compare the programs; no weights are read. weights: compare the bytes of the FP8 checkpoint "
            "--infer with what --train makes of the masters MODEL. numerics: run both on probe tokens and find the "
            "nodes that make other bits; --infer may be a capture (.safetensors). env: compare two "
            "records of `precgraph env`."
        ),
    ] = "graph",
    tokens: Annotated[int, typer.Option(metavar="N", help="Level numerics: how many random probe tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Level numerics: what they are drawn with.")] = 0,
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Level numerics: a text, or token ids in a .json file, in their place."),
    ] = None,
    capture: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Level numerics: write the rollout's values (.safetensors)."),
    ] = None,
    as_json: results.Json = False,
    json_file: results.JsonFile = None,
    html: results.Html = None,
    sarif: results.Sarif = None,
    junit: results.Junit = None,
    github: results.GitHub = False,
    suppressions: results.Suppressions = None,
    baseline: results.Baseline = None,
    fix: results.Fix = False,
    diff: results.Diff = False,
) -> None:
    """Prove that the rollout's program is inside the training forward, or list every root cause why it is not.

    Exit code 0: consistent; 1: inconsistent; 2: could not check.
    """
    choose("--level", level, LEVELS)
    if (fix or diff) and level not in ("graph", "weights"):
        raise InputError(f"--fix and --diff know nothing of level {level}", remedy="leave them out")
    if (capture or prompt_file) and level != "numerics":  # nobody should wait for a file that is never written
        option = "--capture" if capture else "--prompt-file"
        raise InputError(f"{option} is for level numerics, not for level {level}", remedy="leave it out")
    if not infer:  # the current folder, as a path
        raise InputError("--infer is empty", remedy="name a preset, a recipe file, a stack or a checkpoint")
    if level == "weights" and infer == "jet_rl":
        raise InputError("--infer is required at level weights: the FP8 checkpoint's directory")
    reads = model, other, train, infer, prompt_file, suppressions
    formats = results.Formats(as_json, json_file, html, sarif, junit, github, reads)
    require_place(Path(capture) if capture else None, reads=reads)
    output = results.Output(formats, suppressions, baseline, fix=fix, diff=diff)
    if level == "env":
        from precgraph.cli.env import check_machines

        raise typer.Exit(check_machines(model, other, output))
    if level == "numerics":
        from precgraph.cli.numerics import check_values

        probe = tokens, seed, prompt_file
        raise typer.Exit(check_values(model, other, train, infer, backend, probe, capture, output))
    if other is not None:
        raise InputError(
            f"level {level} takes one MODEL, not {other!r} too",
            remedy="name the sides with --train and --infer, and a file for the result with -o",
        )
    if level == "weights":
        from precgraph.cli.weights import check_bytes

        raise typer.Exit(check_bytes(model, train, infer, output))
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
    code = output.conclude(report, context)
    for line in there:
        typer.echo(line, err=True)
    raise typer.Exit(code)


def _there(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """What the variables of the environment file settle, by the documents of both environments, and what to do about
    the rest, which no variable does: as many nodes may differ, each in fewer rules."""
    from precgraph.fix.environment import FILE
    from precgraph.report import one_line
    from precgraph.verify.rules import rule

    before, after = (
        dict.fromkeys(rule(a).code for finding in document["violations"] for a in finding["attributes"])
        for document in (here, there)
    )
    settled = ", ".join(code for code in before if code not in after) or "some of the differences"
    left = len(there["violations"])
    rest = f"{left} root causes remain" if left > 1 else f"{'one' if left else 'no'} root cause remains"
    cause = f", of what no variable settles: {', '.join(after)}" if left else ""
    remedies = dict.fromkeys(f["remedy"] for f in there["violations"])
    return [
        f"{FILE} settles {settled}; {rest} in that environment{cause}; the result above is of this one",
        *(one_line(f"by hand: {remedy}") for remedy in remedies),
    ]


def _graphs(
    model: str, train: str, infer: str, backend: str, env: Mapping[str, str]
) -> tuple[Report, dict[str, Any], Callable[[], Plan]]:
    """The report of level graph in an environment, what its document says besides, and what could mend it."""
    with progress() as step:
        step("reading the recipes")
        from precgraph.stacks.pair import explain, linear_modules, parse, resolve_for
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
        report = explain(compare(train_graph, infer_graph), *sides)
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
            "compared": _compared(report, infer_graph),
            "parts": drawn_parts(train_graph, infer_graph, report),
        }

    def plan() -> Plan:
        from precgraph.fix import plan_graph

        return plan_graph(report, sides, linear_modules(traced.graph), env, Path())

    return report, context, plan


def _compared(report: Report, infer: PrecisionGraph) -> dict[str, Any]:
    """What the verdict rests on: nodes, linears, and how many nodes each kernel runs, by numerics id."""
    forward = [r for r in infer.records() if r.precision.phase == "forward" and r.precision.numerics]
    linears = [r for r in forward if r.op == "linear"]
    return {
        "nodes": report.compared,
        "linears": len(linears),
        "quantized_linears": sum(r.precision.rule("gemm") == "quantized" for r in linears),
        "kernels": dict(sorted(Counter(str(r.precision.numerics) for r in forward).items())),
    }
