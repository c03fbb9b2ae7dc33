"""GGUF files through transformers, which parses one anew for whatever it asks of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

_MADE = ("GGUFReader", "get_tensor_name_map")  # of the package gguf, both read only by who asks for them
_lock = Lock()
_own: dict[str, Any] = {}  # what the package has without the blocks that are under way
_blocks: list[object] = []  # in any thread


@contextmanager
def parsed_once() -> Iterator[None]:
    """While it lasts, a GGUF file is parsed once, and the table of its tensors' names is made once.

    A vocabulary takes seconds to parse. For the config and for the tensors transformers 5.19 makes a reader each, and
    for every module of the model a table of names. What is kept goes when the last block ends, the map of the file too.
    """
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    import gguf

    with _lock:
        if not _blocks:
            _own.update({name: getattr(gguf, name) for name in _MADE})
            for name, made in _own.items():
                setattr(gguf, name, cache(made))
        _blocks.append(None)
    try:
        yield
    finally:
        with _lock:
            _blocks.pop()
            if not _blocks:
                for name, made in _own.items():
                    setattr(gguf, name, made)
