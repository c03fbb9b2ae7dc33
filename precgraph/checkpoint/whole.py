"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from precgraph.errors import InputError


@contextmanager
def whole(final: Path) -> Iterator[Path]:
    """A new directory beside ``final``, which is flushed to disk and takes its name when the block ends well; else, a
    kill apart, nothing is left of it. InputError if ``final`` holds something already, or cannot be written."""
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise InputError("exists already", path=str(final), remedy="name a directory that does not exist")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _flush(path)
        os.rename(temporary, final)
        _flush(final.parent)
    except (SafetensorError, OSError) as error:  # a full disk is one or the other
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(
            f"cannot be written: {error}", path=str(final), remedy="make room, and export again"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
