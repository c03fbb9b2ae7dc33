"""Weights as the GPU GEMMs read them: FP8 codes with scales, or the bf16 master itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.quantizer import QTensor

BLOCK = 128


@dataclass(eq=False)
class Stack:
    """Weights that read one value, one below the other, each padded to whole blocks on its own.

    ``codes [P, pad(K)]`` and ``scales [P / 128, pad(K) / 128]`` for FProp, ``codes_t [pad(K), P]`` and ``scales_t`` for
    DGrad, where ``P`` is the sum of the padded row counts. The transposed copy is made when a backward first asks for
    it, so that a rollout never holds it; 128x128 scales transpose with the bytes, nothing is quantised again.
    """

    codes: Tensor
    scales: Tensor
    codes_t: Tensor | None = None
    scales_t: Tensor | None = None

    def transposed(self) -> tuple[Tensor, Tensor]:
        """``codes_t`` and ``scales_t``."""
        if self.codes_t is None or self.scales_t is None:
            self.codes_t, self.scales_t = self.codes.t().contiguous(), self.scales.t().contiguous()
        return self.codes_t, self.scales_t


@dataclass(eq=False)
class Fp8Weight:
    """One weight ``[N, K]`` quantised in 128x128 blocks: rows ``start : start + pad(N)`` of a :class:`Stack`.

    Its codes and scales are views that are made once: a stack's storage never moves.
    """

    shape: torch.Size
    format: Format
    stack: Stack
    start: int

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        return cls.create_group([master], fmt)[0]

    @classmethod
    def create_group(cls, masters: Sequence[Tensor], fmt: Format | None) -> list[Self]:
        """Weights ``[N_i, K]`` of one input, side by side in one stack, so that one GEMM can serve them all."""
        if fmt is None or fmt.granularity != f"{BLOCK}x{BLOCK}":
            raise LoweringError(
                f"an FP8 GEMM on the GPU takes weights in {BLOCK}x{BLOCK} blocks, not {fmt}",
                remedy='set linear.weight.granularity = "128x128"',
            )
        rows, columns = [padded(m.shape[0]) for m in masters], padded(masters[0].shape[1])
        codes = torch.zeros(sum(rows), columns, dtype=fmt.torch_dtype, device=masters[0].device)
        scales = torch.empty(sum(rows) // BLOCK, columns // BLOCK, dtype=torch.float32, device=codes.device)
        stack = Stack(codes, scales)
        packs = [cls(m.shape, fmt, stack, sum(rows[:i])) for i, m in enumerate(masters)]
        for pack, master in zip(packs, masters, strict=True):
            pack.update(master)
        return packs

    @cached_property
    def rows(self) -> slice:
        """Where this weight is in its stack."""
        return slice(self.start, self.start + padded(self.shape[0]))

    @cached_property
    def blocks(self) -> slice:
        """The same, in the stack's scales."""
        return slice(self.rows.start // BLOCK, self.rows.stop // BLOCK)

    @cached_property
    def codes(self) -> Tensor:
        return self.stack.codes[self.rows]

    @cached_property
    def scales(self) -> Tensor:
        return self.stack.scales[self.blocks]

    def transposed(self) -> tuple[Tensor, Tensor]:
        """``[pad(K), pad(N)]`` codes and their scales."""
        codes, scales = self.stack.transposed()
        return codes[:, self.rows], scales[:, self.blocks]

    def update(self, master: Tensor) -> None:
        """Quantise ``master`` in place, into the transposed copy too where there is one; one read of the master."""
        from precgraph.lowering.triton.quantize import quantize_weight

        transposed = (None, None) if self.stack.codes_t is None else self.transposed()
        quantize_weight(master, self.format, self.codes, self.scales, *transposed)

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scales": self.scales}

    def storage(self) -> list[Tensor]:
        copies = self.stack.codes_t, self.stack.scales_t
        return [self.stack.codes, self.stack.scales, *(t for t in copies if t is not None)]


@dataclass(eq=False)
class MasterWeight:
    """A weight that a GEMM reads as it is: the master's own storage ``[N, K]``."""

    values: Tensor

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        return cls(master)

    def update(self, master: Tensor) -> None:
        self.values = master

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def storage(self) -> list[Tensor]:
        return [self.values]


def padded(size: int, multiple: int = BLOCK) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def is_whole_stack(weights: Sequence[Fp8Weight]) -> bool:
    """Whether ``weights`` are all the members of one stack, in order."""
    stack, stop = weights[0].stack, 0
    for weight in weights:
        if weight.stack is not stack or weight.start != stop:
            return False
        stop = weight.rows.stop
    return stop == stack.codes.shape[0]


def adjacent_columns(parts: Sequence[Tensor]) -> bool:
    """Whether tensors ``[M, n_i]`` are neighbouring slices of the columns of one tensor, in order."""
    first, offset = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != first.stride() or part.storage_offset() != offset:
            return False
        offset += part.shape[1] * part.stride(1)
    return True


def joined_columns(parts: Sequence[Tensor]) -> Tensor:
    """Tensors ``[M, n_i]`` side by side: their common storage where they are slices of one, else a copy.

    Kernels that make several operands of one GEMM write them into one buffer; then this costs nothing.
    """
    if len(parts) == 1:
        return parts[0]
    if not adjacent_columns(parts):
        return _copied_columns(parts)
    return parts[0].as_strided((parts[0].shape[0], sum(p.shape[1] for p in parts)), parts[0].stride())


def _copied_columns(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].dtype.itemsize == 1:  # FP8 is moved as bytes
        return torch.cat([p.view(torch.uint8) for p in parts], dim=1).view(parts[0].dtype)
    return torch.cat(list(parts), dim=1)


def adjacent(parts: Sequence[QTensor]) -> QTensor | None:
    """Quantised tensors ``[..., n_i]`` as the one whose neighbouring columns they are, in order, or None."""
    codes, scales = [p.codes for p in parts], [p.scales for p in parts]
    if not adjacent_columns(codes) or not adjacent_columns(scales):
        return None
    shape = torch.Size((*parts[0].shape[:-1], sum(p.shape[-1] for p in parts)))
    return QTensor(joined_columns(codes), joined_columns(scales), shape, parts[0].format)


def pad_columns(x: Tensor, multiple: int = BLOCK) -> Tensor:
    """``x [M, n]`` with zero columns up to a multiple."""
    return F.pad(x, (0, -x.shape[1] % multiple)) if x.shape[1] % multiple else x
