"""One process at a time trains in a run directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import ConfigError

_FILE = ".lock"
_held: set[Path] = set()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep a run directory, which is made if it is missing, from every other process; within this one it nests.

    ConfigError if another process has it. The operating system gives the lock back when the process ends, in whatever
    way; the file stays, unless the directory was made here and nothing else has been put into it: then both go.
    """
    place = directory.resolve()
    if place in _held:
        yield
        return
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _FILE).open("ab")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", path=str(directory)) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another process trains here", path=str(directory), remedy="let it end, or choose another run.dir"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot be locked: {error.strerror or error}", path=str(directory),
                remedy="choose a run.dir on a file system that has flock",
            ) from None  # fmt: skip
        _held.add(place)
        try:
            yield
        finally:
            _held.discard(place)
            if made and directory.is_dir() and os.listdir(directory) == [_FILE]:
                (directory / _FILE).unlink()
                directory.rmdir()
            fcntl.flock(file, fcntl.LOCK_UN)  # also for children that were forked and live on
