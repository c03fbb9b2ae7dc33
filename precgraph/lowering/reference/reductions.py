"""Sums whose order is part of their definition, so that any backend can give the same bits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

PIECE = 512


def ordered_sum(x: Tensor) -> Tensor:
    """Sum of fp32 ``x [..., n]`` over the last dimension, kept: the rule ``pieces512``.

    The row is cut into pieces of 512, or of the next power of two if it is shorter, the last one filled with zeros.
    The pieces are added elementwise in order; then the halves of the result are added until one number is left.
    """
    width = x.shape[-1]
    piece = min(PIECE, 1 << (width - 1).bit_length())
    pieces = F.pad(x, (0, -width % piece)).unflatten(-1, (-1, piece))
    total: Tensor = pieces[..., 0, :]
    for i in range(1, pieces.shape[-2]):
        total = total + pieces[..., i, :]
    while total.shape[-1] > 1:
        low, high = total.chunk(2, dim=-1)
        total = low + high
    return total
