"""A page on an experiment's runs, for a repository: curves, mismatch by position, a table.

Written from run directories alone (``config.toml`` and ``metrics.jsonl``), so it can be made again, elsewhere, later.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.errors import TrainerError
from trainer.plot import Run, groups, plot_runs, read_runs, spread

EDGE = 5  # steps that a first value is the mean of
LAST = 10  # and a last one
POSITION = "mismatch/position/"
Value = Callable[[Run], float | None]


def write_report(directory: Path, output: Path, commands: Sequence[str] = ()) -> list[Path]:
    """``output.png``, ``.html`` and ``.md`` of all runs below ``directory``, made by ``commands``; returns the paths.

    TrainerError if there is none. ``gpu.csv`` beside the runs (utilisation in percent, MiB, once a second) is averaged.
    """
    found = sorted(p.parent for p in directory.glob("*/metrics.jsonl") if p.parent.name != "smoke")
    paths = [p for p in found if (p / "metrics.jsonl").stat().st_size]
    if not paths:
        raise TrainerError("holds no run with a step", path=str(directory), remedy="run the experiment first")
    written = plot_runs(paths, output)
    page = output.with_name(output.name + ".md")
    text = _page(read_runs(paths), busy(directory / "gpu.csv"), output.name)
    if commands:
        text += "\n".join(["", "Made by:", "", "```sh", *commands, "```", ""])
    page.write_text(text, encoding="utf-8")
    return [*written, page]


def busy(path: Path) -> float | None:
    """Mean utilisation in 0 .. 1 of what ``nvidia-smi -l 1`` wrote; None without a file."""
    if not path.exists():
        return None
    shares = [int(line.split(",")[0]) for line in path.read_text().splitlines() if line.split(",")[0].strip().isdigit()]
    return statistics.fmean(shares) / 100 if shares else None


def _page(runs: Sequence[Run], share: float | None, image: str) -> str:
    arms = groups(runs)
    config = runs[0].config
    lines = [
        f"# {config.task.data} {config.task.params}", "",
        f"{config.rollout.groups} prompts × {config.rollout.samples} responses of at most {config.rollout.max_tokens} "
        f"tokens a step, AdamW {config.optimizer.lr:g}; means over seeds ± standard deviation; first: mean of {EDGE} "
        f"steps, last: mean of {LAST}.", "",
        f"![Curves]({image}.png)", "",
        *_table(arms, [(title, value) for title, value in _columns()]), "",
        "## Mean absolute difference of log-probabilities by position in the response", "",
        *_table(arms, [(b, _mean(POSITION + b)) for b in _buckets(runs)]), "",
    ]  # fmt: skip
    if share is not None:
        lines += [f"All runs shared one card, which was busy {share:.0%} of the time (nvidia-smi, once a second).", ""]
    lines += ["| run | steps | digest of the trainer's program |", "|---|---|---|"]
    lines += [f"| {r.path.name} | {len(r.records)} | `{r.records[-1]['graph/digest'][:16]}` |" for r in runs]
    return "\n".join(lines) + "\n"


def _columns() -> list[tuple[str, Value]]:
    return [
        ("steps", lambda r: float(len(r.records))),
        ("pass, first", _edge("reward/pass_rate", EDGE)),
        ("pass, last", _edge("reward/pass_rate", -LAST)),
        ("drawn anew, first", _edge("eval/pass_rate", 1)),
        ("drawn anew, last", _edge("eval/pass_rate", -1)),
        ("mean abs Δ", _mean("mismatch/mean")),
        ("max abs Δ", _largest("mismatch/max")),
        ("k3", _mean("mismatch/k3")),
        ("rollout tokens/s", _mean("speed/rollout")),
        ("update tokens/s", _mean("speed/update")),
        ("s / step", _mean("time/step")),
    ]


def _buckets(runs: Sequence[Run]) -> list[str]:
    """Positions that the runs' own records tell apart, in order."""
    names = {key.removeprefix(POSITION) for x in runs for r in x.records for key in r if key.startswith(POSITION)}
    return sorted(names, key=lambda name: float(name.rstrip("+").split("-")[0]))


def _table(arms: Sequence[tuple[str, Sequence[Run]]], columns: Sequence[tuple[str, Value]]) -> list[str]:
    lines = ["| arm | " + " | ".join(title for title, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, members in arms:
        cells = [spread([v for run in members if (v := value(run)) is not None]) for _, value in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _values(run: Run, key: str) -> list[float]:
    return [float(r[key]) for r in run.records if r.get(key) is not None]


def _edge(key: str, count: int) -> Value:
    """Mean of the first ``count`` values, or of the last ``-count``."""

    def value(run: Run) -> float | None:
        values = _values(run, key)
        part = values[:count] if count > 0 else values[count:]
        return statistics.fmean(part) if part else None

    return value


def _mean(key: str) -> Value:
    return lambda run: statistics.fmean(_values(run, key)) if _values(run, key) else None


def _largest(key: str) -> Value:
    return lambda run: max(_values(run, key), default=None)
