"""A rollout's store from an FP8 checkpoint: its codes and scales as they are, never quantised again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precgraph.checkpoint import Fp8Checkpoint, Part
from precgraph.checkpoint.fp8 import CODES, SCALE
from precgraph.errors import InputError
from precgraph.format import Format
from precgraph.runtime.vllm.weights import RolloutStore, fits, install_pack, pack_groups

Where = dict[str, list[tuple[str, Part]]]  # path of a parameter to the checkpoint's tensors that it consists of


@torch.no_grad()
def load_quantized(store: RolloutStore, checkpoint: Fp8Checkpoint, parts: Mapping[str, Part]) -> None:
    """Fill ``store`` from ``checkpoint``, whose tensors are where ``parts`` says (:func:`precgraph.checkpoint.layout`).

    InputError for a tensor of another name, shape or dtype than the program reads: a layer that the recipe quantises
    and the checkpoint does not or the other way round, another block size, a scale that is missing or no positive
    number, a parameter that is missing. What rounded the weights is not in a checkpoint; level weights finds that out.
    """
    store.invalid = "loading the checkpoint broke off"
    store.version = max(store.version, 1)
    checkpoint.require_complete()
    where = _where(store, checkpoint, parts)
    quantized = {key.path for key in store.program.packs if key.format is not None}
    for path in store.parameters - quantized:
        if not store.masters[path].is_meta:
            store.masters[path].copy_(_plain(store, checkpoint, where, path))
    for members in pack_groups(store.program.packs):
        fp8 = {k.path: _quantized(store, checkpoint, where, k.path, k.format) for k in members if k.format is not None}
        rest = {k.path: _plain(store, checkpoint, where, k.path) for k in members if k.format is None}
        empty = {p: torch.zeros_like(store.masters[p], device=store.device) for p in fp8}  # the pack's layout
        store.fill(members, {**empty, **rest})
        for key in members:
            if key.path in fp8:
                install_pack(store.packs[key], *fp8[key.path])
    store.invalid = None


def _where(store: RolloutStore, checkpoint: Fp8Checkpoint, parts: Mapping[str, Part]) -> Where:
    """The tensors of each parameter; nothing is left over and nothing missing."""
    found: Where = {}
    for name in checkpoint:
        if name.endswith(SCALE):
            continue
        path = store.names.get(parts[name].path) if name in parts else None
        if path is None:
            raise InputError("the model has no parameter of this name", path=name, remedy="correct the config")
        found.setdefault(path, []).append((name, parts[name]))
    for name, part in parts.items():
        path = store.names.get(part.path)
        if path is not None and (part.expert is not None or path not in found) and name not in checkpoint:
            raise InputError("the checkpoint lacks this weight", path=name, remedy="restore the checkpoint")
    return found


def _plain(store: RolloutStore, checkpoint: Fp8Checkpoint, where: Where, path: str) -> Tensor:
    """A parameter in the model's dtype."""
    master = store.masters[path]
    made = torch.empty(master.shape, dtype=master.dtype)
    for name, part in where[path]:
        value, place = checkpoint.read(name), part.of(made)
        if value.shape != place.shape or not fits(value.dtype, master.dtype):
            raise _other(name, value.dtype, value.shape, str(master.dtype).removeprefix("torch."), place.shape)
        place.copy_(value)
    return made


def _quantized(
    store: RolloutStore, checkpoint: Fp8Checkpoint, where: Where, path: str, fmt: Format
) -> tuple[Tensor, Tensor]:
    """A parameter's codes [..., N, K] and scales [..., N/r, K/c]."""
    (r, c), shape = fmt.block, tuple(store.masters[path].shape)
    if checkpoint.quantization.block != (r, c):
        raise InputError(
            f"the checkpoint's blocks are {list(checkpoint.quantization.block)}, the recipe's {[r, c]}",
            path=str(checkpoint.folder), remedy="use the recipe that the checkpoint was exported by",
        )  # fmt: skip
    codes = torch.empty(shape, dtype=fmt.torch_dtype)
    scales = torch.empty((*shape[:-2], -(-shape[-2] // r), -(-shape[-1] // c)), dtype=torch.float32)
    for name, part in where[path]:
        entry, place = checkpoint.entries[name], part.of(codes)
        if CODES.get(entry.dtype) != fmt.dtype or entry.shape != tuple(place.shape):
            raise _other(name, entry.dtype, entry.shape, fmt.dtype, place.shape)
        scale = checkpoint.scale(name)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise InputError("not every scale is a positive finite number", path=name, remedy="export it again")
        place.view(torch.uint8).copy_(checkpoint.read(name).view(torch.uint8))
        rows = slice(None) if part.expert is None else slice(part.rows[0] // r, -(-part.rows[1] // r))
        (scales if part.expert is None else scales[part.expert])[rows] = scale
    return codes, scales


def _other(name: str, dtype: object, shape: tuple[int, ...], wanted: str, wants: tuple[int, ...]) -> InputError:
    found = str(dtype).removeprefix("torch.")
    return InputError(
        f"the checkpoint holds {found}{list(shape)}, and by the recipe it is {wanted}{list(wants)}", path=name,
        remedy="use the recipe that the checkpoint was exported by, or export it by this one",
    )  # fmt: skip
