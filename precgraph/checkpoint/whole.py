"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from precgraph.errors import InputError


def require_new(path: Path) -> None:
    """InputError if ``path`` is anything but an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError("exists already", path=str(path), remedy="name a directory that does not exist")


@contextmanager
def placed(final: Path) -> Iterator[Path]:
    """A new directory beside ``final``, which is flushed to disk and takes its name when the block ends well; else, a
    kill apart, nothing is left of it."""
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # as the umask has it
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(mode)  # safetensors makes its files for their owner alone
            _flush(path)
        _flush(temporary)
        os.rename(temporary, final)
        _flush(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def whole(final: Path) -> Iterator[Path]:
    """:func:`placed`, for an export. InputError if ``final`` holds something already, or cannot be written."""
    require_new(final)
    try:
        with placed(final) as temporary:
            yield temporary
    except (SafetensorError, OSError) as error:  # a full disk is one or the other
        raise InputError(
            f"cannot be written: {error}", path=str(final), remedy="make room, and export again"
        ) from error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
