"""Row invariance on this machine: a token's bits must not depend on the tokens that are computed beside it.

Every reference kernel runs on 300 rows at once, then on batches of 1 to 300 of the same rows, alone and with several
threads; attention also as a prefill, in chunks and token by token. The results must be equal bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from precgraph.format import Format
from precgraph.lowering.reference import elementwise, gemm
from precgraph.lowering.reference.attention import attend
from precgraph.ops import AttentionSpec
from precgraph.quantizer import quantize
from precgraph.runtime.logprobs import logprobs_from_logits
from precgraph.runtime.runner import require_numerics_state

ROWS = 300
SIZES = (*range(1, 34), 47, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 299, 300)
_ALONE = range(0, ROWS, 37)  # the rows that are computed alone

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Probe:
    """A kernel on ``ROWS`` rows: ``run(start, stop)`` computes some of them, every result having a row for each."""

    kernel: str
    numerics: str
    shape: str
    run: Callable[[int, int], Results]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One probe with one number of threads: how many batches were compared, and the first that differed, in words."""

    kernel: str
    numerics: str
    shape: str
    threads: int
    batches: int
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure


def row_invariance(
    threads: Sequence[int] | None = None, step: Callable[[str], None] = lambda _: None
) -> Iterator[Outcome]:
    """Test the reference kernels on the CPU with each number of ``threads`` (by default 1 and all that there are).

    ``step`` is told what is tested. NumericsStateError: a global switch would change fp32 arithmetic.
    """
    require_numerics_state()
    counts = threads or (1, max(2, os.cpu_count() or 1))
    for make in PROBES:
        probe = make()
        with _threads(1):
            wanted = probe.run(0, ROWS)
        for count in counts:
            step(f"{probe.kernel} {probe.shape}, {count} threads")
            with _threads(count):
                yield _test(probe, wanted, count)


def _test(probe: Probe, wanted: Results, threads: int) -> Outcome:
    batches = [(start, start + 1) for start in _ALONE]
    batches += [(start, start + n) for n in SIZES for start in [7 * n % (ROWS - n + 1)]]
    for start, stop in batches:
        for result, all_rows in zip(probe.run(start, stop), wanted, strict=True):
            expected = all_rows[start:stop]
            if not torch.equal(result, expected):
                differing = int((result != expected).sum())
                failure = f"rows {start}-{stop - 1} alone differ from {ROWS} rows at once in {differing} numbers"
                return Outcome(probe.kernel, probe.numerics, probe.shape, threads, len(batches), failure)
    return Outcome(probe.kernel, probe.numerics, probe.shape, threads, len(batches))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------ probes

_HIDDEN, _WIDE, _VOCABULARY = 576, 1536, 49152  # SmolLM2's; the hidden size is not a multiple of 128


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def _quantize() -> Probe:
    x, fmt = _random(ROWS, _HIDDEN), Format(dtype="float8_e4m3fn", granularity="1x128")

    def run(start: int, stop: int) -> Results:
        q = quantize(x[start:stop], fmt)
        return q.codes.view(torch.uint8), q.scales

    return Probe("quantize", "reference.quantize.v1", f"{_HIDDEN}", run)


def _fp8_linear() -> Probe:
    fmt = Format(dtype="float8_e4m3fn", granularity="1x128")
    x = _random(ROWS, _HIDDEN)
    weight = gemm.Float64Weight.create(_random(_WIDE, _HIDDEN), Format(dtype=fmt.dtype, granularity="128x128"))

    def run(start: int, stop: int) -> Results:
        return (gemm.fp8_linear(quantize(x[start:stop], fmt), weight, None),)

    return Probe("fp8 linear", "reference.linear.fp8_exact_groups", f"{_HIDDEN} to {_WIDE}", run)


def _linear() -> Probe:
    x, weight = _random(ROWS, _HIDDEN), gemm.Float32Weight.create(_random(_WIDE, _HIDDEN), None)

    def run(start: int, stop: int) -> Results:
        return (gemm.tiled_linear(x[start:stop], weight, None),)

    return Probe("bf16 linear", "reference.linear.tiles16", f"{_HIDDEN} to {_WIDE}", run)


def _logits() -> Probe:
    vocabulary = _VOCABULARY // 8  # enough for many tiles, and seconds faster
    x, weight = _random(ROWS, _HIDDEN), gemm.Float32Weight.create(_random(vocabulary, _HIDDEN), None)

    def run(start: int, stop: int) -> Results:
        return (gemm.tiled_logits(x[start:stop], weight, None),)

    return Probe("lm_head", "reference.lm_head.tiles16", f"{_HIDDEN} to {vocabulary}", run)


def _rms_norm() -> Probe:
    x, weight = _random(ROWS, _HIDDEN), _random(_HIDDEN)

    def run(start: int, stop: int) -> Results:
        return (elementwise.rms_norm(x[start:stop], weight, 1e-6),)

    return Probe("rms_norm", "reference.rms_norm.pieces512", f"{_HIDDEN}", run)


def _gated() -> Probe:
    gate, up = _random(ROWS, _WIDE + 1), _random(ROWS, _WIDE + 1)  # an odd width has a scalar tail

    def run(start: int, stop: int) -> Results:
        return (elementwise.gated(gate[start:stop], up[start:stop], "silu"),)

    return Probe("gated silu", "reference.gated.composed", f"{_WIDE + 1}", run)


def _attention() -> Probe:
    spec = AttentionSpec(scale=0.125, window=0, softcap=0.0, layer=0, heads=9, kv_heads=3, head_dim=64)
    q, k, v = _random(ROWS, 9, 64), _random(ROWS, 3, 64), _random(ROWS, 3, 64) * 2

    def run(start: int, stop: int) -> Results:
        return attend(q[start:stop], k[:stop], v[:stop], start, spec, need_lse=True)

    return Probe("attention, decode and chunks", "reference.attention.tiles", "9 heads, 3 kv, 64", run)


def _log_softmax() -> Probe:
    logits, ids = _random(ROWS, _VOCABULARY).float() * 4, torch.arange(ROWS) * 163

    def run(start: int, stop: int) -> Results:
        return (logprobs_from_logits(logits[start:stop], ids[start:stop], 0.7),)

    return Probe("log_softmax", "logprobs_from_logits", f"{_VOCABULARY}", run)


PROBES: tuple[Callable[[], Probe], ...] = (
    _quantize, _fp8_linear, _linear, _logits, _rms_norm, _gated, _attention, _log_softmax,
)  # fmt: skip
