"""What a run warns of: trends over its steps, and what is a defect in any one of them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from precgraph.mismatch import ERROR_LIMIT
from trainer.config import MetricsTable
from trainer.metrics import averaged, incomplete


@dataclass
class Trend:
    """Whether a positive quantity grows steadily: judged on the slope of its logarithm, never on one value.

    An alarm needs ``growth`` over the window along a straight line (R² above ``fit``); noise around a constant has no
    line. Values of exactly 0 are no trend.
    """

    window: int = 12
    growth: float = 2.0
    fit: float = 0.7
    values: deque[float] = field(default_factory=deque)

    def add(self, value: float) -> bool:
        """Take a step's value; True if the window now shows a trend."""
        self.values.append(value)
        if len(self.values) > self.window:
            self.values.popleft()
        if len(self.values) < self.window or min(self.values) <= 0:
            return False
        y = [math.log(v) for v in self.values]
        n, middle, level = len(y), (len(y) - 1) / 2, sum(y) / len(y)
        sxx = sum((i - middle) ** 2 for i in range(n))
        sxy = sum((i - middle) * (v - level) for i, v in enumerate(y))
        syy = sum((v - level) ** 2 for v in y)
        slope = sxy / sxx
        return slope * (n - 1) > math.log(self.growth) and sxy**2 > self.fit * sxx * syy


@dataclass
class Level:
    """Whether a quantity stays above ``limit``: judged on the median of the window, never on one value."""

    limit: float
    window: int = 5
    values: deque[float] = field(default_factory=deque)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def add(self, value: float) -> bool:
        """Take a step's value; True if the window is above the limit now."""
        self.values.append(value)
        if len(self.values) > self.window:
            self.values.popleft()
        return len(self.values) == self.window and self.median > self.limit


class Alarms:
    """Warnings of a run. ``exact`` says that any mismatch at all is a defect, as is a token that cannot be compared:
    those are told at once, all else when it lasts."""

    TRENDS = ("mismatch/mean", "mismatch/k3")

    def __init__(self, table: MetricsTable, *, exact: bool) -> None:
        self.table, self.exact = table, exact
        self.trends = {name: Trend() for name in self.TRENDS}
        self.error, self.masked = Level(ERROR_LIMIT), Level(table.masked_alarm)
        self.alike = Level(math.nextafter(1.0, 0.0))  # every group of the median step
        self._windows: dict[str, Trend | Level] = {
            **self.trends, "mismatch/mult_prob_error": self.error, "correction/masked": self.masked,
            "reward/zero_spread": self.alike,
        }  # fmt: skip

    def check(self, record: Mapping[str, Any]) -> list[str]:
        """The alarms of a step, as sentences."""
        out = []
        if self.exact and record.get("mismatch/tokens_different"):
            out.append(
                f"{record['mismatch/tokens_different']} tokens differ between two programs of one digest, first at "
                f"position {record['mismatch/first_position']} of a response, worst in sample "
                f"{record['mismatch/worst_sequence']}"
            )
        if record.get("mismatch/missing"):
            out.append(incomplete(record))
        raised = {
            name for name, window in self._windows.items()
            if name in record and averaged(record, name) and window.add(float(record[name] or 0.0))
        }  # fmt: skip
        for name, trend in self.trends.items():
            if name in raised:
                out.append(
                    f"{name} grows steadily: {trend.values[0]:.2e} to {trend.values[-1]:.2e} in {trend.window} steps"
                )
        lasting = f"in the median of {Level.window} steps"
        if "mismatch/mult_prob_error" in raised:
            out.append(f"mean exp|Δ| is {self.error.median:.3f} {lasting}, above {ERROR_LIMIT}")
        if "correction/masked" in raised:
            out.append(f"the correction masks {self.masked.median:.1%} of the sequences {lasting}: it hides a mismatch")
        if "reward/zero_spread" in raised:
            out.append(
                f"the rewards within each group are equal {lasting}, so nothing is learned: look at the samples, the "
                "reward and how hard the questions are"
            )
        return out

    def state(self) -> dict[str, list[float]]:
        """What the windows remember, for a checkpoint."""
        return {name: list(window.values) for name, window in self._windows.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Inverse of :meth:`state`."""
        for name, values in state.items():
            if name in self._windows:
                self._windows[name].values = deque(values)
