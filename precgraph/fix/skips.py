"""Skip lists in the configuration of a stack: the shortest edit after which exactly the wanted layers are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from precgraph import strict_json
from precgraph.fix.plan import Change

KEYS = ("ignored_layers", "modules_to_not_convert", "ignore")
_TABLES = (("quantization_config",), ("hf_overrides", "quantization_config"))
Place = tuple[str, ...]


def find_list(data: Mapping[str, Any]) -> Place | str:
    """Where a configuration has its skip list, or where it would belong; or why that is not clear."""
    found, tables = [], []
    for table in _TABLES:
        inner: Any = data
        for key in table:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            tables.append((table, inner))
            found += [(*table, key) for key in KEYS if inner.get(key) is not None]
    if len(found) == 1:
        return found[0]
    if not found and len(tables) == 1:
        table, inner = tables[0]
        return (*table, "modules_to_not_convert" if "quant_method" in inner else "ignore")
    return "has more than one skip list" if found else "has no quantization_config"


def edited(
    entries: Sequence[str], hits: Callable[[str], Sequence[str]], unskip: set[str], skip: Sequence[str]
) -> list[str]:
    """``entries`` without those that hit a module of ``unskip``, in whose place the other modules that they hit stand
    by their full path, and with ``skip`` at the end."""
    out: list[str] = []
    for entry in entries:
        modules = hits(entry)
        out += [entry] if unskip.isdisjoint(modules) else [m for m in modules if m not in unskip]
    return list(dict.fromkeys([*out, *skip]))


def rewrite(path: Path, place: Place, entries: Sequence[str], words: str) -> Change | str:
    """The change that writes ``entries`` at ``place`` of a JSON or TOML file; or what to do by hand."""
    by_hand = f"{path}: set {'.'.join(place)} to {json.dumps(list(entries))}"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            data = strict_json.parse(text)
        except ValueError as error:
            return f"{by_hand} ({error}, so the file is not touched)"
        _put(data, place, list(entries))
        indent = re.search(r"\n( +)\"", text)
        plain = text.isascii()
        after = json.dumps(data, indent=len(indent[1]) if indent else None, ensure_ascii=plain)
        return Change(path, text, after + ("\n" if text.endswith("\n") else ""), words)
    if path.suffix == ".toml":
        document = tomlkit.parse(text)
        array = tomlkit.array()
        array.extend(entries)
        _put(document, place, array.multiline(len(entries) > 1))
        return Change(path, text, tomlkit.dumps(document), words)
    return f"{by_hand} (only JSON and TOML are edited: comments of other files would be lost)"


def _put(data: Any, place: Place, value: Any) -> None:
    for key in place[:-1]:
        data = data[key]
    data[place[-1]] = value
