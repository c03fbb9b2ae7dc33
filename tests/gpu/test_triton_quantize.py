"""Triton quantisers against the torch definition on the same device: codes and scales, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from precgraph.errors import InputError, LoweringError
from precgraph.format import Format
from precgraph.lowering.triton import quantize as q
from precgraph.quantizer import quantize
from tests.gpu.device import KERNELS, gpu_only, sizes
from tests.gpu.same import ROWS, RULES, TOKENS, assert_quantized, awkward, same_bits

pytestmark = KERNELS

COUNTS = sizes((1, 2, 7, 64, 127, 128, 129, 1000), (1, 7, 128, 129))


@pytest.mark.parametrize("width", sizes([128, 576, 4096], [128, 576]))
def test_every_count_of_rows(width: int) -> None:
    for count in COUNTS:
        x = awkward(count, width, seed=count)
        assert_quantized(q.quantize_rows(x, ROWS), x, ROWS)
        assert_quantized(q.quantize_tokens(x, TOKENS), x, TOKENS)
        rows, tokens = q.quantize_both(x, ROWS, TOKENS)
        assert_quantized(rows, x, ROWS)
        assert_quantized(tokens, x, TOKENS)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_rule(rule: str, dtype: torch.dtype) -> None:
    rows_fmt, tokens_fmt = replace(ROWS, **RULES[rule]), replace(TOKENS, **RULES[rule])
    for width in sizes((300, 384), (300,)):
        x = awkward(sizes(300, 130), width, dtype=dtype)
        rows, tokens = q.quantize_both(x, rows_fmt, tokens_fmt)
        assert_quantized(rows, x, rows_fmt)
        assert_quantized(tokens, x, tokens_fmt)
        assert_quantized(q.quantize_rows(x, rows_fmt), x, rows_fmt)
        assert_quantized(q.quantize_tokens(x, tokens_fmt), x, tokens_fmt)


def test_large() -> None:
    x = awkward(*sizes((8192, 4096), (300, 700)))
    for _ in range(2):
        rows, tokens = q.quantize_both(x, ROWS, TOKENS)
        assert_quantized(rows, x, ROWS)
        assert_quantized(tokens, x, TOKENS)


def test_strided_and_batched_inputs() -> None:
    wide = awkward(1, 200, sizes(1024, 640))
    views = (wide[..., 256:512], wide[..., 3:515], wide[..., ::2], wide.transpose(1, 2), wide.reshape(2, 100, -1))
    for x in views:
        rows, tokens = q.quantize_both(x, ROWS, TOKENS)
        assert_quantized(rows, x, ROWS)
        assert_quantized(tokens, x, TOKENS)


@pytest.mark.parametrize("widths", [(512, 128, 128), (256, 128), (128, 384, 256)])
@pytest.mark.parametrize("count", sizes([1, 7, 129, 1000], [129]))
def test_parts_are_quantised_where_they_are(widths: tuple[int, ...], count: int) -> None:
    dense = [awkward(count, width, seed=width + i) for i, width in enumerate(widths)]
    wide = awkward(count, sum(widths) + 64)
    strided = list(wide[:, 64:].split(widths, dim=1))
    for parts in (dense, strided, [dense[0], *strided[1:]], [torch.zeros_like(dense[0]), *dense[1:]]):
        whole = torch.cat(parts, dim=1)
        rows, tokens = q.quantize_parts(parts, ROWS, TOKENS)
        assert rows is not None and tokens is not None
        assert_quantized(rows, whole, ROWS)
        assert_quantized(tokens, whole, TOKENS)
        rows, absent = q.quantize_parts(parts, ROWS, None)
        assert rows is not None and absent is None
        assert_quantized(rows, whole, ROWS)
        absent, tokens = q.quantize_parts(parts, None, TOKENS)
        assert tokens is not None and absent is None
        assert_quantized(tokens, whole, TOKENS)


def test_parts_of_every_dtype() -> None:
    for dtype in (torch.float16, torch.float32):
        parts = [awkward(130, width, seed=width, dtype=dtype) for width in (256, 128, 384)]
        rows, tokens = q.quantize_parts(parts, ROWS, TOKENS)
        assert rows is not None and tokens is not None
        assert_quantized(rows, torch.cat(parts, dim=1), ROWS)
        assert_quantized(tokens, torch.cat(parts, dim=1), TOKENS)


@pytest.mark.parametrize("widths", [(512, 128, 128), (576, 192, 192), (128, 128, 128, 128), (576,)])
def test_a_projection_groups_gradients_are_read_or_joined(widths: tuple[int, ...]) -> None:
    for count in sizes((1, 129, 1000), (129,)):
        parts = list(awkward(1, count, sum(widths)).split(widths, dim=-1))
        rows, tokens = q.quantize_apart(parts, ROWS, TOKENS)
        for part, row, token in zip(parts, rows, tokens, strict=True):
            assert_quantized(row, part, ROWS)
            assert_quantized(token, part, TOKENS)
        assert q.quantize_apart(parts, ROWS, None)[1] == [] == q.quantize_apart(parts, None, TOKENS)[0]


def test_parts_that_no_kernel_reads_side_by_side_are_refused() -> None:
    for widths in ((576, 192, 192), (128, 128, 128, 128)):
        with pytest.raises(InputError, match="join them"):
            q.quantize_parts([awkward(4, width) for width in widths], ROWS, TOKENS)


def test_layouts_are_what_deep_gemm_reads() -> None:
    rows, tokens = q.quantize_both(awkward(130, 256), ROWS, TOKENS)
    assert rows.codes.is_contiguous() and rows.scales.stride() == (1, 132)
    assert rows.scales.untyped_storage().nbytes() == 2 * 132 * 4  # the last column is padded too
    assert tokens.codes.t().is_contiguous() and tokens.codes.shape == (256, 256) and tokens.scales.is_contiguous()


def test_non_finite_blocks_have_non_finite_scales() -> None:
    x = awkward(256, 256)
    x[3, 5], x[130, 200], x[131, 7] = float("inf"), float("nan"), float("-inf")
    rows, tokens = q.quantize_both(x, ROWS, TOKENS)
    assert_quantized(rows, x, ROWS)
    assert_quantized(tokens, x, TOKENS)
    assert (~rows.scales.isfinite()).sum() == 3


@pytest.mark.parametrize("shape", sizes([(128, 128), (576, 1536), (300, 200), (4096, 4096)], [(128, 128), (300, 200)]))
@pytest.mark.parametrize("rule", ["default", "ue8m0", "deepgemm"])
def test_weights_and_their_transposed_copies(shape: tuple[int, int], rule: str) -> None:
    fmt = replace(Format("float8_e4m3fn", "128x128"), **RULES[rule])
    master = awkward(*shape)
    right = quantize(master, fmt)
    buffers = q.new_weight(master.shape, fmt, master.device)
    for buffer in buffers:
        buffer.view(torch.uint8).fill_(0xFF)
    q.quantize_weight(master, fmt, *buffers)
    codes, scales, codes_t, scales_t = buffers
    assert same_bits(codes, right.codes) and same_bits(scales, right.scales)
    assert same_bits(codes_t, right.codes.t()) and same_bits(scales_t, right.scales.t())


@gpu_only("it has no CUDA graphs")
def test_weights_refill_in_a_cuda_graph() -> None:
    fmt = Format("float8_e4m3fn", "128x128")
    master = awkward(512, 256)
    buffers = q.new_weight(master.shape, fmt, master.device)
    q.quantize_weight(master, fmt, *buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.quantize_weight(master, fmt, *buffers)
    master.copy_(awkward(512, 256, seed=1))
    graph.replay()
    assert same_bits(buffers[0], quantize(master, fmt).codes)


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    x = awkward(4, 256)
    with pytest.raises(LoweringError, match="compute 1x128"):
        q.quantize_rows(x, Format("float8_e4m3fn", "1x64"))
    with pytest.raises(LoweringError, match='backend="reference"'):
        q.quantize_rows(x.to("meta"), ROWS)
