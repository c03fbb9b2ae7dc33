"""Two values of one node: how many of their bits differ, and by how much they differ as numbers.

A value is a tensor, codes with scales, a tuple of these, or a :class:`Fingerprint` that stands for bytes which are not
at hand. Values of one dtype and layout are compared bit for bit (a NaN equals itself, 0 does not equal -0), others as
the numbers that they stand for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precgraph.errors import CheckError
from precgraph.quantizer import QTensor, dequantize

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """sha256 over dtype, shape and bytes of a value that is not kept itself."""

    sha256: str


@dataclass(frozen=True, slots=True)
class Delta:
    """How two values differ.

    ``values`` are the numbers compared and ``differing`` those whose bits differ, or, where the two are stored
    differently, that differ as numbers; ``bits`` of ``all_bits`` stored bits differ, scales included. ``largest`` is
    the largest absolute difference (infinity where a NaN or infinity is on one side only) and ``relative`` the root
    mean square of Δ over that of the first value. ``scales`` of quantised values differ. Of fingerprints only that
    they differ is known: such a difference is not ``measured``.
    """

    values: int = 0
    differing: int = 0
    bits: int = 0
    all_bits: int = 0
    largest: float = 0.0
    relative: float = 0.0
    scales: int = 0
    differs: bool = False
    same_storage: bool = True
    measured: bool = True

    @property
    def share(self) -> float:
        """Share of the numbers that differ."""
        return self.differing / self.values if self.values else 0.0

    @property
    def bit_share(self) -> float:
        """Share of the stored bits that differ."""
        return self.bits / self.all_bits if self.all_bits else 0.0


def compare(first: Any, second: Any, where: str = "") -> Delta:
    """The difference of two values of one node; CheckError if their shapes do not fit (``where`` names the node)."""
    ours, theirs = list(leaves(first)), list(leaves(second))
    if len(ours) != len(theirs):
        raise CheckError(f"has {len(ours)} parts on one side and {len(theirs)} on the other", path=where)
    return _together([_pair(a, b, where) for a, b in zip(ours, theirs, strict=True)])


def leaves(value: Any) -> Iterator[Tensor | QTensor | Fingerprint]:
    """The tensors of a value in order; what is none (a length) is left out."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, Tensor) and value.is_complex():
        yield torch.view_as_real(value)
    elif isinstance(value, Tensor | QTensor | Fingerprint):
        yield value


def numbers(value: Tensor | QTensor) -> Tensor:
    """What is stored as fp32 (codes times scales; integers and fp64 as fp64)."""
    if isinstance(value, QTensor):
        if value.scales.dim() < 3:
            return dequantize(value)
        slices = zip(value.codes, value.scales, strict=True)  # of experts, each quantised on its own
        return torch.stack([dequantize(QTensor(c, s, value.shape[1:], value.format)) for c, s in slices])
    return value.float() if value.is_floating_point() and value.dtype != torch.float64 else value.double()


def fingerprint(value: Any) -> Fingerprint:
    """The hash of a value's bytes, wherever it is."""
    state = hashlib.sha256()
    for part in leaves(value):
        tensors = (part.codes, part.scales) if isinstance(part, QTensor) else (part,)
        for tensor in tensors:
            if isinstance(tensor, Fingerprint):
                state.update(tensor.sha256.encode())
                continue
            state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return Fingerprint(state.hexdigest())


# ---------------------------------------------------------------------------------------- one pair


def _pair(a: Tensor | QTensor | Fingerprint, b: Tensor | QTensor | Fingerprint, where: str) -> Delta:
    if isinstance(a, Fingerprint) or isinstance(b, Fingerprint):
        hashes = [x if isinstance(x, Fingerprint) else fingerprint(x) for x in (a, b)]
        return Delta(differs=hashes[0] != hashes[1], measured=False)
    if tuple(a.shape) != tuple(b.shape):
        raise CheckError(f"has shape {list(a.shape)} on one side and {list(b.shape)} on the other", path=where)
    x, y = numbers(a), numbers(b).to(_device(a))
    stored = [(s, t.to(s.device)) for s, t in zip(_stored(a), _stored(b), strict=False)]
    if type(a) is not type(b) or any(s.dtype != t.dtype or s.shape != t.shape for s, t in stored):
        return _as_numbers(x, y)
    flips = [_flipped(s, t) for s, t in stored]
    if not any(int(flip) for flip, _ in flips):
        return Delta(x.numel(), all_bits=sum(8 * s.nbytes for s, _ in stored))
    as_numbers = _as_numbers(x, y)
    bitwise = int(_unequal(*stored[0]).sum()) if not isinstance(a, QTensor) else as_numbers.differing
    scales = int(_unequal(*stored[1]).sum()) if isinstance(a, QTensor) else 0
    return Delta(
        x.numel(), bitwise, sum(int(flip) for flip, _ in flips), sum(bits for _, bits in flips), as_numbers.largest,
        as_numbers.relative, scales, differs=True,
    )  # fmt: skip


def _stored(value: Tensor | QTensor) -> Sequence[Tensor]:
    return (value.codes, value.scales) if isinstance(value, QTensor) else (value,)


def _device(value: Tensor | QTensor) -> torch.device:
    return value.codes.device if isinstance(value, QTensor) else value.device


def _words(x: Tensor) -> Tensor:
    return x.contiguous().view(_INTEGERS[x.dtype.itemsize])


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    return _words(a) != _words(b)


def _flipped(a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """How many bits differ, of how many."""
    changed = _words(a) ^ _words(b)
    found = changed[changed != 0].view(torch.uint8)
    count = torch.zeros((), dtype=torch.int64, device=a.device)
    for shift in range(8):
        count += ((found >> shift) & 1).sum()
    return count, 8 * a.nbytes


def _as_numbers(x: Tensor, y: Tensor) -> Delta:
    same = (x == y) | (x.isnan() & y.isnan())
    delta = torch.where(same, 0.0, (x - y).double().abs())
    delta = torch.where(delta.isnan(), torch.inf, delta)
    differing = int((~same).sum())
    largest = float(delta.max()) if delta.numel() else 0.0
    size = float(x.double().square().mean().sqrt()) if x.numel() else 0.0
    change = float(delta.square().mean().sqrt()) if x.numel() else 0.0
    return Delta(
        x.numel(), differing, largest=largest, relative=change / size if size else float(change > 0),
        differs=differing > 0, same_storage=False,
    )  # fmt: skip


def _together(parts: Sequence[Delta]) -> Delta:
    """The parts of a tuple as one."""
    if len(parts) == 1:
        return parts[0]
    return Delta(
        sum(p.values for p in parts), sum(p.differing for p in parts), sum(p.bits for p in parts),
        sum(p.all_bits for p in parts), max((p.largest for p in parts), default=0.0),
        max((p.relative for p in parts), default=0.0), sum(p.scales for p in parts), any(p.differs for p in parts),
        all(p.same_storage for p in parts), all(p.measured for p in parts),
    )  # fmt: skip
