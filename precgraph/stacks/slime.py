"""slime: Megatron trains; weights are quantised in slime and served by SGLang.

Read: ``slime/backends/megatron_utils/kernels/fp8_kernel.py`` (``blockwise_cast_to_fp8_triton``, eps 1e-10) and
``slime/ray/actor_group.py``, which sets NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 unless it is set.
``tools/convert_hf_to_fp8.py`` (commit 193a2e13) is another quantiser: x / s, no floor.
"""

from __future__ import annotations

from dataclasses import replace

from precgraph.stacks import megatron, sglang
from precgraph.stacks.base import Built, Request, Stack, fp8, fp8_recipe, plain_recipe


def build(request: Request) -> Built:
    """The recipe of a file of slime's (Megatron's) arguments; ``rollout_fp8: false`` serves bf16."""
    if request.side == "train":
        env = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", **request.env}
        arguments = request.config or {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
        return megatron.of_arguments("slime", replace(request, env=env), arguments)
    if request.config.get("rollout_fp8", True) is False:
        return Built(plain_recipe("slime"))
    activation, assumed = sglang.activation(request)
    weight = fp8("128x128", divide="reciprocal", amax_floor=1e-10)
    return Built(fp8_recipe("slime", request, activation, weight), assumed=assumed)


STACK = Stack(
    name="slime",
    title="slime (Megatron + SGLang)",
    version="main of 2026",
    sources=(
        "slime/backends/megatron_utils/kernels/fp8_kernel.py", "slime/ray/actor_group.py",
        "tools/convert_hf_to_fp8.py", *megatron.STACK.sources,
    ),
    switches={
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "default 1 in slime, unlike TransformerEngine's own",
        "rollout_fp8": "from a file: false if the rollout's checkpoint is bf16",
    },
    unknown=(
        "the last bit of a Triton scale: its division is not IEEE's",
        "checkpoints of tools/convert_hf_to_fp8.py: compare their bytes",
        *sglang.STACK.unknown[:1],
    ),
    remedies={
        **megatron.STACK.remedies,
        "amax_floor": "give both quantisers one floor: slime's is 1e-10, TransformerEngine's amax_epsilon is 0",
        "scale_dtype": "leave NVTE_FP8_BLOCK_SCALING_FP32_SCALES at 1, slime's default",
    },
    build=build,
    keys=("rollout_fp8", *megatron.KEYS),
    variables=megatron.STACK.variables,
    dashes=True,
)  # fmt: skip
