"""Sampling parameters, and the draw of one token a request from a batch of logits.

What a request draws depends on its logits, its parameters and its own random numbers, not on the batch: probabilities
become integers whose running sums are exact in any order, and every other operation is along a row. On a GPU a draw
from the whole vocabulary is a kernel of its own (:mod:`precgraph.lowering.triton.draw`), and nothing waits for it.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from precgraph.errors import InputError, NonFiniteError
from precgraph.runtime.limits import MAX_TEMPERATURE, MIN_TEMPERATURE
from precgraph.runtime.logprobs import chosen_logprobs

MAX_SEED = 2**63 - 1
MAX_N = 16384  # vLLM's limit, too
_AT_ONCE = 128  # rows: sorting and summing a vocabulary takes some 50 bytes a logit
_ONE = 2.0**52  # probability 1 as an integer: sums of a distribution stay exact in int64 and in float64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    ``max_tokens``: at most so many new tokens. ``temperature`` divides the fp32 logits; 0 takes the likeliest token
    (the lowest id among equals) and ignores ``top_k`` and ``top_p``; its log-probabilities are those of temperature 1.
    ``top_k`` (0: all) keeps the k likeliest tokens, then ``top_p`` the smallest set of likeliest ones that holds at
    least that share of what top_k kept; among equals the lower id comes first. A token of ``stop_token_ids`` ends the
    request and is its last token; nothing else does, so pass the tokenizer's end token. ``seed`` fixes the request's
    draws, so equal prompts with one seed get equal samples: give each its own, or none, which draws one from torch's
    global generator. ``n`` samples of a prompt are ``n`` requests, at most 16384: one with ``seed`` and others with
    seeds made of it; greedy requests require n = 1. ``stop``, vLLM's stop strings, is refused: requests are token ids,
    and no text. InputError for that, and for a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    n: int = 1
    stop: InitVar[Any] = None

    def __post_init__(self, stop: Any) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer from 1")
        _require(
            _is_number(self.temperature)
            and (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE),
            "temperature", self.temperature,
            f"0 (greedy), or at least {MIN_TEMPERATURE} and at most {MAX_TEMPERATURE}",
        )  # fmt: skip
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        kept = _is_int(self.top_k) and 0 <= self.top_k < 2**63  # on a device it has 64 bits
        _require(kept, "top_k", self.top_k, "an integer from 0 (0 keeps all tokens) to 2**63 - 1")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            self.seed,
            "None or 0 to 2**63 - 1",
        )
        _require(_is_int(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"an integer from 1 to {MAX_N}")
        _require(self.n == 1 or not self.greedy, "n", self.n, "1 with temperature 0, whose samples would be equal")
        if stop:
            raise InputError(
                f"SamplingParams.stop = {stop!r}: text is not looked at",
                remedy="end requests at stop_token_ids, or cut what you decode; precgraph.vllm.LLM takes "
                "vllm.SamplingParams(stop=...) too, where the checkpoint has a tokenizer",
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

    def each(self) -> list[Self]:
        """The parameters of each of the ``n`` samples, as of a request of its own."""
        if self.n == 1:
            return [self]
        return [replace(self, n=1, seed=seed) for seed in seeds_of(self.seed, self.n)]


def seeds_of(seed: int | None, n: int) -> list[int | None]:
    """Those of a prompt's ``n`` samples: ``seed`` and others made of it, or none.

    Not ``seed + j``, as vLLM has it: whoever counts seeds by steps would get most samples of the step before again.
    """
    return [seed if j == 0 or seed is None else random.Random(f"{seed}/{j}").getrandbits(63) for j in range(n)]


@dataclass(frozen=True, slots=True)
class Sampled:
    """``ids [N]``; ``logprobs [N]`` fp32 after temperature, over the full vocabulary; ``kept_mass [N]`` float64: the
    share of that distribution that ``top_k`` and ``top_p`` left to draw from, 1 where they did not apply. Read only:
    steps share what does not change.
    """

    ids: Tensor
    logprobs: Tensor
    kept_mass: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Parameters of a batch on its device, made once for as long as the batch stays the same.

    ``temperature [N]`` fp32, 1 for greedy rows; ``all_kept [N]`` float64, the kept mass where all is kept. ``greedy``,
    ``whole`` and ``cut`` are the indices of rows that take the likeliest token, draw from all, and draw from some; None
    for none of the batch, for which ``count [C, 1]`` and ``share [C, 1]`` are top-k (0: all) and top-p.
    """

    temperature: Tensor
    all_kept: Tensor
    greedy: Tensor | None
    whole: Tensor | None
    cut: Tensor | None
    count: Tensor
    share: Tensor

    @property
    def all_whole(self) -> bool:
        """Whether every row draws from all tokens."""
        return self.whole is not None and self.greedy is None and self.cut is None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        kinds = ["cut" if p.truncated else "greedy" if p.greedy else "whole" for p in params]
        rows = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in ("greedy", "whole", "cut")}
        index = {kind: on_device(found, torch.int64, device) if found else None for kind, found in rows.items()}
        cut = [params[i] for i in rows["cut"]]
        return cls(
            on_device([p.temperature or 1.0 for p in params], torch.float32, device),
            torch.ones(len(params), dtype=torch.float64, device=device), **index,
            count=on_device([p.top_k for p in cut], torch.int64, device)[:, None],
            share=on_device([p.top_p for p in cut], torch.float64, device)[:, None],
        )  # fmt: skip


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of host values; on a GPU copied from pinned memory, so that the host does not wait for the device."""
    if device.type != "cuda" or not values:
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def sample(logits: Tensor, params: Sequence[SamplingParams] | Rows, uniforms: Sequence[float]) -> Sampled:
    """Draw a token from each row of ``logits [N, V]``, read as fp32, at the quantile ``uniforms[i]`` in [0, 1).

    A row that holds NaN or +infinity, or whose temperature makes one, is a NonFiniteError on a CPU. A GPU is not waited
    for: there such a row's log-probability is NaN, and the caller looks at it (:func:`require_finite`).
    """
    rows = params if isinstance(params, Rows) else Rows.of(params, logits.device)
    quantiles = on_device(uniforms, torch.float64, logits.device)
    sums, logits = None, logits.float()
    if logits.device.type == "cuda":
        from precgraph.lowering.triton.logprobs import block_sums

        sums = block_sums(logits, rows.temperature)  # one read, for the draws and for the log-probabilities
    else:
        require_finite((logits / rows.temperature[:, None]).amax(-1))
    if rows.all_whole:  # most steps: nothing to gather or to scatter
        ids = _draw_whole(logits, rows.temperature, quantiles, sums)
        return Sampled(ids, chosen_logprobs(logits, ids, rows.temperature, sums), rows.all_kept)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    kept = rows.all_kept.clone()
    if rows.greedy is not None:
        ids.index_copy_(0, rows.greedy, _rows(logits, rows.greedy).argmax(-1))
    if rows.whole is not None:
        x, temperature, at = (_rows(t, rows.whole) for t in (logits, rows.temperature, quantiles))
        own = None if sums is None else sums.index_select(1, rows.whole)
        ids.index_copy_(0, rows.whole, _draw_whole(x, temperature, at, own))
    if rows.cut is not None:
        parts = (t.split(_AT_ONCE) for t in (rows.cut, rows.count, rows.share))
        for cut, count, share in zip(*parts, strict=True):
            x, temperature, at = (_rows(t, cut) for t in (logits, rows.temperature, quantiles))
            drawn, held = _draw_truncated(x / temperature[:, None], count, share, at)
            ids.index_copy_(0, cut, drawn)
            kept.index_copy_(0, cut, held)
    return Sampled(ids, chosen_logprobs(logits, ids, rows.temperature, sums), kept)


def warn_of_shared_seeds(requests: Iterable[tuple[Sequence[int], Any]], stacklevel: int) -> None:
    """One UserWarning where requests that draw alike share a seed: their samples are correlated, and equal for equal
    prompts, so that a group of them has no advantages. Temperatures or cuts that differ are compared on purpose.

    ``requests`` are prompts, each with its params, ours or vLLM's; ``stacklevel`` is that of :func:`warnings.warn` in
    the caller.
    """
    first: dict[tuple[Any, ...], tuple[int, Sequence[int]]] = {}
    for i, (ids, p) in enumerate(requests):
        if p.seed is None or p.temperature < MIN_TEMPERATURE:  # draws of its own, or none
            continue
        other, prompt = first.setdefault((p.seed, p.temperature, p.top_p, p.top_k), (i, ids))
        if other != i:
            alike = "equal" if tuple(prompt) == tuple(ids) else "correlated"
            warnings.warn(
                f"samples {other} and {i} share the seed {p.seed}, and with it their random numbers: they are "
                f"{alike}; pass n for several samples of a prompt, leave the seed out (torch.manual_seed fixes the "
                "draws of all requests without one), or pass a list of params with a seed each",
                stacklevel=stacklevel + 1,
            )
            return


def ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """``[N]`` int64: how many logits of a row of ``logits [N, V]`` are at least that of its token ``ids [N]``."""
    if logits.device.type == "cuda":
        from precgraph.lowering.triton.draw import ranks as on_gpu

        return on_gpu(logits, ids)
    return (logits >= logits.gather(1, ids[:, None])).sum(1)


def require_finite(values: Tensor) -> None:
    """NonFiniteError if a log-probability, or the largest logit of a row, is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteError(
            "logits hold NaN or infinity after temperature",
            remedy="compile(..., checked=True) names the node that makes them",
        )


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x if rows.shape[0] == x.shape[0] else x.index_select(0, rows)


def _weights(scaled: Tensor) -> Tensor:
    """Softmax in fp32 as integers, exact down to probabilities of 2^-28."""
    return torch.softmax(scaled, -1).double().mul_(_ONE).round_().long()


def _draw_whole(logits: Tensor, temperature: Tensor, quantiles: Tensor, sums: Tensor | None) -> Tensor:
    """On a GPU by the sums of the logits' blocks; on a CPU there are none."""
    if sums is not None:
        from precgraph.lowering.triton.draw import draw

        return draw(logits, temperature, quantiles, sums)
    return _draw(_weights(logits / temperature[:, None]).cumsum(-1), quantiles)


def _draw(sums: Tensor, quantiles: Tensor, totals: Tensor | None = None) -> Tensor:
    """The first column whose running sum exceeds ``quantile * total``; a column of weight 0 is never the first."""
    totals = sums[:, -1] if totals is None else totals
    target = (quantiles * totals.double()).floor().long()
    return torch.searchsorted(sums, target[:, None], right=True).squeeze(1)


def _draw_truncated(scaled: Tensor, top_k: Tensor, share: Tensor, quantiles: Tensor) -> tuple[Tensor, Tensor]:
    """Draw among the likeliest tokens; also the share of the distribution that they hold."""
    width = scaled.shape[1]
    order = scaled.sort(dim=-1, descending=True, stable=True).indices
    weights = _weights(scaled).gather(-1, order)
    sums = weights.cumsum(-1)
    count = torch.where(top_k == 0, width, top_k.clamp(max=width))
    # A token stays while those before it hold less than the share; with a share of 1 that is all of any weight.
    wanted = share * sums.gather(-1, count - 1).double()
    count = torch.minimum(count, ((sums - weights).double() < wanted).sum(-1, keepdim=True)).clamp(min=1)
    held = sums.gather(-1, count - 1).squeeze(1)
    drawn = _draw(sums, quantiles, held).clamp(max=width - 1)  # as the count, of NaN alone: some token of the row
    return order.gather(-1, drawn[:, None]).squeeze(1), held.double() / sums[:, -1].double()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise InputError(f"SamplingParams.{name} must be {rule}, not {value!r}")
