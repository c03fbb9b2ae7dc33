"""The CUDA sources compile for Hopper on a machine without a GPU, and their constants are the launcher's."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from precgraph.lowering.cuda import driver, wgrad

SOURCE = Path(wgrad.__file__).with_name("wgrad.cu").read_text()


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)", SOURCE)
    assert found, name
    return int(found[1])


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda-bindings, which a CUDA build brings")
def test_it_compiles() -> None:
    assert driver.compile_source("wgrad.cu").startswith(b"\x7fELF")


def test_the_launcher_agrees_with_the_source() -> None:
    rows, columns, group, stages, warps = map(constant, ("TILE_N", "TILE_K", "GROUP", "STAGES", "WARPS"))
    assert (rows, columns) == wgrad._TILE and rows == warps // 4 * 64
    assert (warps + 4) * 32 == wgrad._THREADS
    tiles, scales, barriers = (rows + columns) * group, (rows + columns) * 4, 2 * 8
    assert stages * (tiles + scales + barriers) + warps * 16 * 128 == wgrad._SHARED_MEMORY
