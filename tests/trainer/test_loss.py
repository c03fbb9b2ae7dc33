"""Every formula of the loss against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer import loss
from trainer.config import AlgorithmTable

ONE = torch.tensor([1.0])


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def policy(new: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, **more: Any) -> loss.Terms:
    importance = more.pop("importance", torch.ones_like(new))
    reference = more.pop("reference", None)
    return loss.policy_loss(new, old, advantage, weight, importance, reference, AlgorithmTable(**more))


# ------------------------------------------------------------------------------------- advantages


def test_advantages_are_normalised_within_each_group() -> None:
    """Both groups have a spread of 1 around their own mean: the same advantages, although 10 is not 1."""
    rewards = torch.tensor([[1.0, 0.0], [10.0, 9.0]], dtype=torch.float64)
    wanted = 0.5 / (math.sqrt(0.5) + 1e-4)
    got = loss.advantages(rewards, "group_norm")
    torch.testing.assert_close(got, torch.tensor([[wanted, -wanted]] * 2, dtype=torch.float64))
    torch.testing.assert_close(
        loss.advantages(rewards, "centred"), torch.tensor([[0.5, -0.5]] * 2, dtype=torch.float64)
    )


def test_advantages_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 0.5, standard deviation sqrt(4 × 0.25 / 3) = 0.57735."""
    got = loss.advantages(t(1, 0, 0, 1)[None], "group_norm")
    assert got.tolist()[0] == pytest.approx(
        [0.5 / (0.5773502691896257 + 1e-4), *[-0.5 / 0.5774502691896257] * 2, 0.5 / 0.5774502691896257]
    )


@pytest.mark.parametrize("kind", ["group_norm", "centred"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_zero_spread_gives_exactly_zero(kind: str, value: float) -> None:
    """0.1 and 1/3 are not their own mean in floating point."""
    got = loss.advantages(torch.full((2, 3), value), kind)
    assert torch.equal(got, torch.zeros(2, 3))


@pytest.mark.parametrize("kind", ["group_norm", "centred"])
def test_a_group_of_one_gives_zero_and_not_nan(kind: str) -> None:
    assert torch.equal(loss.advantages(torch.tensor([[1.0]]), kind), torch.zeros(1, 1))


def test_degenerate_groups_are_found_in_the_raw_rewards_of_each() -> None:
    assert loss.degenerate(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist() == [True, False]


def test_overlong_penalty_by_hand() -> None:
    """Of 100 tokens, the last 20 are the buffer: 80 costs nothing, 90 half, 100 everything."""
    got = loss.overlong_penalty(torch.tensor([10, 80, 85, 90, 100]), 100, 20, 2.0)
    assert got.tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]


# ---------------------------------------------------------------------------------------- weights


def test_token_weights_by_hand() -> None:
    lengths = [2, 6]
    assert loss.token_weights(lengths, [True, True], "token", 10) == [1 / 8, 1 / 8]
    assert loss.token_weights(lengths, [True, True], "sequence", 10) == [1 / 4, 1 / 12]
    assert loss.token_weights(lengths, [True, True], "constant", 10) == [1 / 20, 1 / 20]


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_one_mask_in_numerator_and_denominator(kind: str) -> None:
    """Two completions of 10 tokens, one of them left out: the loss is that of the other alone."""
    both, alone = (loss.token_weights([10] * n, [True, False][:n], kind, 16) for n in (2, 1))
    assert both == [alone[0], 0.0]


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_nothing_kept_gives_zero_weights(kind: str) -> None:
    assert loss.token_weights([3, 4], [False, False], kind, 16) == [0.0, 0.0]
    assert loss.token_weights([0, 4], [True, True], kind, 16)[0] == 0.0  # a response without a token
    assert loss.token_weights([], [], kind, 16) == []


# ----------------------------------------------------------------------------------------- ratios


def test_loss_on_policy_by_hand() -> None:
    """Ratio 1: the loss is −mean advantage, its gradient −advantage × weight."""
    new = t(-1.0, -2.0, -3.0).requires_grad_()
    terms = policy(new, new.detach(), t(1.0, -1.0, 0.5), t(0.25, 0.25, 0.5))
    assert torch.equal(terms.ratio, torch.ones(3, dtype=torch.float64))
    assert terms.loss.item() == -(0.25 - 0.25 + 0.25)
    terms.loss.backward()
    assert new.grad is not None and new.grad.tolist() == [-0.25, 0.25, -0.25]
    assert not terms.clipped.any()


def test_clip_is_asymmetric() -> None:
    """Ratios 1.25 and 1.35 with A = 1 and an upper bound of 1.28; 0.7 and 0.85 with A = −1 and a lower bound of 0.8."""
    ratios, advantage = [1.25, 1.35, 0.7, 0.85], t(1, 1, -1, -1)
    new = t(*[math.log(r) for r in ratios]).requires_grad_()
    terms = policy(new, torch.zeros_like(new), advantage, t(1, 1, 1, 1), clip_low=0.2, clip_high=0.28)
    assert terms.loss.item() == pytest.approx(-(1.25 + 1.28 - 0.8 - 0.85))
    assert terms.clipped.tolist() == [False, True, True, False]
    terms.loss.backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-1.25, 0.0, 0.0, 0.85])


def test_a_ratio_that_would_overflow_is_finite_and_clipped() -> None:
    new = t(1000.0, -1000.0).requires_grad_()
    terms = policy(new, torch.zeros_like(new), t(1.0, 1.0), t(0.5, 0.5))
    assert terms.loss.item() == pytest.approx(-(0.5 * 1.28 + 0.5 * math.exp(-20)))
    terms.loss.backward()
    assert new.grad is not None and torch.isfinite(new.grad).all()


def test_masked_terms_are_replaced_and_not_multiplied() -> None:
    """A ratio of exp(1000) that the correction drops: loss −0.5 and gradient (0, −0.5), never NaN."""
    new = torch.tensor([1000.0, 0.0], requires_grad=True)
    terms = policy(new, torch.zeros(2), torch.ones(2), torch.full((2,), 0.5), importance=torch.tensor([0.0, 1.0]))
    assert terms.loss.item() == -0.5
    terms.loss.backward()
    assert new.grad is not None and new.grad.tolist() == [0.0, -0.5]


def test_infinite_values_behind_a_zero_weight_do_not_poison() -> None:
    new = torch.tensor([float("-inf"), -1.0], requires_grad=True)
    terms = policy(new, torch.tensor([-1.0, -1.0]), torch.ones(2), torch.tensor([0.0, 1.0]))
    assert terms.loss.item() == -1.0


# ---------------------------------------------------------------------------------- KL, correction


def test_k3_by_hand() -> None:
    """reference − policy of 0, log 2 and −log 2: r − 1 − log r = 0, 1 − log 2 and log 2 − 1/2."""
    got = loss.k3(t(0, math.log(2), -math.log(2)), t(0, 0, 0))
    assert got.tolist() == pytest.approx([0.0, 1 - math.log(2), math.log(2) - 0.5])
    assert torch.isfinite(loss.k3(t(1000.0, -1000.0), t(0.0, 0.0))).all()


def test_k3_is_unbiased() -> None:
    """Its mean over the policy's distribution is KL(policy ‖ reference)."""
    p, q = t(0.6, 0.3, 0.1), t(0.2, 0.5, 0.3)
    assert float((p * loss.k3(q.log(), p.log())).sum()) == pytest.approx(float((p * (p / q).log()).sum()))


def test_kl_term_enters_the_loss() -> None:
    new = t(math.log(2.0)).requires_grad_()
    terms = policy(new, new.detach(), t(0.0), t(1.0), reference=t(0.0), kl=0.1)
    assert terms.loss.item() == pytest.approx(0.1 * (math.log(2) - 0.5))
    terms.loss.backward()
    assert new.grad is not None and new.grad.item() == pytest.approx(0.1 * (1 - 0.5))  # d k3 / d new = 1 − r


def test_token_truncated_correction_by_hand() -> None:
    """Ratios 2, 1/2 and 8, capped at 3."""
    trainer, rollout = t(math.log(2), math.log(0.5), math.log(8)), t(0, 0, 0)
    weight, masked = loss.correction(trainer, rollout, torch.tensor([0, 0, 1]), 2, "token_truncated", 3.0)
    assert weight.tolist() == pytest.approx([2.0, 0.5, 3.0]) and not masked.any()


def test_sequence_correction_is_the_exponential_of_the_sum() -> None:
    """Differences 0.1 and −0.1: exp(0) = 1, not 2.01. The second sequence, exp(0.9), is above the cap: masked."""
    delta, sequence = t(0.1, -0.1, 0.5, 0.4), torch.tensor([0, 0, 1, 1])
    weight, masked = loss.correction(delta, torch.zeros_like(delta), sequence, 2, "sequence_masked", 2.0)
    assert weight.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0]) and masked.tolist() == [False, True]


def test_sequence_ratio_of_a_huge_sum_is_finite() -> None:
    weight, masked = loss.correction(t(200.0, -900.0), t(0.0, 0.0), torch.tensor([0, 1]), 2, "sequence_masked", 1e9)
    assert torch.isfinite(weight).all() and not masked.any()


@pytest.mark.parametrize("kind", ["token_truncated", "sequence_masked"])
def test_a_missing_log_probability_has_ratio_one(kind: str) -> None:
    trainer = t(-0.1, -5.0, -0.2)
    weight, _ = loss.correction(trainer, t(-0.1, math.nan, -0.2), torch.tensor([0, 0, 0]), 1, kind, 2.0)
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_no_correction_and_no_gradient_through_one() -> None:
    trainer = t(-1.0, -2.0).requires_grad_()
    assert loss.correction(trainer, t(0, 0), torch.tensor([0, 0]), 1, "none", 2.0)[0].tolist() == [1.0, 1.0]
    for kind in ("token_truncated", "sequence_masked"):
        assert not loss.correction(trainer, t(0, 0), torch.tensor([0, 0]), 1, kind, 2.0)[0].requires_grad


def test_k3_of_nearly_equal_policies() -> None:
    """Δ²/2 + Δ³/6, where exp(Δ) - 1 - Δ would be noise of fp32."""
    delta = torch.tensor([1e-4, -1e-4, 3e-4])
    right = (delta.double() ** 2 / 2 + delta.double() ** 3 / 6).float()
    torch.testing.assert_close(loss.k3(delta, torch.zeros(3)), right, rtol=5e-3, atol=0.0)
