"""The further families, each by the properties that matter most: Hugging Face's bits in BF16, no mismatch in FP8."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import precgraph
from precgraph import Recipe
from precgraph.attention import IMPLEMENTATION
from precgraph.graph import op_name, precision
from precgraph.runtime.engine import Engine
from precgraph.verify import check_inclusion
from tests.families import MORE_LMS, causal_lm
from tests.rollouts import mixed_params, prompts_of, worst_difference
from tests.test_bf16_equals_huggingface import assert_same_gradients, step, tokens
from tests.test_parity import Pair, assert_equal, make_pair, padded, scored, sequences, valid

LENGTHS = (1, 7, 129)


@cache
def fp8(family: str) -> Pair:
    """Trainer and rollout of a family, what the rollout says of sequences; read only."""
    return make_pair(causal_lm(family), sequences(LENGTHS))


@pytest.mark.parametrize("family", MORE_LMS)
def test_bf16_equals_huggingface(family: str) -> None:
    model = causal_lm(family).train()
    oracle: Any = copy.deepcopy(model)
    oracle.set_attn_implementation(IMPLEMENTATION)
    compiled = precgraph.compile(model, "train", Recipe.bf16())
    for rows, width in ((1, 1), (1, 17), (1, 130), (3, 9)):
        logits, loss, gradients = step(compiled, tokens(rows, width))
        wanted_logits, wanted_loss, wanted = step(oracle, tokens(rows, width))
        assert torch.equal(logits, wanted_logits), width
        assert torch.equal(loss, wanted_loss) or width == 1
        assert_same_gradients(gradients, wanted)
    assert all(g is not None and g.abs().max() > 0 for g in gradients.values())


@pytest.mark.parametrize("family", MORE_LMS)
def test_training_equals_rollout(family: str) -> None:
    """Alone, under gradients; padded on both sides; packed."""
    pair = fp8(family)
    for row, logits in zip(pair.sequences, pair.logits, strict=True):
        out = pair.actor(row[None]).logits
        assert out.requires_grad and torch.equal(out[0].detach(), logits)
    with torch.no_grad():
        for side in ("left", "right"):
            ids, mask = padded(pair.sequences, side, extra=3)
            assert_equal(valid(pair.actor(ids, attention_mask=mask).logits, mask), pair.logits)
            assert_equal(scored(precgraph.token_logprobs(pair.actor, ids, mask), mask), pair.logprobs)
        rows = pair.sequences[::-1]
        positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
        for model in (pair.actor, pair.rollout):
            out = model(torch.cat(rows)[None], position_ids=positions).logits[0]
            assert_equal(out.split([len(r) for r in rows]), pair.logits[::-1])


@pytest.mark.parametrize("family", MORE_LMS)
def test_engine_equals_the_trainer(family: str) -> None:
    pair = fp8(family)
    prompts, params = prompts_of(LENGTHS), mixed_params(len(LENGTHS), max_tokens=6)
    done = Engine(pair.rollout, max_batch_tokens=50).generate(prompts, params)
    for layout in ("left", "packed"):
        assert worst_difference(pair.actor, done, params, layout) == 0.0


@pytest.mark.parametrize("family", MORE_LMS)
def test_rollout_is_part_of_training(family: str) -> None:
    pair = fp8(family)
    assert check_inclusion(pair.actor.precgraph.graph, pair.rollout.precgraph.graph).ok
    assert pair.actor.precgraph.graph.digest() == pair.rollout.precgraph.graph.digest()


@pytest.mark.parametrize("family", MORE_LMS)
def test_every_forward_kernel_is_row_invariant(family: str) -> None:
    graph = fp8(family).rollout.precgraph.graph
    assert not [n.name for n in graph if "kernel" in n.meta and n.meta["kernel"].row_invariant is not True]
    kept = {op_name(n) for n in graph if op_name(n).startswith("aten.") and precision(n).module}
    assert kept <= ELEMENTWISE | MOVES


ELEMENTWISE = {"aten.mul.Tensor", "aten.to.dtype"}  # Gemma's scale of embeddings
MOVES = {"aten.slice.Tensor", "aten.chunk.default", "aten.transpose.int", "aten.view.default", "aten.reshape.default"}
