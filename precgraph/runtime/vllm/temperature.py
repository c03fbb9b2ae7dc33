"""Temperatures in whose place vLLM takes another, without a word to who asked, and those that cannot be scored."""

from __future__ import annotations

from precgraph.errors import InputError
from precgraph.runtime.logprobs import MAX_TEMPERATURE

LEAST = 0.01  # what vLLM takes for a temperature between 0 (greedy) and this; its constant has no public name


def require_served(temperature: float) -> None:
    """InputError for a temperature in whose place vLLM would take another, or that is too high to be scored."""
    if 0 < temperature < LEAST:
        raise InputError(
            f"vLLM takes {LEAST} in place of {temperature}", path="temperature",
            remedy=f"take 0 (greedy), or {LEAST} and more",
        )  # fmt: skip
    if not temperature <= MAX_TEMPERATURE:
        raise InputError(
            f"a temperature of {temperature} cannot be scored", path="temperature",
            remedy=f"take at most {MAX_TEMPERATURE}",
        )  # fmt: skip
