"""How close is each Triton kernel to the card's copy bandwidth?

Every input and output byte counts once. Launches are replayed from a CUDA graph over several sets of inputs, so that
neither the host nor the L2 cache is measured. ``python -m benchmarks.gpu.bandwidth [NAME ...]``: a line a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.common.options import need_gpu
from benchmarks.common.results import Result, append
from precgraph.format import Format

ROWS, TOKENS, BLOCKS = (Format("float8_e4m3fn", g) for g in ("1x128", "128x1", "128x128"))
TARGET = 0.85  # of copy bandwidth
SETS = 3  # of inputs


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: ``make()`` allocates inputs and returns the call; ``bytes`` it must move."""

    name: str
    shape: str
    bytes: float
    make: Callable[[], Callable[[], object]]


def microseconds(make: Callable[[], Callable[[], object]], repeats: int = 5) -> float:
    """Median time of one call, over replays of a graph that holds ``SETS`` calls."""
    calls = [make() for _ in range(SETS)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * 2:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / (3 * 2 * SETS))
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond by a copy of 1 GiB; by a kernel, since a graph's own copies are slower."""

    def make() -> Callable[[], object]:
        source, target = randn(1 << 14, 1 << 15), torch.empty(1 << 14, 1 << 15, device="cuda", dtype=torch.bfloat16)
        return partial(torch.add, source, 0, out=target)

    return 2 * 2 * (1 << 29) / microseconds(make)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


FUSED = {"rows_fmt": ROWS, "tokens_fmt": TOKENS}
SCALE = 4 / 128  # bytes of scales an element and layout
ONE, BOTH = 1 + SCALE, 2 + 2 * SCALE  # bytes an element in one layout and in both


def quantisers(T: int, K: int) -> Iterator[Case]:
    from precgraph.lowering.triton import quantize

    n, shape = T * K, f"{T}x{K}"
    quant = {"rows": (quantize.quantize_rows, (ROWS,), ONE), "tokens": (quantize.quantize_tokens, (TOKENS,), ONE)}
    quant["rows+tokens"] = (quantize.quantize_both, (ROWS, TOKENS), BOTH)
    for name, (run, formats, size) in quant.items():
        yield Case(
            f"quantise {name}", shape, n * (2 + size), partial(lambda r, f: partial(r, randn(T, K), *f), run, formats)
        )

    def weight() -> Callable[[], object]:
        master = randn(K, 4096)
        buffers = quantize.new_weight(master.shape, BLOCKS, master.device)
        return partial(quantize.quantize_weight, master, BLOCKS, *buffers)

    yield Case("quantise weight", f"{K}x4096", K * 4096 * 4, weight)


def gradients(T: int, widths: tuple[int, ...]) -> Iterator[Case]:
    """Those of q, k and v, of which v's is a slice: what a step quantises at once."""
    from precgraph.lowering.triton import quantize

    def make() -> Callable[[], object]:
        parts = [*(randn(T, width) for width in widths[:-1]), randn(T, 2 * widths[-1])[:, : widths[-1]]]
        return partial(quantize.quantize_apart, parts, ROWS, TOKENS)

    yield Case("quantise parts", f"{T}x{'+'.join(map(str, widths))}", T * sum(widths) * (2 + BOTH), make)


def units(T: int, K: int, activation: str) -> Iterator[Case]:
    from precgraph.lowering.triton import gated

    n, shape = T * K, f"{T}x{K}"

    def operands() -> tuple[Tensor, ...]:
        return (*randn(T, 2 * K).split(K, dim=-1), activation)

    def forward(**formats: Format | bool) -> Callable[[], Callable[[], object]]:
        return lambda: partial(gated.fused_gated, *operands(), **formats)

    def backward(**formats: Format | bool) -> Callable[[], Callable[[], object]]:
        return lambda: partial(gated.fused_gated_backward, randn(T, K), *operands(), **formats)

    yield Case(f"{activation}·mul bf16", shape, n * 6, forward(want_value=True))
    yield Case(f"{activation}·mul rows", shape, n * (4 + ONE), forward(rows_fmt=ROWS))
    yield Case(f"{activation}·mul tokens", shape, n * (4 + ONE), forward(tokens_fmt=TOKENS))
    yield Case(f"{activation}·mul rows+tokens", shape, n * (4 + BOTH), forward(**FUSED))
    yield Case(f"{activation}·mul bwd bf16", shape, n * 10, backward(want_value=True))
    yield Case(f"{activation}·mul bwd rows+tokens", shape, n * (6 + 2 * BOTH), backward(**FUSED))
    again = backward(unit_fmt=TOKENS, **FUSED)
    yield Case(f"{activation}·mul bwd rows+tokens, unit tokens", shape, n * (6 + 2 * BOTH + ONE), again)


def norms(T: int, K: int) -> Iterator[Case]:
    from precgraph.lowering.triton import norm, norm_backward

    n, shape, eps = T * K, f"{T}x{K}", 1e-6

    def fused(**formats: Format) -> Callable[[], Callable[[], object]]:
        return lambda: partial(norm.fused_norm, randn(T, K), randn(T, K), randn(K), eps, want_normed=False, **formats)

    yield Case("norm bf16", shape, n * 4, lambda: partial(norm.rms_norm, randn(T, K), randn(K), eps))
    yield Case("add+norm rows", shape, n * (6 + ONE), fused(rows_fmt=ROWS))
    yield Case("add+norm rows+tokens", shape, n * (6 + BOTH), fused(**FUSED))

    def backward(**formats: Format) -> Callable[[], Callable[[], object]]:
        run = partial(norm_backward.fused_norm_backward, **formats)
        return lambda: partial(run, randn(T, K), randn(T, K), randn(K), eps, randn(T, K))

    again = partial(norm.fused_norm, tokens_fmt=TOKENS, want_normed=False)
    yield Case("norm tokens", shape, n * (2 + ONE), lambda: partial(again, randn(T, K), None, randn(K), eps))
    yield Case("norm bwd + residual", shape, n * 8, backward())
    yield Case("norm bwd + residual, norm tokens", shape, n * (8 + ONE), backward(tokens_fmt=TOKENS))


def heads(T: int, H: int, D: int) -> Iterator[Case]:
    from precgraph.lowering.triton import rope

    n, tables, shape = T * H * D, T * D * 4, f"{T}x{H}x{D}"
    cos, sin, gain = randn(1, T, D), randn(1, T, D), randn(D)

    def x() -> Tensor:
        return randn(1, T, (H + 16) * D)[..., : H * D].unflatten(-1, (H, D))

    yield Case("rope", shape, n * 4 + tables, lambda: partial(rope.rope, x(), cos, sin))
    yield Case("norm+rope", shape, n * 4 + tables, lambda: partial(rope.norm_rope, x(), gain, 1e-6, cos, sin))
    yield Case("rope bwd", shape, n * 4 + tables, lambda: partial(rope.rope_backward, x(), cos, sin))
    backward = rope.norm_rope_backward
    yield Case("norm+rope bwd", shape, n * 6 + tables, lambda: partial(backward, x(), x(), gain, 1e-6, cos, sin))


def logits(N: int, V: int) -> Iterator[Case]:
    from precgraph.lowering.triton import logprobs

    n, shape = N * V, f"{N}x{V}"
    ids, grad = torch.randint(V, (N,), device="cuda"), torch.randn(N, device="cuda")
    temperature = torch.full((N,), 0.7, device="cuda")
    state = torch.stack((torch.full((N,), 5.0), torch.full((N,), 8.0))).cuda()

    def z() -> Tensor:
        return torch.randn(N, V, device="cuda")

    run, back = logprobs.logprobs, logprobs.logprobs_backward
    yield Case("logprobs T=0.7", shape, n * 4, lambda: partial(run, z(), ids, temperature))
    yield Case("logprobs entropy T=0.7", shape, n * 4, lambda: partial(run, z(), ids, temperature, entropy=True))
    yield Case("logprobs bwd T=0.7", shape, n * 6, lambda: partial(back, grad, z(), ids, state, temperature))


def cases() -> Iterator[Case]:
    """Qwen3-8B's shapes at 8192 tokens; logits in chunks of 1024."""
    for K in (4096, 12288):
        yield from quantisers(8192, K)
        yield from units(8192, K, "silu")
    yield from gradients(8192, (4096, 1024, 1024))
    yield from units(8192, 12288, "gelu_tanh")
    yield from norms(8192, 4096)
    yield from heads(8192, 32, 128)
    yield from logits(1024, 151936)
    yield from logits(1024, 50257)


def main(names: list[str]) -> None:
    need_gpu()
    copy = copy_bandwidth()
    results = [Result("1 GiB", "copy", copy / 1e6, "TB/s")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy / 1e6:.2f} TB/s")
    print(f"{'kernel':32s} {'shape':14s} {'us':>8s} {'TB/s':>6s} {'of copy':>8s}")
    for case in cases():
        if names and not any(name in case.name for name in names):
            continue
        time = microseconds(case.make)
        rate = case.bytes / time
        results.append(Result(case.shape, case.name, time, "us"))
        results.append(Result(case.shape, f"{case.name}, of copy bandwidth", rate / copy, "1"))
        mark = "" if rate >= TARGET * copy else "  below target"
        print(
            f"{case.name:32s} {case.shape:14s} {time:8.1f} {rate / 1e6:6.2f} {rate / copy:8.1%}{mark}",
            flush=True,
        )
        torch.cuda.empty_cache()
    append("kernels", results)


if __name__ == "__main__":
    main(sys.argv[1:])
