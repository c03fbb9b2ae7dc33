"""Megatron-LM: TransformerEngine's block scaling behind ``--fp8-format`` and ``--fp8-recipe``.

Read in ``megatron/training/arguments.py`` (main of 2025/26), ``_add_transformer_engine_args``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from precgraph.stacks import transformer_engine
from precgraph.stacks.base import Built, Request, Stack, plain_recipe
from precgraph.stacks.matching import Skips


def build(request: Request) -> Built:
    """The recipe of a file of arguments (dashes or underscores); without one, of block scaling in E4M3."""
    return of_arguments("megatron", request, request.config or {"fp8_format": "e4m3", "fp8_recipe": "blockwise"})


def of_arguments(name: str, request: Request, arguments: Mapping[str, Any]) -> Built:
    """The recipe of Megatron's arguments; ``fp8`` is TransformerConfig's name of ``--fp8-format``."""
    options = {str(key).lstrip("-").replace("-", "_"): value for key, value in arguments.items()}
    form = options.get("fp8_format", options.get("fp8"))
    if not form:
        return Built(plain_recipe(name))
    kind = options.get("fp8_recipe", "delayed")
    if kind != "blockwise":
        raise request.error(f"fp8_recipe = {kind!r} is not modelled", "use fp8_recipe = blockwise")
    skips = _edges(request, options) if options.get("first_last_layers_bf16") else Skips()
    recipe = transformer_engine.block_scaling(name, request, {"fp8_format": form}, skips)
    return Built(recipe, skips)


def _edges(request: Request, options: Mapping[str, Any]) -> Skips:
    """Layers at the start and the end that stay in bf16."""
    first, last = (_count(request, options, f"num_layers_at_{end}_in_bf16") for end in ("start", "end"))
    numbers = {m: int(found[1]) for m in request.modules if (found := re.search(r"\.layers\.(\d+)\.", m))}
    count = max(numbers.values(), default=-1) + 1
    chosen = {m: "first_last_layers_bf16" for m, n in numbers.items() if n < first or n >= count - last}
    return Skips(chosen, (), "by the number of the layer")


def _count(request: Request, options: Mapping[str, Any], key: str) -> int:
    value = str(options.get(key, 1))  # a string where it was an option on a command line
    if not value.isdecimal():
        raise request.error(f"{key} = {value!r} is no number of layers")
    return int(value)


KEYS = (
    "fp8_format", "fp8", "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)  # fmt: skip

STACK = Stack(
    name="megatron",
    title="Megatron-LM",
    version="main of 2026",
    sources=("megatron/training/arguments.py", *transformer_engine.STACK.sources),
    switches={
        "--fp8-format": "e4m3, or hybrid: gradients in E5M2",
        "--fp8-recipe": "only blockwise is modelled; the default is delayed",
        "--first-last-layers-bf16, --num-layers-at-start-in-bf16, --num-layers-at-end-in-bf16": "layers left in bf16",
        **transformer_engine.STACK.switches,
    },
    unknown=transformer_engine.UNKNOWN,
    remedies={**transformer_engine.REMEDIES, "rule.gemm": "leave the same layers out: --first-last-layers-bf16"},
    build=build,
    keys=KEYS,
    variables=transformer_engine.VARIABLES,
    dashes=True,
)
