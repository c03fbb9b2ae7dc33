"""Temperatures in whose place vLLM takes another, without a word to who asked."""

from __future__ import annotations

from precgraph.errors import InputError

LEAST = 0.01  # what vLLM takes for a temperature between 0 (greedy) and this; its constant has no public name


def require_served(temperature: float) -> None:
    """InputError for a temperature in whose place vLLM would take another."""
    if 0 < temperature < LEAST:
        raise InputError(
            f"vLLM takes {LEAST} in place of {temperature}", path="temperature",
            remedy=f"take 0 (greedy), or {LEAST} and more",
        )  # fmt: skip
