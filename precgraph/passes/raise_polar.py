"""Rules of ``raise`` for RoPE in complex numbers (DeepSeek-V2): two neighbours in a head are one number."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from precgraph import ops
from precgraph.graph import tensor
from precgraph.passes.rewrite import Rule, closed, emit, is_call

aten = torch.ops.aten
_SAME = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)


def polar_table(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``polar(1, position · inv_freq) * scaling``."""
    if not is_call(node, aten.mul.Tensor) or not is_call(node.args[0], aten.polar.default):
        return None
    polar, scaling = node.args
    ones, angles = polar.args
    if not isinstance(scaling, float | int) or not is_call(ones, aten.ones_like.default) or ones.args != (angles,):
        return None
    if not is_call(angles, aten.mul.Tensor) or tensor(angles).dtype != "float32":
        return None
    positions, frequencies = (_below(a, *_SAME, aten.unsqueeze.default) for a in angles.args)
    if positions.op != "placeholder" or frequencies.op != "get_attr" or tensor(frequencies).dtype != "float32":
        return None
    return emit(graph, ops.polar_table, (positions, frequencies, float(scaling)), like=node, role="table")


def polar_rope(graph: fx.Graph, node: Any) -> fx.Node | None:
    """``as_real(as_complex(x32) * table)``, rounded to x's dtype."""
    if not is_call(node, aten.type_as.default, aten.to.dtype) or not is_call(node.args[0], aten.flatten.using_ints):
        return None
    flat = node.args[0]
    real = flat.args[0]
    if not is_call(real, aten.view_as_real.default) or flat.args[1:] not in ((3,), (3, 4), (3, -1)):
        return None
    product = real.args[0]
    if not is_call(product, aten.mul.Tensor) or not is_call(product.args[0], aten.view_as_complex.default):
        return None
    number, turned = product.args
    pairs = number.args[0]
    wide: Any = pairs.args[0] if is_call(pairs, aten.reshape.default, aten.view.default) else None
    if not is_call(wide, aten.to.dtype) or wide.args[1] != torch.float32:
        return None
    x, table = wide.args[0], _table(turned)
    if table is None or tensor(node) != tensor(x) or not _neighbours(x, pairs):
        return None
    inner = [flat, real, product, number, pairs, wide]
    return emit(graph, ops.polar_rope, (x, table), like=node) if closed(node, inner) else None


def _table(turned: Any) -> fx.Node | None:
    """The table that was given a dimension for the heads."""
    widened = _below(turned, *_SAME)
    if not is_call(widened, aten.unsqueeze.default) or widened.args[1] != 1:
        return None
    table = _below(widened.args[0], *_SAME)
    return table if is_call(table, ops.polar_table) else None


def _neighbours(x: fx.Node, pairs: fx.Node) -> bool:
    """Whether ``pairs`` is ``x [B, H, T, D]`` as ``[B, H, T, D / 2, 2]``."""
    before, after = tensor(x).shape, tensor(pairs).shape
    width = before[-1]
    return len(before) == 4 and isinstance(width, int) and after == (*before[:-1], width // 2, 2)


def _below(node: Any, *moves: Any) -> Any:
    """What is left below ``moves``, casts that cast nothing and new dimensions (integers become fp32)."""
    while is_call(node, *moves) and (tensor(node).dtype in ("float32", tensor(node.args[0]).dtype)):
        node = node.args[0]
    return node


POLAR_RULES: tuple[Rule, ...] = (polar_table, polar_rope)
