"""Attention on Hopper: FlashAttention-3 forward, and a backward from its output and log-sum-exp.

FA3 is exact across packing, chunks and decoding if its number of splits and its tile of keys are fixed. One split: with
several, the order of the sum depends on the batch. The tile of keys depends on three things besides the head width
(``hopper/tile_size.h``). On ``max_seqlen_q``, for one query counts as not causal: the bound that is passed is never
below :data:`QUERY_BOUND`; over pages some widths allow a smaller one (:data:`PAGED_QUERY_BOUND`), and so a smaller tile
of queries. On paging, at widths of 80 and 96: keys in one piece have a tile of 144, those in pages one of 128. And on
whether there is a window: under one, these widths have the tile of 128 in one piece too. Where the build has windows,
they get one that no sequence reaches, so that a paged cache gives the bits of keys in one piece. All are part of the
numerics id.

Under a window that sequences do reach, FA3 is not exact: the first tile of keys begins where the window of the call's
first query does (``n_offset``), so chunks have other tiles than the whole. Layers with windows attend by a kernel in
Triton (:mod:`precgraph.lowering.triton.attention`); the backward, which a trainer alone runs, serves them too.

The library is vLLM's copy where vLLM is installed, which alone reads paged caches and knows windows, else ``fa3-fwd``
(PyPI), where widths of 80 and 96 keep the tile of 144. So a trainer and an engine in one environment run one binary; in
two environments that hold different builds their digests differ.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor, fx

from precgraph import ops
from precgraph.errors import LoweringError
from precgraph.lowering.attention_nodes import WIDTHS, is_flash, spec_of
from precgraph.lowering.registry import Kernel, not_hopper, register
from precgraph.runtime.contexts import AttentionContext, OwnAttention, PackedContext, Varlen, attend, device_bounds

QUERY_BOUND = 128  # above every length for which FA3 has a tile of its own, for any number of heads in a group
# The least bound on queries under which a paged cache gives the bits of keys in one piece, by width: where it is 1,
# paged calls have one tile of keys for any number of queries.
PAGED_QUERY_BOUND = {64: QUERY_BOUND, 80: 1, 96: 1, 128: 1, 256: 1}
# Widths at which only a window gives keys in one piece the tile of those in pages, and the tile that they have without.
WHOLE_TILE = {80: 144, 96: 144}
# That window. FA3 takes int32: this is longer than any sequence, and the largest power of two to which it can add a
# sequence's length. The bound on keys is larger still, or FA3 would forget the window.
UNREACHED = 1 << 30


@functools.cache
def library() -> tuple[str, str]:
    """Import name of the FA3 at hand and its ``distribution version``; LoweringError if there is none."""
    for module, distribution in (("vllm.vllm_flash_attn", "vllm"), ("fa3_fwd_interface", "fa3-fwd")):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return module, f"{distribution} {version}"
    raise LoweringError("FlashAttention-3 is not installed", remedy="pip install fa3-fwd==0.0.3")


def unavailable(device: torch.device) -> LoweringError | None:
    """Why FA3 cannot run on ``device``."""
    if problem := not_hopper("FlashAttention-3 needs", device):
        return problem
    try:
        _module()
    except LoweringError as error:
        return error
    except (ImportError, OSError) as error:
        return LoweringError(
            f"{library()[1]} does not load: {error}", remedy="install the build that fits this torch, or fa3-fwd==0.0.3"
        )
    return None


@functools.cache
def _module() -> ModuleType:
    return importlib.import_module(library()[0])


def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: ops.AttentionSpec, *, context: AttentionContext | OwnAttention
) -> tuple[Tensor, Tensor | None]:
    """``q [1, T, H, D]``, ``k, v [1, T, Hkv, D]`` bf16 to ``[1, T, H·D]`` and log-sum-exp ``[T, H]`` fp32."""
    return attend(forward, q, k, v, spec, context)


def forward(
    q: Tensor, call: Varlen, spec: ops.AttentionSpec, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``q [T, H, D]`` on the sequences of ``call``: ``out [T, H, D]``, made if not given; log-sum-exp ``[H, T]``.

    ``spec`` has no window.
    """
    assert not spec.window, "its bits would depend on where a chunk begins"
    size = UNREACHED if spec.head_dim in WHOLE_TILE and _has_windows() else 0
    longest = max(call.longest_query, QUERY_BOUND), max(call.longest_keys, size + 1)
    window = (size - 1, 0) if size else (-1, -1)
    if library()[0] == "fa3_fwd_interface":
        # The operator itself: the package's functions wrap it in two layers of torch's, which cost the host more time
        # than the kernel of a short batch takes.
        none = None
        out, lse, *_ = _module().fa3_fwd_cuda.fwd(
            q, call.keys, call.values, none, none, none, out, call.query_bounds, call.key_bounds, none, none, none,
            *longest, none, none, none, none, none, none, none, none, none, spec.scale, True, *window, 0, spec.softcap,
            True, none, 1, none, 0,
        )  # fmt: skip
        return out, lse
    out, lse = _module().flash_attn_varlen_func(
        q, call.keys, call.values, cu_seqlens_q=call.query_bounds, cu_seqlens_k=call.key_bounds,
        max_seqlen_q=longest[0], max_seqlen_k=longest[1], softmax_scale=spec.scale, causal=True, window_size=window,
        softcap=spec.softcap, out=out, num_splits=1, return_softmax_lse=True, fa_version=3,
    )  # fmt: skip
    return out, lse


# ---------------------------------------------------------------------------------------- backward


def flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: ops.AttentionSpec, *,
    context: PackedContext,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dq, dk, dv)`` of packed sequences by torch's FlashAttention-2 backward, in its deterministic order."""
    bounds, longest = device_bounds(tuple(context.bounds), q.device)
    heads = (-1, spec.heads, spec.head_dim)
    nothing = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is off
    with deterministic():
        grads = torch.ops.aten._flash_attention_backward(
            dy.reshape(heads), q[0], k[0], v[0], out.reshape(heads), lse.t().contiguous(), bounds, bounds, longest,
            longest, 0.0, True, nothing, nothing, scale=spec.scale,
            window_size_left=spec.window - 1 if spec.window else None, window_size_right=0 if spec.window else None,
        )  # fmt: skip
    return tuple(g.unsqueeze(0) for g in grads)


def cudnn_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: ops.AttentionSpec, *, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of sequences of one ``length`` by cuDNN: twice as fast, but its sums depend on the schedule."""
    shape = (-1, length, spec.heads, spec.head_dim)
    dense = [t.reshape(-1, length, *t.shape[-2:]).transpose(1, 2) for t in (q, k, v)]
    logsumexp = lse.t().reshape(spec.heads, -1, length).transpose(0, 1).contiguous().unsqueeze(-1)
    none = torch.empty((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._cudnn_attention_backward(
        dy.reshape(shape).transpose(1, 2), *dense, out.reshape(shape).transpose(1, 2), logsumexp, none, none,
        None, None, None, length, length, 0.0, True, scale=spec.scale,
    )  # fmt: skip
    return tuple(g.transpose(1, 2).reshape(1, -1, *t.shape[-2:]) for g, t in zip(grads, (q, k, v), strict=True))


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: ops.AttentionSpec, *,
    context: PackedContext,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dq, dk, dv)`` by the fastest kernel; under ``torch.use_deterministic_algorithms`` by one that repeats bits."""
    lengths = {b - a for a, b in pairwise(context.bounds)}
    fits = len(lengths) == 1 and spec.head_dim == 128 and not spec.window
    if fits and not torch.are_deterministic_algorithms_enabled():
        return cudnn_backward(dy, q, k, v, out, lse, spec, length=lengths.pop())
    return flash_backward(dy, q, k, v, out, lse, spec, context=context)


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic kernels inside: atomics would make two backward passes differ."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------- records


def _serves(node: fx.Node) -> bool:
    return is_flash(node, WIDTHS) and not spec_of(node).window


def _name() -> str:
    try:
        return library()[1]
    except LoweringError:
        return "fa3-fwd absent"


def _has_windows() -> bool:
    """Whether the build at hand has windows: fa3-fwd leaves them out."""
    return not _name().startswith("fa3-fwd")


def _numerics() -> str:
    windowed = f", {' and '.join(map(str, WHOLE_TILE))} wide as windowed" if _has_windows() else ""
    return f"{_name()}: one split, queries >= {QUERY_BOUND}, as unpaged{windowed}"


register(
    Kernel("attention", "flash_attention", attention, _numerics(), _serves, context=True, library=_name()),
    Kernel(
        "attention_backward", "flash_attention", backward, f"torch {torch.__version__} cuDNN or flash backward",
        partial(is_flash, widths=WIDTHS), row_invariant=False, deterministic=False, context=True,
    ),
)  # fmt: skip
