"""Which keys of a configuration a stack's recipe is read from; a file that says nothing, or nearly something, is an
error.

Such files hold hundreds of settings that no rule here depends on. A key is refused only if it is close to one that is
read at the same place: ``quantizaton`` beside nothing that is read would otherwise be a rollout in bf16.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precgraph.errors import InputError
from precgraph.stacks.base import Stack

HUGGING_FACE = ("architectures", "model_type")
"""Keys of a model's config.json, which is a whole configuration without a quantization_config too."""
_CLOSE = 0.8
_NUMERIC = re.compile(r"quant|fp8|fp4|bf16|block_size|^ignore|scal(e|ing)_")


@dataclass(frozen=True, slots=True)
class Keys:
    """Dotted keys of a file: those that are ``read``, how many are not, and those of them that speak of formats."""

    read: tuple[str, ...] = ()
    unread: int = 0
    numeric: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = f", not read: {self.unread} {'other' if self.unread == 1 else 'others'}"
        named = ", ".join(self.numeric[:3]) + (", ..." if len(self.numeric) > 3 else "")
        return f"keys read: {', '.join(self.read) or 'none'}{others}" + (f" (among them {named})" if named else "")


def keys_of(stack: Stack, config: Mapping[str, Any], path: str) -> Keys:
    """The keys of a configuration that ``stack`` reads.

    InputError: none is read, a key is close to one that is, or a value stands where a table must.
    """
    known = {tuple(key.split(".")) for key in stack.keys}
    if stack.root in config:
        known = {(stack.root, *key) for key in known}
    known |= {("env", name) for name in stack.variables}
    found = list(_leaves(config, (), known, stack, path))
    read = [name for name, is_read in found if is_read]
    other = [name for name, is_read in found if not is_read]
    is_model = "quantization_config" in stack.keys and any(key in config for key in HUGGING_FACE)
    if not read and not is_model:
        raise InputError(
            f"has no key that {stack.title} is read by", path=path,
            remedy=f"keys: {', '.join(stack.keys)}; leave the file out for what {stack.title} does without one",
        )  # fmt: skip
    return Keys(tuple(read), len(other), tuple(name for name in other if _NUMERIC.search(name)))


def _leaves(
    table: Mapping[str, Any], at: tuple[str, ...], known: set[tuple[str, ...]], stack: Stack, path: str
) -> Iterator[tuple[str, bool]]:
    """Each key that holds no further table, and whether it is read."""
    here = {key[len(at)] for key in known if len(key) > len(at) and key[: len(at)] == at}
    for raw, value in table.items():
        name = str(raw).lstrip("-").replace("-", "_") if stack.dashes else str(raw)
        full = (*at, name)
        if full in known or (name in here and value is None):
            yield ".".join(full), True
        elif name in here:
            if not isinstance(value, Mapping):
                inside = [".".join(key[len(full) :]) for key in sorted(known) if key[: len(full)] == full]
                raise InputError(
                    f"{'.'.join(full)} must be a table, not {value!r}", path=path,
                    remedy=f"keys: {', '.join(inside)}; or remove it",
                )  # fmt: skip
            yield from _leaves(value, full, known, stack, path)
        else:
            if at != ("env",) and (close := _close(name, here)):
                there = ".".join((*at, close))
                raise InputError(
                    f"has an unknown key {'.'.join(full)!r}; did you mean {there!r}?", path=path,
                    remedy="correct or remove it: as it is, nothing reads it",
                )  # fmt: skip
            inner = list(_leaves(value, full, known, stack, path)) if isinstance(value, Mapping) else []
            yield from inner or [(".".join(full), False)]


def _close(name: str, here: set[str]) -> str | None:
    """The key that ``name`` is a misspelling of; fp4_format is none of fp8_format."""
    same = [key for key in here if re.findall(r"\d+", key) == re.findall(r"\d+", name)]
    return next(iter(difflib.get_close_matches(name, same, n=1, cutoff=_CLOSE)), None)
