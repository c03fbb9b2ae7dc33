"""Compiled models inside torch's wrappers: torch.compile runs their program as it is, others are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import precgraph
from precgraph import InputError, StaleWeightsError, UnsupportedModelError
from tests.families import causal_lm, plain_module

IDS = torch.arange(1, 9)[None]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def graphs_of(function: Any, *args: Any) -> tuple[Any, int]:
    """What ``function`` returns under torch.compile, and how many graphs Dynamo took from it."""
    taken: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        taken.append(graph)
        return graph.forward

    torch.compiler.reset()
    return torch.compile(function, backend=backend)(*args), len(taken)


def test_torch_compile_takes_nothing_from_a_program() -> None:
    actor = precgraph.compile(causal_lm("qwen2"))
    out, count = graphs_of(actor, IDS)
    assert count == 0 and torch.equal(out.logits, actor(IDS).logits)
    out.logits.float().sum().backward()
    assert actor.lm_head.weight.grad is not None
    scores, count = graphs_of(lambda ids: precgraph.token_logprobs(actor, ids), IDS)
    assert count == 0 and torch.equal(scores, precgraph.token_logprobs(actor, IDS))
    module, example = plain_module("mlp")
    plain = precgraph.compile(module, example_inputs=example)
    out, count = graphs_of(plain, *example)
    assert count == 0 and torch.equal(out, plain(*example))


def test_what_surrounds_a_program_is_still_compiled() -> None:
    actor = precgraph.compile(causal_lm("qwen2"))
    loss, count = graphs_of(lambda ids: actor(ids).logits.float().square().mean(), IDS)
    assert count == 1 and torch.equal(loss, actor(IDS).logits.float().square().mean())


def test_a_distributed_wrapper_is_named(mesh: DeviceMesh) -> None:
    actor = precgraph.compile(causal_lm("qwen2"))
    wrapped = DistributedDataParallel(actor)
    with pytest.raises(InputError, match=r"not the DistributedDataParallel around it; pass its \.module.*average"):
        precgraph.token_logprobs(wrapped, IDS)
    assert torch.equal(precgraph.token_logprobs(wrapped.module, IDS), precgraph.token_logprobs(actor, IDS))
    with pytest.raises(InputError, match=r"call precgraph\.compile\(model\) first"):
        precgraph.token_logprobs(nn.DataParallel(causal_lm("qwen2")), IDS)


def test_fsdp_is_refused(mesh: DeviceMesh) -> None:
    actor = precgraph.compile(causal_lm("qwen2"))
    fully_shard(actor, mesh=mesh)
    with pytest.raises(
        UnsupportedModelError, match=r"embed_tokens\.weight: .*DTensor: FSDP is not supported.*all weights"
    ):
        precgraph.token_logprobs(actor, IDS)
    with pytest.raises(StaleWeightsError, match="FSDP, which replaces parameters, is not supported"):
        actor(IDS)  # FSDP shows whole parameters meanwhile, which are not those that were compiled
