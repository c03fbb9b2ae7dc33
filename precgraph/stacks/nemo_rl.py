"""NeMo-RL: Megatron trains; weights are quantised in NeMo-RL as vLLM loads them.

Read in ``nemo_rl/models/generation/fp8.py`` (commit 381cc6b0), release 0.4 to 0.7's way: ``init_fp8``,
``cast_tensor_to_fp8_blockwise``. It sets VLLM_USE_DEEP_GEMM_E8M0=0 with ``use_deep_gemm``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from precgraph.stacks import megatron, transformer_engine, vllm
from precgraph.stacks.base import Built, Request, Stack, fp8, fp8_recipe, other_weight, plain_recipe, table, taken
from precgraph.stacks.matching import Skips, skips, substring


def build(request: Request) -> Built:
    """The recipe of one side of a NeMo-RL configuration (``policy: ...``)."""
    policy = request.config.get("policy", request.config)
    if request.side == "train":
        arguments = table(request, policy, "megatron_cfg", "fp8_cfg")
        if request.config and not arguments.get("enabled", False):
            return Built(plain_recipe("nemo_rl"))
        form = {"fp8": arguments.get("fp8", "e4m3"), "fp8_recipe": arguments.get("fp8_recipe", "blockwise")}
        return megatron.of_arguments("nemo_rl", request, form)
    options = table(request, policy, "generation", "vllm_cfg")
    if request.config and options.get("precision") != "fp8":
        return Built(plain_recipe("nemo_rl"))
    if options.get("pow2_weight_scaling_factors") or options.get("pow2_activation_scaling_factors"):
        raise request.error("NeMo-RL's pow2_*_scaling_factors are not modelled", "leave them out")
    left_out = _skips(request, options)
    env = {**request.env, "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    activation = vllm.activation(replace(request, env=env, config={}))
    weight = taken(fp8("128x128", scale_rule="max/amax", amax_floor=0.0), other_weight(request), "source")
    return Built(fp8_recipe("nemo_rl", request, activation, weight, left_out), left_out, (), ("weight.source",))


def _skips(request: Request, options: object) -> Skips:
    """``quantization_ignored_layer_kws``, each looked for inside every name, and whole layers at both ends."""
    assert isinstance(options, dict)
    words = skips(options.get("quantization_ignored_layer_kws") or (), request.modules, substring)
    numbers = {m: int(found[1]) for m in request.modules if (found := re.search(r"\.layers\.(\d+)\.", m))}
    count = max(numbers.values(), default=-1) + 1
    first, last = options.get("num_first_layers_in_bf16", 0), options.get("num_last_layers_in_bf16", 0)
    ends = {m: f"layers.{n}" for m, n in numbers.items() if n < first or n >= count - last}
    return Skips({**ends, **words.by_module}, words.unmatched, words.how)


STACK = Stack(
    name="nemo_rl",
    title="NeMo-RL (Megatron + vLLM)",
    version="0.4 (commit 381cc6b0)",
    sources=("nemo_rl/models/generation/fp8.py", *vllm.STACK.sources, *megatron.STACK.sources[:1]),
    switches={
        "policy.generation.vllm_cfg.precision": "fp8, or bf16 rollouts",
        "policy.generation.vllm_cfg.quantization_ignored_layer_kws": "layers left in bf16, matched as substrings",
        "policy.generation.vllm_cfg.num_first_layers_in_bf16, num_last_layers_in_bf16": "layers left in bf16",
        "policy.megatron_cfg.fp8_cfg": "enabled, fp8, fp8_recipe of the trainer",
    },
    unknown=(
        "the last bit of a weight's scale: torch rounds the reciprocal of amax before it multiplies by 448",
        "the dtype of the weights that reach the quantiser: taken from the other side",
        "without use_deep_gemm, whether E8M0 is switched off: assumed off",
    ),
    remedies={
        **megatron.STACK.remedies,
        "rule.gemm": "name layers in full: quantization_ignored_layer_kws are looked for as substrings",
    },
    build=build,
    keys=(
        "generation.vllm_cfg.precision",
        "generation.vllm_cfg.quantization_ignored_layer_kws",
        "generation.vllm_cfg.num_first_layers_in_bf16",
        "generation.vllm_cfg.num_last_layers_in_bf16",
        "generation.vllm_cfg.pow2_weight_scaling_factors",
        "generation.vllm_cfg.pow2_activation_scaling_factors",
        "megatron_cfg.fp8_cfg.enabled",
        "megatron_cfg.fp8_cfg.fp8",
        "megatron_cfg.fp8_cfg.fp8_recipe",
    ),
    variables=(*transformer_engine.VARIABLES, "VLLM_USE_DEEP_GEMM"),
    root="policy",
)
