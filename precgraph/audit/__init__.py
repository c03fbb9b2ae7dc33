"""``precgraph audit``: what a log of rollout and trainer log-probabilities says about the loop that wrote it."""

from precgraph.audit.judge import Audit, Verdict, audit
from precgraph.audit.plot import plot

__all__ = ["Audit", "Verdict", "audit", "plot"]
