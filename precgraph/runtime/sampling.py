"""Sampling parameters, and the draw of one token a request from a batch of logits.

What a request draws depends on its logits, its parameters and its own random numbers, not on the batch: probabilities
become integers whose running sums are exact in any order, on any device, and every other operation is along a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precgraph.errors import InputError, NonFiniteError
from precgraph.runtime.logprobs import logprobs_from_logits

MIN_TEMPERATURE = 1e-5
MAX_SEED = 2**63 - 1
_ONE = 2.0**52  # probability 1 as an integer: sums of a distribution stay exact in int64 and in float64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    ``max_tokens``: at most so many new tokens. ``temperature`` divides the fp32 logits; 0 takes the likeliest token
    (the lowest id among equals) and ignores ``top_k`` and ``top_p``; its log-probabilities are those of temperature 1.
    ``top_k`` (0: all) keeps the k likeliest tokens, then ``top_p`` the smallest set of likeliest ones that holds at
    least that share of what top_k kept; among equals the lower id comes first. A token of ``stop_token_ids`` ends the
    request and is its last token; nothing else does, so pass the tokenizer's end token. ``seed`` fixes the request's
    draws; without one, it is drawn from torch's global generator. InputError for a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer from 1")
        _require(
            _is_number(self.temperature) and (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf),
            "temperature", self.temperature, f"0 (greedy) or finite and at least {MIN_TEMPERATURE}",
        )  # fmt: skip
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer from 0 (0 keeps all tokens)")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            self.seed,
            "None or 0 to 2**63 - 1",
        )
        stops = self.stop_token_ids
        ids = isinstance(stops, Sequence) and not isinstance(stops, str) and all(_is_int(t) and t >= 0 for t in stops)
        _require(ids, "stop_token_ids", stops, "a sequence of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(stops))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True)
class Sampled:
    """``ids [N]``; ``logprobs [N]`` fp32 after temperature, over the full vocabulary; ``kept_mass [N]`` float64: the
    share of that distribution that ``top_k`` and ``top_p`` left to draw from, 1 where they did not apply.
    """

    ids: Tensor
    logprobs: Tensor
    kept_mass: Tensor


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Sampled:
    """Draw a token from each row of ``logits [N, V]`` fp32 at the quantile ``uniforms[i]`` in [0, 1).

    NonFiniteError if a row holds NaN or +infinity, or if its temperature makes one.
    """
    temperature = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=logits.device)
    scaled = logits / temperature[:, None]
    if not bool(torch.isfinite(scaled.amax(-1)).all()):
        raise NonFiniteError(
            "logits hold NaN or infinity after temperature",
            remedy="compile(..., checked=True) names the node that makes them",
        )
    ids = scaled.argmax(-1)
    kept = torch.ones(len(params), dtype=torch.float64, device=logits.device)
    quantiles = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    whole = [i for i, p in enumerate(params) if not p.greedy and not p.truncated]
    if whole:
        ids[whole] = _draw(_weights(_rows(scaled, whole)).cumsum(-1), quantiles[whole])
    cut = [i for i, p in enumerate(params) if p.truncated]
    if cut:
        ids[cut], kept[cut] = _draw_truncated(_rows(scaled, cut), [params[i] for i in cut], quantiles[cut])
    return Sampled(ids, logprobs_from_logits(logits, ids, temperature), kept)


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    return x if len(rows) == x.shape[0] else x[rows]


def _weights(scaled: Tensor) -> Tensor:
    """Softmax in fp32 as integers, exact down to probabilities of 2^-28."""
    return torch.softmax(scaled, -1).double().mul_(_ONE).round_().long()


def _draw(sums: Tensor, quantiles: Tensor, totals: Tensor | None = None) -> Tensor:
    """The first column whose running sum exceeds ``quantile * total``; a column of weight 0 is never the first."""
    totals = sums[:, -1] if totals is None else totals
    target = (quantiles * totals.double()).floor().long()
    return torch.searchsorted(sums, target[:, None], right=True).squeeze(1)


def _draw_truncated(scaled: Tensor, params: Sequence[SamplingParams], quantiles: Tensor) -> tuple[Tensor, Tensor]:
    """Draw among the likeliest tokens; also the share of the distribution that they hold."""
    width = scaled.shape[1]
    order = scaled.sort(dim=-1, descending=True, stable=True).indices
    weights = _weights(scaled).gather(-1, order)
    sums = weights.cumsum(-1)
    count = torch.tensor([min(p.top_k or width, width) for p in params], device=scaled.device)[:, None]
    share = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scaled.device)[:, None]
    # A token stays while those before it hold less than the share; with a share of 1 that is all of any weight.
    wanted = share * sums.gather(-1, count - 1).double()
    count = torch.minimum(count, ((sums - weights).double() < wanted).sum(-1, keepdim=True))
    held = sums.gather(-1, count - 1).squeeze(1)
    drawn = _draw(sums, quantiles, held)
    return order.gather(-1, drawn[:, None]).squeeze(1), held.double() / sums[:, -1].double()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise InputError(f"SamplingParams.{name} must be {rule}, not {value!r}")
