"""What a worker answers to a call of precgraph's: plain data, errors included.

vLLM turns an exception of a worker in another process into text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import precgraph.errors
from precgraph.errors import PrecGraphError

Reply = dict[str, Any]


def replies(call: Callable[..., Any]) -> Callable[..., Reply]:
    """A worker's method with its result under ``value``, or a typed error under ``error``.

    It raises the error where nobody would read the reply (``worker.unheard``).
    """

    @functools.wraps(call)
    def reply(worker: Any, *args: Any, **kwargs: Any) -> Reply:
        try:
            return {"value": call(worker, *args, **kwargs)}
        except PrecGraphError as error:
            if worker.unheard:
                raise
            return {"error": [type(error).__name__, error.message, error.path, error.remedy]}

    return reply


def value_of(reply: Reply) -> Any:
    """The result of a reply; its typed error is raised again."""
    if "error" in reply:
        name, message, path, remedy = reply["error"]
        raise getattr(precgraph.errors, name)(message, path=path, remedy=remedy)
    return reply["value"]


def kept_masses(record: Mapping[Any, float], count: int) -> list[float]:
    """The kept mass of the first ``count`` tokens from a record by the token's index, which JSON makes text.

    An empty record is that of a request whose every token could be drawn: 1. PrecGraphError: the record lacks a token.
    """
    kept = {int(index): mass for index, mass in record.items()}
    for i in range(count if kept else 0):
        if i not in kept:
            raise PrecGraphError(f"the record of the request has no kept mass for token {i} of {count}")
    return [kept[i] if kept else 1.0 for i in range(count)]
