"""A plan: files and their new text, and what is left to do by hand."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from precgraph.errors import InputError


@dataclass(frozen=True, slots=True)
class Change:
    """One file: its text now (empty if there is none), its new text, what that does in words, and the ``verb`` of
    having written it: "wrote" where that alone mends nothing."""

    path: Path
    before: str
    after: str
    words: str
    verb: str = "fixed"

    def diff(self) -> Iterator[str]:
        """The change as a unified diff."""
        old, new = (text.splitlines(keepends=True) for text in (self.before, self.after))
        name = str(self.path)
        for line in difflib.unified_diff(old, new, name if self.before else "/dev/null", name):
            yield line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


@dataclass(slots=True)
class Plan:
    """``changes`` are safe; ``by_hand`` are remedies for what is not, or is not understood; ``environment`` are the
    variables of an environment file among the changes."""

    changes: list[Change] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def diff(self) -> str:
        """All changes as a unified diff."""
        return "".join(line for change in self.changes for line in change.diff())

    def apply(self) -> None:
        """Write every file, each whole or not at all. InputError: one has changed meanwhile, or cannot be written."""
        for change in self.changes:
            now = change.path.read_text(encoding="utf-8") if change.path.exists() else ""
            if now != change.before:
                raise InputError("has changed since it was read", path=str(change.path), remedy="run the check again")
        for change in self.changes:
            _replace(change.path, change.after)

    def undo(self) -> None:
        """Put back what :meth:`apply` found."""
        for change in self.changes:
            if change.before:
                _replace(change.path, change.before)
            else:
                change.path.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    path = path.resolve()  # a link stays a link
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=str(path), remedy="make it writable") from None
