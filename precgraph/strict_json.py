"""JSON without what Python takes silently: one key twice and NaN are errors in what is read, and not written.

What is nested too deeply for everything that walks through it, or holds text that no file can, is an error in every
format that is read (:func:`sound`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from precgraph.errors import InputError

DEEPEST = 100  # levels of tables and lists


def parse(text: str) -> Any:
    """The value of a JSON text. ValueError for what is none, for a key that is there twice and for NaN."""
    return sound(lambda t: json.loads(t, parse_constant=_no_constant, object_pairs_hook=_each_key_once), text)


def sound(parse: Callable[[str], Any], text: str) -> Any:
    """What ``parse`` makes of a JSON, TOML or YAML text. ValueError: what that raises for what is none, too deep
    nesting, or half of a surrogate pair, which an escape can write and no encoding can."""
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        for word in level:
            if isinstance(word, str) and not word.isascii():
                _require_unicode(word)
        inner = [part for v in level for part in _parts(v) if isinstance(part, str | dict | list)]
        level = list({id(part): part for part in inner}.values())  # YAML's aliases may be one object many times
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def read(path: Path) -> Any:
    """The value of a JSON file. InputError, in one line, if it cannot be read or is no strict JSON."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except ValueError as error:
        raise InputError(f"is not valid JSON: {error}", path=str(path)) from None


def lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines of a JSONL file with their numbers from 1: of bytes, for a string of JSON may hold Unicode's own line
    ends. OSError if it cannot be read."""
    return list(enumerate(path.read_bytes().splitlines(), 1))


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with null for NaN and infinity, which JSON has no numbers for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list) else ()


def _require_unicode(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{word[:40]!a} holds half of a surrogate pair") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, unless the last of several values would silently be taken."""
    found = dict(pairs)
    if len(found) != len(pairs):
        key = next(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        raise ValueError(f"the key {key!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
