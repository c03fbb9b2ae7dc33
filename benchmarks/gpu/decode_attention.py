"""Attention of decoding steps over vLLM's paged cache: its time by the size of a page and by the bound on queries.

``python -m benchmarks.gpu.decode_attention [--context 640] [--batch 64 256 512]``. Heads are Qwen3-8B's: 32, on 8 of
keys, of width 128; one query a sequence, one split. Keys and values count once, and the share is of the card's copy
bandwidth. The engine's graphs have a bound of 2 at this width, for they serve steps with prompts too: under 1 FA3 may
leave the causal mask out, which is right for one query alone. ``equal`` says whether the bits are those of pages of 16
tokens under the largest bound here, the least that the trainer sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.common.options import need_gpu, positive
from benchmarks.common.results import Result, append
from benchmarks.gpu.bandwidth import copy_bandwidth, microseconds
from precgraph.lowering.flash_attention import QUERY_BOUND

HEADS, KV_HEADS, WIDTH = 32, 8, 128
PAGES = (16, 64, 128, 256)  # the first is vLLM's own choice
BOUNDS = (QUERY_BOUND, 2, 1)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(seed))


def attention(batch: int, context: int, page: int, bound: int) -> Callable[[], Tensor]:
    """A call of one step; the same queries, keys and values for any page and bound."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    pages, longest = -(-context // page), -(-context // PAGES[-1]) * PAGES[-1]
    table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).cuda()
    q = random(batch, HEADS, WIDTH, seed=0)
    caches = []
    for seed in (1, 2):
        tokens = random(batch, longest, KV_HEADS, WIDTH, seed=seed)[:, : pages * page]
        caches.append(torch.empty(batch * pages, page, KV_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16))
        caches[-1][table] = tokens.reshape(-1, page, KV_HEADS, WIDTH)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    bounds = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    blocks = table.to(torch.int32).reshape(batch, pages)

    def call() -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q, *caches, cu_seqlens_q=bounds, max_seqlen_q=bound, seqused_k=lengths, max_seqlen_k=context,
            block_table=blocks, causal=True, num_splits=1, fa_version=3,
        )  # fmt: skip
        return out

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=positive, default=640)
    parser.add_argument("--batch", type=positive, nargs="+", default=[64, 256, 512])
    options = parser.parse_args()
    need_gpu()
    copy, results = copy_bandwidth(), []
    for batch in options.batch:
        right = attention(batch, options.context, PAGES[0], QUERY_BOUND)()
        read = 2 * 2 * batch * options.context * KV_HEADS * WIDTH
        for page in PAGES:
            for bound in BOUNDS:
                equal = torch.equal(attention(batch, options.context, page, bound)(), right)
                time = microseconds(partial(attention, batch, options.context, page, bound))
                what = f"pages of {page}, bound {bound}"
                print(
                    f"{batch:4d} x {options.context}  {what:24s} {time:8.1f} us  {100 * read / time / copy:5.1f}% of "
                    f"copy  {'equal' if equal else 'other bits'}",
                    flush=True,
                )
                results.append(Result(f"{batch} x {options.context}, 32/8 heads of 128", what, time, "us"))
    append("decode attention", results)


if __name__ == "__main__":
    main()
