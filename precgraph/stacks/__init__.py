"""Other people's stacks as recipes: what each computes where it says "FP8 in blocks", from its own configuration.

One file a stack. Each says where its rules were read, what switches them, and what is not known.
"""

from __future__ import annotations

import difflib

from precgraph.errors import RecipeError
from precgraph.stacks import (
    deep_gemm,
    megatron,
    nemo_rl,
    prime_rl,
    sglang,
    skyrl,
    slime,
    torchao,
    transformer_engine,
    verl,
    vllm,
)
from precgraph.stacks.base import NOT_MODELLED, Built, Hint, Request, Setting, Stack

STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        vllm.STACK, sglang.STACK, sglang.SUBSTRING, transformer_engine.STACK, megatron.STACK, torchao.STACK,
        deep_gemm.STACK, verl.STACK, slime.STACK, nemo_rl.STACK, prime_rl.STACK, skyrl.STACK,
    )
}  # fmt: skip
ALIASES = {"te": "transformer_engine", "megatron_lm": "megatron", "ao": "torchao"}


_SHORT = "for short: " + ", ".join(f"{short} ({name})" for short, name in ALIASES.items())


def find(name: str) -> Stack | None:
    """The stack of that name or alias (dashes or underscores), or None."""
    key = name.lower().replace("-", "_")
    return STACKS.get(ALIASES.get(key, key))


def get(name: str) -> Stack:
    """The stack of that name; RecipeError with the nearest one if there is none."""
    stack = find(name)
    if stack is None:
        names = [*STACKS, *ALIASES]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise RecipeError(f"no stack is called {name!r}{hint}", remedy=f"stacks: {', '.join(STACKS)}; {_SHORT}")
    return stack


__all__ = ["ALIASES", "NOT_MODELLED", "STACKS", "Built", "Hint", "Request", "Setting", "Stack", "find", "get"]
