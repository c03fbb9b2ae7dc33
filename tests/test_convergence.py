"""Unified FP8 training reaches the loss of BF16 training.

The task has entropy that no model can remove, so that the final loss is far from zero and 2 % of it means something.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import precgraph
from precgraph import Recipe
from tests.families import causal_lm

SYMBOLS, LENGTH, ROWS, STEPS = 24, 40, 6, 200
FOLLOW, BACK = 0.6, 0.25  # probability of the successor of the last symbol, and of the symbol before it


def batch(generator: torch.Generator) -> Tensor:
    """Sequences ``[ROWS, LENGTH]``: the next symbol follows the last, repeats the one before, or is any."""
    ids = torch.randint(0, SYMBOLS, (ROWS, LENGTH), generator=generator)
    draw = torch.rand(ROWS, LENGTH, generator=generator)
    for t in range(2, LENGTH):
        follow, back = draw[:, t] < FOLLOW, draw[:, t] < FOLLOW + BACK
        ids[:, t] = torch.where(follow, (5 * ids[:, t - 1] + 1) % SYMBOLS, torch.where(back, ids[:, t - 2], ids[:, t]))
    return ids


def entropy() -> float:
    """Of the next symbol given the last two, in nats; where both rules name one symbol it is a little less."""
    rest = (1 - FOLLOW - BACK) / SYMBOLS
    named = (FOLLOW + rest, BACK + rest)
    return -sum(p * math.log(p) for p in named) - (SYMBOLS - 2) * rest * math.log(rest)


def train(recipe: Recipe) -> list[float]:
    """Losses of 200 AdamW steps from one initialisation on one stream of data."""
    model = causal_lm(
        "llama", vocab_size=SYMBOLS, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2,
    ).train()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    actor = precgraph.compile(model, "train", recipe)
    before = {n: p.detach().clone() for n, p in actor.named_parameters()}
    optimizer = torch.optim.AdamW(actor.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 20, (STEPS - step) / 100 + 0.02)
        ids = batch(generator)
        loss = actor(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = [float((p.detach() != before[n]).float().mean()) for n, p in actor.named_parameters() if p.dim() > 1]
    assert min(moved) > 0.9, "updates must not round to nothing in bf16"
    return losses


@pytest.mark.slow
def test_fp8_reaches_the_loss_of_bf16() -> None:
    fp8, bf16 = train(Recipe.jet_rl()), train(Recipe.bf16())
    last_fp8, last_bf16 = (sum(run[-20:]) / 20 for run in (fp8, bf16))
    assert fp8 != bf16
    assert bf16[0] > 3.0 and last_bf16 < 1.25 * entropy(), (bf16[0], last_bf16, entropy())
    assert abs(last_fp8 - last_bf16) < 0.02 * last_bf16, (last_fp8, last_bf16)
