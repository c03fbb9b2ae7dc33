"""SkyRL: Megatron trains; weights are quantised in SkyRL for vLLM ("serialized_blockwise").

Read in ``skyrl/backends/skyrl_train/weight_sync/serialized_fp8.py`` (2026, ``SerializedFp8Config`` and
``blockwise_cast_to_fp8``): the floor is NVTE_FP8_BLOCK_AMAX_EPSILON, but at least 1e-10, where the trainer's is the
variable itself.
"""

from __future__ import annotations

from dataclasses import replace

from precgraph.stacks import transformer_engine, vllm
from precgraph.stacks.base import Built, Request, Stack, fp8, fp8_recipe

_EPSILON = "NVTE_FP8_BLOCK_AMAX_EPSILON"


def build(request: Request) -> Built:
    """The trainer's TransformerEngine recipe, or the rollout's, in this environment."""
    env = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", **request.env}
    inner = replace(request, env=env, config={})
    try:
        epsilon = float(env.get(_EPSILON) or 0)
    except ValueError:
        raise request.error(f"environment: {_EPSILON} = {env[_EPSILON]!r} is not a number") from None
    if request.side == "train":
        return Built(transformer_engine.block_scaling("skyrl", inner, {"amax_epsilon": epsilon}))
    scale = "float32" if inner.switch("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", True) else "ue8m0_log2"
    weight = fp8(
        "128x128",
        scale_dtype=scale,
        amax_floor=max(epsilon, 1e-10),
        source=request.config.get("weight_dtype", "bfloat16"),
    )
    return Built(fp8_recipe("skyrl", request, vllm.activation(inner), vllm.requantized(inner, weight)))


STACK = Stack(
    name="skyrl",
    title="SkyRL (Megatron + vLLM)",
    version="main of 2026",
    sources=(
        "skyrl/backends/skyrl_train/weight_sync/serialized_fp8.py",
        *transformer_engine.STACK.sources,
        *vllm.STACK.sources,
    ),
    switches={
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "default 1 in SkyRL: fp32 scales on both sides",
        _EPSILON: "floor of the trainer's amax, default 0; the rollout's is at least 1e-10",
        "VLLM_USE_DEEP_GEMM_E8M0": "as in vLLM",
    },
    unknown=(
        "on CUDA, torch divides by the number 448 by multiplying with its reciprocal; the source says amax / 448",
        "models other than Qwen3.5: which layers are quantised",
        *vllm.STACK.unknown,
    ),
    remedies={
        **vllm.REMEDIES,
        "amax_floor": f"set {_EPSILON} to the same value, at least 1e-10, for the trainer and every worker",
        "scale_rule": "quantise both sides by one rule: TransformerEngine has no switch for it",
    },
    build=build,
    keys=("weight_dtype",),
    variables=(_EPSILON, *transformer_engine.VARIABLES, *vllm.VARIABLES),
)
