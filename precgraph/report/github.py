"""GitHub Actions annotations: one workflow command a line, which the runner reads from stdout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from precgraph.report.document import kind, rows_of, value_lines, verdict

_COMMANDS = {
    "violation": "error",
    "known": "warning",
    "suppressed": "notice",
    "not_proved": "warning",
    "note": "notice",
}


def render(document: Mapping[str, Any]) -> Iterator[str]:
    """``::error title=PG105 amax floor, model.layers.{0-1}.mlp::...`` for each row, after the verdict: GitHub shows
    ten a step and kind, so what matters most comes first. What is not proved is an error if the check was strict.

    A module's name cannot start a command of its own: line breaks, ``%``, and in the title ``:`` and ``,`` are escaped.
    """
    word, rest = verdict(document)
    yield f"::{'notice' if document['ok'] else 'error'} title=precgraph check::{_data(f'{word}: {rest}')}"
    commands = {**_COMMANDS, "not_proved": "error"} if document.get("strict") else _COMMANDS
    for state, command in commands.items():
        for row in rows_of(document, state):
            title = f"{row['code']} in {row['module'] or 'the model'}"
            yield f"::{command} title={_property(title)}::{_data(_message(row))}"


def _message(row: Mapping[str, Any]) -> str:
    count = f"{kind(row)}: " if row["count"] > 1 else ""
    last = f"accepted: {row['reason']}" if "reason" in row else f"what to do: {row['remedy']}"
    return "\n".join([f"{count}{row['message']}", *value_lines(row), last])


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
