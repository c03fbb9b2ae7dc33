"""The weights of a rollout alone: FP8 where the program reads FP8, and no master where nothing reads it.

:func:`wire` names the tensors that a policy consists of, on the trainer's side and on the rollout's. FP8 weights travel
as they are: codes ``[N, K]`` under the parameter's path and fp32 block scales under ``path + "_scale_inv"``, the
layout of FP8 checkpoints of Hugging Face; everything else in the dtype that the program reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from precgraph.errors import InputError, StaleWeightsError
from precgraph.graph import PrecisionGraph, precision
from precgraph.lowering.program import PackKey, Program
from precgraph.lowering.registry import Pack
from precgraph.runtime.store import WeightStore
from precgraph.trace import Trace

SCALES = "_scale_inv"


class UnknownNameError(InputError):
    """A checkpoint's tensor has a name that the model's parameters do not have."""


class RolloutStore(WeightStore):
    """A store that is filled from a checkpoint or by updates, group by group; masters that no kernel reads stay away.

    Its version is the trainer's, 0 until there are weights. While an update is being installed, and after one that
    broke off, :meth:`require_fresh` refuses.
    """

    def __init__(self, trace: Trace, program: Program, device: torch.device) -> None:
        read = read_directly(program.graph)
        masters = {
            # Only weights arrive later; other buffers and constants are what the model's own code made of them.
            path: torch.empty_like(t, device=device if path in read else "meta")
            if path in trace.graph.parameters and not trace.graph.parameters[path].buffer
            else t.to(device)
            for path, t in trace.tensors.items()
        }
        super().__init__({p: masters[p] for p in sorted(masters, key=lambda p: masters[p].is_meta)})
        self.program = program
        self.parameters = {p for p, info in trace.graph.parameters.items() if not info.buffer}
        self.names = {alias: p for p, info in trace.graph.parameters.items() for alias in (p, *info.aliases)}
        self.installs = 0  # updates that were begun; two may have one version
        self.invalid: str | None = "no weights were loaded yet"

    @property
    def stale(self) -> bool:
        return self.invalid is not None

    def require_fresh(self) -> None:
        if self.invalid is not None:
            raise StaleWeightsError(self.invalid, remedy="sync the weights, then generate")

    def wanted(self) -> Iterator[tuple[str, Tensor]]:
        """Path of every parameter, and a tensor of its dtype and shape."""
        return ((path, self.masters[path]) for path in sorted(self.parameters))

    # ------------------------------------------------------------------------------- checkpoints
    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill from the tensors of a bf16 checkpoint, quantising as the recipe says; again, in place.

        InputError for a tensor of another name, shape or dtype than the model's, and for one that is missing.
        """
        self.invalid = "loading the checkpoint broke off"
        self.version = max(self.version, 1)
        groups = pack_groups(self.program.packs)
        waiting: dict[str, Tensor] = {}
        seen: set[str] = set()
        for name, weight in weights:
            path = self._path(name, weight)
            if path in seen:
                continue  # the other name of a tied weight
            seen.add(path)
            waiting[path] = weight.to(self.device, self.masters[path].dtype)
            if not self.masters[path].is_meta:
                self.masters[path].copy_(weight)
            for members in [g for g in groups if {k.path for k in g} <= waiting.keys()]:
                groups.remove(members)
                self.fill(members, waiting)
            still = {k.path for g in groups for k in g}
            waiting = {p: w for p, w in waiting.items() if p in still}
        missing = sorted(self.parameters - seen)
        if missing:
            raise InputError(
                f"the checkpoint lacks {len(missing)} of the model's weights",
                path=missing[0],
                remedy="restore the checkpoint",
            )
        self._require_masters()
        self.invalid = None

    def _path(self, name: str, weight: Tensor) -> str:
        path = self.names.get(name)
        if path is None:
            raise UnknownNameError("the model has no parameter of this name", path=name)
        master = self.masters[path]
        if weight.shape != master.shape or not fits(weight.dtype, master.dtype):
            raise InputError(
                f"the checkpoint holds {_describe(weight)}, the model's config wants {_describe(master)}", path=name,
                remedy="correct the config, or convert the checkpoint to bfloat16",
            )  # fmt: skip
        return path

    def fill(self, keys: list[PackKey], masters: Mapping[str, Tensor]) -> None:
        """Make or refill the packs of one group from ``masters``, by path."""
        if keys[0] in self.packs:
            for key in keys:
                self.packs[key].update(masters[key.path])
            return
        own = {key.path: self.masters[key.path] for key in keys}
        # Weights of plain packs are read in place: those keep their own storage.
        self.masters.update({p: masters[p] for p, t in own.items() if t.is_meta})
        try:
            self.require(keys)
        finally:
            self.masters.update(own)

    # ----------------------------------------------------------------------------------- updates
    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy the tensors of :func:`wire`, checked and complete, into place; no storage moves."""
        self.invalid = f"installing the weights of version {version} broke off"
        self.installs += 1
        for key in self.program.packs:
            if key.format is not None:
                install_pack(self.packs[key], tensors[key.path], tensors[key.path + SCALES])
        for path in read_directly(self.program.graph):
            self.masters[path].copy_(tensors[path])
        for key in self.program.packs:
            if key.format is None:
                self.packs[key].update(self.masters[key.path])
        self.version = version
        self.invalid = None

    def addresses(self) -> dict[str, int]:
        """Where every tensor that a kernel reads begins."""
        found = {p: t.data_ptr() for p, t in self.masters.items() if not t.is_meta}
        for key, pack in self.packs.items():
            found |= {f"{key}.{name}": t.data_ptr() for name, t in pack.tensors().items()}
        return found


def install_pack(pack: Pack, codes: Tensor, scales: Tensor) -> None:
    """Write codes ``[..., N, K]`` and their scales into a pack. FP8 is moved as bytes."""
    stored = pack.tensors()
    rows, columns = codes.shape[-2:]
    own = stored["codes"].view(torch.uint8)
    own[..., :rows, :columns].copy_(codes.view(torch.uint8))
    # Zeros already, but after a sleep that discarded the weights, where padding is what the memory holds.
    own[..., rows:, :].zero_()
    own[..., columns:].zero_()
    stored["scales"].copy_(scales)
    refill = getattr(pack, "refill", None)  # what a layout keeps besides, such as float64 copies
    if refill is not None:
        refill()


def pack_groups(keys: Iterable[PackKey]) -> list[list[PackKey]]:
    """Packs that are made together."""
    groups: dict[Any, list[PackKey]] = {}
    for key in sorted(keys, key=str):
        groups.setdefault(key.group or key, []).append(key)
    return list(groups.values())


# --------------------------------------------------------------------------------------- the wire


def wire(store: WeightStore, program: Program) -> dict[str, Tensor]:
    """The policy's tensors by name, as kernels of the forward read them: the store's own memory, with its strides."""
    tensors = {path: store.masters[path].detach() for path in sorted(read_directly(program.graph))}
    for key in sorted(program.packs, key=str):
        if key.format is not None:
            pack = store.packs[key].tensors()
            rows, columns = store.masters[key.path].shape[-2:]
            tensors[key.path] = pack["codes"][..., :rows, :columns]
            tensors[key.path + SCALES] = pack["scales"]
    return tensors


def read_directly(graph: PrecisionGraph) -> set[str]:
    """Paths of the parameters and buffers that the forward reads in their own dtype."""
    return {
        str(n.target) for n in graph
        if n.op == "get_attr" and any(precision(u).phase == "forward" for u in n.users if u.op == "call_function")
    }  # fmt: skip


def fits(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a checkpoint's dtype is the model's: transformers widens what a class keeps in fp32, which is exact."""
    return found == wanted or (found, wanted) == (torch.bfloat16, torch.float32)


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
