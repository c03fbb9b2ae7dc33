"""Where the time on the card goes: kernels by name, and how long the card waits between them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Span = tuple[float, float, str]  # begin and end in microseconds, name
ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events


def tell(title: str, spans: Iterable[Span], calls: int, count: int = 28) -> None:
    """Print a table of ``calls`` calls in a row: milliseconds a call, busy and waiting, and by kernel."""
    ordered = sorted(spans)
    if not ordered:
        print(f"{title}: nothing ran on the card")
        return
    spent: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in ordered:
        spent[name].append((end - begin) / 1000)
    busy, last = 0.0, ordered[0][0]
    for begin, end, _ in ordered:  # kernels of two streams may overlap
        busy += max(0.0, end - max(begin, last)) / 1000
        last = max(last, end)
    wall = (last - ordered[0][0]) / 1000
    print(
        f"{title}: {wall / calls:.2f} ms a call, kernels {busy / calls:.2f}, between them {(wall - busy) / calls:.2f}"
    )
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:count]:
        share = 100 * sum(times) / wall
        print(f"  {sum(times) / calls:8.3f} ms {share:5.1f} % {len(times) / calls:7.1f} x {name[:110]}")


def of_trace(path: Path) -> list[Span]:
    """What ran on the card, from a trace of torch's profiler (``.json.gz``)."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in ON_CARD]
