"""prime-rl: weights quantised in blocks for the rollout.

Read in ``src/prime_rl/trainer/models/fp8.py`` (commit 4a7a6dda), ``quantize_to_fp8_blockwise``: the floor is on the
scale, 1e-12, so 4.48e-10 on the maximum.
"""

from __future__ import annotations

from dataclasses import replace

from precgraph.stacks import vllm
from precgraph.stacks.base import Built, Request, Stack, fp8, fp8_recipe, plain_recipe


def build(request: Request) -> Built:
    """The trainer in bf16; the rollout in vLLM with weights quantised by prime-rl from ``weight_dtype``."""
    if request.side == "train":
        return Built(plain_recipe("prime_rl"))
    weight = fp8("128x128", amax_floor=448e-12, source=request.config.get("weight_dtype", "bfloat16"))
    engine = replace(request, config={})
    return Built(fp8_recipe("prime_rl", request, vllm.activation(engine), vllm.requantized(engine, weight)))


STACK = Stack(
    name="prime_rl",
    title="prime-rl (FSDP + vLLM)",
    version="commit 4a7a6dda",
    sources=("src/prime_rl/trainer/models/fp8.py", *vllm.STACK.sources),
    switches={"weight_dtype": "dtype of the weights that are quantised", "VLLM_USE_DEEP_GEMM_E8M0": "as in vLLM"},
    unknown=("FP8 training of later versions", "which layers are left out", *vllm.STACK.unknown),
    remedies={**vllm.REMEDIES, "source": "round the weights to bf16 before they are quantised, as the other side does"},
    build=build,
    keys=("weight_dtype",),
    variables=vllm.VARIABLES,
)
