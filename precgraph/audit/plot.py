"""The plot of an audit."""

from __future__ import annotations

from pathlib import Path

from precgraph.audit.judge import Audit
from precgraph.errors import InputError


def plot(found: Audit, path: str | Path, limit: int = 20000) -> None:
    """Four panels as an image: |Δ| by position, by entropy, of the sequences that differ most, and both values of each
    token.

    InputError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a plot needs matplotlib, which is not installed", remedy="pip install matplotlib") from None
    figure = Figure(figsize=(10, 7), layout="constrained")
    (a, b), (c, d) = figure.subplots(2, 2)
    by = {name: {key: mean for key, (mean, _) in table.items()} for name, table in found.buckets.items()}
    worst = {name: mean for name, mean, _ in found.sequences if mean}
    for axes, title, means in (
        (a, "by position", by.get("position", {})),
        (b, "by entropy", by.get("entropy", {})),
        (c, "worst sequences" if worst else "no sequence differs", worst),
    ):
        axes.bar(list(means), list(means.values()))
        axes.set(title=title, ylabel="mean |Δ|")
        axes.set_ylim(bottom=0)
    c.set_xticks(range(len(worst)), list(worst), rotation=60, ha="right", rotation_mode="anchor")
    rollout, trainer = (values[:: max(1, len(values) // limit)] for values in found.points)
    d.plot(rollout, trainer, ".", markersize=2)
    d.axline((0, 0), slope=1, linewidth=0.8)
    d.set(title="log-probabilities", xlabel="rollout", ylabel="trainer")
    try:
        figure.savefig(path)
    except ValueError as error:  # an ending that is no format
        raise InputError(f"cannot be drawn: {error}", path=str(path), remedy="name a .png, .svg or .pdf") from None
