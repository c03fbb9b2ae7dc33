"""Weights from a trainer in another process on the same GPU: CUDA IPC handles, as plain data.

A handle names memory of the trainer's, which stays the trainer's: the receiver maps it, checks it, and copies it into
its own tensors. What travels are the numbers that ``torch`` itself would pickle for a CUDA tensor (torch 2.11 to 2.14).
"""

from __future__ import annotations

import base64
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor, reduce_tensor

from precgraph.errors import InputError, SyncError

_OTHER = 'use route="file"'
_COUNTER = slice(11, 13)  # of a handle: the file and the place in it where torch counts readers
_STORAGE = {"UntypedStorage": torch.UntypedStorage, "TypedStorage": torch.storage.TypedStorage}


class Handles:
    """The handles of a trainer's tensors that one receiver is given, each made once for as long as its tensor stays.

    With each handle, torch wraps the tensor's storage once more and counts one reader, which the receiver takes away
    when it drops the tensor; until then the memory is not reused, even if the trainer has dropped it. :attr:`release`
    takes them all away, for a receiver that has ended; it is called, too, when this object goes.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, list[Any]]] = {}
        self._replaced: list[list[Any]] = []  # handles that the receiver still holds, until it has taken others
        self.release = weakref.finalize(self, _release, self._made, self._replaced)

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
        """A handle for each tensor, as JSON values. The tensors must live until the receiver has finished.

        It must be given them: a handle that is made and not opened keeps its memory until :attr:`release`.
        InputError for a tensor that is on no GPU.
        """
        places = {name: _place(tensor) for name, tensor in tensors.items()}
        for name in [n for n, (place, _) in self._made.items() if place != places.get(n)]:
            self._replaced.append(self._made.pop(name)[1])
        for name, tensor in tensors.items():
            if name not in self._made:
                self._made[name] = places[name], _handle(name, tensor)
        for device in {tensor.device for tensor in tensors.values()}:  # the receiver reads at once
            torch.cuda.synchronize(device)
        return {name: handle for name, (_, handle) in self._made.items()}

    def taken(self) -> None:
        """The receiver has opened the handles that :meth:`of` gave last, and dropped all others."""
        self._replaced.clear()


class Opened:
    """The tensors behind the handles of one trainer, mapped for as long as it names them.

    Mapping takes up to a millisecond a tensor, and torch counts one reader a handle: none is opened twice.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[list[Any], Tensor]] = {}

    def of(self, found: Mapping[str, list[Any]]) -> dict[str, Tensor]:
        """The tensors behind handles; others are dropped. SyncError for data that is no handle."""
        # First, for a new storage may begin where an old one did, and torch would take it for that one.
        self._held = {name: held for name, held in self._held.items() if held[0] == found.get(name)}
        for name, handle in found.items():
            if name not in self._held:
                self._held[name] = handle, _open(name, handle)
        return {name: tensor for name, (_, tensor) in self._held.items()}


def _place(tensor: Tensor) -> Any:
    """What a handle depends on. The weak reference tells a storage from a later one at the same address."""
    return StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _release(made: Mapping[str, tuple[Any, list[Any]]], replaced: list[list[Any]]) -> None:
    for handle in (*(handle for _, handle in made.values()), *replaced):
        counter, offset = (_restored(a) for a in handle[_COUNTER])
        if counter is not None:  # an empty tensor's
            torch.UntypedStorage._release_ipc_counter(counter, offset)


def _handle(name: str, tensor: Tensor) -> list[Any]:
    if tensor.device.type != "cuda":
        raise InputError(f"the tensor is on {tensor.device}, CUDA IPC needs it on a GPU", path=name, remedy=_OTHER)
    try:
        rebuild, arguments = reduce_tensor(tensor.detach())
    except RuntimeError as error:
        raise SyncError(f"torch cannot share the tensor: {error}", path=name, remedy=_OTHER) from error
    if rebuild is not rebuild_cuda_tensor:
        raise SyncError(f"torch shares the tensor by {rebuild.__name__}, not by CUDA IPC", path=name, remedy=_OTHER)
    return [_plain(a) for a in arguments]


def _open(name: str, handle: list[Any]) -> Tensor:
    try:
        tensor: Tensor = rebuild_cuda_tensor(*(_restored(a) for a in handle))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise SyncError(f"the handle cannot be opened: {error}", path=name, remedy=_OTHER) from None
    return tensor


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Size | tuple):
        return list(value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, type):
        return {"class": value.__name__}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return torch.Size(value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{content!r} is no dtype")
        return dtype
    return {**_STORAGE, "Tensor": Tensor, "Parameter": torch.nn.Parameter}[content]
