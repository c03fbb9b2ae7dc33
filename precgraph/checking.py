"""``precgraph.check``: is the rollout's program inside the training forward?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from precgraph.errors import CheckError, InputError
from precgraph.graph import PrecisionGraph
from precgraph.loading import load_config_model, program_config
from precgraph.lowering.lower import lower, target
from precgraph.passes.pipeline import build
from precgraph.recipe import Recipe
from precgraph.runtime.compiled import Compiled
from precgraph.trace import Trace, trace
from precgraph.verify import Report, check_inclusion

Side = nn.Module | PrecisionGraph


def check(
    train: Side,
    infer: Side | None = None,
    *,
    train_recipe: Recipe | None = None,
    infer_recipe: Recipe | None = None,
    backend: str = "auto",
    example_inputs: Sequence[Tensor] | None = None,
) -> Report:
    """Compare the rollout's program with the training forward, node by node; no weights are read.

    Each side is a compiled model, a :class:`~precgraph.PrecisionGraph`, or a plain model, which is traced and lowered
    with its recipe (default :meth:`Recipe.jet_rl`) on ``backend``, for its own device, or this machine's if it has no
    values (meta device). Without ``infer``, the rollout is that of ``train`` itself. ``example_inputs`` are needed for
    plain models that are not causal language models.

    Returns a report with ``ok``, ``violations``, ``not_proved``, ``notes`` and ``str(report)``. Raises CheckError for
    two programs that are not a training and a rollout program, or of which only one is lowered; InputError for a recipe
    beside a side that already has one; and what :func:`precgraph.compile` raises.
    """
    traces: dict[int, Trace] = {}

    def program(side: Side, mode: str, recipe: Recipe | None) -> PrecisionGraph:
        if isinstance(side, PrecisionGraph):
            return _finished(side, mode, recipe)
        compiled: Compiled | None = getattr(side, "precgraph", None)
        if compiled is not None:
            if compiled.mode == mode:
                return _finished(compiled.graph, mode, recipe)
            if infer is not None:
                raise _wrong_mode(compiled.mode, mode)
            return lowered(compiled.trace, mode, recipe or compiled.recipe, compiled.backend)
        if id(side) not in traces:
            traces[id(side)] = trace(side, example_inputs)
        return lowered(traces[id(side)], mode, recipe or Recipe.jet_rl(), backend)

    if infer is None and isinstance(train, PrecisionGraph):
        raise CheckError("one graph cannot be checked against itself", remedy="pass the rollout's graph too")
    return check_inclusion(
        program(train, "train", train_recipe), program(train if infer is None else infer, "infer", infer_recipe)
    )


def lowered(
    traced: Trace, mode: str, recipe: Recipe, backend: str = "auto", device: torch.device | None = None
) -> PrecisionGraph:
    """The lowered graph of one mode (``train`` or ``infer``), its well-formedness checked after each pass.

    ``device``: what it is to run on; by default the traced model's, and for a model on the meta device the GPU if
    there is one, else the CPU.
    """
    device = device or target(traced.tensors.values())
    return lower(build(traced.graph, mode, recipe, check=True), backend, device)


def trace_served(model: PreTrainedModel, traced: Trace | None, checkpoint: str | Path) -> Trace | None:
    """The trace of the model that the ``config.json`` of a served ``checkpoint`` describes; None if it has the program
    of ``model``. ``traced`` is the trace of that; without one it is made, if the two configs do not settle it."""
    theirs = load_config_model(checkpoint, warn=False)
    if program_config(model) == program_config(theirs):
        return None
    found, ours = trace(theirs), traced or trace(model)
    return None if found.graph.digest() == ours.graph.digest() else found


def require_same_program(name: str, model: PreTrainedModel, traced: Trace | None, checkpoint: str | Path) -> None:
    """InputError if a served ``checkpoint`` is of another model than ``model``, which the user calls ``name``, whatever
    its weights are; ``traced`` as in :func:`trace_served`."""
    if trace_served(model, traced, checkpoint) is not None:
        raise InputError(
            f"its config.json describes another program than that of {name}", path=str(checkpoint),
            remedy=f"precgraph check {name} --infer {checkpoint} names the nodes that differ",
        )  # fmt: skip


def _finished(graph: PrecisionGraph, mode: str, recipe: Recipe | None) -> PrecisionGraph:
    if recipe is not None:
        raise InputError(
            f"the {mode} side already has its recipe in it, so {mode}_recipe cannot change it",
            remedy="leave the recipe out, or pass the model that was compiled",
        )
    if graph.mode != mode:
        raise _wrong_mode(graph.mode, mode)
    return graph


def _wrong_mode(found: str, wanted: str) -> CheckError:
    names = {"train": "training", "infer": "rollout", "raw": "traced, not yet compiled"}
    return CheckError(
        f"the {names[wanted]} side is a {names.get(found, found)} program",
        remedy="call check(train, infer) with a model compiled for each mode",
    )
