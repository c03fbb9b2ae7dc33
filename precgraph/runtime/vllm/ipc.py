"""Weights from a trainer in another process on the same GPU: CUDA IPC handles, as plain data.

A handle names memory of the trainer's, which stays the trainer's: the receiver maps it, checks it, and copies it into
its own tensors. What travels are the numbers that ``torch`` itself would pickle for a CUDA tensor (torch 2.11 to 2.14).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from precgraph.errors import InputError, SyncError

_OTHER = 'use route="file"'
_STORAGE = {"UntypedStorage": torch.UntypedStorage, "TypedStorage": torch.storage.TypedStorage}


def handles(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """A handle for each tensor, as JSON values. The tensors must live until the receiver has finished."""
    torch.cuda.synchronize()
    return {name: _handle(name, tensor) for name, tensor in tensors.items()}


def opened(found: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """The tensors behind handles; SyncError for data that is no handle."""
    return {name: _open(name, handle) for name, handle in found.items()}


def _handle(name: str, tensor: Tensor) -> list[Any]:
    if tensor.device.type != "cuda":
        raise InputError(f"the tensor is on {tensor.device}, CUDA IPC needs it on a GPU", path=name, remedy=_OTHER)
    rebuild, arguments = reduce_tensor(tensor.detach())
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
