"""Predicates on attention nodes that the GPU backends share."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from precgraph import ops
from precgraph.graph import precision

WIDTHS = (64, 80, 96, 128, 256)  # the head widths whose exactness is tested


def spec_of(node: fx.Node) -> ops.AttentionSpec:
    """The last argument of attention and of its backward."""
    spec = node.args[-1]
    assert isinstance(spec, ops.AttentionSpec)
    return spec


def is_flash(node: fx.Node, widths: Collection[int]) -> bool:
    """Whether attention, or its backward, has the numerics of FlashAttention, no softcap and heads of these widths."""
    p, spec = precision(node), spec_of(node)
    numerics = p.compute == "float32" and p.rule("probabilities") == "bfloat16"
    return numerics and spec.head_dim in widths and not spec.softcap
