"""Which attention backward that takes FlashAttention-3's output and log-sum-exp is the fastest on this card?

``python -m benchmarks.gpu.attention_backward``. Causal, bf16, heads of Qwen3-8B: 32, on 8 of keys, of width 128. The
candidates are FlashAttention-4's (dense, and varlen as the program calls it; plain and deterministic), what the program
takes without that, and every plan that the heuristics of cuDNN's graph API name; a copy that a kernel's layout needs
counts. First the errors of the gradients of one short sequence, relative to those of float32. Then a call by itself,
from its first launch on, and 100 in a row, for which the card may lower its clock, each with its rate; and whether
repeated calls give equal bits.

The libraries of others are optional. What fits torch 2.11 on CUDA 13: flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl
4.8.1 and its libs-cu13, quack-kernels 0.6.5, apache-tvm-ffi 0.1.15.post2, torch-c-dlpack-ext 0.1.5, einops 0.8.2; and
nvidia-cudnn-frontend 1.19.1.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from benchmarks.common.options import need_gpu
from benchmarks.common.results import Result, append
from precgraph.lowering import flash_attention_4
from precgraph.lowering.flash_attention import attention, cudnn_backward, deterministic, flash_backward, unavailable
from precgraph.ops import AttentionSpec
from precgraph.runtime.contexts import PackedContext

HEADS, KV_HEADS, WIDTH = 32, 8, 128
SPEC = AttentionSpec(WIDTH**-0.5, window=0, softcap=0.0, layer=0, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH)
SHORT = (1, 1024)  # sequences and their length: the errors are of this one
SHAPES = ((1, 8192), (4, 2048))
CHECKS, REPEATS, ROW = 5, 20, 100  # calls
MODES = {False: "", True: ", deterministic"}

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v, tokens first; with or without a dimension of sequences
Call = Callable[[], Gradients]
Candidates = Iterator[tuple[str, Callable[[], Call]]]  # a name, and what makes the call


class Case:
    """``q, k, v [1, T, heads, D]``, ``dy [1, T, H·D]`` of sequences of one length; FA3's ``out``, ``lse [T, H]``."""

    def __init__(self, sequences: int, length: int) -> None:
        self.length, tokens = length, sequences * length
        self.name = f"{sequences}x{length}, {HEADS}/{KV_HEADS} heads of {WIDTH}"
        self.context = PackedContext(range(0, tokens + 1, length))
        self.flops = 2.5 * 4 * length**2 / 2 * HEADS * WIDTH * sequences
        self.q, self.k, self.v = (randn(1, tokens, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.dy = randn(1, tokens, HEADS * WIDTH)
        out, lse = attention(self.q, self.k, self.v, SPEC, context=self.context)
        assert lse is not None  # this context leaves attention to the kernel
        self.out, self.lse = out, lse
        self.given = self.dy, self.q, self.k, self.v, out, lse, SPEC  # as a kernel of the program takes them

    def operands(self, length: int) -> list[Tensor]:
        """q, k, v, out and dy as ``[T / length, length, heads, D]``."""
        flat = (self.q, self.k, self.v, self.out, self.dy)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS, HEADS)
        return [t.reshape(-1, length, h, WIDTH) for t, h in zip(flat, heads, strict=True)]

    def dense_lse(self) -> Tensor:
        """``[B, H, length]``: a copy where there are several sequences."""
        lse = self.lse.t().reshape(HEADS, -1, self.length).transpose(0, 1).contiguous()
        return lse.view(lse.shape)  # or one sequence would have strides that are not cuDNN's


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def program(case: Case) -> Candidates:
    yield "program: cuDNN", lambda: partial(cudnn_backward, *case.given, length=case.length)
    yield "program: FA2, deterministic", lambda: partial(flash_backward, *case.given, context=case.context)


def flash4(fixed: bool, case: Case) -> Candidates:
    from flash_attn.cute import interface

    operands = case.operands(case.length)

    def dense() -> Gradients:
        dq, dk, dv, *_ = interface._flash_attn_bwd(
            *operands, case.dense_lse(), SPEC.scale, True, deterministic=fixed
        )  # fmt: skip
        return dq, dk, dv

    def varlen() -> Gradients:
        with deterministic() if fixed else nullcontext():
            return flash_attention_4.backward(*case.given, context=case.context)

    yield f"FA4 dense{MODES[fixed]}", lambda: dense
    yield f"FA4 varlen{MODES[fixed]}", lambda: varlen


def cudnn_plans(deterministic: bool, case: Case) -> Candidates:
    """Each plan once: several of the heuristics may name it. Gradients lie in memory as what they are of."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    given, modes = case.operands(case.length), cudnn.heur_mode
    bf16, fp32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    views = [*(t.transpose(1, 2) for t in given), case.dense_lse().unsqueeze(-1)]
    kinds = {torch.bfloat16: bf16, torch.float32: fp32}
    inputs = [graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kinds[t.dtype]) for t in views]
    outputs = graph.sdpa_backward(
        *inputs, attn_scale=SPEC.scale, diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
        diagonal_band_right_bound=0, use_deterministic_algorithm=deterministic,
    )  # fmt: skip
    for output, t in zip(outputs, views[:3], strict=True):
        output.set_output(True).set_dim(list(t.shape)).set_stride(list(t.stride())).set_data_type(bf16)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
    graph.check_support()

    def make(index: int) -> Call:
        graph.build_plan_at_index(index)
        space = torch.empty(max(graph.get_workspace_size_plan_at_index(index), 1), dtype=torch.uint8, device="cuda")

        def call() -> Gradients:
            dq, dk, dv = (torch.empty_like(t) for t in given[:3])
            tensors = [*given, case.dense_lse(), dq, dk, dv]
            graph.execute_plan_at_index(dict(zip([*inputs, *outputs], tensors, strict=True)), space, index, handle)
            return dq, dk, dv

        return call

    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    for plan in dict.fromkeys(names):
        yield f"cuDNN {cudnn.backend_version()}, {plan}{MODES[deterministic]}", partial(make, names.index(plan))


def families() -> Iterator[tuple[str, Callable[[Case], Candidates]]]:
    """The program's candidates and those of each package that is installed; says which is not."""
    yield "program", program
    for package, family in {"flash-attn-4": flash4, "nvidia-cudnn-frontend": cudnn_plans}.items():
        try:
            name = f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed: left out", flush=True)
            continue
        yield from ((f"{name}{mode}", partial(family, deterministic)) for deterministic, mode in MODES.items())


def float32(case: Case) -> list[Tensor]:
    """Gradients of the textbook's formula, for one sequence."""
    q, k, v, _, dy = (t.float().transpose(1, 2) for t in case.operands(case.length))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    later = torch.ones(case.length, case.length, dtype=torch.bool, device="cuda").triu(1)
    y = (SPEC.scale * q @ k.transpose(-1, -2)).masked_fill(later, -torch.inf).softmax(-1) @ v
    return [g.transpose(1, 2) for g in torch.autograd.grad(y, leaves, dy)]


def errors(right: list[Tensor], case: Case, name: str, call: Call) -> list[Result]:
    found = {}
    for of, gradient, r in zip(("dq", "dk", "dv"), call(), right, strict=True):
        found[of] = float((gradient.reshape(r.shape).float() - r).norm() / r.norm())
    told = ", ".join(f"{of} {error:.5f}" for of, error in found.items())
    print(f"{case.name}  {name:40s} errors of {told}", flush=True)
    return [Result(case.name, f"{name}, relative error of {of}", error, "1") for of, error in found.items()]


def times(case: Case, name: str, call: Call) -> list[Result]:
    first = call()
    equal = all(all(map(torch.equal, first, call())) for _ in range(CHECKS))
    single, row = sorted(microseconds(call, 1) for _ in range(REPEATS))[REPEATS // 2], microseconds(call, ROW)
    line, results = f"{case.name}  {name:40s}", [Result(case.name, f"{name}, equal bits", float(equal), "1")]
    for what, time in ((name, single), (f"{name}, {ROW} in a row", row)):
        rate = case.flops / time / 1e6
        line += f" {time:8.1f} us {rate:4.0f} TFLOP/s"
        results += [Result(case.name, what, time, "us"), Result(case.name, f"{what}, rate", rate, "TFLOP/s")]
    print(f"{line}  {'equal' if equal else 'other bits'}", flush=True)
    return results


def microseconds(call: Call, calls: int) -> float:
    """Of one call, of ``calls`` in a row that begin on an idle card."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    time: float = start.elapsed_time(stop)
    return 1000 * time / calls


@contextmanager
def problems_told(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        print(f"{where}: PROBLEM: {type(error).__name__}: {' '.join(str(error).split())[:600]}", flush=True)


def main() -> None:
    need_gpu()
    if error := unavailable(torch.device("cuda")):
        sys.exit(str(error))
    torch.manual_seed(0)
    found = list(families())
    for shape in (SHORT, *SHAPES):
        case = Case(*shape)
        measure = partial(errors, float32(case)) if shape == SHORT else times
        for package, family in found:
            with problems_told(f"{case.name}  {package}"):
                for name, make in family(case):
                    with problems_told(f"{case.name}  {name}"):
                        append("attention backward", measure(case, name, make()))


if __name__ == "__main__":
    main()
