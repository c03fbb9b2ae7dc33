"""What a run warns of: trends over its steps, and what is a defect in any one of them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    def __post_init__(self) -> None:
        self.values: deque[float] = deque(maxlen=self.window)

    def add(self, value: float) -> bool:
        """Take a step's value; True if the window now shows a trend."""
        self.values.append(value)
        if len(self.values) < self.window or min(self.values) <= 0:
            return False
        y = [math.log(v) for v in self.values]
        n, middle, level = len(y), (len(y) - 1) / 2, sum(y) / len(y)
        sxx = sum((i - middle) ** 2 for i in range(n))
        sxy = sum((i - middle) * (v - level) for i, v in enumerate(y))
        syy = sum((v - level) ** 2 for v in y)
        slope = sxy / sxx
        return slope * (n - 1) > math.log(self.growth) and sxy**2 > self.fit * sxx * syy

    def told(self, name: str) -> str:
        """The alarm, as a sentence."""
        return f"{name} grows steadily: {self.values[0]:.2e} to {self.values[-1]:.2e} in {self.window} steps"


@dataclass
class Level:
    """Whether a quantity stays above ``limit``: judged on the median of the window, never on one value.

    ``text`` is the alarm, with places for the ``median`` and for words that say of what it is (``lasting``).
    """

    limit: float
    text: str
    window: int = 5

    def __post_init__(self) -> None:
        self.values: deque[float] = deque(maxlen=self.window)

    def add(self, value: float) -> bool:
        """Take a step's value; True if the window is above the limit now."""
        self.values.append(value)
        return len(self.values) == self.window and statistics.median(self.values) > self.limit

    def told(self, name: str) -> str:
        """The alarm, as a sentence."""
        lasting = f"in the median of {self.window} steps"
        return self.text.format(median=statistics.median(self.values), lasting=lasting)


class Alarms:
    """Warnings of a run. ``exact`` says that any mismatch at all is a defect, as is a token that cannot be compared:
    those are told at once, all else when it lasts."""

    def __init__(self, table: MetricsTable, *, exact: bool) -> None:
        self.exact = exact
        self._windows: dict[str, Trend | Level] = {
            "mismatch/mean": Trend(),
            "mismatch/k3": Trend(),
            "mismatch/mult_prob_error": Level(
                ERROR_LIMIT, f"mean exp|Δ| is {{median:.3f}} {{lasting}}, above {ERROR_LIMIT}"
            ),
            "correction/masked": Level(
                table.masked_alarm, "the correction masks {median:.1%} of the sequences {lasting}: it hides a mismatch"
            ),
            "reward/zero_spread": Level(
                math.nextafter(1.0, 0.0),  # it is all groups or no alarm
                "the rewards within each group are equal {lasting}, so nothing is learned: look at the samples, the "
                "reward and how hard the questions are",
            ),
        }

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
        for name, window in self._windows.items():
            if name in record and averaged(record, name) and window.add(float(record[name] or 0.0)):
                out.append(window.told(name))
        return out

    def state(self) -> dict[str, list[float]]:
        """What the windows remember, for a checkpoint."""
        return {name: list(window.values) for name, window in self._windows.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Inverse of :meth:`state`."""
        for name, values in state.items():
            if name in self._windows:
                self._windows[name].values.extend(values)
