"""Reference kernels of expert layers: the GEMM kernels of one weight, expert by expert.

Those are row-invariant, so it does not matter which or how many rows an expert gets. Each expert's weight is padded to
whole blocks and quantised on its own, however its rows divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from precgraph import ops
from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.lowering.reference import gemm
from precgraph.lowering.reference.reductions import ordered_sum
from precgraph.quantizer import QTensor, quantize


def quantize_slices(weight: Tensor, fmt: Format) -> QTensor:
    """``weight [E, N, K]``, every ``weight[e]`` quantised on its own.

    codes ``[E, pad(N), pad(K)]``, scales ``[E, N/r, K/c]``, both rounded up; slice ``e`` is ``quantize(weight[e])``.
    """
    parts = [quantize(one, fmt) for one in weight]
    codes, scales = torch.stack([p.codes for p in parts]), torch.stack([p.scales for p in parts])
    return QTensor(codes, scales, weight.shape, fmt)


@dataclass(eq=False)
class Float64Experts:
    """The quantised weights of all experts; ``parts[e]`` is a view of slice ``e`` for exact products."""

    quantized: QTensor
    parts: list[gemm.Float64Weight]

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        if fmt is None:
            raise LoweringError("a quantised GEMM needs a weight format")
        whole = quantize_slices(master, fmt)
        pairs = zip(whole.codes, whole.scales, strict=True)
        slices = [QTensor(codes, scales, master.shape[1:], fmt) for codes, scales in pairs]
        return cls(whole, [gemm.Float64Weight(q, q.codes.double()) for q in slices])

    def update(self, master: Tensor) -> None:
        for part, one in zip(self.parts, master, strict=True):
            part.update(one)

    def refill(self) -> None:
        """Remake the float64 copies after codes were written into :meth:`tensors`."""
        for part in self.parts:
            part.refill()

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.quantized.codes, "scales": self.quantized.scales}


@dataclass(eq=False)
class Float32Experts:
    """The weights of all experts in their own dtype, widened once to fp32."""

    values: Tensor
    parts: list[gemm.Float32Weight]

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        values = master.float()
        return cls(values, [gemm.Float32Weight(one) for one in values])

    def update(self, master: Tensor) -> None:
        self.values.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}


# ----------------------------------------------------------------------------------------- kernels


def linear(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``expert_linear`` by a kernel of ``linear``."""

    def run(x: Any, weight: Any, index: Tensor, slots: int) -> Tensor:
        rows = weight.parts[0].quantized.shape[0] if isinstance(weight, Float64Experts) else weight.values.shape[1]
        y = torch.empty(index.numel(), rows, dtype=torch.bfloat16, device=index.device)
        for part, (places, sources) in zip(weight.parts, ops.dispatched(index, len(weight.parts), slots), strict=True):
            if len(places):
                y[places] = kernel(_rows(x, sources), part, None)
        return y

    return run


def dgrad(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``expert_dgrad`` by a kernel of ``linear_dgrad``; the parts of a row are summed in fp32 in order of its slots."""

    def run(dy: Any, weight: Any, index: Tensor, slots: int) -> Tensor:
        first = weight.parts[0]
        width = first.quantized.shape[1] if isinstance(weight, Float64Experts) else first.values.shape[1]
        dx = torch.empty(index.numel(), width, dtype=torch.bfloat16, device=index.device)
        for part, (places, _) in zip(weight.parts, ops.dispatched(index, len(weight.parts), slots), strict=True):
            if len(places):
                dx[places] = kernel([_rows(dy, places)], [part])
        total, *rest = dx.float().view(-1, slots, width).unbind(1)
        for more in rest:
            total = total + more
        return total.to(dx.dtype)

    return run


def fp8_wgrad(
    dys: Sequence[QTensor | None], xs: Sequence[QTensor | None], index: Tensor, experts: int, slots: int
) -> Tensor:
    """``dyᵀ @ x`` of each expert, both quantised along its own tokens: ``[E, N, K]``; zero without tokens."""
    pairs = list(zip(dys, xs, strict=True))
    made = [gemm.fp8_wgrad(dy, x) if dy is not None and x is not None else None for dy, x in pairs]
    some = next(m for m in made if m is not None)
    return torch.stack([torch.zeros_like(some) if m is None else m for m in made])


def plain_wgrad(dy: Tensor, x: Tensor, index: Tensor, experts: int, slots: int) -> Tensor:
    """``dyᵀ @ x`` of each expert, bf16 operands, fp32 sums."""
    rows = ops.dispatched(index, experts, slots)
    return torch.stack([gemm.plain_wgrad(dy[places], x[sources]) for places, sources in rows])


def _rows(x: Any, rows: Tensor) -> Any:
    """Rows of a 2-D tensor, or of one that has a scale for each group of a row."""
    if isinstance(x, QTensor):
        return QTensor(x.codes.view(torch.uint8)[rows].view(x.codes.dtype), x.scales[rows],
                       torch.Size((len(rows), x.shape[1])), x.format)  # fmt: skip
    return x[rows]


# --------------------------------------------------------------------------------- around the GEMMs


def top_k(x: Tensor, k: int, ordered: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` greatest of each row, in order either way; of equal ones the first."""
    values, index = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), index[..., :k].contiguous()


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept, in the order ``pieces512``."""
    return ordered_sum(x.float()).to(x.dtype)


def wide_linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(dx, dweight)`` from an fp32 gradient, sums in fp32, each rounded once."""
    dx = (dy @ weight.float()).to(x.dtype)
    return dx, (dy.flatten(0, -2).t() @ x.flatten(0, -2).float()).to(weight.dtype)


def wide_linear(x: Tensor, weight: gemm.Float32Weight) -> Tensor:
    """bf16 operands, fp32 products, sums and result, in tiles of one shape."""
    return gemm.tiled_logits(x, weight, None)


def combine_backward(dy: Tensor, y: Tensor, scores: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``(dy_rows, dscores)``; products rounded as autograd rounds them, their sum in fp32 and rounded once."""
    parts = y.view(*scores.shape, -1)
    wide = dy.unsqueeze(1).to(torch.promote_types(y.dtype, scores.dtype))
    drows = (wide * scores.unsqueeze(-1)).to(y.dtype).view_as(y)
    return drows, ordered_sum((wide * parts).float()).squeeze(-1).to(scores.dtype)
