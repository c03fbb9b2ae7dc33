"""GEMMs on Hopper by DeepGEMM: FP8 for linears (FProp, DGrad, WGrad), bf16 for lm_head and what recipes leave out.

FProp and DGrad run the 1D2D kernel (one operand in groups of 1x128, the weight in 128x128 blocks, bf16 out), and so
does WGrad where a recipe quantises the activation in 128x128 blocks. Where both operands are in groups of 128 along
tokens and :mod:`precgraph.lowering.cuda.wgrad` does not serve, it runs 1D1D (fp32 out, rounded once). Both kernels sum
128 products in the tensor core, scale the sum and add it to an fp32 accumulator, group after group: rows do not depend
on each other and nothing is split, so results are row-invariant and deterministic whatever tile the library picks (a
test shows it).

The library is PyPI's ``sgl-deep-gemm`` (imported as ``deep_gemm``) or the copy inside vLLM. It compiles a kernel for
every new tile of a weight's shape, about four seconds each, into ``DG_JIT_CACHE_DIR`` (default ``~/.deep_gemm``). Left
open, a shape costs registers that some tiles do not have: those of 128x192, which 512 tokens take for an N of 6144,
spill 440 bytes a thread and are 3.4 times slower (docs/results/speed.md). WGrad's K is the number of tokens, so
its kernels, and those of bf16, which spill nothing, serve all shapes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from precgraph import ops
from precgraph.errors import LoweringError
from precgraph.lowering.fuse import Fused, Fusion, Of, register_fusion
from precgraph.lowering.gemm_nodes import bf16, fp8, wgrads
from precgraph.lowering.packs import (
    Fp8Weight,
    MasterWeight,
    is_whole_stack,
    joined_columns,
    pad_columns,
    padded,
)  # fmt: skip
from precgraph.lowering.registry import Kernel, not_hopper, register
from precgraph.quantizer import QTensor

_DISTRIBUTIONS = (("deep_gemm", "sgl-deep-gemm", "0.1."), ("vllm.third_party.deep_gemm", "vllm", "0."))
_OF_WEIGHT, _OPEN = "nk", ""  # the sizes that a kernel is compiled for; the library's own choice is "nk" throughout

# ------------------------------------------------------------------------------------- the library


@functools.cache
def library() -> tuple[str, str]:
    """Import name of the DeepGEMM at hand and its ``distribution version``; LoweringError if none fits."""
    remedy = "pip install 'precgraph[deep-gemm]' (sgl-deep-gemm 0.1)"
    for module, distribution, wanted in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not version.startswith(wanted):
            raise LoweringError(f"{distribution} {version} is not a version that precgraph knows", remedy=remedy)
        return module, f"{distribution} {version}"
    raise LoweringError("DeepGEMM is not installed", remedy=remedy)


def unavailable(device: torch.device) -> LoweringError | None:
    """Why DeepGEMM cannot run on ``device``: another GPU, no library, no compiler."""
    if problem := not_hopper("FP8 GEMMs need", device):
        return problem
    try:
        name = library()[1]
        if compiler() is None:
            return LoweringError(
                f"{name} compiles its kernels and finds no nvcc",
                remedy="install the CUDA toolkit and set CUDA_HOME to it",
            )
        _module()
    except LoweringError as error:
        return error
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        return LoweringError(
            f"{library()[1]} does not load: {error}", remedy="install apache-tvm-ffi, and a torch that it fits"
        )
    return None


def compiler() -> Path | None:
    """The nvcc that DeepGEMM's JIT will call: below CUDA_HOME or CUDA_PATH, on the PATH, or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    nvcc = Path(home, "bin", "nvcc") if home else Path(on_path or "/usr/local/cuda/bin/nvcc")
    return nvcc if nvcc.exists() else None


@functools.cache
def _module() -> ModuleType:
    module = importlib.import_module(library()[0])
    module.set_pdl(True)  # start while the kernel before ends; the kernels wait before they read
    return module


# --------------------------------------------------------------------------------------------- FP8


def fp8_linear(x: QTensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """FProp: ``x [..., K]`` 1x128, ``weight [N, K]`` to bf16 ``[..., N]``; then the bf16 bias."""
    y = _gemm_1d2d(x.codes, x.scales, weight.codes, weight.scales)
    return _output(y, 0, weight, bias, x.shape)


def fp8_linears(x: QTensor, weights: Sequence[Fp8Weight], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """FProp of linears that read one value: one GEMM if they share a stack; outputs are slices of its columns."""
    if not is_whole_stack(weights):
        return [fp8_linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    stack = weights[0].stack
    y = _gemm_1d2d(x.codes, x.scales, stack.codes, stack.scales)
    return [_output(y, w.start, w, b, x.shape) for w, b in zip(weights, biases, strict=True)]


def _output(y: Tensor, start: int, weight: Fp8Weight, bias: Tensor | None, shape: torch.Size) -> Tensor:
    columns = weight.shape[0]
    part = _like(y if columns == y.shape[1] else y[:, start : start + columns], shape)
    return part if bias is None else part + bias


def fp8_dgrad(dys: Sequence[QTensor], weights: Sequence[Fp8Weight]) -> Tensor:
    """DGrad: ``Σ dy_i [..., N_i] @ weight_i [N_i, K]`` in one GEMM along all N, so in one fp32 accumulator."""
    codes, scales = joined_columns([d.codes for d in dys]), joined_columns([d.scales for d in dys])
    if is_whole_stack(weights):
        right, right_scales = weights[0].stack.transposed()
    else:
        parts = [w.transposed() for w in weights]
        right, right_scales = joined_columns([c for c, _ in parts]), joined_columns([s for _, s in parts])
    y = _gemm_1d2d(codes, scales, right, right_scales)
    return _like(y[:, : weights[0].shape[1]], dys[0].shape)


def _gemm_1d2d(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, compiled: str = _OF_WEIGHT) -> Tensor:
    """``a [M, K] @ b [N, K].T`` to bf16 ``[M, N]``; scales ``[M, K / 128]`` and ``[N / 128, K / 128]``."""
    d = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    left, right = (a, _rows_major(a_scales)), (b, b_scales.contiguous())
    _module().fp8_gemm_nt(left, right, d, compiled_dims=compiled, disable_ue8m0_cast=True)  # scales stay fp32
    return d


def fp8_wgrad(dy: QTensor, x: QTensor) -> Tensor:
    """WGrad: ``dyᵀ @ x``, both in groups of 128 along tokens; fp32 sums, rounded to bf16 ``[N, K]``.

    The groups of ``x`` may be 128 columns wide, too: then the faster 1D2D kernel serves, which writes bf16 itself.
    """
    if x.format.block[1] > 1:
        left = dy.codes.t().contiguous(), _rows_major(dy.scales.t())
        return _gemm_1d2d(*left, x.codes.t().contiguous(), x.scales.t(), _OPEN)[:, : x.shape[-1]]
    return fp8_wgrad_sums(dy, x).to(torch.bfloat16)


def fp8_wgrad_sums(dy: QTensor, x: QTensor) -> Tensor:
    """The fp32 sums of :func:`fp8_wgrad`."""
    left = dy.codes.t().contiguous(), _rows_major(dy.scales.t())
    codes, scales = x.codes.t().contiguous(), x.scales.t()
    # The kernel adds to what is there; TMA wants rows of 16 bytes.
    total = torch.zeros(left[0].shape[0], padded(codes.shape[0], 4), dtype=torch.float32, device=codes.device)
    total = total[:, : codes.shape[0]]
    right = codes, _rows_major(scales)
    _module().fp8_gemm_nt(left, right, total, c=total, recipe=(1, 1, 128), compiled_dims=_OPEN, disable_ue8m0_cast=True)
    return total


def _like(y: Tensor, shape: torch.Size) -> Tensor:
    """``y [M, n]`` with the leading dimensions of ``shape [..., K]``: a view."""
    return y.view(*shape[:-1], y.shape[1])


def _rows_major(scales: Tensor) -> Tensor:
    """Scales ``[M, G]`` in the layout that the kernels read, columns of a multiple of 16 bytes; a copy if need be."""
    wanted = (1, padded(scales.shape[0], 4))
    if scales.stride() == wanted:
        return scales
    copy = torch.empty_strided(scales.shape, wanted, dtype=scales.dtype, device=scales.device)
    return copy.copy_(scales)


# -------------------------------------------------------------------------------------------- bf16


def bf16_linear(x: Tensor, weight: MasterWeight, bias: Tensor | None) -> Tensor:
    """``x [..., K] @ weight [N, K].T`` in bf16, summed in fp32, then the bf16 bias."""
    y = _like(_bf16_gemm(x.flatten(0, -2), weight.values, torch.bfloat16), x.shape)
    return y if bias is None else y + bias


def bf16_logits(x: Tensor, weight: MasterWeight, bias: Tensor | None) -> Tensor:
    """lm_head: bf16 operands, fp32 logits ``[..., V]``."""
    logits = _like(_bf16_gemm(x.flatten(0, -2), weight.values, torch.float32), x.shape)
    return logits if bias is None else logits + bias.float()


def bf16_dgrad(dys: Sequence[Tensor], weights: Sequence[MasterWeight]) -> Tensor:
    """``dy [..., N] @ weight [N, K]``, bf16 operands and result, fp32 sums."""
    (dy,), (weight,) = dys, weights
    return _like(_bf16_gemm(dy.flatten(0, -2), weight.values.t(), torch.bfloat16), dy.shape)


def bf16_wgrad(dy: Tensor, x: Tensor, out: torch.dtype = torch.bfloat16) -> Tensor:
    """``dyᵀ @ x`` over tokens, bf16 operands, fp32 sums, rounded to ``out``."""
    return _bf16_gemm(dy.flatten(0, -2).t(), x.flatten(0, -2).t(), out)


def _bf16_gemm(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """``a [M, K] @ b [N, K].T``; either operand may be a transposed view."""
    columns = b.shape[0]
    d = torch.empty(a.shape[0], padded(columns, 16 // out.itemsize), dtype=out, device=a.device)[:, :columns]
    _module().bf16_gemm_nt(_aligned(a), _aligned(b), d, compiled_dims=_OPEN)
    return d


def _aligned(x: Tensor) -> Tensor:
    """``x`` with a step between rows that is a multiple of 16 bytes, as TMA wants it; a copy if need be."""
    transposed = x.stride(0) == 1 and x.stride(1) != 1
    rows = x.t() if transposed else x
    step = 16 // x.dtype.itemsize
    if rows.stride(1) != 1 or rows.stride(0) % step:
        rows = pad_columns(rows, step)[:, : rows.shape[1]]
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows.t() if transposed else rows


# ----------------------------------------------------------------------------------------- fusions


def _linears(members: Sequence[fx.Node], escaping: frozenset[fx.Node]) -> Fused | None:
    """q, k, v or gate, up: quantised linears of one value."""
    x = members[0].args[0]
    if any(n.target is not ops.linear or n.args[0] is not x or not fp8("1x128", "128x128")(n) for n in members):
        return None
    args = (Of(members[0], 0), [Of(n, 1) for n in members], [Of(n, 2) for n in members])
    return Fused(fp8_linears, args, tuple(members))


def _wgrad_in_fp8(node: fx.Node) -> bool:
    return fp8("128x1", "128x1")(node) or fp8("128x1", "128x128")(node)


# ----------------------------------------------------------------------------------------- records


def _name() -> str:
    try:
        return library()[1]
    except LoweringError:
        return "sgl-deep-gemm absent"


def _kernel(op: str, run: Callable[..., Any], rule: str, serves: Callable[[fx.Node], bool], **more: Any) -> Kernel:
    return Kernel(op, "deep_gemm", run, f"{_name()} {rule}", serves, library=_name(), **more)


register(
    _kernel("linear", fp8_linear, "fp8 1D2D", fp8("1x128", "128x128"), pack=Fp8Weight),
    _kernel("linear_dgrad", fp8_dgrad, "fp8 1D2D", fp8("1x128", "128x128"), pack=Fp8Weight),
    _kernel("linear_wgrad", fp8_wgrad, "fp8 1D1D", fp8("128x1", "128x1"), row_invariant=False),
    _kernel("linear_wgrad", fp8_wgrad, "fp8 1D2D", fp8("128x1", "128x128"), row_invariant=False),
    _kernel("linear", bf16_linear, "bf16", bf16("bfloat16"), pack=MasterWeight),
    _kernel("lm_head", bf16_logits, "bf16 to fp32", bf16("float32"), pack=MasterWeight),
    _kernel("linear_dgrad", bf16_dgrad, "bf16", bf16("bfloat16"), pack=MasterWeight),
    _kernel("linear_wgrad", bf16_wgrad, "bf16", bf16("bfloat16"), row_invariant=False),
    _kernel("linear_wgrad", fp8_wgrad_sums, "fp8 1D1D", fp8("128x1", "128x1", "float32"), row_invariant=False),
    _kernel(
        "linear_wgrad", partial(bf16_wgrad, out=torch.float32), "bf16 to fp32", bf16("float32"), row_invariant=False
    ),
)
register_fusion(
    Fusion("projections", "deep_gemm", _linears),
    Fusion("wgrads", "deep_gemm", wgrads(fp8_wgrad, _wgrad_in_fp8)),
)
