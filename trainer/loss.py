"""The formulas of GRPO, on flat tensors: one entry per response token, sequences back to back.

No function looks at token values: masks come from lengths. Weights are made once per optimiser step from counts over
the whole batch, so that the loss is a plain weighted sum and its split into micro-batches does not matter. Excluded
entries are replaced (``torch.where``), never multiplied by zero: 0 × infinity would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOG_LIMIT = 20.0  # exp(20) = 4.9e8: far beyond any clip range, far from overflow
NORM_EPS = 1e-4  # added to a group's standard deviation (TRL 0.20 and the GRPO code that it follows)


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """``rewards [groups, samples]`` to advantages of the same shape, each group on its own.

    ``group_norm``: (r − mean) / (std + 1e-4), std with n − 1 (GRPO, arXiv 2402.03300); ``centred``: r − mean (Dr. GRPO,
    arXiv 2503.20783). A group of equal rewards, or of one, gets zeros.
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    # Equal rewards may leave a rounding error of the mean, which division by a tiny spread would blow up.
    centred = torch.where(degenerate(rewards)[..., None], 0.0, centred)
    if kind == "centred" or rewards.shape[-1] < 2 or not rewards.numel():
        return centred
    return centred / (rewards.std(-1, keepdim=True) + NORM_EPS)


def degenerate(rewards: Tensor) -> Tensor:
    """``[groups]``: whether all rewards of a group are equal, so that it teaches nothing. From the raw rewards."""
    return (rewards == rewards[..., :1]).all(-1)


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """What a response of that length loses: 0 up to ``max_tokens − buffer``, then linearly up to ``penalty`` (DAPO,
    arXiv 2503.14476, equation 13)."""
    over = (lengths - (max_tokens - buffer)).clamp(min=0).double() / buffer
    return over.clamp(max=1.0) * penalty


def token_weights(lengths: list[int], kept: list[bool], kind: str, max_tokens: int) -> list[float]:
    """The weight of each token of each sequence, so that the loss is ``Σ weight × term``; 0 for those not ``kept``.

    ``token``: 1 / tokens kept; ``sequence``: 1 / (length × sequences kept); ``constant``: 1 / (max_tokens × sequences
    kept). One mask counts in numerator and denominator. All zeros if nothing is kept: the step is to be skipped.
    """
    counted = [k and n > 0 for n, k in zip(lengths, kept, strict=True)]
    sequences = sum(counted)
    tokens = sum(n for n, k in zip(lengths, counted, strict=True) if k)
    if kind == "token":
        return [1.0 / tokens if k else 0.0 for k in counted]
    if kind == "sequence":
        return [1.0 / (n * sequences) if k else 0.0 for n, k in zip(lengths, counted, strict=True)]
    return [1.0 / (max_tokens * sequences) if k else 0.0 for k in counted]


def safe_exp(x: Tensor) -> Tensor:
    """``exp`` of a log-ratio, which stays finite, as does its gradient, for any ``x``."""
    return x.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def k3(reference: Tensor, policy: Tensor) -> Tensor:
    """The k3 estimate of KL(policy ‖ reference) on samples of the policy: r − 1 − log r, r = reference / policy.

    Never negative; its mean is the KL divergence (Schulman, "Approximating KL divergence").
    """
    delta = (reference - policy).clamp(-LOG_LIMIT, LOG_LIMIT)
    return torch.expm1(delta) - delta  # exp(Δ) - 1 would be the rounding of 1 where Δ is small


def correction(
    trainer: Tensor, rollout: Tensor, sequence: Tensor, count: int, kind: str, cap: float
) -> tuple[Tensor, Tensor]:
    """Importance weights ``[tokens]`` for samples of another policy, and which sequences were masked ``[count]``.

    ``sequence [tokens]`` names each token's sequence. ``token_truncated``: min(π_trainer / π_rollout, cap) per token;
    ``sequence_masked``: the product of a sequence's ratios, exp(Σ Δ), 0 above ``cap``. A token without a rollout
    log-probability (NaN) has ratio 1. Weights carry no gradient. Masked sequences stay in the loss's denominator.
    """
    none = torch.zeros(count, dtype=torch.bool, device=trainer.device)
    if kind == "none":
        return torch.ones_like(trainer), none
    delta = torch.where(rollout.isnan(), 0.0, trainer - rollout).detach()
    if kind == "token_truncated":
        return safe_exp(delta).clamp(max=cap), none
    ratio = safe_exp(torch.zeros(count, dtype=delta.dtype, device=delta.device).index_add(0, sequence, delta))
    masked = ratio > cap
    return torch.where(masked, 0.0, ratio)[sequence], masked


@dataclass(frozen=True, slots=True)
class Terms:
    """``loss`` is the weighted sum, with gradient; the rest are per token, without: ``ratio``, ``clipped``, ``kl``."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor


def policy_loss(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    weight: Tensor,
    importance: Tensor,
    reference: Tensor | None,
    table: Any,
) -> Terms:
    """``Σ weight × (−importance × min(ratio × A, clip(ratio) × A) + kl × k3)`` over tokens ``[n]``.

    ``ratio`` = exp(new − old), clipped to 1 − ``clip_low`` .. 1 + ``clip_high`` (PPO; asymmetric in DAPO). ``table`` is
    an :class:`~trainer.config.AlgorithmTable`. Tokens of weight or importance 0 add nothing, gradient included.
    """
    ratio = safe_exp(new - old)
    bounded = ratio.clamp(1 - table.clip_low, 1 + table.clip_high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    term = torch.where(importance > 0, -importance * gain, 0.0)
    kl = torch.zeros_like(new) if reference is None else k3(reference, new)
    if table.kl:
        term = term + table.kl * kl
    loss = torch.where(weight > 0, weight * term, 0.0).sum()
    clipped = bounded * advantage < ratio * advantage
    return Terms(loss, ratio.detach(), clipped.detach(), kl.detach())
