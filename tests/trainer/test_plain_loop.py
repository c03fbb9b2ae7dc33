"""The loop of one's own in examples/: it needs no trainer, learns, and is exact."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("plain_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short_and_uses_only_precgraph() -> None:
    source = PATH.read_text()
    assert len(source.splitlines()) < 150
    imported = {
        (n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0]
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Import | ast.ImportFrom)
    }
    assert imported == {"__future__", "argparse", "collections", "torch", "transformers", "precgraph"}


def test_it_learns_without_a_mismatch() -> None:
    loop = load()
    prompts = [[1, 5, 9], [2, 6]]
    history = loop.train(loop.tiny_model(), prompts, loop.even_tokens, steps=8, lr=2e-3, max_tokens=8)
    rewards = [reward for reward, _ in history]
    assert all(mismatch == 0.0 for _, mismatch in history)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_its_advantages_are_zero_without_spread() -> None:
    loop = load()
    assert torch.equal(loop.advantages(torch.ones(1, 4)), torch.zeros(4))
