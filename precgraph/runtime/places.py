"""What a program was traced from: a model that has changed since is refused before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from precgraph.errors import StaleWeightsError, UnsupportedModelError


class Place(NamedTuple):
    """Where the model keeps a module, parameter or buffer, or a submodule a forward of its own: the owner's dictionary,
    the name in it, the full path."""

    owner: dict[str, Any]
    name: str
    value: Any
    path: str


class Hooks(NamedTuple):
    """One kind of a submodule's hooks, the keys of those that act, and its path; no two hooks ever have one key."""

    now: Mapping[int, Any]
    keys: tuple[int, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Places:
    """Everything that a model's modules held when it was compiled, and which hooks its submodules had.

    Forward hooks of submodules ran when the model was traced, and what they did to values is part of the program; a
    program calls no submodule, so others would never run. Hooks of the model itself run with its own call.
    """

    held: tuple[Place, ...] = ()
    hooks: tuple[Hooks, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        modules = list(model.named_modules(remove_duplicate=False))
        held = tuple(
            Place(owner, name, value, f"{prefix}.{name}".removeprefix("."))
            for prefix, module in modules
            for owner in (module._modules, module._parameters, module._buffers)
            for name, value in owner.items()
        )
        patched = tuple(Place(vars(m), "forward", vars(m).get("forward"), f"{p}.forward") for p, m in modules[1:])
        hooks = tuple(
            Hooks(now, _acting(now), prefix) for prefix, module in modules[1:]
            for now in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
                        module._backward_pre_hooks)
        )  # fmt: skip
        return cls(held + patched, hooks)

    def require_same(self) -> None:
        """StaleWeightsError for a part that was replaced, UnsupportedModelError for a hook that would not run."""
        for owner, name, value, path in self.held:
            if owner.get(name) is not value:
                raise _replaced(owner.get(name), path)
        for now, keys, path in self.hooks:
            if tuple(now) != keys and _acting(now) != keys:
                raise UnsupportedModelError(
                    "its hooks have changed since the model was compiled, and a program runs none", path=path,
                    remedy="register forward hooks before compiling, or remove the new ones",
                )  # fmt: skip


def _replaced(now: Any, path: str) -> StaleWeightsError | UnsupportedModelError:
    """The error for a part in whose place the model has ``now``. FSDP shows plain parameters while its forward runs."""
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(now, DTensor):
            return UnsupportedModelError(
                "the parameter is a DTensor: FSDP is not supported, since one process holds all weights", path=path,
                remedy="leave the compiled model whole, and average gradients across ranks yourself",
            )  # fmt: skip
    return StaleWeightsError(
        "it was replaced after the model was compiled", path=path,
        remedy="compile the model again (FSDP, which replaces parameters, is not supported)",
    )  # fmt: skip


def _acting(hooks: Mapping[int, Any]) -> tuple[int, ...]:
    """Keys, without that of ``gradient_checkpointing_enable()``, whose hook lets torch's checkpoints see a gradient."""
    idle = "enable_input_require_grads.<locals>.make_inputs_require_grads"
    return tuple(key for key, hook in hooks.items() if not getattr(hook, "__qualname__", "").endswith(idle))
