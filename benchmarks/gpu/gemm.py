"""FP8 GEMMs of Qwen3-8B's layers on one card: what the program calls against the libraries, operands at hand.

``python -m benchmarks.gpu.gemm``. FProp against a bare DeepGEMM call (what the path around it costs), at a training
step's number of tokens and at those of decoding steps; WGrad by our own kernel against cuBLASLt's, DeepGEMM's 1D1D with
its zero fill and cast, and bf16; errors against float64 on Gaussian data. Calls are replayed from a CUDA graph, so
launching them is not counted, and a weight that fits into the L2 cache comes from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from benchmarks.common.options import need_gpu
from benchmarks.common.results import Result, append
from precgraph.format import Format
from precgraph.lowering import deep_gemm
from precgraph.lowering.cuda import wgrad
from precgraph.lowering.packs import Fp8Weight
from precgraph.quantizer import QTensor

ROWS, TOKENS, BLOCKS = (Format("float8_e4m3fn", g) for g in ("1x128", "128x1", "128x128"))
T, DECODING = 8192, (64, 128, 256, 512)  # tokens
CALLS, REPEATS = 10, 15
# Rows and columns of a weight: q, k and v; o; gate and up; down.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (24576, 4096), "down": (4096, 12288)}
CHECKED = 256  # rows of a WGrad that are compared with float64


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def microseconds(call: Callable[[], object]) -> float:
    """Median over replays of a graph of :data:`CALLS`, after a warm-up."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(REPEATS)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return 1000 / CALLS * sorted(start.elapsed_time(stop) for start, stop in events)[REPEATS // 2]


def fprop(N: int, K: int, tokens: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    from precgraph.lowering.triton.quantize import quantize_rows

    weight, x = Fp8Weight.create(randn(N, K), BLOCKS), quantize_rows(randn(1, tokens, K), ROWS)
    out = torch.empty(tokens, N, dtype=torch.bfloat16, device="cuda")
    operands = (x.codes, x.scales), (weight.codes, weight.scales)
    raw = deep_gemm._module().fp8_gemm_nt

    def bare() -> Tensor:
        raw(*operands, out, disable_ue8m0_cast=True)
        return out

    plain_x, plain = randn(tokens, K), randn(N, K)
    yield "FProp, program", lambda: deep_gemm.fp8_linear(x, weight, None)
    yield "FProp, bare DeepGEMM", bare
    yield "FProp, bf16", lambda: plain_x @ plain.t()


def wgrads(dy: Tensor, x: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    from precgraph.lowering.triton.quantize import quantize_tokens

    left, right, square = quantize_tokens(dy[None], TOKENS), quantize_tokens(x[None], TOKENS), blocks(x)
    yield "WGrad, program", lambda: wgrad.fp8_wgrad(left, right)
    yield "WGrad, program, fp32", lambda: wgrad.fp8_wgrad(left, right, torch.float32)
    yield "WGrad, cuBLASLt", lambda: cublaslt(left, right)
    yield "WGrad, DeepGEMM 1D1D", lambda: deep_gemm.fp8_wgrad(left, right)
    yield "WGrad, x in 128x128", lambda: deep_gemm.fp8_wgrad(left, square)
    yield "WGrad, bf16", lambda: dy.t() @ x


def cublaslt(dy: QTensor, x: QTensor) -> Tensor:
    """WGrad of operands in groups of 128 tokens by cuBLASLt, through torch."""
    groups = ScalingType.BlockWise1x128
    left, right = dy.codes.t(), x.codes.t()
    return scaled_mm(left, right.t(), dy.scales.t(), groups, x.scales.t(), groups, output_dtype=torch.bfloat16)


def blocks(x: Tensor) -> QTensor:
    """``x [T, K]`` in 128x128 blocks, stored transposed."""
    from precgraph.lowering.triton.quantize import new_weight, quantize_weight

    codes, scales, codes_t, scales_t = new_weight(x.shape, BLOCKS, x.device)
    quantize_weight(x, BLOCKS, codes, scales, codes_t, scales_t)
    return QTensor(codes_t.t(), scales_t.t(), x[None].shape, BLOCKS)


def main() -> None:
    need_gpu()
    torch.manual_seed(0)
    for name, (N, K) in SHAPES.items():
        for tokens in (T, *DECODING):
            for what, call in fprop(N, K, tokens):
                tell(name, what, microseconds(call), tokens, N, K)
        dy, x = randn(T, N), randn(T, K)
        right = dy[:, :CHECKED].double().t() @ x.double()
        for what, call in wgrads(dy, x):
            error = float((call()[:CHECKED].double() - right).norm() / right.norm())
            tell(name, what, microseconds(call), T, N, K, error)


def tell(name: str, what: str, time: float, tokens: int, N: int, K: int, error: float | None = None) -> None:
    """Print the time of a product, its rate, and its relative error where it has one; and keep them."""
    shape, rate = f"{name}, {tokens}x{N}x{K}", 2 * tokens * N * K / time / 1e6
    results = [Result(shape, what, time, "us"), Result(shape, f"{what}, rate", rate, "TFLOP/s")]
    line = f"{shape:28s} {what:24s} {time:8.1f} us {rate:6.0f} TFLOP/s"
    if error is not None:
        results.append(Result(shape, f"{what}, relative error", error, "1"))
        line += f"  error {error:.5f}"
    print(line, flush=True)
    append("gemm", results)


if __name__ == "__main__":
    main()
