"""``precgraph check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precgraph.cli import results
from precgraph.cli.console import choose, guarded, require_place
from precgraph.cli.model import MODEL, SIDE_HELP, Backend
from precgraph.errors import InputError

READS = {
    "graph": ("train", "infer", "backend", "fix", "diff"),
    "weights": ("train", "infer", "fix", "diff"),
    "numerics": ("other", "train", "infer", "backend", "tokens", "seed", "prompt_file", "capture"),
    "env": ("other",),
}  # beside MODEL, the formats, --strict, --suppressions and --baseline, which every level reads
_INSTEAD = {"other": "name the sides with --train and --infer, and a file for the result with -o"}
DEFAULT = "jet_rl"


@guarded
def check(
    ctx: typer.Context,
    model: Annotated[str, MODEL],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="[OTHER]",
            help="Level env: MODEL and OTHER are records of two machines. Level numerics: two captures.",
            show_default=False,
        ),
    ] = None,
    train: Annotated[str, typer.Option(metavar="SPEC", help=f"Training side. {SIDE_HELP}")] = DEFAULT,
    infer: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="Rollout side, in the same way.", show_default=f"{DEFAULT}; none at level weights"
        ),
    ] = None,
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
    strict: results.Strict = False,
    fix: results.Fix = False,
    diff: results.Diff = False,
) -> None:
    """Prove that the rollout's program is inside the training forward, or list every root cause why it is not.

    Exit code 0: consistent, or nothing differs but points are not proved; 1: inconsistent, or with --strict not
    proved; 2: could not check.
    """
    choose("--level", level, tuple(READS))
    _refuse_unread(ctx, level)
    if infer == "":  # the current folder, as a path
        raise InputError("--infer is empty", remedy="name a preset, a recipe file, a stack or a checkpoint")
    reads = model, other, train, infer, prompt_file, suppressions
    formats = results.Formats(as_json, json_file, html, sarif, junit, github, reads)
    require_place(Path(capture) if capture else None, reads=reads)
    output = results.Output(formats, suppressions, baseline, strict=strict, fix=fix, diff=diff)
    if level == "env":
        from precgraph.cli.env import check_machines

        raise typer.Exit(check_machines(model, other, output))
    if level == "numerics":
        from precgraph.cli.numerics import check_values

        probe = tokens, seed, prompt_file
        raise typer.Exit(check_values(model, other, train, infer or DEFAULT, backend, probe, capture, output))
    if level == "weights":
        from precgraph.cli.weights import check_bytes

        if infer is None:
            raise InputError("--infer is required at level weights: the FP8 checkpoint's directory")
        raise typer.Exit(check_bytes(model, train, infer, output))
    from precgraph.cli.graph import check_programs

    raise typer.Exit(check_programs(model, train, infer or DEFAULT, backend, output))


def _refuse_unread(ctx: typer.Context, level: str) -> None:
    """InputError for what was given and the level does not read: a verdict would be taken for one that rests on it, and
    a file waited for that is never written."""
    for parameter in ctx.command.params:
        name = str(parameter.name)
        levels = [each for each, options in READS.items() if name in options]
        source = ctx.get_parameter_source(name)
        if levels and level not in levels and source is not None and source.name != "DEFAULT":
            option = parameter.opts[0]
            raise InputError(
                f"{option if option.startswith('-') else name.upper()} is for level{'s' * (len(levels) > 1)} "
                f"{' and '.join(levels)}, not for level {level}",
                remedy=_INSTEAD.get(name, "leave it out"),
            )
