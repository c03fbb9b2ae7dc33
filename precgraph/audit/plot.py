"""The plot of an audit."""

from __future__ import annotations

from pathlib import Path

from precgraph.audit.judge import Audit
from precgraph.errors import InputError


def plot(found: Audit, path: str | Path, limit: int = 20000) -> None:
    """Four panels as an image: Δ by position, by entropy, by sequence, and both values of each token.

    InputError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a plot needs matplotlib, which is not installed", remedy="pip install matplotlib") from None
    figure = Figure(figsize=(10, 7), layout="constrained")
    (a, b), (c, d) = figure.subplots(2, 2)
    for axes, name in ((a, "position"), (b, "entropy")):
        table = found.buckets.get(name, {})
        axes.bar(list(table), [mean for mean, _ in table.values()])
        axes.set(title=f"by {name}", ylabel="mean |Δ|")
    c.bar([name for name, *_ in found.sequences], [mean for _, mean, _ in found.sequences])
    c.set(title="worst sequences", ylabel="mean |Δ|")
    c.tick_params(axis="x", rotation=60)
    rollout, trainer = (values[:: max(1, len(values) // limit)] for values in found.points)
    d.plot(rollout, trainer, ".", markersize=2)
    d.axline((0, 0), slope=1, linewidth=0.8)
    d.set(title="log-probabilities", xlabel="rollout", ylabel="trainer")
    try:
        figure.savefig(path)
    except ValueError as error:  # an ending that is no format
        raise InputError(f"cannot be drawn: {error}", path=str(path), remedy="name a .png, .svg or .pdf") from None
