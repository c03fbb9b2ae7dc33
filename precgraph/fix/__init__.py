"""Edits that make two sides agree, where that is safe and there is only one way; else what to do by hand.

The training side says what is meant: the rollout's file follows it. Only if the rollout has no file of its own does the
training side's follow the rollout.
"""

from precgraph.fix.graph import plan_graph
from precgraph.fix.plan import Change, Plan
from precgraph.fix.weights import plan_weights

__all__ = ["Change", "Plan", "plan_graph", "plan_weights"]
