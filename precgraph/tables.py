"""Files that hold a table: a model's config.json, an index, the configuration of a stack."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from precgraph.errors import InputError
from precgraph.strict_json import sound

Parser = tuple[str, Callable[[str], Any]]
_YAML: Parser = "YAML", lambda text: yaml.safe_load(text) or {}
# JSON is read as transformers and the stacks read it: Infinity is a number in their configs.
_PARSERS: dict[str, Parser] = {
    ".json": ("JSON", json.loads), ".yaml": _YAML, ".yml": _YAML, ".toml": ("TOML", tomllib.loads)
}  # fmt: skip
_REMEDY = "correct the file, or restore it"


def read_table(path: Path) -> dict[str, Any]:
    """The table in a JSON, YAML or TOML file, by its suffix. InputError, in one line with what to do, if there is none.

    An empty YAML file is an empty table.
    """
    if path.suffix not in _PARSERS:
        raise InputError("is no configuration file", path=str(path), remedy="pass .json, .yaml or .toml")
    language, parse = _PARSERS[path.suffix]
    try:
        data = sound(parse, path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "name a file that is there and may be read"
        raise InputError(f"cannot be read: {error.strerror}", path=str(path), remedy=remedy) from None
    except (ValueError, yaml.YAMLError) as error:  # malformed, or no text
        line = " ".join(str(error).split())
        raise InputError(f"is not valid {language}: {line}", path=str(path), remedy=_REMEDY) from None
    if not isinstance(data, dict):
        raise InputError("holds no table", path=str(path), remedy=_REMEDY)
    return data
