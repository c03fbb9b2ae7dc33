"""WeightStore: the quantised weights of a policy, made from its masters, versioned and updated in place."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from precgraph.errors import NonFiniteError, StaleWeightsError, UnsupportedModelError
from precgraph.lowering.program import PackKey
from precgraph.lowering.registry import Pack

Named = tuple[str, str, Tensor]  # a weight's path, what about it holds values, and these

_STORES: weakref.WeakSet[WeightStore] = weakref.WeakSet()


class WeightStore:
    """Masters by path, and each weight in the layouts that kernels want.

    Storage never moves after a pack is made, so CUDA graphs and other readers stay valid. ``version`` counts refreshes.
    The store is stale once a master has changed since the last :meth:`refresh`: an optimiser step of any kind is seen
    by a hook, other in-place writes by the tensors' version counters and addresses, and, with ``checked``, anything
    else (``p.data`` writes) by a checksum of the masters.
    """

    def __init__(self, masters: Mapping[str, Tensor], *, checked: bool = False) -> None:
        self.masters = dict(masters)
        self.packs: dict[PackKey, Pack] = {}
        self.version = 0
        self.checked = checked
        self._steps = dict.fromkeys(self.masters, 0)  # of optimisers, by path
        self._as_compiled = {path: (t.shape, t.dtype) for path, t in self.masters.items()}
        self._seen: Any = None
        self._graph: _Graph | None = None
        _STORES.add(self)

    def watch(self) -> None:
        """From now on compare a checksum of the masters, too."""
        if not self.checked:
            stale, self.checked = self.stale, True
            self._seen = None if stale else self._state()

    def require(self, keys: Iterable[PackKey]) -> None:
        """Make the packs of a program that are not there yet."""
        groups: dict[Any, list[PackKey]] = {}
        for key in sorted(set(keys) - self.packs.keys(), key=str):
            groups.setdefault(key.group or key, []).append(key)
        for members in groups.values():
            members.sort(key=lambda key: key.place)
            made = dict(zip(members, self._create(members), strict=True))
            _require_finite(_values_of(made))
            self.packs.update(made)
        if self.version == 0:
            self._require_masters()
            _require_finite(self._loose())
            self.version = 1
            self._seen = self._state()

    def _create(self, keys: list[PackKey]) -> list[Pack]:
        """The packs of one group, or of one key that has none."""
        masters, first = [self.masters[key.path].detach() for key in keys], keys[0]
        if first.group:
            return list(first.pack.create_group(masters, first.format))  # type: ignore[attr-defined]
        return [first.pack.create(masters[0], first.format)]

    @torch.no_grad()
    def refresh(self) -> int:
        """Refill every pack from its master, in place; returns the new version. NonFiniteError names a bad weight."""
        self._require_masters()
        for key, pack in self.packs.items():
            device = self.masters[key.path].device
            if device != next(iter(pack.tensors().values())).device:
                raise StaleWeightsError(f"the model moved to {device}", path=key.path, remedy="compile it again")
        if not bool(self._refill()):
            _require_finite(self._held())
        self.version += 1
        self._seen = self._state()
        return self.version

    def _refill(self) -> Tensor:
        """Every pack from its master; whether all that the store holds is finite now.

        On a GPU, where launching takes longer than quantising, one CUDA graph does it: captured at the second refresh
        of the same storage, and dropped when any of it has moved.
        """
        storages = [getattr(pack, "storage", None) for pack in self.packs.values()]
        if self.device.type != "cuda" or None in storages:
            return self._update()
        kept = [t for storage in storages if storage for t in storage()]
        places = [t.data_ptr() for t in (*self.masters.values(), *kept)]
        if self._graph is None or self._graph.places != places:
            self._graph = _Graph(places)
            return self._update()
        return self._graph.run(self._update)

    def _update(self) -> Tensor:
        for key, pack in self.packs.items():
            pack.update(self.masters[key.path].detach())
        return _all_finite(self._held())

    def _held(self) -> list[Named]:
        """What must be finite: the masters that no pack is made from, and what packs hold besides codes."""
        return [*self._loose(), *_values_of(self.packs)]

    def _loose(self) -> list[Named]:
        """The masters that no pack is made from."""
        packed = {key.path for key in self.packs}
        return [(path, "the weight holds", m.detach()) for path, m in self.masters.items() if path not in packed]

    def _require_masters(self) -> None:
        """Masters have the shape and the dtype that they were compiled with."""
        for path, master in self.masters.items():
            shape, dtype = self._as_compiled[path]
            if master.shape != shape:
                raise StaleWeightsError(
                    f"the weight was {list(shape)} when it was compiled and is {list(master.shape)} now",
                    path=path,
                    remedy="compile the model again",
                )
            if master.dtype != dtype:
                raise UnsupportedModelError(
                    f"the weight was {dtype} when it was compiled and is {master.dtype} now",
                    path=path,
                    remedy="load the model again, and compile it: model.to(dtype) rounds RoPE's frequencies too",
                )

    @property
    def device(self) -> torch.device:
        """Where the masters are."""
        return next(iter(self.masters.values())).device

    def trainable(self) -> set[str]:
        """Paths of the masters that want gradients now."""
        return {path for path, t in self.masters.items() if t.requires_grad}

    @property
    def stale(self) -> bool:
        """Whether a master may have changed since the last refresh."""
        return bool(self._seen != self._state())

    def require_fresh(self) -> None:
        """StaleWeightsError if the packs are not those of the masters."""
        if self.stale:
            raise StaleWeightsError(
                f"the masters have changed since weights version {self.version}",
                remedy="call actor.sync() after optimizer.step(); what was compiled from the model and not from the "
                "actor has a store of its own, and a sync() of its own",
            )

    def values(self) -> dict[str, Any]:
        """Packs under the names by which programs read them."""
        return {str(key): pack for key, pack in self.packs.items()}

    def checksum(self) -> int:
        """crc32 over the bytes of the masters, in the order of their paths."""
        value = 0
        for path in sorted(self.masters):
            raw = self.masters[path].detach().contiguous().flatten().view(torch.uint8)
            value = zlib.crc32(raw.cpu().numpy().data, value)
        return value

    def marks(self, paths: Iterable[str]) -> list[tuple[int, int, int]]:
        """What changes when one of these masters is written: version counter, address, optimiser steps."""
        return [(self.masters[p]._version, self.masters[p].data_ptr(), self._steps[p]) for p in paths]

    def _state(self) -> tuple[Any, ...]:
        marks = self.marks(self.masters)
        return (marks, self.checksum()) if self.checked else (marks,)

    def note_step(self, optimizer: Optimizer) -> None:
        """Called after every optimiser step in the process."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for path, master in self.masters.items():
            self._steps[path] += id(master) in stepped


def _values_of(packs: Mapping[PackKey, Pack]) -> list[Named]:
    """Scales, and values that are kept as they are: where a non-finite weight shows."""
    return [
        (key.path, f"{name} made from the weight hold", tensor)
        for key, pack in packs.items()
        for name, tensor in pack.tensors().items()
    ]


def _all_finite(named: Iterable[Named]) -> Tensor:
    """Whether no tensor holds NaN or infinity, as a tensor: nobody waits for it here."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, _, tensor in named:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel():  # FP8 codes are finite
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    norms = [torch.nn.utils.get_total_norm(tensors, math.inf).float() for tensors in by_dtype.values()]
    return torch.isfinite(torch.stack(norms)).all() if norms else torch.tensor(True)


def _require_finite(named: Sequence[Named]) -> None:
    """NonFiniteError for the first tensor with NaN or infinity; one synchronisation if there is none."""
    if bool(_all_finite(named)):
        return
    for path, what, tensor in named:
        if not bool(_all_finite([(path, what, tensor)])):
            raise NonFiniteError(f"{what} NaN or infinity", path=path, remedy="restore the weight from a checkpoint")


class _Graph:
    """A refresh as a CUDA graph, captured at its first run, for storage at these ``places``."""

    def __init__(self, places: list[int]) -> None:
        self.places = places
        self._graph: torch.cuda.CUDAGraph | None = None
        self._finite = torch.tensor(True)

    def run(self, update: Callable[[], Tensor]) -> Tensor:
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._finite = update()
            self._graph = graph
        self._graph.replay()
        return self._finite


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for store in list(_STORES):
        store.note_step(optimizer)


register_optimizer_step_post_hook(_after_step)
