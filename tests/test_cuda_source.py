"""The constants of the CUDA source are the launcher's, and a machine without a Hopper GPU is told what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from precgraph.lowering.cuda import driver, wgrad

SOURCE = Path(wgrad.__file__).with_name("wgrad.cu").read_text()


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)", SOURCE)
    assert found, name
    return int(found[1])


def test_the_launcher_agrees_with_the_source() -> None:
    rows, columns, group, stages, warpgroups = map(constant, ("TILE_N", "TILE_K", "GROUP", "STAGES", "WARPGROUPS"))
    assert (rows, columns) == wgrad.TILE and group == driver.SWIZZLE
    assert (4 * warpgroups + 4) * 32 == wgrad.THREADS
    tiles, scales, barriers = (rows + columns) * group, (rows + columns) * 4, 2 * 8
    assert stages * (tiles + scales + barriers) + 4 * warpgroups * 16 * 128 + 1024 == wgrad.SHARED_MEMORY


def test_a_cpu_is_told_what_it_needs() -> None:
    problem = wgrad.unavailable(torch.device("cpu"))
    assert problem is not None and "compute capability 9.0" in problem.message and problem.remedy
