"""Sampling: what may be drawn, how often, and with what log-probability. Oracles in numpy float64."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from precgraph.errors import InputError, NonFiniteError
from precgraph.runtime.limits import MAX_TEMPERATURE, MIN_TEMPERATURE
from precgraph.runtime.logprobs import require_temperature
from precgraph.runtime.sampling import Sampled, SamplingParams, ranks, sample

PROBABILITIES = (0.6, 0.3, 0.1)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def random_logits(rows: int, width: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def sweep(logits: Tensor, params: SamplingParams, draws: int = 1000) -> Sampled:
    """The same row at evenly spaced quantiles: every token's share of the draws is its probability."""
    return sample(logits.expand(draws, -1), [params] * draws, [i / draws for i in range(draws)])


def softmax(logits: Tensor, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    x = logits.double().numpy() / temperature
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def support(logits: Tensor, params: SamplingParams) -> list[int]:
    """The ids that may be drawn, likeliest first, lower ids first among equals."""
    p = softmax(logits, params.temperature)
    order = sorted(range(len(p)), key=lambda i: (-float(logits[i]), i))[: params.top_k or None]
    whole = float(p[order].sum())
    kept: list[int] = []
    for token in order:
        if p[kept].sum() >= params.top_p * whole:
            break
        kept.append(token)
    return kept


# ------------------------------------------------------------------------------------------ support


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    drawn = sweep(logits_of(*PROBABILITIES), SamplingParams(top_p=0.85))
    assert set(drawn.ids.tolist()) == {0, 1}
    torch.testing.assert_close(drawn.kept_mass, torch.full((1000,), 0.9, dtype=torch.float64), rtol=0, atol=1e-6)
    # The log-probability is that of the whole vocabulary; divided by the kept mass it is what was drawn from.
    chosen = drawn.logprobs[drawn.ids == 0][0].item()
    assert chosen == pytest.approx(math.log(0.6), abs=1e-6)
    assert chosen - math.log(drawn.kept_mass[0].item()) == pytest.approx(math.log(2 / 3), abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {0}), (0.5, {0}), (0.61, {0, 1}), (0.95, {0, 1, 2}), (1.0, {0, 1, 2})]
)
def test_top_p_keeps_at_least_one(top_p: float, kept: set[int]) -> None:
    assert set(sweep(logits_of(*PROBABILITIES), SamplingParams(top_p=top_p)).ids.tolist()) == kept


def test_top_k_comes_first_and_top_p_counts_within_it() -> None:
    # Of the two kept by top_k, the first holds 2/3.
    assert set(sweep(logits_of(*PROBABILITIES), SamplingParams(top_k=2, top_p=0.66)).ids.tolist()) == {0}
    assert set(sweep(logits_of(*PROBABILITIES), SamplingParams(top_k=2, top_p=0.67)).ids.tolist()) == {0, 1}
    assert set(sweep(logits_of(*PROBABILITIES), SamplingParams(top_k=99)).ids.tolist()) == {0, 1, 2}


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0]])
    assert set(sweep(logits, SamplingParams(top_k=2)).ids.tolist()) == {1, 3}
    assert set(sweep(logits, SamplingParams(top_p=0.3)).ids.tolist()) == {1}
    assert sample(logits, [SamplingParams(temperature=0)], [0.9]).ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (7, 1.0), (40, 0.8), (1, 1.0), (0, 0.05)])
def test_support_and_kept_mass_against_numpy(temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    for seed in range(5):
        logits = random_logits(1, 300, seed)
        kept = support(logits[0], params)
        drawn = sweep(logits, params)
        assert set(drawn.ids.tolist()) <= set(kept)
        # Every quantile's token, from the running sums of the oracle.
        p = softmax(logits[0], temperature)[kept]
        expected = np.searchsorted(np.cumsum(p / p.sum()), (np.arange(1000) + 0.0) / 1000, side="right")
        agree = np.mean(np.asarray(kept)[np.minimum(expected, len(kept) - 1)] == drawn.ids.numpy())
        assert agree > 0.99  # a quantile may fall on an edge
        assert abs(drawn.kept_mass - p.sum()).max() < 1e-6


def test_logits_of_another_dtype_are_read_as_fp32() -> None:
    x = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params, quantiles = [SamplingParams(top_p=0.5)] * 8, [i / 8 for i in range(8)]
    wide, narrow = sample(x, params, quantiles), sample(x.float(), params, quantiles)
    for name in ("ids", "logprobs", "kept_mass"):
        assert torch.equal(getattr(wide, name), getattr(narrow, name))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for params in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.99)):
        drawn = sample(logits.expand(4, -1), [params] * 4, [0.0, 0.49, 0.51, 1 - 2**-53])
        assert drawn.ids.tolist() == [1, 1, 3, 3]


# ------------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), (0.4, 0.3, 0.15, 0.1, 0.05)),
        (SamplingParams(temperature=0.5), (0.16, 0.09, 0.0225, 0.01, 0.0025)),
        (SamplingParams(top_k=3), (0.4, 0.3, 0.15, 0, 0)),
        (SamplingParams(top_p=0.65), (0.4, 0.3, 0, 0, 0)),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, expected: tuple[float, ...]) -> None:
    draws = 20_000
    quantiles = random.Random(7)
    logits = logits_of(0.4, 0.3, 0.15, 0.1, 0.05).expand(draws, -1)
    drawn = sample(logits, [params] * draws, [quantiles.random() for _ in range(draws)])
    counts = np.bincount(drawn.ids.numpy(), minlength=5)
    p = np.asarray(expected) / sum(expected)
    assert counts[p == 0].sum() == 0
    statistic = float((((counts - draws * p) ** 2)[p > 0] / (draws * p)[p > 0]).sum())
    freedom = int((p > 0).sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # mean and standard deviation of chi-square


def test_a_large_vocabulary_is_drawn_from_end_to_end() -> None:
    drawn = sweep(torch.zeros(1, 50_000), SamplingParams(), 100)
    assert (drawn.ids - torch.arange(100) * 500).abs().max() <= 1


# ---------------------------------------------------------------------------------------- one batch


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = random_logits(9, 5000)
    params = [
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_k=5),
        SamplingParams(top_p=0.5), SamplingParams(temperature=0.7, top_k=50, top_p=0.9), SamplingParams(),
        SamplingParams(temperature=0), SamplingParams(top_p=0.99),
    ]  # fmt: skip
    quantiles = [i / 9 for i in range(9)]
    together = sample(logits, params, quantiles)
    for i in range(9):
        alone = sample(logits[i : i + 1], [params[i]], [quantiles[i]])
        assert torch.equal(alone.ids[0], together.ids[i])
        assert torch.equal(alone.logprobs[0], together.logprobs[i])
        assert torch.equal(alone.kept_mass[0], together.kept_mass[i])


def test_what_can_be_sampled_can_be_scored() -> None:
    limits = re.escape(f"at least {MIN_TEMPERATURE} and at most {MAX_TEMPERATURE}")
    for limit in (MIN_TEMPERATURE, MAX_TEMPERATURE):
        require_temperature(SamplingParams(temperature=limit).temperature)
    for refused in (lambda t: SamplingParams(temperature=t), require_temperature):
        for outside in (MIN_TEMPERATURE * 0.99, MAX_TEMPERATURE * 1.01, math.inf, math.nan):
            with pytest.raises(InputError, match=limits):
                refused(outside)


def test_logprobs_are_log_softmax_after_temperature() -> None:
    logits = random_logits(4, 1000)
    params = [SamplingParams(temperature=t) for t in (0.7, 1.0, 1.3, 0.0)]
    drawn = sample(logits, params, [0.5] * 4)
    divisors = torch.tensor([[0.7], [1.0], [1.3], [1.0]])
    expected = (logits / divisors).log_softmax(-1).gather(1, drawn.ids[:, None])[:, 0]
    assert torch.equal(drawn.logprobs, expected)
    assert drawn.ids[3] == logits[3].argmax()
    assert drawn.kept_mass.tolist() == [1.0] * 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(bad: float, temperature: float) -> None:
    logits = random_logits(2, 10)
    logits[1, 3] = bad
    with pytest.raises(NonFiniteError):
        sample(logits, [SamplingParams(temperature=temperature)] * 2, [0.5, 0.5])


def test_a_row_of_nan_draws_some_token_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU rows are not looked at before the draw: the row says NaN afterwards, and the others are as alone."""
    monkeypatch.setattr("precgraph.runtime.sampling.require_finite", lambda values: None)
    params = SamplingParams(top_p=0.9, top_k=40)
    logits = random_logits(4, 100)
    right = sample(logits, [params] * 4, [0.1, 0.4, 0.7, 0.99])
    logits[1], logits[2, 3] = torch.nan, torch.inf
    found = sample(logits, [params] * 4, [0.1, 0.4, 0.7, 0.99])
    assert bool(((found.ids >= 0) & (found.ids < 100)).all())
    assert found.logprobs[1:3].isnan().all()
    assert torch.equal(found.ids[[0, 3]], right.ids[[0, 3]])
    assert torch.equal(found.logprobs[[0, 3]], right.logprobs[[0, 3]])


# --------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", math.inf), ("temperature", 1e-9), ("temperature", "1"), ("top_p", 0.0), ("top_p", 1.1),
        ("top_p", math.nan), ("top_k", -1), ("top_k", 2.0), ("seed", -1), ("seed", 2**63), ("seed", 0.5),
        ("n", 0), ("n", 1.5), ("n", True), ("n", 16385),
        ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("stop_token_ids", "ab"), ("stop_token_ids", [1.0]),
    ],
)  # fmt: skip
def test_values_out_of_range_are_errors_that_name_them(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"SamplingParams.{name} must be"):
        SamplingParams(**{name: value})


def test_samples_of_one_prompt_have_seeds_of_their_own() -> None:
    """The first has the seed that was asked for; those of another seed share none, however near it is."""
    params = [SamplingParams(top_k=3, seed=seed, n=100) for seed in (3, 4, 2**63 - 1)]
    each = [p.each() for p in params]
    assert [ones[0] for ones in each] == [SamplingParams(top_k=3, seed=seed) for seed in (3, 4, 2**63 - 1)]
    assert all(one == replace(p, n=1, seed=one.seed) for p, ones in zip(params, each, strict=True) for one in ones)
    assert len({one.seed for ones in each for one in ones}) == 300
    assert SamplingParams(top_k=3, seed=3, n=2).each() == each[0][:2]
    assert SamplingParams(n=2).each() == [SamplingParams()] * 2
    with pytest.raises(InputError, match="n must be 1 with temperature 0"):
        SamplingParams(temperature=0, n=2)


def test_stop_strings_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=re.escape("stop = ['.']: text is not looked at; end requests at stop_token")):
        SamplingParams(stop=["."])  # type: ignore[arg-type]


def test_stop_ids_are_kept_as_a_tuple() -> None:
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


# ------------------------------------------------------------------------------------------- ranks


def test_a_rank_counts_equals_and_what_is_not_a_number_is_below_all() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, -math.inf, math.nan, 0.0, -0.0, math.inf])
    found = ranks(row.expand(8, -1), torch.arange(8))
    assert found.dtype == torch.int64
    assert found.tolist() == [4, 3, 3, 7, 0, 6, 6, 1]


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_ranks_are_places_in_the_sorted_row(width: int) -> None:
    logits = random_logits(24, width)
    logits[:8] = logits[:8].round()  # many that are equal
    logits[4:12, ::3] = -math.inf
    logits[8:16, 1::5] = math.nan
    logits[16] = -math.inf
    logits[17] = math.nan
    for start in range(0, width, max(1, width // 7)):
        ids = (torch.arange(24) + start) % width
        found = ranks(logits, ids).tolist()
        for row, token, rank in zip(logits.numpy(), ids.tolist(), found, strict=True):
            ascending = np.sort(row[~np.isnan(row)])
            assert rank == len(ascending) - np.searchsorted(ascending, row[token])
