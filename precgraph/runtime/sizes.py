"""How many rows a kernel is called with: on a GPU only a few different counts.

DeepGEMM compiles a kernel, for seconds, whenever a count of rows asks for a tile that it has not met. A rollout's
batches and a trainer's micro-batches have any number of rows, so they are filled up. Rows do not depend on each other,
so what is added changes no bit of the rest.
"""

from __future__ import annotations

import torch

FILLED = {"cuda"}  # kinds of devices on which calls are filled up


def filled(count: int, device: torch.device) -> int:
    """``count``, or on a GPU the next size of a few: at most half as many again."""
    return next_size(count) if device.type in FILLED else count


def next_size(count: int) -> int:
    """The smallest power of two, or three quarters of one, that is at least ``count``."""
    if count < 2:
        return count
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
