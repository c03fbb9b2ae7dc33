"""Curves of several runs on one page, and a table of their final values.

Runs that differ only in ``run.name``, ``run.dir`` and ``run.seed`` are seeds of one experiment: one colour, and one row
with their spread.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from trainer.config import Config, load_run
from trainer.errors import TrainerError
from trainer.metrics import Record, read_records

PANELS = (
    ("reward/mean", "reward"), ("response/length", "response length (tokens)"), ("entropy/mean", "entropy (nats)"),
    ("mismatch/max", "max |Δ log-prob|"), ("mismatch/mean", "mean |Δ log-prob|"), ("kl/reference", "KL to reference"),
    ("eval/pass_rate", "pass rate of held-out items"), ("mismatch/k3", "k3 estimate of the mismatch's KL"),
    ("update/grad_norm", "norm of the gradient"),
)  # fmt: skip
FINAL = (
    ("reward/mean", "reward"), ("reward/pass_rate", "pass"), ("response/length", "length"), ("entropy/mean", "entropy"),
    ("mismatch/mean", "mean |Δ|"), ("mismatch/max", "max |Δ|"), ("mismatch/k3", "k3"), ("time/step", "s / step"),
)  # fmt: skip
# What differs between seeds of one experiment: names, the share of a card, and where things are to be had from.
_NO_PART = ("run.name", "run.dir", "run.seed", "model.memory", "model.origin", "task.origin")
LAST = 10  # steps that a final value is the mean of
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#e69f00", "#6f4e9c", "#555555")


@dataclass(frozen=True)
class Run:
    """A run's directory, configuration and records."""

    path: Path
    config: Config
    records: list[Record]

    @property
    def experiment(self) -> str:
        """What seeds of one experiment have in common."""
        data = self.config.to_dict()
        for path in _NO_PART:
            table, key = path.split(".")
            del data[table][key]
        return json.dumps(data, sort_keys=True)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs with at least one record. TrainerError for one that has none, and for one that is named twice, which would
    be a seed of its own."""
    for path in paths:
        if [p.resolve() for p in paths].count(path.resolve()) > 1:
            raise TrainerError("is named twice", path=str(path), remedy="name each run once")
    runs = [Run(p, load_run(p), read_records(p)) for p in paths]
    for run in runs:
        if not run.records:
            raise TrainerError("has no step yet", path=str(run.path), remedy="let it finish a step")
    return runs


def groups(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Seeds together, with a label each: the arm, and the first run's name where arms do not tell them apart."""
    by: dict[str, list[Run]] = {}
    for run in runs:
        by.setdefault(run.experiment, []).append(run)
    arms = [members[0].config.precision.arm for members in by.values()]
    return [
        (arm if arms.count(arm) == 1 else f"{arm} ({members[0].config.run.name})", members)
        for arm, members in zip(arms, by.values(), strict=True)
    ]


# ------------------------------------------------------------------------------------------- curves


def plot_runs(paths: Sequence[Path], output: Path) -> list[Path]:
    """Write ``output.png`` and ``output.html``; returns both paths."""
    runs = read_runs(paths)
    image = _figure(groups(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    png, page = output.with_name(output.name + ".png"), output.with_name(output.name + ".html")
    png.write_bytes(image)
    page.write_text(_page(runs, image), encoding="utf-8")
    return [png, page]


def _figure(experiments: Sequence[tuple[str, Sequence[Run]]]) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainerError("plots need matplotlib", remedy="pip install 'precgraph[trainer]'") from error
    figure = Figure(figsize=(13, 10), layout="constrained", dpi=110)
    axes = figure.subplots(3, 3).flatten()
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        for number, (label, members) in enumerate(experiments):
            colour = COLOURS[number % len(COLOURS)]
            for i, run in enumerate(members):
                _curve(axis, run.records, key, colour, label if i == 0 else None)
        _finish(axis, key, title, [r for _, members in experiments for run in members for r in run.records])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curve(axis: Any, records: Sequence[Record], key: str, colour: str, label: str | None) -> None:
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    smooth = key == "reward/mean" and len(values) > 10
    axis.plot(steps, values, color=colour, linewidth=1.0 if smooth else 1.4, alpha=0.3 if smooth else 0.9,
              label=None if smooth else label)  # fmt: skip
    if smooth:
        axis.plot(steps, moving_mean(values, 9), color=colour, linewidth=2.0, label=label)


def _finish(axis: Any, key: str, title: str, records: Sequence[Record]) -> None:
    values = [float(r[key]) for r in records if r.get(key) is not None and math.isfinite(r[key])]
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    if key.startswith("mismatch/"):
        if any(v > 0 for v in values):
            # Exactly 0 has a place of its own below the logarithmic part.
            axis.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(v for v in values if v > 0))))
            axis.set_ylim(bottom=0)
        else:
            axis.set_ylim(-0.05, 1)
            axis.text(0.5, 0.5, f"0.0 at all {len(values)} steps", ha="center", transform=axis.transAxes)
    elif values and min(values) >= 0:
        axis.set_ylim(0, max(values) * 1.05 or 1.0)


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Centred mean over at most ``width`` values, fewer at the ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


# -------------------------------------------------------------------------------------------- table


def final_value(run: Run, key: str) -> float | None:
    """Mean of the last ten steps that have the value."""
    values = [float(r[key]) for r in run.records if r.get(key) is not None][-LAST:]
    return statistics.fmean(values) if values else None


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and one row an experiment: label, seeds, steps, and each final value as mean ± standard deviation."""
    out = [["arm", "seeds", "steps", *(title for _, title in FINAL)]]
    for label, members in groups(runs):
        cells = [label, str(len(members)), str(min(len(r.records) for r in members))]
        for key, _ in FINAL:
            values = [v for v in (final_value(run, key) for run in members) if v is not None]
            cells.append(spread(values))
        out.append(cells)
    return out


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation of seeds, in few digits."""
    if not values:
        return "–"
    centre = statistics.fmean(values)
    return _short(centre) if len(values) < 2 else f"{_short(centre)} ± {_short(statistics.stdev(values))}"


def _short(value: float) -> str:
    if value == 0:
        return "0.0"
    return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.3g}"


def summary(paths: Sequence[Path], width: int) -> RenderableType:
    """The final values for a terminal of ``width`` columns: a row an experiment, or, where that does not fit, a column
    each, or a table each."""
    header, *body = rows(read_runs(paths))
    whole = [_table([header, *body]), _table(zip(header, *body, strict=True))]
    apart = [_table(zip(header, row, strict=True)) for row in body]
    fitting = next(([table] for table in whole if _width(table) <= width), apart)
    return Group(f"means of the last {LAST} steps", *fitting)


def _table(lines: Iterable[Sequence[str]]) -> Table:
    """The first line is the heading; the first column names the others."""
    header, *body = lines
    table = Table()
    for i, name in enumerate(header):
        table.add_column(escape(name), justify="left" if i == 0 else "right", overflow="fold")
    for line in body:
        table.add_row(*map(escape, line))
    return table


def _width(table: Table) -> int:
    """What it takes with no cell folded."""
    room = Console(width=10_000)
    return Measurement.get(room, room.options, table).maximum


def _page(runs: Sequence[Run], image: bytes) -> str:
    """One HTML file that needs no other."""
    header, *body = rows(runs)
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in body)
    heads = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    names = "".join(
        f"<li><code>{html.escape(str(r.path))}</code>: {r.config.precision.arm}, seed {r.config.run.seed}, "
        f"{html.escape(r.config.task.data)}, {len(r.records)} steps</li>"
        for r in runs
    )
    picture = base64.b64encode(image).decode()
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>precgraph-train</title>
<style>body{{font:14px sans-serif;margin:2em auto;max-width:80em;color:#222}}img{{max-width:100%}}
table{{border-collapse:collapse}}td,th{{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:right}}
td:first-child,th:first-child{{text-align:left}}</style>
<h1>Runs</h1><ul>{names}</ul>
<img alt="Curves of the runs" src="data:image/png;base64,{picture}">
<h2>Means of the last {LAST} steps</h2><table><tr>{heads}</tr>{cells}</table></html>
"""
