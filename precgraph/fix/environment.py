"""The file of environment variables under which two stacks agree in more."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from precgraph.fix.plan import Change

FILE = Path("precgraph.env")


def environment_file(folder: Path, variables: Mapping[str, str]) -> Change | None:
    """The change of :data:`FILE` that sets ``variables``; other lines stay. None if they are all there."""
    path = (folder / FILE).resolve()
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = before.splitlines()
    for name, value in variables.items():
        line = f"{name}={value}"
        places = [i for i, old in enumerate(lines) if re.match(rf"\s*(export\s+)?{name}\s*=", old)]
        for i in places:
            lines[i] = line
        if not places:
            lines.append(line)
    after = "\n".join(lines) + "\n"
    read = f"set -a; . {shlex.quote(str(path))}; set +a"
    words = f"{path}: {in_words(variables)}; start both sides in this environment ({read})"
    return None if after == before else Change(path, before, after, words, "wrote")


def in_words(variables: Mapping[str, str]) -> str:
    """``A=1 and B=0``."""
    return " and ".join(f"{name}={value}" for name, value in variables.items())
