"""WGrad of FP8 linears on Hopper, both operands in groups of 128 along tokens: a kernel of our own (``wgrad.cu``).

It adds what DeepGEMM's 1D1D kernel adds, in its order, so the fp32 sums are the same bits. Its warpgroups take turns
at the tensor core, and the result is written once, in its own dtype: faster than that one and than
cuBLASLt's (docs/results/speed.md). Sums do not depend on the schedule: the same bits in every run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from precgraph.errors import LoweringError
from precgraph.graph import tensor
from precgraph.lowering.cuda.driver import SWIZZLE, compile_source, kernel, launch, tensor_map
from precgraph.lowering.fuse import Fusion, register_fusion
from precgraph.lowering.gemm_nodes import fp8, wgrads
from precgraph.lowering.registry import Kernel, not_hopper, register
from precgraph.quantizer import QTensor

_SOURCE = "wgrad.cu"
TILE = 256, 128  # rows of dy, rows of x; as in the source, like the two below
THREADS = 384
SHARED_MEMORY = 1024 + 0x35840  # what aligns it, and what it holds
_STEP = 16  # widths are multiples of this: TMA's step in bytes, and the rows of x that are loaded in one order


def unavailable(device: torch.device) -> LoweringError | None:
    """Why this folder's kernels cannot run on ``device``."""
    if problem := not_hopper("kernels in CUDA C++ need", device):
        return problem
    try:
        compile_source(_SOURCE)
    except ModuleNotFoundError:
        return LoweringError("cuda-bindings is not installed", remedy="pip install 'precgraph[cuda]'")
    except LoweringError as error:
        return error
    except (ImportError, OSError, RuntimeError) as error:
        return LoweringError(f"NVRTC does not load: {error}", remedy="pip install nvidia-cuda-nvrtc, of torch's CUDA")
    return None


def fp8_wgrad(dy: QTensor, x: QTensor, out: torch.dtype = torch.bfloat16) -> Tensor:
    """``dyᵀ @ x``: ``dy [..., N]``, ``x [..., K]`` in groups of 128 tokens; fp32 sums ``[N, K]`` rounded to ``out``.

    ``out`` is bf16 or fp32; widths are multiples of 16.
    """
    (rows, row_scales), (columns, column_scales) = map(_operand, (dy, x))
    (N, tokens), K, groups = rows.shape, columns.shape[0], row_scales.shape[0]
    gradient = torch.empty(N, K, dtype=out, device=rows.device)
    sixteens = (2, tokens), (4, 4 * tokens), (2, 2 * tokens), (K // 16, 16 * tokens)
    arguments = (
        tensor_map(rows.data_ptr(), (tokens, N), (tokens,), (SWIZZLE, TILE[0] // 2), torch.uint8),
        # Row 16 i + 8 b + 2 q + p of a tile is row 16 i + 4 q + 2 b + p of x: of sixteen columns of sums, the four that
        # a thread has lie side by side, and so do their scales.
        tensor_map(
            columns.data_ptr(), (tokens, *(size for size, _ in sixteens)), tuple(step for _, step in sixteens),
            (SWIZZLE, 2, 4, 2, TILE[1] // 16), torch.uint8,
        ),
        _scales(row_scales, TILE[0]),
        _scales(column_scales, TILE[1]),
        ctypes.c_void_p(gradient.data_ptr()),
        *map(ctypes.c_int, (N, K, groups)),
    )  # fmt: skip
    name = "wgrad_bf16" if out == torch.bfloat16 else "wgrad_fp32"
    turns = -(-N // TILE[0]) * -(-K // (2 * TILE[1]))
    function = kernel(_SOURCE, name, rows.device, SHARED_MEMORY)
    launch(function, 2 * min(turns, _clusters(rows.device)), THREADS, SHARED_MEMORY, arguments)
    return gradient


def _operand(q: QTensor) -> tuple[Tensor, Tensor]:
    """Codes ``[n, pad(T)]`` and scales ``[T / 128, n]`` as TMA reads them: copies only where strides do not fit."""
    scales = q.scales
    if scales.stride(1) != 1 or scales.stride(0) % 4 or scales.data_ptr() % 16:
        scales = scales.contiguous()
    return q.codes.t().contiguous(), scales


def _scales(scales: Tensor, height: int) -> Any:
    (groups, n), step = scales.shape, 4 * scales.stride(0)
    return tensor_map(scales.data_ptr(), (n, groups), (step,), (height, 1), torch.float32)


@functools.cache
def _clusters(device: torch.device) -> int:
    """How many pairs of blocks run at once: a block fills a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count // 2


# ----------------------------------------------------------------------------------------- records


def _serves(out: str) -> Callable[[fx.Node], bool]:
    """Both operands in groups of 128 tokens, and widths that the copy engine can address."""

    def serves(node: fx.Node) -> bool:
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        return fp8("128x1", "128x1", out)(node) and all(int(tensor(a).shape[-1]) % _STEP == 0 for a in operands)

    return serves


for _dtype in (torch.bfloat16, torch.float32):
    _run, _served = partial(fp8_wgrad, out=_dtype), _serves(str(_dtype).removeprefix("torch."))
    register(Kernel("linear_wgrad", "cuda", _run, "precgraph fp8 1D1D", _served, row_invariant=False))
    register_fusion(Fusion("wgrads", "cuda", wgrads(_run, _served)))
