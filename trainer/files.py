"""Text files of a run, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.errors import TrainerError


def replace_text(path: Path, text: str) -> None:
    """Put ``text`` in the place of what ``path`` holds. TrainerError if that fails, on a full disk for one: then the
    file is as it was, and nothing lies beside it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise TrainerError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
