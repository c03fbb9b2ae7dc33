"""What an engine's configuration must be for the program to run exactly; set or refused before anything is loaded.

vLLM calls :meth:`EngineConfig.verify_and_update_config` for every model of our architecture, in the process that
builds the configuration: with ``vllm serve`` and with :class:`precgraph.vllm.LLM` alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import vllm.platforms
import vllm.triton_utils
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from precgraph.checkpoint.carried import KEY, read_carried
from precgraph.errors import InputError, RecipeError, UnsupportedModelError
from precgraph.recipe import Recipe
from precgraph.runtime.vllm import RUNNER
from precgraph.runtime.vllm.arguments import require_whole
from precgraph.runtime.vllm.sizes import captured_sizes
from precgraph.runtime.vllm.versions import require_version, v2_processor

OPTIONS = ("digest",)
WORKERS = {
    "cpu": "precgraph.runtime.vllm.worker_cpu.ExactCPUWorker",
    "cuda": "precgraph.runtime.vllm.worker_gpu.ExactGPUWorker",
}
DUMMY = "precgraph_dummy"  # our loader of random weights
GATE = "precgraph.runtime.vllm.params:ExactGate"
_CHECKED = ContextVar("precgraph: requests are checked before vLLM has them", default=False)
DIVIDED = {  # what would put one model on several devices, and why it may not
    "tensor_parallel_size": "splits sums, and blocks of 128, in other places than the trainer does",
    "pipeline_parallel_size": "is not supported",
    "prefill_context_parallel_size": "splits prompts, which attend in one piece in the trainer",
    "decode_context_parallel_size": "splits the keys of a request, which are summed in one order",
}


class EngineConfig(VerifyAndUpdateConfig):  # type: ignore[misc]
    """The hook that vLLM looks up by our architecture's name."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        require_version()
        v2 = asks_for_v2()
        if v2:
            _require_gate()
        recipe_of(vllm_config.model_config.hf_config)
        own_options(vllm_config.additional_config)
        _refuse(vllm_config)
        _refuse_ways_past(vllm_config)
        device = str(vllm_config.device_config.device_type)
        if device not in WORKERS:
            raise UnsupportedModelError(f"the plugin runs on CPUs and NVIDIA GPUs, not on {device!r}")
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        if parallel.worker_cls not in ("auto", WORKERS[device]):
            raise UnsupportedModelError(
                f"worker_cls {parallel.worker_cls!r} would replace the plugin's worker",
                remedy="leave worker_cls at auto",
            )
        parallel.worker_cls = WORKERS[device]
        if vllm_config.load_config.load_format == "dummy":
            vllm_config.load_config.load_format = DUMMY
        model.logits_processors = None if v2 and v2_processor() is None else [GATE]
        model.disable_cascade_attn = True  # which sums the keys of a common prefix apart
        model.logprobs_mode = "processed_logprobs"
        if device == "cuda":
            _capture_steps(vllm_config)
        os.environ[RUNNER] = str(int(v2))  # the engine's processes inherit it
        if getattr(vllm_config, "use_v2_model_runner", False) != v2:
            raise UnsupportedModelError(
                f"vLLM takes its other model runner although {RUNNER}={int(v2)}",
                remedy=f"leave out what needs it, or set {RUNNER}={int(not v2)}; and start the engine in a process in "
                "which no other engine has run",
            )


def require_undivided(name: str, size: int) -> None:
    """UnsupportedModelError if several devices are to share the model: ``name`` is one of :data:`DIVIDED`."""
    if size > 1:
        raise UnsupportedModelError(
            f"{name} = {size} {DIVIDED[name]}",
            remedy=f"run an engine on each device, in a process of its own, or vllm serve --data-parallel-size {size}",
        )


def asks_for_v2() -> bool:
    """Whether the environment asks for vLLM's V2 model runner; the plugin takes V1 where it says nothing."""
    asked = os.environ.get(RUNNER) or "0"
    if asked not in ("0", "1"):
        raise UnsupportedModelError(f"{RUNNER}={asked} is neither 0 nor 1", remedy="unset it")
    if asked == "1" and not vllm.triton_utils.HAS_TRITON:
        raise UnsupportedModelError(f"{RUNNER}=1: the V2 runner needs Triton", remedy="install Triton, or unset it")
    return asked == "1"


def takes_v2() -> bool:
    """Whether an engine whose requests are looked at before vLLM has them runs on V2: as the environment says, else
    where there are a GPU and Triton. V1's work on the host grows with the requests: a slow one falls behind the card.
    """
    if os.environ.get(RUNNER):
        return asks_for_v2()
    return bool(vllm.platforms.current_platform.is_cuda() and vllm.triton_utils.HAS_TRITON)


@contextmanager
def requests_checked() -> Iterator[None]:
    """While an engine is configured whose requests have passed :func:`precgraph.runtime.vllm.params.require_exact`."""
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def _require_gate() -> None:
    """UnsupportedModelError where V2 has no place from which to refuse what a request asks for, nor somebody before."""
    if v2_processor() is None and not _CHECKED.get():
        raise UnsupportedModelError(
            f"{RUNNER}=1: the V2 runner of this vLLM takes no logits processor, which is what refuses requests that "
            "an exact rollout cannot serve",
            remedy=f"unset {RUNNER}, take vLLM 0.31 or newer, or start the engine by precgraph.vllm.LLM",
        )


def recipe_of(hf_config: Any) -> Recipe:
    """The recipe that a model's config carries under ``precgraph``: a preset's name, or the rules as a table."""
    carried = getattr(hf_config, KEY, None)
    if carried is None:
        raise RecipeError(
            f"the model's config carries no recipe under {KEY!r}",
            remedy='pass --hf-overrides \'{"architectures": ["PrecGraphForCausalLM"], "precgraph": "jet_rl"}\'',
        )
    return read_carried(carried)


def own_options(additional: Any) -> dict[str, Any]:
    """What vLLM's ``additional_config`` holds for the plugin: ``{"precgraph": {...}}``.

    InputError for what is no table or has a key that is no option, DigestError for a digest that no program has: either
    would leave the engine unchecked.
    """
    own = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
    where, known = f'additional_config["{KEY}"]', ", ".join(OPTIONS)
    if not isinstance(own, Mapping):
        raise InputError(f"{own!r:.80} is no table", path=where, remedy=f"pass a dict; known keys: {known}")
    for key in own:
        if key not in OPTIONS:
            raise InputError(f"unknown key {key!r}", path=where, remedy=f"known keys: {known}")
    if "digest" in own:
        require_whole(own["digest"])
    return dict(own)


def _capture_steps(vllm_config: Any) -> None:
    """The program's kernels as they are, in CUDA graphs; vLLM's compiler has nothing to compile."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    compilation.mode = CompilationMode.NONE
    if vllm_config.model_config.enforce_eager:
        return
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    if compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        compilation.cudagraph_capture_sizes = captured_sizes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


def _refuse(vllm_config: Any) -> None:
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    for name in DIVIDED:
        require_undivided(name, getattr(parallel, name))
    if model.quantization and getattr(model.hf_config, "quantization_config", None):
        raise UnsupportedModelError(
            f"the config of this checkpoint says {model.quantization!r}, and vLLM would look for layers of its own",
            remedy='add "quantization_config": null to --hf-overrides; the plugin reads the codes and scales itself',
        )
    if str(model.dtype) != "torch.bfloat16":
        raise UnsupportedModelError(
            f"model dtype {str(model.dtype).removeprefix('torch.')}, and the program's is bfloat16",
            remedy="pass --dtype bfloat16; without it vLLM takes that of the checkpoint's config, which must hold "
            "bfloat16 weights",
        )
    refused = {
        f"kv_cache_dtype {cache.cache_dtype!r}": cache.cache_dtype not in ("auto", "bfloat16"),
        f"quantization {model.quantization!r}": bool(model.quantization),
        "speculative decoding": vllm_config.speculative_config is not None,
        "enable_prompt_embeds": getattr(model, "enable_prompt_embeds", False),
        "a watermark": getattr(vllm_config, "watermark_config", None) is not None,
        "return_sampling_mask": getattr(model, "return_sampling_mask", False),
        "LoRA": vllm_config.lora_config is not None,
        "custom logits processors": any(p != GATE for p in model.logits_processors or ()),
    }
    for what, given in refused.items():
        if given:
            raise UnsupportedModelError(
                f"{what} does not go with an exact rollout",
                remedy="leave it out: dtype is bfloat16, and the recipe says what is quantised",
            )


def _refuse_ways_past(vllm_config: Any) -> None:
    """What brings keys or weights into the engine past its prefix cache and the plugin's updates."""
    stores = {
        "kv_transfer_config": getattr(vllm_config, "kv_transfer_config", None),
        "kv_offloading_size": getattr(vllm_config.cache_config, "kv_offloading_size", None),
    }
    for name, given in stores.items():
        if given is not None:
            raise UnsupportedModelError(
                f"{name}: a store outside the prefix cache finds keys and values by their tokens, and after an update "
                "gives back those of older weights",
                remedy="leave it out; the prefix cache itself is exact, for an update drops it",
            )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise UnsupportedModelError(
            "weight_transfer_config: vLLM's own updates change weights without the plugin's version and checks",
            remedy="leave it out; update by precgraph.vllm.LLM.sync, or over HTTP by the four calls of docs/vllm.md",
        )
