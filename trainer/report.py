"""A page on an experiment's runs, for a repository: what was run, curves, tables.

Written from run directories alone (``config.toml`` and ``metrics.jsonl``), so it can be made again, elsewhere, later.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config import Config
from trainer.errors import TrainerError
from trainer.plot import (
    DEFINITIONS,
    LAST,
    MISMATCH,
    Column,
    Run,
    Value,
    groups,
    last,
    plot_runs,
    points,
    read_runs,
    seeds,
    spread,
)

FIRST = 5  # steps that a first value is the mean of
POSITION = "mismatch/position/"


@dataclass(frozen=True, slots=True)
class Said:
    """What the runs do not know of themselves: a title, ``facts`` by name (machine, versions, date), paragraphs, and
    the commands that made them."""

    title: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def write_report(directory: Path, output: Path, said: Said | None = None) -> list[Path]:
    """``output.png``, ``.html`` and ``.md`` of all runs below ``directory``; returns the paths.

    TrainerError if there is none. ``gpu.csv`` beside the runs (utilisation in percent, MiB, once a second) is averaged.
    """
    found = sorted(p.parent for p in directory.glob("*/metrics.jsonl") if p.parent.name != "smoke")
    paths = [p for p in found if (p / "metrics.jsonl").stat().st_size]
    if not paths:
        raise TrainerError("holds no run with a step", path=str(directory), remedy="run the experiment first")
    written = plot_runs(paths, output)
    page = output.with_name(output.name + ".md")
    lines = _page(read_runs(paths), busy(directory / "gpu.csv"), output.name, said or Said())
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*written, page]


def busy(path: Path) -> float | None:
    """Mean utilisation in 0 .. 1 of what ``nvidia-smi -l 1`` wrote; None without a file."""
    if not path.exists():
        return None
    shares = [int(line.split(",")[0]) for line in path.read_text().splitlines() if line.split(",")[0].strip().isdigit()]
    return statistics.fmean(shares) / 100 if shares else None


def _page(runs: Sequence[Run], share: float | None, image: str, said: Said) -> list[str]:
    config, arms = runs[0].config, groups(runs)
    lines = [f"# {said.title or f'GRPO on {config.task.data}'}", "", *_facts(runs, said.facts), ""]
    for note in said.notes:
        lines += [note, ""]
    lines += [
        f"![Curves]({image}.png)", "", "Numbers are means over seeds ± standard deviation.", "",
        "## What is learned", "", *_table(arms, _learned(runs)), "",
        "The pass rate is the share of responses with a reward of 1 or more. Sampled: what a step learns from, at "
        f"temperature {config.rollout.temperature:g}. {_evaluation(config).capitalize()}: of one evaluation on "
        f"{config.eval.items} items.", "",
        "## The difference between rollout and trainer", "", DEFINITIONS, "",
        *_table(arms, [*((c.title, c) for c in MISMATCH), ("share of tokens that differ", _different)]), "",
        "Of all steps; max is a run's largest.", "",
    ]  # fmt: skip
    if len(places := _positions(runs)) > 1:
        means = [(p, Column(p, POSITION + p, statistics.fmean)) for p in places]
        lines += ["Mean |Δ| by position in the response:", "", *_table(arms, means), ""]
    lines += ["## Time", "", *_table(arms, _times()), "", "Means of all steps; an update's tokens include padding.", ""]
    if share is not None:
        lines += [
            f"All runs shared one card. From their start to their end, some kernel ran {share:.0%} of the time "
            "(nvidia-smi, once a second).", "",
        ]  # fmt: skip
    lines += ["## Runs", "", "| run | steps | trainer's program | rollout's program |", "|---|---|---|---|"]
    lines += [
        f"| {r.name} | {len(r.records)} | {_digest(r, 'graph/digest')} | {_digest(r, 'rollout/digest')} |" for r in runs
    ]
    lines += ["", "Programs are named by the first digits of their digests."]
    if said.commands:
        lines += ["", "## Commands", "", "```sh", *said.commands, "```"]
    return lines


def _facts(runs: Sequence[Run], more: Mapping[str, str]) -> list[str]:
    """What was run, as a table: ``more``, and what the configurations say."""
    c = runs[0].config
    steps = sorted({len(r.records) for r in runs})
    params = ", ".join(f"{key} {value}" for key, value in c.task.params.items())
    facts = {
        **more,
        "task": f"`{c.task.data}`" + (f" ({params})" if params else ""),
        "a step": f"{c.rollout.groups} prompts × {c.rollout.samples} responses of at most {c.rollout.max_tokens} "
        f"tokens, sampled at temperature {c.rollout.temperature:g}; AdamW, learning rate {c.optimizer.lr:g}",
        "runs": f"{len(runs)}, of {' or '.join(map(str, steps))} steps; seeds "
        + ", ".join(map(str, sorted({r.config.run.seed for r in runs}))),
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]


def _evaluation(config: Config) -> str:
    """How evaluations sample, in words."""
    t = config.eval.temperature
    return f"at temperature {t:g}" if t else "greedy (temperature 0)"


def _learned(runs: Sequence[Run]) -> list[tuple[str, Value]]:
    """Pass rates of the samples, and of the first and the last evaluation that all runs have."""
    columns: list[tuple[str, Value]] = [
        (f"sampled pass rate, first {FIRST} steps", Column("", "reward/pass_rate", _first)),
        (f"last {LAST} steps", Column("", "reward/pass_rate", last)),
    ]
    shared = set.intersection(*({step for step, _ in points(r, "eval/pass_rate")} for r in runs))
    word = _evaluation(runs[0].config).partition(" (")[0]
    for step in sorted({min(shared), max(shared)} if shared else ()):
        columns.append((f"{word} pass rate after {step + 1} steps", _evaluated(step)))
    return [*columns, (f"response length, last {LAST} steps", Column("", "response/length", last))]


def _first(values: Sequence[float]) -> float:
    return statistics.fmean(values[:FIRST])


def _evaluated(step: int) -> Value:
    return lambda run: dict(points(run, "eval/pass_rate")).get(step)


def _different(run: Run) -> float | None:
    """The share of all tokens whose log-probabilities differ at all."""
    tokens = sum(n for _, n in points(run, "mismatch/tokens"))
    return sum(n for _, n in points(run, "mismatch/tokens_different")) / tokens if tokens else None


def _times() -> list[tuple[str, Value]]:
    titles = {
        "time/step": "s / step", "time/rollout": "rollout, s", "time/update": "update, s", "time/sync": "sync, s",
        "speed/rollout": "rollout, tokens/s", "speed/update": "update, tokens/s",
    }  # fmt: skip
    return [(title, Column(title, key, statistics.fmean)) for key, title in titles.items()]


def _positions(runs: Sequence[Run]) -> list[str]:
    """Positions that the runs' own records tell apart, in order."""
    names = {key.removeprefix(POSITION) for x in runs for r in x.records for key in r if key.startswith(POSITION)}
    return sorted(names, key=lambda name: float(name.rstrip("+").split("-")[0]))


def _table(arms: Sequence[tuple[str, Sequence[Run]]], columns: Sequence[tuple[str, Value]]) -> list[str]:
    titles = ["arm", "seeds", *(title.replace("|", "\\|") for title, _ in columns)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for label, members in arms:
        cells = [seeds(members), *(spread(members, value) for _, value in columns)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _digest(run: Run, key: str) -> str:
    digest = run.records[-1].get(key)
    return f"`{digest[:16]}`" if digest else "–"
