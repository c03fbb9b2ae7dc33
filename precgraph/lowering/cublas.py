"""WGrad of FP8 linears on Hopper by cuBLASLt, through torch: both operands in groups of 128 along tokens.

128 products are summed in the tensor core, scaled by both groups and added up in fp32, as DeepGEMM's 1D1D kernel does,
in another order; the result is written once, in bf16 or fp32, where DeepGEMM's is added to fp32 zeros and cast. That
and its tiles make it the faster of the two (``benchmarks/gpu/gemm.py``). Repeated calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from precgraph.errors import LoweringError
from precgraph.graph import tensor
from precgraph.lowering.fuse import Fusion, register_fusion
from precgraph.lowering.gemm_nodes import fp8, wgrads
from precgraph.lowering.packs import adjacent
from precgraph.lowering.registry import TAKE_REFERENCE, Kernel, register
from precgraph.quantizer import QTensor

_CUDA = (12, 9)  # the first whose cuBLASLt has such scales on Hopper
_STEP = 16  # widths are multiples of this


def unavailable(device: torch.device) -> LoweringError | None:
    """Why cuBLASLt cannot multiply such operands on ``device``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return LoweringError(
            "cuBLASLt multiplies FP8 in groups of 128 on compute capability 9.0 (H100, H200) alone",
            remedy=TAKE_REFERENCE,
        )
    found = tuple(int(part) for part in str(torch.version.cuda).split("."))
    if found < _CUDA:
        return LoweringError(
            f"torch was built for CUDA {torch.version.cuda}; FP8 in groups of 128 needs {_CUDA[0]}.{_CUDA[1]}",
            remedy="install a build of torch for a newer CUDA",
        )
    return None


def fp8_wgrad(dy: QTensor, x: QTensor, out: torch.dtype = torch.bfloat16) -> Tensor:
    """``dyᵀ @ x``: ``dy [..., N]``, ``x [..., K]`` in groups of 128 tokens; fp32 sums ``[N, K]`` rounded to ``out``."""
    from torch.nn.functional import ScalingType, scaled_mm

    groups: Any = ScalingType.BlockWise1x128
    (left, left_scales), (right, right_scales) = map(_operand, (dy, x))
    return scaled_mm(left, right.t(), left_scales, groups, right_scales, groups, output_dtype=out)


def fp8_wgrads(dys: Sequence[QTensor], x: QTensor, out: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """WGrad of linears that read one value: one GEMM where their gradients lie side by side, rows ``N_i`` each."""
    joint = adjacent(dys)
    if joint is None:
        return [fp8_wgrad(d, x, out) for d in dys]
    return list(fp8_wgrad(joint, x, out).split([d.shape[-1] for d in dys]))


def _operand(q: QTensor) -> tuple[Tensor, Tensor]:
    """Codes ``[n, pad(T)]`` and scales ``[n, T / 128]`` with unit stride along n; copies only where strides differ."""
    groups, n = q.scales.shape
    # torch wants a stride of n even along a single group, where any stride counts as contiguous
    return q.codes.t().contiguous(), q.scales.contiguous().as_strided((n, groups), (1, n))


def _serves(out: str) -> Callable[[fx.Node], bool]:
    """Both operands in groups of 128 tokens, and widths that cuBLASLt takes."""

    def serves(node: fx.Node) -> bool:
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        return fp8("128x1", "128x1", out)(node) and all(int(tensor(a).shape[-1]) % _STEP == 0 for a in operands)

    return serves


for _dtype in (torch.bfloat16, torch.float32):
    _name = str(_dtype).removeprefix("torch.")
    register(
        Kernel(
            "linear_wgrad", "cublas", partial(fp8_wgrad, out=_dtype), f"cuBLASLt of CUDA {torch.version.cuda} fp8 1D1D",
            _serves(_name), row_invariant=False,
        )
    )  # fmt: skip
    register_fusion(Fusion("wgrads", "cublas", wgrads(partial(fp8_wgrads, out=_dtype), _serves(_name))))
