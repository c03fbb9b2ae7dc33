"""Backward of attention on Hopper by FlashAttention-4, from FlashAttention-3's output and log-sum-exp.

It takes packed sequences of any lengths, where cuDNN's takes those of one length and torch's FlashAttention-2 is half
as fast (``benchmarks/gpu/attention_backward.py``), and it adds up the heads of a group in fp32. Under
``torch.use_deterministic_algorithms`` it sums in a fixed order, a tenth slower.

A backward is no public function of the package: of other releases than :data:`VERSION` nothing is known. Its kernels
are compiled on first use, in seconds each; ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`` keeps them on disk.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import partial

import torch
from torch import Tensor

from precgraph.errors import LoweringError
from precgraph.lowering.attention_nodes import is_flash
from precgraph.lowering.registry import Kernel, not_hopper, register
from precgraph.ops import AttentionSpec
from precgraph.runtime.contexts import PackedContext, device_bounds

VERSION = "4.0.0b36"
WIDTHS = (64, 96, 128, 256)  # of heads, all tested; at 80 this release's dq is wrong
_INTERFACE = "flash_attn.cute.interface"


def unavailable(device: torch.device) -> LoweringError | None:
    """Why FlashAttention-4 cannot run on ``device``."""
    if problem := not_hopper("FlashAttention-4's backward here needs", device):
        return problem
    remedy = "pip install 'precgraph[flash-attn-4]', or go without: other kernels serve the backward"
    try:
        found = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return LoweringError("FlashAttention-4 is not installed", remedy=remedy)
    if found != VERSION:
        return LoweringError(f"FlashAttention-4 {found} is not {VERSION}, whose backward is tested", remedy=remedy)
    try:
        importlib.import_module(_INTERFACE)
    except (ImportError, OSError) as error:
        return LoweringError(f"FlashAttention-4 {found} does not load: {error}", remedy=remedy)
    return None


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, *,
    context: PackedContext,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dq, dk, dv)`` of ``q [1, T, H, D]``, ``k, v [1, T, Hkv, D]``, ``dy, out [1, T, H·D]``, ``lse [T, H]`` fp32."""
    bounds, longest = device_bounds(tuple(context.bounds), q.device)
    heads = (-1, spec.heads, spec.head_dim)
    mask = {"window_size_left": spec.window - 1, "window_size_right": 0} if spec.window else {"causal": True}
    grads = importlib.import_module(_INTERFACE)._flash_attn_bwd(
        q[0], k[0], v[0], out.reshape(heads), dy.reshape(heads), lse.t(), spec.scale, cu_seqlens_q=bounds,
        cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
        deterministic=torch.are_deterministic_algorithms_enabled(), **mask,
    )  # fmt: skip
    dq, dk, dv = (g.unsqueeze(0) for g in grads)
    return dq, dk, dv


register(
    Kernel(
        "attention_backward", "flash_attention_4", backward, f"flash-attn-4 {VERSION} backward",
        partial(is_flash, widths=WIDTHS), row_invariant=False, deterministic=False, context=True,
        library=f"flash-attn-4 {VERSION}",
    )
)  # fmt: skip
