"""What a resumed run does otherwise than before: which keys changed, and from which step on.

``config.toml`` is the configuration of a run's latest steps. ``changes.jsonl`` beside it has a line for each step from
which on keys were others, ``{"step": 40, "changes": {"optimizer.lr": [1e-06, 2e-06]}}``, values before and after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from precgraph.strict_json import lines, sound
from trainer.config import Config, load_run
from trainer.errors import ConfigError, TrainerError
from trainer.files import replace_text

FILE = "changes.jsonl"
_PLACES = ("run.dir", "model.origin", "task.origin")  # where things are: no step depends on them
_IDENTITY = ("precision.arm", "precision.recipe", "run.seed", "task")  # keys, and a whole table
_REMEDY = "restore it; without it config.toml says how all steps were made"

Changes = dict[str, list[Any]]


def since(directory: Path, step: int, config: Config) -> Changes:
    """Keys of ``config`` that the steps before ``step`` of the run in ``directory`` were made without: values before
    and after."""
    before = _keys(load_run(directory))
    for row in reversed(_rows(directory)):
        if row["step"] >= step:  # what it was for is made again
            before |= {key: old for key, (old, _) in row["changes"].items()}
    return {key: [before[key], value] for key, value in _keys(config).items() if before[key] != value}


def history(directory: Path) -> list[tuple[int, Changes]]:
    """What was changed when the run in ``directory`` was resumed: from which step on, and values before and after."""
    return [(row["step"], row["changes"]) for row in _rows(directory)]


def require_same_run(changes: Changes, directory: Path) -> None:
    """ConfigError if what makes a run that run is among the changes: its steps would be of two experiments."""
    found = [key for key in changes if key in _IDENTITY or key.partition(".")[0] in _IDENTITY]
    if found:
        raise ConfigError(
            f"{', '.join(found)} would change in the middle of the run", path=str(directory),
            remedy="fork it: --into NEW_DIRECTORY",
        )  # fmt: skip


def record(directory: Path, step: int, changes: Changes) -> None:
    """Write down that the steps from ``step`` on are made with these changes; lines of steps to come are dropped."""
    rows = [row for row in _rows(directory) if row["step"] < step]
    rows += [{"step": step, "changes": changes}] if changes else []
    path = directory / FILE
    if rows or path.exists():
        replace_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def _keys(config: Config) -> dict[str, Any]:
    return {path: value for path, value in config.flat().items() if path not in _PLACES}


def _rows(directory: Path) -> list[dict[str, Any]]:
    path = directory / FILE
    if not path.is_file():
        return []
    try:
        rows = [sound(json.loads, line.decode()) for _, line in lines(path)]
    except ValueError as error:  # of JSON, of UTF-8
        raise TrainerError(f"is no list of changes: {error}", path=str(path), remedy=_REMEDY) from None
    for row in rows:
        if not isinstance(row, dict) or type(row.get("step")) is not int or not _is_changes(row.get("changes")):
            raise TrainerError(f"is no list of changes: {row!r:.80}", path=str(path), remedy=_REMEDY)
    return rows


def _is_changes(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(pair, list) and len(pair) == 2 for pair in found.values())
