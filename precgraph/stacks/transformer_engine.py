"""TransformerEngine ``Float8BlockScaling``.

Read in the main branch of 2026 (commit 000b637e): ``transformer_engine/common/recipe/__init__.py``; the arithmetic in
its own reference, ``tests/pytorch/references/quantize_scale_calc.py`` (commit 3580212c). Its ``QParams`` have
``amax_epsilon`` 0.0; no variable of TransformerEngine's changes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precgraph.format import Format
from precgraph.stacks.base import Built, Request, Setting, Stack, fp8, fp8_recipe

KEYS = ("use_f32_scales", "fp8_format", "amax_epsilon", "x_block_scaling_dim", "w_block_scaling_dim")
_GRANULARITY: Mapping[Any, tuple[str, str]] = {1: ("1x128", "1x128"), 2: ("128x128", "128x128")}


def build(request: Request) -> Built:
    """The recipe of ``Float8BlockScaling(**config)`` in this environment."""
    for key in request.config:
        if key not in KEYS:
            raise request.error(f"Float8BlockScaling has no modelled option {key!r}", f"options: {', '.join(KEYS)}")
    return Built(block_scaling("transformer_engine", request, request.config))


def block_scaling(name: str, request: Request, options: Mapping[str, Any], skips: Any = None) -> Any:
    """The recipe named ``name`` of a Float8BlockScaling with these options."""
    dims = options.get("x_block_scaling_dim", 1), options.get("w_block_scaling_dim", 2)
    if dims not in ((1, 2), (1, 1)):
        raise request.error(f"x_block_scaling_dim, w_block_scaling_dim = {dims} is not modelled", "use 1 and 2")
    form = str(options.get("fp8_format", "E4M3")).upper().rpartition(".")[2]
    if form not in ("E4M3", "HYBRID"):
        raise request.error(f"fp8_format = {form!r} is neither E4M3 nor HYBRID")
    activation = format_of(request, options, "1x128")
    gradient = replace(activation, dtype="float8_e5m2") if form == "HYBRID" else activation
    return fp8_recipe(
        name, request, activation, replace(activation, granularity=_GRANULARITY[dims[1]][0]), skips, gradient
    )


def format_of(request: Request, options: Mapping[str, Any], granularity: str) -> Format:
    """One operand: the inverse scale, rounded down to a power of two unless fp32 scales are asked for."""
    exact = options.get("use_f32_scales", request.switch("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", False))
    if not isinstance(exact, bool):
        raise request.error(f"use_f32_scales = {exact!r} is neither true nor false")
    floor = options.get("amax_epsilon", 0.0)
    try:
        floor = float(floor)  # YAML takes 1e-4 for a string
    except (TypeError, ValueError, OverflowError):
        raise request.error(f"amax_epsilon = {floor!r} is no number") from None
    return fp8(
        granularity,
        scale_dtype="float32" if exact else "ue8m0",
        scale_rule="max/amax",
        amax_floor=floor,
    )


REMEDIES: Mapping[str, str | Setting] = {
    "scale_dtype": Setting("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", "TransformerEngine"),
    "scale_rule": "quantise the other side with TransformerEngine's rule (448/amax, then x times it), or train with "
    "another quantiser: TransformerEngine has no switch for it",
    "amax_floor": "set amax_epsilon of the QParams of Float8BlockScaling to the other side's floor",
}
UNKNOWN = (
    "sm_100 and newer: the recipe is emulated with MXFP8, which has groups of 32",
    "primary weights in FP8: whether fp32 masters are rounded to bf16 before they are quantised",
)
VARIABLES = ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES",)
STACK = Stack(
    name="transformer_engine",
    title="TransformerEngine Float8BlockScaling",
    version="2 (main, commit 000b637e)",
    sources=("transformer_engine/common/recipe/__init__.py", "tests/pytorch/references/quantize_scale_calc.py"),
    switches={
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "default 0: powers of two; 1: fp32 scales",
        "use_f32_scales, fp8_format, amax_epsilon, w_block_scaling_dim": "arguments of the recipe, from a file",
    },
    unknown=UNKNOWN,
    remedies=REMEDIES,
    build=build,
    keys=KEYS,
    variables=VARIABLES,
)
