"""Where the time on the card goes: kernels by name, and how long the card waits between them."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

Span = tuple[float, float, str]  # begin and end in microseconds, name
ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
RECORDED = ("user_annotation",)  # what ``record_function`` encloses, on the host


def tell(title: str, spans: Iterable[Span], calls: int, count: int = 28) -> None:
    """Print a table of ``calls`` calls in a row: milliseconds a call, busy and waiting, and by kernel."""
    ordered = sorted(spans)
    if not ordered:
        print(f"{title}: nothing ran on the card")
        return
    spent: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in ordered:
        spent[name].append((end - begin) / 1000)
    busy = covered(ordered) / 1000  # kernels of two streams may overlap
    wall = (max(end for _, end, _ in ordered) - ordered[0][0]) / 1000
    print(
        f"{title}: {wall / calls:.2f} ms a call, kernels {busy / calls:.2f}, between them {(wall - busy) / calls:.2f}"
    )
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:count]:
        share = 100 * sum(times) / wall
        print(f"  {sum(times) / calls:8.3f} ms {share:5.1f} % {len(times) / calls:7.1f} x {name[:110]}")


def covered(spans: Iterable[Span]) -> float:
    """Microseconds that the spans cover together."""
    total, reached = 0.0, -math.inf
    for begin, end, _ in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def of_trace(path: Path, *kinds: Collection[str]) -> list[list[Span]]:
    """The events of each kind, a set of categories, in a trace of torch's profiler (``.json``, ``.json.gz``)."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [[(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in kind] for kind in kinds]
