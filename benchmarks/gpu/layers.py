"""Qwen3-8B layers on one card: precgraph's FP8 training program against BF16, side by side.

``python -m benchmarks.gpu.layers [--layers 12] [--batch 4x2048 1x8192] [--peers eager compiled ...] [--profile]``
times the forward (as a reference model runs it) and forward + backward of the layers, without lm_head, and prints saved
activations. BF16 peers are Hugging Face's model with SDPA's default choice and with cuDNN attention; ``precgraph BF16``
is this project's program with no linear quantised. One variant checkpoints the MLP of the first layer of each twelve.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

import precgraph
from benchmarks.common.options import need_gpu, positive, rows_by_length
from benchmarks.common.results import Result, append
from benchmarks.common.spans import tell
from precgraph.format import Format
from precgraph.recipe import Recipe
from precgraph.runtime.checkpointing import checkpointed
from precgraph.runtime.contexts import PackedContext

PEERS = ("eager", "compiled", "again", "liger")  # Liger last: it replaces functions of transformers in the process
REPEATS, CALLS = 5, 3  # a time is that of calls in a row, as micro-batches follow each other without waiting
Hidden = Callable[[], Tensor]  # the layers' output, differentiable where gradients are enabled


@dataclass(frozen=True)
class Times:
    """Milliseconds of a forward alone and of forward + backward; GB that the forward leaves for the backward."""

    forward: float
    both: float
    saved: float


def new_model(layers: int) -> Qwen3ForCausalLM:
    """Qwen3-8B's layers with random weights, bf16, on the card."""
    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=32768, num_hidden_layers=layers, max_position_embeddings=40960, tie_word_embeddings=False,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)


def measure(hidden: Hidden, model: torch.nn.Module) -> Times:
    """Median of :data:`REPEATS`, after two calls of each kind to warm up."""
    with torch.no_grad():
        forward = median(hidden)
    total = median(step(hidden, model))
    model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    kept = hidden()
    saved = torch.cuda.memory_allocated() - before
    del kept
    return Times(forward, total, saved / 1e9)


def step(hidden: Hidden, model: torch.nn.Module) -> Callable[[], None]:
    """Forward and backward, whose gradients are the only ones: nothing is added to those of a call before."""
    with torch.no_grad():
        gradient = torch.randn_like(hidden())

    def call() -> None:
        model.zero_grad(set_to_none=True)
        hidden().backward(gradient)

    return call


def median(call: Callable[[], object]) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / CALLS)
    return sorted(times)[REPEATS // 2]


# --------------------------------------------------------------------------------------------- ours


def ours(model: Any, ids: Tensor) -> Hidden:
    """A compiled model on the rows of ``ids [B, S]``, packed; what has its flag set now is checkpointed."""
    rows, length = ids.shape
    flat = ids.reshape(1, -1)
    positions = torch.arange(length, device=ids.device).repeat(rows)[None]
    context = PackedContext(tuple(range(0, rows * length + 1, length)))
    names = checkpointed(model, model.precgraph.runner.program)
    return lambda: model.precgraph.hidden(flat, positions, context, checkpoint=names)


# -------------------------------------------------------------------------------------------- peers


def peers(kind: str, layers: int, ids: Tensor) -> Iterator[tuple[str, Times]]:
    """BF16 of one kind with both attention kernels."""
    for attention in ("SDPA", "cuDNN"):
        with fresh(layers) as model, backend(attention):
            if kind == "liger":
                from liger_kernel.transformers import apply_liger_kernel_to_qwen3

                apply_liger_kernel_to_qwen3(rope=True, rms_norm=True, swiglu=True, model=model)
            if kind == "compiled":
                for layer in model.model.layers:
                    layer.compile()
            yield f"{kind}, {attention}", measure(lambda: model.model(input_ids=ids).last_hidden_state, model)


@contextmanager
def fresh(layers: int) -> Iterator[Any]:
    model = new_model(layers)
    try:
        yield model
    finally:
        del model
        gc.collect()
        torch.cuda.empty_cache()


def backend(attention: str) -> Any:
    """cuDNN's attention forced, or torch's own choice."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if attention == "cuDNN" else nullcontext()


# ------------------------------------------------------------------------------------------ reports


def profile(title: str, call: Callable[[], object]) -> None:
    """Where the time of a call goes; in a row, as timed."""
    for _ in range(2):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    tell(title, ((e.time_range.start, e.time_range.end, e.name) for e in trace.events() if on_card(e)), CALLS)


def on_card(event: Any) -> bool:
    return bool(event.device_type == DeviceType.CUDA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--batch", nargs="+", type=rows_by_length, metavar="ROWSxLENGTH", default=["4x2048", "1x8192"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    need_gpu()
    tables: dict[str, dict[str, Times]] = {batch: {} for batch in options.batch}
    for kind in ("ours", *sorted(options.peers, key=PEERS.index)):
        for batch, table in tables.items():
            for name, times in variants(kind, options, tokens(batch)):
                table[name] = times
                append("layers", rows(f"{name}, {options.layers} layers, {batch}", times))
            report(f"{options.layers} layers, {batch}", table)


def variants(kind: str, options: argparse.Namespace, ids: Tensor) -> Iterator[tuple[str, Times]]:
    """Names and times of what is compared; ``again`` is our first one, to see whether the card has slowed down."""
    plain = Recipe.jet_rl()
    if kind == "again":
        with fresh(options.layers) as model:
            yield "precgraph FP8, again", measure_ours(model, ids, plain, profiled=False)
    elif kind == "ours":
        with fresh(options.layers) as model:
            yield "precgraph FP8", measure_ours(model, ids, plain, profiled=options.profile)
        for name, recipe in (("precgraph, X 128x128", wgrad_in_blocks()), ("precgraph BF16", same_kernels())):
            with fresh(options.layers) as model:
                yield name, measure_ours(model, ids, recipe, profiled=False)
        with fresh(options.layers) as model:
            checkpoint_one_in_twelve(model)
            yield "precgraph, one MLP in twelve checkpointed", measure_ours(model, ids, plain, profiled=False)
    else:
        yield from peers(kind, options.layers, ids)


def tokens(batch: str) -> Tensor:
    """Token ids ``[B, S]`` for a batch such as ``4x2048``."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(32768, tuple(map(int, batch.split("x"))), device="cuda", generator=generator)


def wgrad_in_blocks() -> Recipe:
    """WGrad's activations in 128x128 blocks, which the faster 1D2D kernel takes: an option, not the paper's recipe."""
    recipe = Recipe.jet_rl()
    return replace(recipe, linear=replace(recipe.linear, wgrad_activation=Format("float8_e4m3fn", "128x128")))


def same_kernels() -> Recipe:
    """BF16 GEMMs between the kernels of the FP8 program: what FP8 alone gains."""
    return replace(Recipe.jet_rl(), linear=Recipe.bf16().linear)


def checkpoint_one_in_twelve(model: Any) -> None:
    """The backward makes gate and up of the first layer of each twelve again."""
    for layer in model.model.layers[::12]:
        layer.mlp.gradient_checkpointing = True


def measure_ours(model: Any, ids: Tensor, recipe: Recipe, *, profiled: bool) -> Times:
    """The compiled program's times, with a profile on request."""
    actor = precgraph.compile(model, "train", recipe)
    hidden = ours(actor, ids)
    times = measure(hidden, actor)
    if profiled:
        with torch.no_grad():
            profile("forward", hidden)
        profile("forward + backward", step(hidden, actor))
    return times


def report(shape: str, table: dict[str, Times]) -> None:
    """One line a variant, with the ratio of the best BF16 to it."""
    bf16 = [t for name, t in table.items() if not name.startswith("precgraph")]
    print(f"{shape}: ms forward, forward + backward; best BF16's over these; GB saved")
    width = max(map(len, table))
    for name, t in table.items():
        line = f"  {name:{width}s} {t.forward:8.1f} {t.both:8.1f}"
        if bf16:
            best = min(b.forward for b in bf16), min(b.both for b in bf16)
            line += f"   {best[0] / t.forward:5.2f} {best[1] / t.both:5.2f}"
        print(f"{line}   {t.saved:6.2f}", flush=True)


def rows(shape: str, t: Times) -> list[Result]:
    return [
        Result(shape, "forward", t.forward, "ms"),
        Result(shape, "forward + backward", t.both, "ms"),
        Result(shape, "saved activations", t.saved, "GB"),
    ]


if __name__ == "__main__":
    main()
