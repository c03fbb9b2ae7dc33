"""GGUF files through transformers, which parses one anew for whatever it asks of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_MADE = ("GGUFReader", "get_tensor_name_map")  # of the package gguf, both read only by who asks for them


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

    before = {name: getattr(gguf, name) for name in _MADE}
    kept = any(hasattr(made, "cache_info") for made in before.values())  # by a block around this one
    try:
        for name, made in before.items():
            setattr(gguf, name, made if kept else cache(made))
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)
