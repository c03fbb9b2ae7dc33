"""verl: one configuration file for the trainer (FSDP or Megatron) and the rollout (vLLM or SGLang).

Read in 2026's main: ``verl/utils/fp8_utils.py`` (bf16 first; which parameters), ``verl/utils/kernel/fp8_kernel.py``
(commit 250e58e0: a Triton kernel, eps 1e-10, or 448/amax with VERL_DISABLE_TRITON_FP8=1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precgraph.format import Format
from precgraph.stacks import megatron, sglang, transformer_engine, vllm
from precgraph.stacks.base import Built, Request, Stack, fp8, fp8_recipe, lookup, plain_recipe, table


def build(request: Request) -> Built:
    """The recipe of one side of a verl configuration; without one: FSDP in bf16, and an FP8 rollout in vLLM."""
    worker = request.config.get("actor_rollout_ref", request.config)
    return _trainer(request, worker) if request.side == "train" else _rollout(request, worker)


def _trainer(request: Request, worker: Mapping[str, Any]) -> Built:
    strategy = lookup(worker, "actor", "strategy") or "fsdp"
    if strategy in ("fsdp", "fsdp2"):
        return Built(plain_recipe("verl"))
    if strategy != "megatron":
        raise request.error(f"actor.strategy = {strategy!r} is not modelled", "use fsdp, fsdp2 or megatron")
    arguments = table(request, worker, "actor", "megatron", "override_transformer_config")
    return megatron.of_arguments("verl", request, arguments)


def _rollout(request: Request, worker: Mapping[str, Any]) -> Built:
    rollout = table(request, worker, "rollout") or ({} if worker else {"quantization": "fp8"})
    method, engine = rollout.get("quantization"), rollout.get("name", "vllm")
    if method in (None, "null"):
        return Built(plain_recipe("verl"))
    if method != "fp8":
        raise request.error(f"rollout.quantization = {method!r} is not modelled", "use fp8")
    if engine not in ("vllm", "sglang"):
        raise request.error(f"rollout.name = {engine!r} is not modelled", "use vllm or sglang")
    engine_request = replace(request, config={"dtype": rollout.get("dtype", "bfloat16")})
    if engine == "sglang":
        activation, assumed = sglang.activation(engine_request)
        return Built(fp8_recipe("verl", request, activation, weight(request)), assumed=assumed)
    served = vllm.requantized(engine_request, weight(request))
    return Built(fp8_recipe("verl", request, vllm.activation(engine_request), served))


def weight(request: Request) -> Format:
    """Weights as verl quantises them for the rollout: from bf16."""
    if request.env.get("VERL_DISABLE_TRITON_FP8", "0").lower() in ("1", "true", "yes"):
        return fp8("128x128", scale_rule="max/amax", amax_floor=0.0)
    return fp8("128x128", divide="reciprocal", amax_floor=1e-10)


STACK = Stack(
    name="verl",
    title="verl (FSDP or Megatron, and vLLM or SGLang)",
    version="main of 2026",
    sources=(
        "verl/utils/fp8_utils.py", "verl/utils/kernel/fp8_kernel.py", *vllm.STACK.sources, *megatron.STACK.sources[:1],
    ),
    switches={
        "actor_rollout_ref.actor.strategy": "fsdp, fsdp2 (bf16) or megatron",
        "actor_rollout_ref.actor.megatron.override_transformer_config": "fp8, fp8_recipe, first_last_layers_bf16 ...",
        "actor_rollout_ref.rollout.name, .quantization, .dtype": "vllm or sglang; fp8 or nothing",
        "VERL_DISABLE_TRITON_FP8": "1: weights by 448/amax and a multiplication",
        "VLLM_USE_DEEP_GEMM_E8M0": "as in vLLM",
    },
    unknown=("the last bit of a Triton scale: its division is not IEEE's", *vllm.STACK.unknown),
    remedies={
        **vllm.REMEDIES,
        "rule.gemm": "train in FP8 too (actor.strategy=megatron, override_transformer_config.fp8_recipe=blockwise) or "
        "set rollout.quantization=null",
    },
    build=build,
    keys=(
        "actor.strategy", *(f"actor.megatron.override_transformer_config.{key}" for key in megatron.KEYS),
        "rollout.name", "rollout.quantization", "rollout.dtype",
    ),
    variables=("VERL_DISABLE_TRITON_FP8", *transformer_engine.VARIABLES, *vllm.VARIABLES),
    root="actor_rollout_ref",
)  # fmt: skip
