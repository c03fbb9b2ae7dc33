"""``precgraph bisect``."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precgraph.cli.console import choose, console, guarded, progress, require_place, write_result
from precgraph.cli.model import MODEL, SIDE_HELP, Backend
from precgraph.cli.results import Json, JsonFile
from precgraph.strict_json import finite

if TYPE_CHECKING:
    from precgraph.bisect import Bisection, Part

SCHEMA = 1
BY = ("roles", "layers", "modules")


@guarded
def bisect(
    model: Annotated[str, MODEL],
    train: Annotated[str, typer.Option(metavar="SPEC", help=f"Training side. {SIDE_HELP}")] = "bf16",
    infer: Annotated[str, typer.Option(metavar="SPEC", help="Rollout side, in the same way.")] = "jet_rl",
    by: Annotated[str, typer.Option(help="What to give back: roles, layers or modules.")] = "roles",
    backend: Backend = "auto",
    tokens: Annotated[int, typer.Option(metavar="N", help="How many random probe tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="What they are drawn with.")] = 0,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A text, or token ids in a .json file, in their place.")
    ] = None,
    as_json: Json = False,
    json_file: JsonFile = None,
) -> None:
    """Give parts of the rollout back to the training side one at a time, and say which owns the mismatch.

    With --train bf16 (the default) that is: turn it back to BF16. Exit code 0: measured; 2: could not.
    """
    choose("--by", by, BY)
    require_place(json_file, reads=(model, train, infer, prompt_file))
    with progress() as step:
        step("starting torch")
        from precgraph.bisect import bisect as measure
        from precgraph.cli.numerics import probe_tokens
        from precgraph.probe import load_pair

        pair = load_pair(model, train, infer, backend, os.environ, step)
        ids = probe_tokens(model, tokens, seed, prompt_file, pair.vocabulary)
        pair.require(ids)
        result = measure(pair, ids, by, step)
    data = {
        "schema": SCHEMA, "model": model, "sides": {"train": train, "infer": infer}, "by": by,
        "probe": {"tokens": len(ids), "seed": None if prompt_file else seed, "prompt_file": prompt_file},
        "total": finite(asdict(result.total)), **finite({"explained": result.explained}),
        "interaction": result.interaction(), "parts": [_part(p) for p in result.parts],
    }  # fmt: skip
    write_result(data, as_json, json_file, lambda _: _print(result, train, infer))


def _part(part: Part) -> dict[str, Any]:
    return {**finite(asdict(part)), "without": part.without and finite(asdict(part.without))}


def _print(result: Bisection, train: str, infer: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    out, total = console(), result.total
    out.print(f"training: {train}, rollout: {infer}", highlight=False, markup=False)
    table = Table(title=f"Mismatch with one of the {result.by} given back", title_justify="left")
    for heading in (result.by[:-1], "share", "k3", "mean |Δ|", "max |Δ|"):
        table.add_column(heading, justify="left" if heading == result.by[:-1] else "right")
    table.add_row("(none: the rollout as it is)", "", *_numbers(total))
    for part in result.parts:
        if part.without is None:
            table.add_row(escape(part.name), "?", "", "", "")
        else:
            table.add_row(escape(part.name), f"{part.share:.1%}", *_numbers(part.without))
    out.print(table)
    for part in result.parts:
        if part.problem:
            out.print(f"{part.name}: {part.problem}", highlight=False, markup=False)
    out.print(f"{total.tokens} probe tokens; {result.interaction()}", highlight=False, markup=False)


def _numbers(p: Any) -> tuple[str, str, str]:
    return f"{p.k3:.3g}", f"{p.mean:.3g}", f"{p.largest:.3g}"
