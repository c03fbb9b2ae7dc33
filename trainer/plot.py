"""Curves of several runs on one page, and a table of what they came to.

Runs that differ only in their seeds and in keys that change no number are of one experiment: one colour, and one row
with the spread of its seeds. Runs of one seed, such as a fork and its origin, are not independent and count once.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from trainer.changes import history
from trainer.config import Config, load_run
from trainer.errors import TrainerError
from trainer.metrics import Record, averaged, read_records

PANELS = (
    ("reward/mean", "reward"), ("response/length", "response length (tokens)"), ("entropy/mean", "entropy (nats)"),
    ("mismatch/max", "max |Δ| (nats)"), ("mismatch/mean", "mean |Δ| (nats)"), ("kl/reference", "KL to reference"),
    ("eval/pass_rate", "pass rate in evaluations"), ("mismatch/k3", "k3 estimate of the mismatch's KL"),
    ("update/grad_norm", "norm of the gradient"),
)  # fmt: skip
LAST = 10  # steps that a final value is the mean of
Take = Callable[[Sequence[float]], float]
Value = Callable[["Run"], float | None]


def last(values: Sequence[float]) -> float:
    return statistics.fmean(values[-LAST:])


@dataclass(frozen=True, slots=True)
class Column:
    """A value of each run: ``take`` of what its records have under ``key``, None if that is nothing."""

    title: str
    key: str
    take: Take

    def __call__(self, run: Run) -> float | None:
        values = [value for _, value in points(run, self.key)]
        return self.take(values) if values else None


MISMATCH = (
    Column("mean |Δ|", "mismatch/mean", statistics.fmean),
    Column("max |Δ|", "mismatch/max", max),
    Column("k3", "mismatch/k3", statistics.fmean),
)
FINAL = (
    Column("reward", "reward/mean", last), Column("pass", "reward/pass_rate", last),
    Column("length", "response/length", last), Column("entropy", "entropy/mean", last), *MISMATCH,
    Column("s / step", "time/step", statistics.fmean),
)  # fmt: skip
WINDOWS = f"reward, pass, length, entropy: means of the last {LAST} steps; |Δ|, k3, s / step: of all steps"
DEFINITIONS = (
    "Δ is the trainer's log-probability of a sampled token less the rollout's, in nats, over the full vocabulary after "
    "temperature; k3 is the mean of exp(Δ) − 1 − Δ, an estimate of KL(rollout ‖ trainer)."
)
# What may differ between seeds of one experiment, and why. Not run.steps and run.eval_every, which decide what final
# values and evaluations are of; nor model.checkpointing and precision.checked, which cost time: s / step is compared.
_NO_PART = {
    "run.seed": "it is what seeds differ in",
    "run.name": "a label",
    "run.dir": "a place",
    "run.save_every": "saving draws nothing, and is no part of a step's time",
    "run.keep": "which files stay",
    "model.memory": "the share of a card",
    "model.origin": "read by messages alone",
    "task.origin": "read by messages alone",
    "precision.allow_mismatch": "it lets a pair run, and does not choose it",
    "metrics.asserts": "they stop a run, and change no step",
    "metrics.names": "the same figures once more",
    "metrics.masked_alarm": "read by an alarm alone",
    "metrics.tensorboard": "a copy of what is recorded",
    "metrics.wandb": "a copy of what is recorded",
    "metrics.samples": "how many texts a record shows",
    "metrics.log_tokens": "written after the step was measured; unlike metrics.threshold, which a figure counts from",
}
_PROGRAM = "graph/digest"  # of a record
SPARSE = 20  # so few values are drawn as points, too: a single one is no line
NAMED = 4  # keys in a figure's legend
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#e69f00", "#6f4e9c", "#555555")


@dataclass(frozen=True)
class Run:
    """A run's directory, configuration and records."""

    path: Path
    config: Config
    records: list[Record]

    @property
    def name(self) -> str:
        """That of its directory: a fork has its origin's ``run.name``."""
        return self.path.resolve().name

    @cached_property
    def settings(self) -> dict[str, str]:
        """What seeds of one experiment have in common, by ``table.key``, as JSON: of a key that a resumed run changed
        all values, and of its steps the digests of the programs that made them.
        """
        flat = {path: _json(value) for path, value in self.config.flat().items()}
        changed: set[str] = set()
        for step, changes in history(self.path):
            for key, (old, new) in changes.items():
                first = flat[key] if key in changed else _json(old)
                flat[key] = f"{first}, {_json(new)} from step {step}"
                changed.add(key)
        flat[_PROGRAM] = ", ".join(dict.fromkeys(str(r[_PROGRAM])[:16] for r in self.records if r.get(_PROGRAM)))
        return {path: value for path, value in flat.items() if path not in _NO_PART}


def points(run: Run, key: str) -> list[tuple[int, float]]:
    """Step and value of each record that has one. A run without a KL term has no KL, a step without a token no
    mismatch, though the records say 0."""
    if key == "kl/reference" and not run.config.algorithm.kl:
        return []
    return [(r["step"], float(r[key])) for r in run.records if r.get(key) is not None and averaged(r, key)]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs with at least one record. TrainerError for one that has none, and for one that is named twice, which would
    be a seed of its own."""
    for path in paths:
        if [p.resolve() for p in paths].count(path.resolve()) > 1:
            raise TrainerError("is named twice", path=str(path), remedy="name each run once")
    runs = [Run(p, load_run(p), read_records(p)) for p in paths]
    for run in runs:
        if not run.records:
            raise TrainerError("has no step yet", path=str(run.path), remedy="let it finish a step, or leave it out")
    return runs


def groups(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Seeds together, with a label each: the arm, and the first run's directory where arms do not tell them apart."""
    by: dict[str, list[Run]] = {}
    for run in runs:
        by.setdefault(_json(run.settings), []).append(run)
    arms = [members[0].config.precision.arm for members in by.values()]
    return [
        (arm if arms.count(arm) == 1 else f"{arm} ({members[0].name})", members)
        for arm, members in zip(arms, by.values(), strict=True)
    ]


def differing(experiments: Sequence[tuple[str, Sequence[Run]]]) -> list[list[str]]:
    """Header and one row a key that is not the same in all experiments, but for the arm, which their labels say: its
    value in each, as JSON. Programs that differ are told where nothing else does: another version, or another machine.
    """
    settings = [members[0].settings for _, members in experiments]
    keys = [key for key in settings[0] if any(s[key] != settings[0][key] for s in settings)]
    told = keys if keys == [_PROGRAM] else [key for key in keys if key not in ("precision.arm", _PROGRAM)]
    return [
        ["differs in", *(label for label, _ in experiments)],
        *([key, *(s[key] for s in settings)] for key in told),
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


# ------------------------------------------------------------------------------------------- curves


def targets(output: Path) -> list[Path]:
    """``output.png`` and ``output.html``, whichever of the suffixes ``output`` has."""
    output = output.with_suffix("") if output.suffix in (".png", ".html") else output
    return [output.with_name(output.name + suffix) for suffix in (".png", ".html")]


def plot_runs(paths: Sequence[Path], output: Path) -> list[Path]:
    """Write the ``targets`` of ``output``, in the place of what is there; returns both paths."""
    runs = read_runs(paths)
    image = _figure(groups(runs))
    png, page = targets(output)
    png.parent.mkdir(parents=True, exist_ok=True)
    png.write_bytes(image)
    page.write_text(_page(runs, image), encoding="utf-8")
    return [png, page]


def _figure(experiments: Sequence[tuple[str, Sequence[Run]]]) -> bytes:
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise TrainerError("plots need matplotlib", remedy="pip install 'precgraph[trainer]'") from error
    runs = [run for _, members in experiments for run in members]
    panels = [panel for panel in PANELS if any(points(run, panel[0]) for run in runs)]
    if not panels:
        raise TrainerError("holds nothing to draw", path=str(runs[0].path), remedy="name a run of precgraph-train")
    columns = min(3, len(panels))
    height = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(13, 10 / 3 * height), layout="constrained", dpi=110)
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (key, title) in zip(axes, panels, strict=False):
        for (_, members), colour in zip(experiments, itertools.cycle(COLOURS), strict=False):
            for run in members:
                _curve(axis, points(run, key), key, colour)
        _finish(axis, key, title, [value for run in runs for _, value in points(run, key)])
    lines = [Line2D([], [], color=c, label=label) for label, c in zip(_legend(experiments), itertools.cycle(COLOURS))]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _legend(experiments: Sequence[tuple[str, Sequence[Run]]]) -> list[str]:
    """Labels, each with what its experiment differs in from the others, a line a key, ``NAMED`` keys at most."""
    header, *body = differing(experiments)
    left = f"\nand {len(body) - NAMED} more" if len(body) > NAMED else ""
    return [
        "\n".join([label, *(shorten(f"{row[0]} {row[i]}", 40, placeholder="…") for row in body[:NAMED])]) + left
        for i, label in enumerate(header[1:], 1)
    ]


def _curve(axis: Any, values: Sequence[tuple[int, float]], key: str, colour: str) -> None:
    if not values:
        return
    steps, heights = zip(*values, strict=True)
    smooth = key == "reward/mean" and len(values) > 10
    marker = "o" if len(values) <= SPARSE else ""
    axis.plot(steps, heights, color=colour, marker=marker, markersize=3.5,
              linewidth=1.0 if smooth else 1.4, alpha=0.3 if smooth else 0.9)  # fmt: skip
    if smooth:
        axis.plot(steps, moving_mean(heights, 9), color=colour, linewidth=2.0)


def _finish(axis: Any, key: str, title: str, values: Sequence[float]) -> None:
    finite = [v for v in values if math.isfinite(v)]
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    if key.startswith("mismatch/"):
        if any(v > 0 for v in finite):
            # Exactly 0 has a place of its own below the logarithmic part.
            axis.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(v for v in finite if v > 0))))
            axis.yaxis.get_major_locator().set_params(numticks=9)
            axis.set_ylim(bottom=0)
        else:
            axis.set_ylim(-0.05, 1)
            axis.text(0.5, 0.5, f"0.0 at all {len(finite)} steps", ha="center", transform=axis.transAxes)
    elif finite and min(finite) >= 0:
        axis.set_ylim(0, max(finite) * 1.05 or 1.0)


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Centred mean over at most ``width`` values, fewer at the ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


# -------------------------------------------------------------------------------------------- table


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and one row an experiment: label, seeds, steps, and each final value as mean ± standard deviation."""
    out = [["arm", "seeds", "steps", *(column.title for column in FINAL)]]
    for label, members in groups(runs):
        lengths = sorted({len(r.records) for r in members})
        steps = "–".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
        out.append([label, seeds(members), steps, *(spread(members, column) for column in FINAL)])
    return out


def seeds(members: Sequence[Run]) -> str:
    """How many seeds there are, and runs where those are more."""
    count = len({run.config.run.seed for run in members})
    return str(count) if count == len(members) else f"{count} ({len(members)} runs)"


def spread(members: Sequence[Run], value: Value) -> str:
    """Mean ± standard deviation over seeds; a seed's value is the mean of its runs'."""
    by: dict[int, list[float]] = {}
    for run in members:
        if (found := value(run)) is not None:
            by.setdefault(run.config.run.seed, []).append(found)
    values = [statistics.fmean(each) for each in by.values()]
    if not values:
        return "–"
    centre = statistics.fmean(values)
    if len(values) < 2 or not any(values) or not math.isfinite(centre):
        return _short(centre, centre)
    deviation = statistics.stdev(values)
    return " ± ".join(_short(v, max(abs(centre), deviation)) for v in (centre, deviation))


def _short(value: float, scale: float) -> str:
    """``value`` with the places that three digits of ``scale`` have."""
    if scale == 0 or not math.isfinite(scale):
        return str(scale)
    if abs(scale) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(scale))))}f}"


def summary(paths: Sequence[Path], width: int) -> RenderableType:
    """The final values for a terminal of ``width`` columns, a row an experiment, and what experiments differ in, a
    column each; where that does not fit, columns and rows exchanged, or a table each."""
    runs = read_runs(paths)
    keys = differing(groups(runs))
    return Group(WINDOWS, *_fitting(rows(runs), width), *(_fitting(keys, width) if len(keys) > 1 else ()))


def _fitting(lines: Sequence[Sequence[str]], width: int) -> list[Table]:
    header, *body = lines
    whole = [_table(lines), _table(zip(*lines, strict=True))]
    apart = [_table(zip(header, row, strict=True)) for row in body]
    return next(([table] for table in whole if _width(table) <= width), apart)


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
    keys = differing(groups(runs))
    differences = f"<h2>What they differ in</h2>{_html(keys)}" if len(keys) > 1 else ""
    names = "".join(
        f"<li><code>{html.escape(r.name)}</code>: {r.config.precision.arm}, seed {r.config.run.seed}, "
        f"{html.escape(r.config.task.data)}, {len(r.records)} steps</li>"
        for r in runs
    )
    picture = base64.b64encode(image).decode()
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>precgraph-train</title>
<style>body{{font:14px sans-serif;margin:2em auto;max-width:80em;color:#222}}img{{max-width:100%}}
table{{border-collapse:collapse}}td,th{{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:right}}
td:first-child,th:first-child{{text-align:left}}</style>
<h1>Runs</h1><ul>{names}</ul>{differences}
<img alt="Curves of the runs" src="data:image/png;base64,{picture}">
<h2>What they came to</h2>{_html(rows(runs))}
<p>{html.escape(WINDOWS)}; mean ± standard deviation over seeds, of which runs of one seed, such as a fork, are one.
{DEFINITIONS}</p></html>
"""


def _html(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is the heading."""
    kinds = itertools.chain(("th",), itertools.repeat("td"))
    cells = (
        "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in line)
        for line, kind in zip(lines, kinds, strict=False)
    )
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
