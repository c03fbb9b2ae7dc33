"""``precgraph check --level weights``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from precgraph.cli.console import progress
from precgraph.cli.results import Output

if TYPE_CHECKING:
    from precgraph.fix import Plan


def check_bytes(masters: str, train: str, infer: str, output: Output) -> int:
    """Compare the checkpoint ``infer`` with what ``train`` makes of ``masters``; the exit code."""
    with progress() as step:
        step("starting torch")
        from precgraph.checking import require_same_program
        from precgraph.checkpoint import Fp8Checkpoint, open_masters, select
        from precgraph.loading import find, load_config_model, stored_weights
        from precgraph.recipe import Recipe
        from precgraph.stacks.pair import Side, parse, resolve_for
        from precgraph.trace import trace
        from precgraph.verify.weights import check_weights, default_threads

        named = parse(train), Side("jet_rl", Recipe.jet_rl())
        step("reading names and shapes")
        theirs, ours = Fp8Checkpoint(infer), open_masters(masters)
        source = find(masters)
        stored_weights(source).require_readable()  # of masters in block FP8, each weight is named below
        step("asking the recipe which layers are quantised")
        model = load_config_model(source)
        traced = trace(model)
        recipe = resolve_for(traced.graph, named, os.environ)[0].recipe
        selection = select(model, recipe, traced)
        report = check_weights(ours, theirs, selection, threads=default_threads(), step=step)
        if report.ok and "model_type" in theirs.config:  # right bytes, and perhaps another program on them
            require_same_program(masters, model, traced, infer)
    context = {
        "level": "weights",
        "model": masters,
        "sides": {"train": train, "infer": infer},
        "checkpoint": infer,
        "recipe": recipe.to_dict(),
        "compared": {"tensors": report.compared, "quantized": len(theirs.weights), "bytes": theirs.nbytes},
    }

    def plan() -> Plan:
        from precgraph.fix import plan_weights

        return plan_weights(report, theirs, selection)

    if output.mend(plan):
        return check_bytes(masters, train, infer, output.as_it_is())
    return output.conclude(report, context)
