"""Log-probabilities: the one function that engines, plugins and trainers call."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from precgraph.errors import InputError

MIN_TEMPERATURE = 1e-6  # below it, logits / temperature may overflow


@overload
def logprobs_from_logits(
    logits: Tensor, ids: Tensor, temperature: float | Tensor = ..., *, entropy: Literal[False] = ...
) -> Tensor: ...
@overload
def logprobs_from_logits(
    logits: Tensor, ids: Tensor, temperature: float | Tensor = ..., *, entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def logprobs_from_logits(
    logits: Tensor, ids: Tensor, temperature: float | Tensor = 1.0, *, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """``log_softmax(logits / temperature)`` at ``ids``, over the full vocabulary; differentiable.

    ``logits [N, V]`` fp32, ``ids [N]``, ``temperature`` a positive number or ``[N]``; returns ``[N]`` fp32, and with
    ``entropy`` also the distribution's entropy in nats ``[N]``. The bits of a row's log-probability do not depend on
    the other rows; an entropy's last bits may.
    """
    if logits.dtype != torch.float32:
        logits = logits.float()
    divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    if not bool(((divisor >= MIN_TEMPERATURE) & divisor.isfinite()).all()):
        raise InputError(
            f"temperature must be positive, at least {MIN_TEMPERATURE}, and finite",
            remedy="greedy sampling is scored at temperature 1",
        )
    logp = torch.log_softmax(logits / divisor.reshape(-1, 1), dim=-1)
    chosen = logp.gather(-1, ids.reshape(-1, 1)).squeeze(-1)
    if not entropy:
        return chosen
    return chosen, -(logp.exp() * logp).sum(-1)
