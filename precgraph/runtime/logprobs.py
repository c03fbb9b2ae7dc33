"""Log-probabilities: the one function that engines, plugins and trainers call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from precgraph.errors import InputError
from precgraph.runtime.inputs import require_values
from precgraph.runtime.limits import MAX_TEMPERATURE, MIN_TEMPERATURE

if TYPE_CHECKING:
    from precgraph.lowering.triton.logprobs import LogProbs


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

    ``logits [N, V]`` fp32, ``ids [N]``, ``temperature`` a number from 1e-5 to 1e18, or ``[N]`` of them; returns ``[N]``
    fp32, and with ``entropy`` also the distribution's entropy in nats ``[N]``. The bits of a row's log-probability do
    not depend on the other rows; an entropy's last bits may.
    """
    require_temperature(temperature)
    logits = logits.float()
    divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    if not entropy:
        return chosen_logprobs(logits, ids, divisor)
    if logits.device.type == "cuda":
        return _on_gpu(logits, ids, divisor, entropy=True)
    logp = torch.log_softmax(logits / divisor.reshape(-1, 1), dim=-1)
    return _at(logp, ids), -(logp.exp() * logp).sum(-1)


def chosen_logprobs(logits: Tensor, ids: Tensor, divisor: Tensor, sums: Tensor | None = None) -> Tensor:
    """:func:`logprobs_from_logits` for temperatures on the logits' device that were checked before.

    It never makes the host wait. On a GPU it is :mod:`precgraph.lowering.triton.logprobs`, on a CPU torch's kernel.
    ``sums`` are what the former's ``block_sums`` made of these logits, if a draw has read them already.
    """
    logits = logits.float()
    if logits.device.type == "cuda":
        return _on_gpu(logits, ids, divisor, entropy=False, sums=sums)[0]
    return _at(torch.log_softmax(logits / divisor.reshape(-1, 1), dim=-1), ids)


def require_temperature(temperature: float | Tensor) -> None:
    """InputError unless all of it lies between the limits above; a tensor on a GPU is waited for."""
    if isinstance(temperature, Tensor):
        require_values("temperature", temperature)
    try:
        given = torch.as_tensor(temperature, dtype=torch.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputError(
            f"temperature must be a number that fp32 can hold, or a tensor of them, not {repr(temperature)[:40]}"
        ) from None
    if not bool(((given >= MIN_TEMPERATURE) & (given <= MAX_TEMPERATURE)).all()):
        raise InputError(
            f"temperature must be at least {MIN_TEMPERATURE} and at most {MAX_TEMPERATURE}",
            remedy="greedy sampling is scored at temperature 1",
        )


def _at(logp: Tensor, ids: Tensor) -> Tensor:
    return logp.gather(-1, ids.reshape(-1, 1)).squeeze(-1)


def _on_gpu(
    logits: Tensor, ids: Tensor, divisor: Tensor, *, entropy: bool, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies ``[N]``; without ``entropy`` the latter are empty."""
    from precgraph.lowering.triton.logprobs import logprobs

    rows = logits.shape[:1]
    ids, divisor = ids.reshape(rows).long().contiguous(), divisor.expand(rows).contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        chosen, entropies = _GpuLogProbs.apply(logits, ids, divisor, entropy)  # type: ignore[no-untyped-call]
        return chosen, entropies
    found = logprobs(logits, ids, divisor, entropy=entropy, sums=sums)
    return found.chosen, _or_empty(found)


def _or_empty(found: LogProbs) -> Tensor:
    return found.chosen.new_empty(0) if found.entropy is None else found.entropy


class _GpuLogProbs(torch.autograd.Function):
    """The Triton kernels under autograd: one read of the logits forward, one backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, divisor: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        from precgraph.lowering.triton.logprobs import logprobs

        found = logprobs(logits, ids, divisor, entropy=entropy)
        entropies = _or_empty(found)
        ctx.entropy = entropy
        ctx.save_for_backward(logits, ids, divisor, found.normalizer, entropies)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return found.chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor, None, None, None]:
        from precgraph.lowering.triton.logprobs import logprobs_backward

        logits, ids, divisor, normalizer, entropies = ctx.saved_tensors
        more = {"entropy": entropies, "entropy_grad": entropy_grad} if ctx.entropy else {}
        return logprobs_backward(grad, logits, ids, normalizer, divisor, **more).float(), None, None, None
