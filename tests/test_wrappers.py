"""Compiled models inside torch's wrappers: torch.compile runs their program as it is, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

import precgraph
from tests.families import causal_lm, plain_module

IDS = torch.arange(1, 9)[None]


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
