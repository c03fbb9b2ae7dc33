"""vLLM as the rollout engine, in the trainer's process.

In the arm ``exact`` it runs precgraph's program on the actor's own weights (:class:`precgraph.vllm.LLM`): nothing is
sent. In the other arms it runs its own model, in bf16 or in its block FP8, and takes the weights anew after an update.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from precgraph.runtime.cache import PagedCache
from precgraph.runtime.engine import CACHE_BYTES, Completion
from precgraph.runtime.sampling import SamplingParams
from precgraph.runtime.vllm.versions import foreign_deep_gemm
from trainer.config import Config
from trainer.errors import ConfigError, TrainerError
from trainer.precision import Pair

BLOCK_SIZE = 16  # tokens in a block of rollout.cache_blocks, as in the embedded engine


class ExactVllm:
    """precgraph's program inside vLLM, on the actor's weight store."""

    def __init__(self, pair: Pair, config: Config) -> None:
        from precgraph.vllm import LLM

        with tempfile.TemporaryDirectory(prefix="precgraph-") as folder:
            _hf_config(pair.actor).save_pretrained(folder)
            self._llm = LLM(folder, actor=pair.actor, **_engine_args(pair.actor, config))
        self.digest: str = self._llm.digest
        self._sleeper = _Sleeper(self._llm.sleep, self._llm.wake, _on_gpu(pair.actor))

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Sequence[Any]:
        self.wake()
        samples: Sequence[Any] = self._llm.generate(prompts, params)
        return samples

    def sleep(self) -> None:
        self._sleeper.sleep()

    def wake(self) -> None:
        self._sleeper.wake()

    def close(self) -> None:
        self._llm.shutdown()


class StockVllm:
    """vLLM's own model with the actor's weights, in bf16 or, with ``quantization``, in its online block FP8.

    Its log-probabilities are normalised again after top-p and top-k, so those are refused. On a CPU its generators
    cannot be set for each request: draws then come from the engine's own, seeded with ``run.seed``.
    """

    def __init__(self, pair: Pair, config: Config, quantization: str | None = None) -> None:
        import vllm

        from precgraph.runtime.vllm.preserve import IN_PROCESS, environment, preserved_state

        self._actor, self._served = pair.actor, int(pair.actor.precgraph.store.version)
        self._seeded = _on_gpu(pair.actor)
        self.digest = f"vllm {vllm.__version__} {quantization or 'bfloat16'}"
        with (
            tempfile.TemporaryDirectory(prefix="precgraph-") as folder,
            preserved_state(),
            environment(IN_PROCESS),
        ):
            pair.actor.save_pretrained(folder)
            _hf_config(pair.actor).save_pretrained(folder)
            self._engine = vllm.LLM(
                folder, dtype="bfloat16", quantization=quantization, logprobs_mode="processed_logprobs",
                seed=config.run.seed, **_engine_args(pair.actor, config),
            )  # fmt: skip
        self._sleeper = _Sleeper(self._engine.sleep, self._engine.wake_up, self._seeded)

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Sequence[Any]:
        from precgraph.runtime.vllm.params import completion_fields, to_vllm

        self.wake()
        self._update()
        asked = [to_vllm(p if self._seeded else replace(p, seed=None)) for p in params]
        outputs = self._engine.generate([{"prompt_token_ids": list(p)} for p in prompts], asked, use_tqdm=False)
        # The whole distribution was drawn from: the kept mass is 1.
        return [Completion(**completion_fields(output, self._served, i)) for i, output in enumerate(outputs)]

    def _update(self) -> None:
        """Hand over the weights if the actor has synced since; vLLM quantises them anew itself."""
        store = self._actor.precgraph.store
        store.require_fresh()
        if store.version == self._served:
            return
        named = ((name, p.detach()) for name, p in self._actor.named_parameters())
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        if not self._seeded and self._actor.config.tie_word_embeddings:
            self._engine.apply_model(_pack_head)
        if not self._engine.reset_prefix_cache():
            raise TrainerError("vLLM keeps keys and values of the weights before", remedy="resume the run")
        self._served = int(store.version)

    def sleep(self) -> None:
        self._sleeper.sleep()

    def wake(self) -> None:
        self._sleeper.wake()

    def close(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


def require_vllm(config: Config, device: torch.device) -> None:
    """ConfigError without vLLM, and for what it cannot run in the configured arm on that device."""
    arm, table = config.precision.arm, config.rollout
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("rollout.engine = 'vllm', but vLLM is not installed", remedy="pip install 'precgraph[vllm]'")
    if arm != "exact" and (table.top_p < 1 or table.top_k > 0):
        raise ConfigError(
            "vLLM's own model reports log-probabilities of the truncated distribution", path="rollout.top_p, top_k",
            remedy='leave them out, or set rollout.engine = "embedded"',
        )  # fmt: skip
    if arm in ("exact", "bf16"):
        return
    if device.type != "cuda":
        raise ConfigError(f"arm {arm!r}: vLLM's own block FP8 needs a GPU", remedy='set rollout.engine = "embedded"')
    if foreign := foreign_deep_gemm():
        raise ConfigError(f"arm {arm!r}: {foreign.message}", remedy=foreign.remedy)


def vllm_rollout(pair: Pair, config: Config) -> ExactVllm | StockVllm:
    """The engine of the configured arm, which :func:`require_vllm` has let pass."""
    if config.precision.arm == "exact":
        return ExactVllm(pair, config)
    return StockVllm(pair, config, None if config.precision.arm == "bf16" else "fp8_per_block")


# ------------------------------------------------------------------------------------------ helpers


class _Sleeper:
    """Frees vLLM's cache while the trainer works, where vLLM can: not on a CPU. Both may be called twice."""

    def __init__(self, sleep: Any, wake: Any, able: bool) -> None:
        self._sleep, self._wake, self._able, self._asleep = sleep, wake, able, False

    def sleep(self) -> None:
        if self._able and not self._asleep:
            self._sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._wake()
            self._asleep = False


def _engine_args(actor: Any, config: Config) -> dict[str, Any]:
    """vLLM's arguments: the limits of ``[rollout]``, and the embedded engine's default for the cache."""
    table, graph = config.rollout, actor.precgraph.graph
    context = getattr(actor.config, "max_position_embeddings", None) or 4096
    one = PagedCache.bytes_per_token(graph) * BLOCK_SIZE
    longest = -(-context // BLOCK_SIZE)
    blocks = table.cache_blocks or min(table.max_sequences * longest, max(longest, CACHE_BYTES // one))
    cache = (blocks + 1) * one
    return {
        "skip_tokenizer_init": True, "max_model_len": context, "max_num_seqs": table.max_sequences,
        "max_num_batched_tokens": max(table.max_batch_tokens, table.max_sequences), "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "kv_cache_memory_bytes": cache,
        "enable_sleep_mode": _on_gpu(actor),
        "enforce_eager": not _on_gpu(actor),  # on a CPU vLLM would compile its model for minutes
        **_share(actor, cache),
    }  # fmt: skip


def _share(actor: Any, cache: int) -> dict[str, float]:
    """What vLLM asks to be free of the GPU when it starts: its cache alone, for the trainer holds the rest."""
    if not _on_gpu(actor):
        return {}
    return {
        "gpu_memory_utilization": cache / torch.cuda.get_device_properties(actor.precgraph.store.device).total_memory
    }


def _pack_head(model: Any) -> None:
    """On some CPUs vLLM multiplies by a packed copy of the head, and makes no new one of a head that is tied."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.quant_method.process_weights_after_loading(head)


def _hf_config(actor: Any) -> Any:
    """The actor's config, which names the class that it is of."""
    config = copy.deepcopy(actor.config)
    config.architectures = [type(actor).own_class.__name__]
    return config


def _on_gpu(actor: Any) -> bool:
    return bool(actor.precgraph.store.device.type == "cuda")
