"""The optimiser: AdamW on fp32 masters or, by stochastic rounding, on the bf16 weights themselves.

An update of 1e-6 is far below half a bf16 step of a typical weight (2^-9 of its value), so plain bf16 weights would
never move. Gradients of micro-batches add up in fp32 whatever the weights' dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from precgraph.optim import StochasticAdamW, zero_state
from trainer.config import OptimizerTable
from trainer.errors import TrainerError, UpdateError

_STATE = "state"
_MASTER = "master"
_REMEDY = "resume with the optimizer table it was saved with"


class MasterOptimizer:
    """AdamW for named parameters, with fp32 gradient sums, clipping and warm-up.

    A backward that sums in fp32 itself may put its sum into the parameter's ``main_grad`` (fp32, as Megatron names it):
    it is added to what came through ``.grad``, and taken, so that the next backward begins with none.

    ``masters="fp32"``: the optimiser owns an fp32 copy of every parameter; after each step the parameter is its bf16
    rounding (to nearest). ``masters="bf16"``: the parameter is the master, rounded stochastically, at no extra memory.
    ``states="8bit"`` quantises both moments (torchao). Gradients are taken from ``.grad`` as soon as autograd has made
    them and ``.grad`` is freed.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], table: OptimizerTable) -> None:
        self.table = table
        self.parameters = {n: p for n, p in named if p.requires_grad}
        self.steps = 0
        fp32 = table.masters == "fp32"
        self.masters: dict[str, Tensor] = {
            n: nn.Parameter(p.detach().float()) if fp32 else p for n, p in self.parameters.items()
        }
        self._sums: dict[str, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._collector(n)) for n, p in self.parameters.items()]
        # Norm weights and biases are not decayed.
        wide = [m for m in self.masters.values() if m.dim() > 1]
        rest = [m for m in self.masters.values() if m.dim() <= 1]
        groups = [{"params": g, "weight_decay": d} for g, d in ((wide, table.weight_decay), (rest, 0.0)) if g]
        self.optimizer = _adamw(groups, table)
        self._rate(0)

    def close(self) -> None:
        """Stop collecting gradients."""
        for hook in self._hooks:
            hook.remove()

    def _collector(self, name: str) -> Any:
        def collect(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is None:  # a backward that keeps the sum in main_grad
                return
            if name in self._sums:
                self._sums[name].add_(grad)
            else:
                self._sums[name] = grad.float()
            parameter.grad = None

        return collect

    # ---------------------------------------------------------------------------------------- step
    def gradients(self) -> dict[str, Tensor]:
        """The fp32 gradients so far, by name: what came through ``.grad``, and every ``main_grad``, taken over.

        TrainerError for a ``main_grad`` of another dtype or shape.
        """
        for name, parameter in self.parameters.items():
            main: Tensor | None = getattr(parameter, "main_grad", None)
            if main is None:
                continue
            if main.dtype != torch.float32 or main.shape != parameter.shape:
                raise TrainerError(
                    f"main_grad must be float32 {list(parameter.shape)}, not {main.dtype} {list(main.shape)}", path=name
                )
            parameter.main_grad = None  # type: ignore[attr-defined]
            self._sums[name] = main.add_(self._sums[name]) if name in self._sums else main
        return self._sums

    def discard(self) -> None:
        """Forget the gradients that have been collected."""
        self.gradients().clear()

    def gradient_norm(self) -> float:
        """The 2-norm of all collected gradients."""
        norms = [torch.linalg.vector_norm(g) for g in self.gradients().values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """One update with the collected gradients, which are used up; returns ``grad_norm`` before clipping and ``lr``.

        UpdateError, before anything has changed, if the norm is not finite. Whatever else stops it, in whatever place,
        ``steps`` tells that something may have changed.
        """
        norm = self.gradient_norm()
        if not norm < float("inf"):
            self.discard()
            raise UpdateError(
                f"the gradient's norm is {norm}",
                remedy="lower optimizer.lr, or find the node with precision.checked = true",
            )
        scale = min(1.0, self.table.clip / (norm + 1e-6)) if self.table.clip else 1.0
        rate = self._rate(self.steps)
        self.steps += 1  # from here on the state is another one, be it that of an update that broke off
        for name, master in self.masters.items():
            grad = self._sums.pop(name, None)
            if grad is not None:
                master.grad = grad.mul_(scale).to(master.dtype)
        with _eager_on_cpu(next(iter(self.masters.values())).device):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.table.masters == "fp32":
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])
        return {"grad_norm": norm, "lr": rate}

    def _rate(self, step: int) -> float:
        """The learning rate of a step: rises linearly over the warm-up, ``lr`` from then on."""
        rate = self.table.lr * min(1.0, (step + 1) / max(1, self.table.warmup))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rate

    # --------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Tensor]:
        """Everything as plain tensors by name: masters (if they are not the parameters), moments, step counts."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if self.table.masters == "fp32":
                out[f"{_MASTER}.{name}"] = master.detach()
            for key, value in self.optimizer.state.get(master, {}).items():
                for part, tensor in _flatten(value):
                    out[f"{_STATE}.{key}{part}.{name}"] = tensor
        return out

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Inverse of :meth:`state_dict`, for an optimiser of the same table; TrainerError for one of another."""
        left = dict(tensors)
        for name, master in self.masters.items():
            if self.table.masters == "fp32":
                master.copy_(_taken(left, f"{_MASTER}.{name}", master))
            if f"{_STATE}.step.{name}" in left:
                for key, value in self._fresh_state(master).items():
                    for part, tensor in _flatten(value):
                        tensor.copy_(_taken(left, f"{_STATE}.{key}{part}.{name}", tensor))
        if left:
            raise TrainerError(
                f"the saved optimiser holds {next(iter(left))!r}, which this one has no place for", remedy=_REMEDY
            )
        self.steps = steps
        self._rate(steps)

    def _fresh_state(self, master: Tensor) -> dict[str, Any]:
        """A zero state of the optimiser's own kind for one parameter."""
        state: dict[str, Any] = self.optimizer.state[master]
        state.update(zero_state(master))
        if self.optimizer.defaults.get("fused"):  # whose kernel reads the count on the device
            state["step"] = state["step"].to(master.device)
        new = getattr(self.optimizer, "_new_buffer", None)  # torchao's, for 8-bit moments
        if new:
            state.update(exp_avg=new(master, True), exp_avg_sq=new(master, False))
        return state


def _adamw(groups: list[dict[str, Any]], table: OptimizerTable) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": table.lr, "betas": (table.beta1, table.beta2), "eps": table.eps}
    if table.states == "8bit":
        return _eight_bit(groups, options, rounded=table.masters == "bf16")
    if table.masters == "bf16":
        return StochasticAdamW(groups, **options)
    # Unlike the default on CUDA, the fused update needs no copies of all tensors.
    return torch.optim.AdamW(groups, **options, fused=groups[0]["params"][0].is_cuda)


def _eight_bit(groups: list[dict[str, Any]], options: dict[str, Any], *, rounded: bool) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise TrainerError(
            "optimizer.states = '8bit' needs torchao", remedy="pip install 'precgraph[torchao]'"
        ) from error

    class WideSmallStates(AdamW8bit):  # type: ignore[misc]
        """torchao 0.18 keeps the moments of small tensors in the weight's dtype, and in bf16 the second moment stands
        still: 0.1 % of a difference is less than half a step. Here they are fp32."""

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            made: Tensor = super()._new_buffer(p, signed)
            return made if hasattr(made, "__tensor_flatten__") else torch.zeros_like(p, dtype=torch.float32)

    result: torch.optim.Optimizer = WideSmallStates(groups, **options, bf16_stochastic_round=rounded)
    return result


def _flatten(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors inside a state: itself, or the parts of torchao's quantised states."""
    if hasattr(value, "__tensor_flatten__"):
        for part in value.__tensor_flatten__()[0]:
            yield f"/{part}", getattr(value, part)
    else:
        yield "", value


def _taken(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in tensors:
        raise TrainerError(f"the saved optimiser lacks {name!r}", remedy=_REMEDY)
    taken = tensors.pop(name)
    if taken.shape != like.shape:  # a smaller one would be spread over it
        found, wanted = list(taken.shape), list(like.shape)
        raise TrainerError(f"the saved optimiser holds {name!r} as {found}, not {wanted}", remedy=_REMEDY)
    return taken


def _eager_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """torchao compiles its update; on a CPU that would need a C++ compiler and minutes."""
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext()
