"""Which of the kernels at hand serves a node: the first in the backend's order whose library is there."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from precgraph import ops
from precgraph.errors import LoweringError
from precgraph.lowering import flash_attention, flash_attention_4, reference, registry
from precgraph.passes.pipeline import build
from precgraph.passes.rewrite import is_call
from precgraph.recipe import Recipe
from precgraph.trace import trace
from tests.families import meta_lm

CUDA = torch.device("cuda")
FIRST, SECOND, LAST = (m.__name__.rpartition(".")[2] for m in (flash_attention_4, flash_attention, reference))


@pytest.mark.parametrize(
    ("width", "missing", "served"),
    [(128, (), FIRST), (64, (), FIRST), (80, (), SECOND), (128, (FIRST,), SECOND), (128, (FIRST, SECOND), None)],
)
def test_backward_of_attention(
    width: int, missing: tuple[str, ...], served: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = build(trace(meta_lm("qwen3")).graph, "train", Recipe.jet_rl())
    node = next(n for n in graph if is_call(n, ops.attention_backward))
    spec = node.args[-1]
    assert isinstance(spec, ops.AttentionSpec)
    node.args = (*node.args[:-1], replace(spec, head_dim=width))
    order = [name for name in registry.BACKENDS["deep_gemm"] if name in (FIRST, SECOND, LAST)]
    monkeypatch.setattr(
        registry, "unavailable", lambda name, device: LoweringError(f"no {name}") if name in missing else None
    )
    if served is None:
        with pytest.raises(LoweringError, match=f"no {FIRST}"):
            registry.select(node, order, CUDA)
    else:
        assert registry.select(node, order, CUDA).backend == served


def test_the_extra_installs_the_release_that_is_served() -> None:
    """Which is the remedy where another is there, or none."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["flash-attn-4"]
    assert requirement.startswith(f"flash-attn-4[cu13]=={flash_attention_4.VERSION};")
