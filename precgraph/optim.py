"""AdamW on bf16 masters: an optimiser for loops that keep no fp32 copy of the weights.

An update of 1e-6 is far below half a bf16 step of a typical weight (2^-9 of its value), so that rounding to nearest
would undo it. Rounded stochastically, it is made now and then, and right on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from precgraph.errors import InputError

_BELOW = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf, "beta1": 1, "beta2": 1}  # what torch's AdamW takes


class StochasticAdamW(torch.optim.Optimizer):
    """torch's AdamW on bf16 parameters: computed in fp32, one parameter at a time, and rounded stochastically.

    Arguments and their defaults are those of :class:`torch.optim.AdamW`. Moments are fp32. The expected value of every
    update is the fp32 update, however small it is. InputError for a parameter of another dtype, which needs no such
    rounding, and for a number out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        values = {**group, **dict(zip(("beta1", "beta2"), group["betas"], strict=True))}
        for name, limit in _BELOW.items():
            if not 0 <= values[name] < limit:  # nor is NaN
                raise InputError(
                    f"StochasticAdamW's {name} = {values[name]}", remedy=f"a number from 0, and below {limit}"
                )
        for p in group["params"]:
            if p.dtype != torch.bfloat16:
                raise InputError(
                    f"StochasticAdamW is for bfloat16 parameters, and one of shape {list(p.shape)} is {p.dtype}",
                    remedy="give that one to torch.optim.AdamW",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what ``closure``, if given, does: the loss."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(zero_state(p))
                wide = p.float()
                adamw(
                    [wide], [p.grad.float()], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                    foreach=False, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip
                p.copy_(stochastic_bf16(wide))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimiser; but torch's own would give the moments the parameters' dtype, and they stay fp32."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, mine, strict=True):
            moments = state_dict["state"].get(index, {})
            for key in moments.keys() - {"step"}:
                self.state[p][key] = moments[key].to(p.device)


def stochastic_bf16(x: Tensor) -> Tensor:
    """fp32 to one of the two nearest bf16 values, the nearer the likelier, so that the expected value is ``x``.

    Noise is added below the bits that bf16 keeps; a carry rounds away from zero. Of NaN, which on an NVIDIA GPU has all
    bits set, a carry would make a zero: it stays NaN. Draws from torch's global generator.
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
    rounded = ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def zero_state(p: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step: the count of steps, on the CPU, and both moments, fp32."""
    zeros = torch.zeros_like(p, dtype=torch.float32)
    return {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
