"""How a mismatch Δ = trainer − rollout of log-probabilities is told, by the trainer and by ``precgraph audit``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

POSITIONS = (0, 1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384)
"""Borders of buckets of a token's position in its response; the last bucket is open."""

ENTROPIES = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Borders of buckets of the trainer's entropy at a token, in nats; the last bucket is open."""

LARGEST = math.log(1e30)
"""The Δ that exp is cut off at."""

ERROR_LIMIT = 1.05
"""Of mean exp |Δ|: above it NeMo-RL's documentation calls a run suspect."""


def bucket_names(borders: Sequence[float]) -> list[str]:
    """``0-1``, ..., ``16384+``."""
    text = [f"{b:g}" for b in borders]
    return [*(f"{a}-{b}" for a, b in itertools.pairwise(text)), f"{text[-1]}+"]
