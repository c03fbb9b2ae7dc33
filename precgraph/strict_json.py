"""JSON without what Python takes silently: one key twice and NaN are errors in what is read, and not written."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precgraph.errors import InputError


def parse(text: str) -> Any:
    """The value of a JSON text. ValueError for what is none, for a key that is there twice and for NaN."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_each_key_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(path: Path) -> Any:
    """The value of a JSON file. InputError, in one line, if it cannot be read or is no strict JSON."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except ValueError as error:
        raise InputError(f"is not valid JSON: {error}", path=str(path)) from None


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with null for NaN and infinity, which JSON has no numbers for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, unless the last of several values would silently be taken."""
    found = dict(pairs)
    if len(found) != len(pairs):
        key = next(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        raise ValueError(f"the key {key!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
