"""The plot of the results file: ``python -m benchmarks.common.plot [results.csv] [results.svg]``.

Of each benchmark on a GPU the newest run: times of layers by variant, and what share of the copy's bandwidth each
kernel reaches.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.common.results import FILE

Row = dict[str, str]
SHARE = ", of copy bandwidth"
TARGET = 0.85


def newest(rows: Iterable[Row], benchmark: str) -> list[Row]:
    """The rows of a benchmark's last run on a GPU; of a number measured twice, the later."""
    found = [r for r in rows if r["benchmark"] == benchmark and " x NVIDIA" in r["machine"]]
    commit = found[-1]["commit"] if found else ""
    return list({(r["shape"], r["metric"]): r for r in found if r["commit"] == commit}.values())


def layers(axes: Axes, rows: list[Row], metric: str) -> None:
    """Milliseconds of each variant, batch by batch, the shortest bar on top."""
    found = [(r["shape"], float(r["value"])) for r in rows if r["metric"] == metric]
    found.sort(key=lambda row: (row[0].rpartition(", ")[2], row[1]), reverse=True)
    colours = ["tab:green" if name.startswith("precgraph") else "tab:gray" for name, _ in found]
    axes.barh([name for name, _ in found], [value for _, value in found], color=colours)
    axes.set_xlabel("ms")
    axes.set_title(f"Qwen3-8B layers: {metric}")


def kernels(axes: Axes, rows: list[Row]) -> None:
    shares = [
        (f"{r['metric'].removesuffix(SHARE)} {r['shape']}", float(r["value"])) for r in rows if SHARE in r["metric"]
    ]
    axes.barh([name for name, _ in reversed(shares)], [value for _, value in reversed(shares)], color="tab:green")
    axes.axvline(TARGET, color="black", linewidth=0.8)
    axes.set_xlabel("share of the copy's bandwidth; the line is the target")
    axes.set_title("Kernels")


def main(source: Path = FILE, target: Path | None = None) -> None:
    with source.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    timed, measured = newest(rows, "layers"), newest(rows, "kernels")
    if not timed and not measured:
        sys.exit(f"{source} has no rows of a GPU: run make bench-gpu on one")
    bars = [max(1, len(timed) // 3)] * 2 + [max(1, len(measured) // 2)]  # a variant has three numbers, a kernel two
    figure, axes = plt.subplots(
        3, 1, figsize=(10, 3 + 0.25 * sum(bars)), height_ratios=[n + 3 for n in bars], layout="constrained"
    )
    layers(axes[0], timed, "forward")
    layers(axes[1], timed, "forward + backward")
    kernels(axes[2], measured)
    row = (timed or measured)[0]
    figure.suptitle(f"{row['machine']}; {row['versions']}; commit {row['commit']}", fontsize=9)
    target = target or source.with_suffix(".svg")
    figure.savefig(target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
