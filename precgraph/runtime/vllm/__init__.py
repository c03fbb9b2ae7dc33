"""The vLLM plugin: vLLM's scheduler, cache and server around precgraph's rollout program.

vLLM calls :func:`register` in every process, through the entry point ``vllm.general_plugins``. It names the
architecture ``PrecGraphForCausalLM`` and touches no other model: what the architecture needs of the engine (worker,
sampler, refusals) is set when a model of that name is configured (:mod:`precgraph.runtime.vllm.config`).
"""

from __future__ import annotations

ARCHITECTURE = "PrecGraphForCausalLM"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # which the plugin sets for the engine's processes where it is not set
# Arguments of a request in its extra_args, vllm_xargs over HTTP: the seed of its draws, and the name under which its
# kept mass is recorded until it is asked for.
SEED, RECORD = "precgraph_seed", "precgraph_record"


def register() -> None:
    """Tell vLLM the architecture, its configuration hook and its loader; may be called any number of times.

    vLLM swallows what a plugin raises and goes on without it. The name is therefore no model of vLLM's: without the
    plugin it is an unknown architecture, and never served by other code.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from precgraph.runtime.vllm.config import EngineConfig

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"precgraph.runtime.vllm.model:{ARCHITECTURE}")
    MODELS_CONFIG_MAP[ARCHITECTURE] = EngineConfig
