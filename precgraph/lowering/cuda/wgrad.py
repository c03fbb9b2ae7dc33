"""WGrad of FP8 linears on Hopper, both operands in groups of 128 along tokens: a kernel of our own (``wgrad.cu``).

It adds what DeepGEMM's 1D1D kernel adds, in its order, so the fp32 sums are the same bits; it is faster because a
tile's column scales are read while products are summed and because the result is written once, in bf16. Sums do not
depend on the schedule: the same bits in every run.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from precgraph.errors import LoweringError
from precgraph.formats import QTensor
from precgraph.graph import tensor
from precgraph.lowering.cuda.driver import compile_source, kernel, launch, tiles
from precgraph.lowering.fuse import Fusion, register_fusion
from precgraph.lowering.gemm_nodes import fp8, wgrads
from precgraph.lowering.packs import adjacent_columns, joined_columns
from precgraph.lowering.registry import Kernel, register

_SOURCE = "wgrad.cu"
_TILE = 192, 128  # rows of dy, rows of x; as in the source, like the two below
_THREADS = 512
_SHARED_MEMORY = 0x2F440


def unavailable(device: torch.device) -> LoweringError | None:
    """Why this folder's kernels cannot run on ``device``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return LoweringError(
            "this kernel needs a Hopper GPU (compute capability 9.0)", remedy='use backend="reference"'
        )
    try:
        compile_source(_SOURCE)
    except ImportError:
        return LoweringError("cuda-bindings is not installed", remedy="pip install 'precgraph[cuda]'")
    except LoweringError as error:
        return error
    return None


def fp8_wgrad(dy: QTensor, x: QTensor, out: torch.dtype = torch.bfloat16) -> Tensor:
    """``dyᵀ @ x``: ``dy [..., N]``, ``x [..., K]`` in groups of 128 tokens; fp32 sums ``[N, K]``, rounded to ``out``.

    ``out`` is bf16 or fp32.
    """
    gradient = torch.empty(dy.shape[-1], x.shape[-1], dtype=out, device=dy.codes.device)
    _run(dy, x, gradient)
    return gradient


def fp8_wgrads(dys: Sequence[QTensor], x: QTensor, out: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """WGrad of linears that read one value: one GEMM where their gradients lie side by side, rows ``N_i`` each."""
    codes, scales = [d.codes for d in dys], [d.scales for d in dys]
    if not adjacent_columns(codes) or not adjacent_columns(scales):
        return [fp8_wgrad(d, x, out) for d in dys]
    widths = [d.shape[-1] for d in dys]
    shape = torch.Size((*dys[0].shape[:-1], sum(widths)))
    joint = QTensor(joined_columns(codes), joined_columns(scales), shape, dys[0].format)
    return list(fp8_wgrad(joint, x, out).split(widths))


def _run(dy: QTensor, x: QTensor, out: Tensor) -> None:
    (rows, row_scales), (columns, column_scales) = map(_operand, (dy, x))
    N, K = rows.shape[0], columns.shape[0]
    name = "wgrad_bf16" if out.dtype == torch.bfloat16 else "wgrad_fp32"
    function = kernel(_SOURCE, name, out.device, _SHARED_MEMORY)
    turns = -(-N // _TILE[0]) * -(-K // (2 * _TILE[1]))
    arguments = (
        tiles(rows, _TILE[0]),
        tiles(columns, _TILE[1]),
        *(ctypes.c_void_p(t.data_ptr()) for t in (row_scales, column_scales, out)),
        *map(ctypes.c_int, (N, K, row_scales.shape[0])),
        *map(ctypes.c_uint64, (row_scales.stride(0), column_scales.stride(0), out.stride(0))),
    )
    launch(function, 2 * min(turns, _clusters(out.device)), _THREADS, _SHARED_MEMORY, arguments)


def _operand(q: QTensor) -> tuple[Tensor, Tensor]:
    """Codes ``[n, pad(T)]`` and scales ``[T / 128, n]`` as TMA reads them: copies only where strides do not fit."""
    codes, scales = q.codes.t(), q.scales
    if scales.stride(1) != 1 or scales.stride(0) % 4 or scales.data_ptr() % 16:
        scales = scales.contiguous()
    return codes.contiguous(), scales


@functools.cache
def _clusters(device: torch.device) -> int:
    """How many pairs of blocks run at once: a block fills a multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // 2


# ----------------------------------------------------------------------------------------- records


def _serves(out: str) -> Callable[[fx.Node], bool]:
    """Both operands in groups of 128 tokens, and widths that the copy engine can address."""

    def serves(node: fx.Node) -> bool:
        dy, x = node.args
        assert isinstance(dy, fx.Node) and isinstance(x, fx.Node)
        return fp8("128x1", "128x1", out)(node) and tensor(dy).shape[-1] % 4 == 0 and tensor(x).shape[-1] % 8 == 0

    return serves


def _library() -> str:
    try:
        return f"cuda-bindings {importlib.metadata.version('cuda-bindings')}"
    except importlib.metadata.PackageNotFoundError:
        return "cuda-bindings absent"


for _dtype in (torch.bfloat16, torch.float32):
    _name = str(_dtype).removeprefix("torch.")
    register(
        Kernel(
            "linear_wgrad", "cuda", partial(fp8_wgrad, out=_dtype), "precgraph fp8 1D1D", _serves(_name),
            row_invariant=False, library=_library(),
        )
    )  # fmt: skip
    register_fusion(Fusion("wgrads", "cuda", wgrads(partial(fp8_wgrads, out=_dtype), _serves(_name))))
