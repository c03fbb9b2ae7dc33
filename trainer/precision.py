"""The precision arms: which program trains, which rolls out, and whether the two are one policy.

==========  ========================================  ==============================================================
arm         trains                                    rolls out
==========  ========================================  ==============================================================
``exact``   the FP8 recipe, precgraph's kernels       the same graph: digests equal, log-probabilities bit for bit
``unified`` the FP8 recipe, precgraph's kernels       the same recipe, other kernels (Triton; on a CPU, vLLM's rules)
``mixed``   BF16, bit for bit Hugging Face            the FP8 recipe
``bf16``    BF16, bit for bit Hugging Face            BF16 with torch's own kernels, which depend on the batch
==========  ========================================  ==============================================================
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

import precgraph
from precgraph import Recipe
from trainer.config import Config, PrecisionTable
from trainer.errors import ConfigError, InconsistentError


@dataclass
class Pair:
    """``actor`` trains and ``program`` rolls out, on one set of masters and one store; ``reference`` is frozen.

    ``exact`` says that both run the same program, so that any difference between their log-probabilities is a defect.
    ``report`` is what ``precgraph.check`` found, ``digest`` that of the trainer's forward program.
    """

    actor: Any
    program: Any
    reference: Any | None
    report: Any
    exact: bool
    digest: str


def fp8_recipe(table: PrecisionTable) -> Recipe:
    """A preset by name, or a recipe file."""
    return Recipe.load(table.recipe) if table.recipe.endswith(".toml") else Recipe.preset(table.recipe)


def stock_rules(recipe: Recipe) -> Recipe:
    """The same recipe as stock vLLM 0.33 executes it: formats and blocks alike, scales and divisions of another kernel
    (activations amax × (1/448), floor 1e-10; weights x × (1/s), floor 1e-4)."""
    activation, weight = recipe.linear.activation, recipe.linear.weight
    if activation is None or weight is None:
        raise ConfigError("arm 'unified' needs an FP8 recipe", remedy='set precision.recipe = "jet_rl"')
    linear = replace(
        recipe.linear,
        activation=replace(activation, scale_rule="amax*(1/max)", amax_floor=1e-10),
        weight=replace(weight, divide="reciprocal", amax_floor=1e-4),
    )
    return replace(recipe, name=f"{recipe.name}_stock", linear=linear)


def build_pair(model: Any, config: Config) -> Pair:
    """Compile both programs of the configured arm from ``model`` (a Hugging Face causal language model), and check
    them.

    InconsistentError, with the report, if the rollout is not inside the training forward and that is not allowed.
    """
    table, recipe = config.precision, fp8_recipe(config.precision)
    train = recipe if table.arm in ("exact", "unified") else Recipe.bf16()
    reference = None
    if config.algorithm.kl:
        frozen = copy.deepcopy(model).requires_grad_(False)
        reference = precgraph.compile(frozen, "infer", train, table.backend, checked=table.checked)
    actor = precgraph.compile(model, "train", train, table.backend, checked=table.checked)
    infer, backend = _rollout_program(table, recipe, next(model.parameters()).device)
    program = precgraph.compile(actor, "infer", infer, backend)
    report = precgraph.check(actor, program)
    digest: str = actor.precgraph.digest
    exact = report.ok and _invariant(program) and program.precgraph.digest == digest
    pair = Pair(actor, program, reference, report, exact, digest)
    if not pair.exact and not config.allow_mismatch:
        raise InconsistentError(
            f"the rollout is not inside the training forward:\n{report}\n",
            path=f"precision.arm = {table.arm!r}", remedy="correct it, or set precision.allow_mismatch = true",
        )  # fmt: skip
    return pair


def _rollout_program(table: PrecisionTable, recipe: Recipe, device: torch.device) -> tuple[Recipe | None, str]:
    """Recipe (None: the trainer's) and backend of the rollout."""
    if table.arm == "exact":
        return None, "auto"
    if table.arm == "mixed":
        return recipe, table.rollout_backend
    if table.arm == "bf16":
        return Recipe.bf16(), table.rollout_backend
    if table.rollout_backend != "auto":
        return recipe, table.rollout_backend
    # A CPU has one set of kernels: there, another stack's rules stand for other kernels.
    return (recipe, "triton_flash") if device.type == "cuda" else (stock_rules(recipe), "auto")


def _invariant(program: Any) -> bool:
    """Whether a token's bits do not depend on the batch that it is computed in."""
    return all(k.row_invariant is not False for k in program.precgraph.kernels().values())
