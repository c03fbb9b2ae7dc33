"""``precgraph check --level weights``."""

from __future__ import annotations

import os
import time
from typing import Any

from precgraph.cli.console import console, progress, write_json

SCHEMA = 1


def check_bytes(masters: str, train: str, infer: str, json_to: str | None) -> int:
    """Compare the checkpoint ``infer`` with what ``train`` makes of ``masters``; the exit code."""
    with progress() as step:
        step("starting torch")
        from precgraph.checkpoint import Checkpoint, Fp8Checkpoint, select
        from precgraph.loading import load_config_model
        from precgraph.recipe import Recipe
        from precgraph.stacks.pair import Side, linear_modules, parse, resolve
        from precgraph.trace import trace
        from precgraph.verify.weights import check_weights, default_threads

        side = parse(train)
        step("reading names and shapes")
        ours, theirs = Checkpoint(masters), Fp8Checkpoint(infer)
        step("asking the recipe which layers are quantised")
        model = load_config_model(masters)
        traced = trace(model)
        recipe = resolve(side, Side("jet_rl", Recipe.jet_rl()), linear_modules(traced.graph), os.environ)[0].recipe
        selection = select(model, recipe, traced)
        start = time.perf_counter()
        report = check_weights(ours, theirs, selection, threads=default_threads(), step=step)
        seconds = time.perf_counter() - start
    data = report.to_json()
    summary: dict[str, Any] = {
        "schema": SCHEMA, "level": "weights", "model": masters, "checkpoint": infer, "recipe": recipe.to_dict(),
        "compared": {"tensors": report.compared, "quantized": len(theirs.weights), "bytes": theirs.nbytes},
        **{key: data[key] for key in ("ok", "violations", "notes")},
    }  # fmt: skip
    if json_to is not None:
        write_json(summary, json_to)
    if json_to != "-":
        from precgraph.cli.check import _findings

        out = console()
        out.print(
            f"[bold]{report.compared}[/] tensors compared, {len(theirs.weights)} of them in FP8; "
            f"{theirs.nbytes / 1e6:.0f} MB in {seconds:.1f} s"
        )
        if report.ok:
            out.print(f"[bold green]consistent:[/] every byte is what {train} makes of the masters")
        else:
            out.print(_findings("What differs", report.rows(), "red"))
            out.print(f"[bold red]inconsistent:[/] {len(report.violations)} findings")
    return report.exit_code
