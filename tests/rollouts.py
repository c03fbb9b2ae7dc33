"""What the tests of rollouts share: compiled pairs, prompts, and scoring by the trainer in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import precgraph
from precgraph.runtime.engine import Completion
from precgraph.runtime.sampling import SamplingParams
from tests.families import VOCABULARY, causal_lm


@cache
def pair(name: str) -> tuple[Any, Any]:
    """Trainer and rollout of a family, on one store; read only."""
    return compiled_pair(name)


def compiled_pair(name: str, **changes: Any) -> tuple[Any, Any]:
    actor = precgraph.compile(causal_lm(name, **changes), mode="train")
    return actor, precgraph.compile(actor, mode="infer")


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def mixed_params(count: int, max_tokens: int = 8) -> list[SamplingParams]:
    """Temperatures 0.7 and 1, plain, cut and greedy, each with a seed of its own."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.7}, {}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 20}, {"top_k": 50, "top_p": 0.9},
        {"temperature": 0.0},
    ]  # fmt: skip
    return [SamplingParams(max_tokens=max_tokens, seed=100 + i, **kinds[i % len(kinds)]) for i in range(count)]


def outputs(completions: Sequence[Completion]) -> list[Any]:
    """All that must not depend on how the requests were run."""
    return [(c.prompt_token_ids, c.token_ids, c.logprobs, c.kept_mass, c.finish_reason) for c in completions]


def rescore(actor: Any, completions: Sequence[Completion], layout: str, temperature: float) -> list[Tensor]:
    """The trainer's log-probabilities of the sampled tokens."""
    rows = [torch.tensor(c.prompt_token_ids + c.token_ids) for c in completions]
    with torch.no_grad():
        if layout == "packed":
            bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
            packed = torch.cat(rows)[None]
            flat = precgraph.token_logprobs(actor, packed, temperature=temperature, cu_seq_lens=bounds)[0]
            parts = [flat[a : b - 1] for a, b in pairwise(bounds)]
        else:
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for i, r in enumerate(rows):
                where = slice(width - len(r), width) if layout == "left" else slice(0, len(r))
                ids[i, where], mask[i, where] = r, 1
            scores = precgraph.token_logprobs(actor, ids, mask, temperature=temperature)
            parts = [
                scores[i][width - len(r) :] if layout == "left" else scores[i][: len(r) - 1] for i, r in enumerate(rows)
            ]
    return [p[-len(c.token_ids) :] for p, c in zip(parts, completions, strict=True)]


def worst_difference(
    actor: Any, completions: Sequence[Completion], params: Sequence[SamplingParams], layout: str
) -> float:
    """max |log p_rollout - log p_trainer| over the tokens of all completions."""
    worst = 0.0
    for temperature in {p.temperature for p in params}:
        mine = [c for c, p in zip(completions, params, strict=True) if p.temperature == temperature]
        for c, scores in zip(mine, rescore(actor, mine, layout, temperature or 1.0), strict=True):
            assert len(scores) == len(c.logprobs) > 0
            worst = max(worst, float((scores - torch.tensor(c.logprobs)).abs().max()))
    return worst
