"""The model that vLLM runs: the rollout program of the checkpoint's own model class and the recipe that it carries."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from precgraph import ops
from precgraph.checkpoint import Fp8Checkpoint, layout
from precgraph.checkpoint.carried import KEY
from precgraph.errors import InputError, SyncError, UnsupportedModelError
from precgraph.graph import PrecisionGraph
from precgraph.loading import load_model, stored_weights
from precgraph.runtime.compiled import Compiled, build_lowered
from precgraph.runtime.places import Places
from precgraph.runtime.runner import Runner
from precgraph.runtime.sampling import MAX_SEED
from precgraph.runtime.vllm import ARCHITECTURE
from precgraph.runtime.vllm.config import recipe_of
from precgraph.runtime.vllm.draws import Draws, Weights
from precgraph.runtime.vllm.quantized import load_quantized
from precgraph.runtime.vllm.sizes import Sizes, sizes_of
from precgraph.runtime.vllm.weights import RolloutStore, UnknownNameError, wire
from precgraph.skeleton import skeleton
from precgraph.trace import require_supported, trace


class PrecGraphForCausalLM(nn.Module):
    """vLLM's model interface over a program and its store.

    It has no parameters of its own that vLLM could initialise, discard or tie: the tensors that kernels read are those
    of ``compiled.store``, the trainer's own if vLLM shares its process.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = _own_config(vllm_config.model_config)
        recipe = recipe_of(vllm_config.model_config.hf_config)
        device = torch.device(vllm_config.device_config.device)
        with _plain_defaults():
            original = skeleton(config)
            require_supported(original)
            traced = trace(original)
            self.places = layout(original)
            if not traced.graph.causal_lm:
                raise UnsupportedModelError(f"{type(original).__name__} is not a causal language model")
            program = build_lowered(traced.graph, "infer", recipe, "auto", device)
            store = RolloutStore(traced, program, device)
        self.compiled = Compiled(traced, "infer", recipe, "auto", False, store, Runner(program, store), Places())
        self.config, self.checkpoint = config, vllm_config.model_config.model
        self.sizes = sizes_of(vllm_config) if device.type == "cuda" else Sizes()
        self.layers = nn.ModuleDict(
            {str(spec.layer): _attention(spec, vllm_config, prefix) for spec in _specs(program.graph)}
        )
        self.context = _attention_of(device)[1]({int(index): layer for index, layer in self.layers.items()})

    # ------------------------------------------------------------------------ what vLLM calls
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """vLLM asks for it of every text model, and calls it for multimodal inputs and prompt embeddings only."""
        raise UnsupportedModelError(f"{ARCHITECTURE} takes token ids only")

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """``input_ids, positions [T]`` to the hidden states ``[T, C]`` that enter the head."""
        if inputs_embeds is not None or intermediate_tensors is not None:
            raise UnsupportedModelError(f"{ARCHITECTURE} takes token ids only")
        self.compiled.store.require_fresh()
        ids, places = (self.sizes.padded(x)[None].long() for x in (input_ids, positions))
        return self.compiled.run_body(ids, places, self.context)[0, : input_ids.shape[0]]

    def compute_logits(self, hidden_states: Tensor, *args: Any) -> Tensor:
        """``[N, C]`` to fp32 logits ``[N, V]``.

        Of a captured step this still runs in Python, and refuses weights that are not complete; a trainer's store is
        asked once for all, by :meth:`precgraph.vllm.LLM.generate`.
        """
        if isinstance(self.compiled.store, RolloutStore):
            self.compiled.store.require_fresh()
        return self.compiled.logits(self.sizes.padded(hidden_states)[None])[: hidden_states.shape[0]]

    @staticmethod
    def get_model_state_cls() -> type[Any]:
        """Of the V2 runner, what brings our sampler."""
        from precgraph.runtime.vllm.sampler_v2 import ExactModelState  # needs Triton

        return ExactModelState

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the store from a bf16 checkpoint, or from the files of an FP8 one, whose scales vLLM would not name.

        Once: what vLLM loads later (``reload_weights``) would have no version, and meet keys of the weights before.
        """
        store = self.compiled.store
        if not isinstance(store, RolloutStore):
            raise UnsupportedModelError(
                "the weights are a trainer's in this process", remedy="actor.sync() refreshes them"
            )
        if store.version:
            raise SyncError(
                f"weights that vLLM loads itself would pass for version {store.version}, which is here",
                remedy="llm.sync(...) brings others",
            )
        folder = Path(self.checkpoint)
        if folder.is_dir() and not stored_weights(folder).plain:
            load_quantized(store, Fp8Checkpoint(folder), self.places)
            return set()
        try:
            store.load(weights)
        except SafetensorError as error:
            raise InputError(
                f"the checkpoint is truncated or damaged: {error}", path=self.checkpoint, remedy="restore it"
            ) from None
        except UnknownNameError:
            # Checkpoints of some families (experts one by one) are put together by transformers' own mapping.
            store.load(load_model(self.checkpoint).state_dict().items())
        return set()

    def load_random_weights(self, seed: int) -> None:
        """Fill the store as ``load_format="dummy"`` asks: weights that make finite numbers, quantised by the recipe."""
        store = self.compiled.store
        assert isinstance(store, RolloutStore)
        generator = torch.Generator(store.device).manual_seed(seed)
        store.load((path, _random(path, master, store.device, generator)) for path, master in store.wanted())

    # -------------------------------------------------------------------- what precgraph calls
    @property
    def digest(self) -> str:
        """The digest of the program that runs."""
        return self.compiled.digest

    def draws(self, vllm_config: Any) -> Draws:
        """The draws of an engine on these weights; data-parallel engines share a seed, and must not draw alike."""
        seed, index = vllm_config.model_config.seed or 0, vllm_config.parallel_config.data_parallel_index
        if index:
            seed = random.Random(f"{seed}/{index}").randint(0, MAX_SEED)
        return Draws(seed, self.serves)

    def share(self, trainer: Compiled) -> None:
        """Run on the store of a trainer in this process; its program's weights are this one's."""
        store, program = trainer.store, self.compiled.runner.program
        store.require(program.packs)
        self.compiled.store = store
        self.compiled.runner = Runner(program, store)

    def serves(self) -> Weights:
        """Which weights there are. Of a trainer's store in this process each update has a version of its own."""
        store = self.compiled.store
        return store.version, getattr(store, "installs", 0)

    def weights(self) -> dict[str, Tensor]:
        """The tensors that the program reads, by the names under which they travel."""
        return wire(self.compiled.store, self.compiled.runner.program)


def _random(path: str, like: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """Matrices as models are initialised (standard deviation 0.02), norms of one, biases of zero."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if made.dim() > 1:
        return made.normal_(0, 0.02, generator=generator)
    return made.fill_(0.0 if path.endswith("bias") else 1.0)


def _own_config(model_config: Any) -> Any:
    """The checkpoint's own config as a trainer reads it, with the user's overrides: vLLM writes into the one it holds.

    What makes vLLM choose this model is left out.
    """
    config: Any = AutoConfig.from_pretrained(
        model_config.hf_config_path or model_config.model, revision=model_config.revision, trust_remote_code=False
    )
    architectures, overrides = config.architectures, model_config.hf_overrides
    if callable(overrides):
        config = overrides(config)
    else:
        _override(config, overrides)
    config.architectures = architectures
    for key in (KEY, "quantization_config"):
        config.__dict__.pop(key, None)
    return config


def _override(config: PreTrainedConfig, table: Mapping[str, Any]) -> None:
    """Set attributes as vLLM does: a table for a part of the config goes into that part."""
    for key, value in table.items():
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            _override(part, value)
        else:
            setattr(config, key, value)


def _specs(graph: PrecisionGraph) -> list[ops.AttentionSpec]:
    specs: list[Any] = [n.args[3] for n in graph if n.target is ops.attention]
    if len({s.layer for s in specs}) != len(specs):
        raise UnsupportedModelError("two attention nodes share one layer index, and so one cache")
    return specs


def _attention(spec: ops.AttentionSpec, vllm_config: Any, prefix: str) -> nn.Module:
    """vLLM's layer for one attention node: it owns the node's part of the cache."""
    from vllm.model_executor.layers.attention import Attention

    device = torch.device(vllm_config.device_config.device)
    backend, _ = _attention_of(device)
    if device.type == "cuda":
        from precgraph.runtime.vllm.attention_gpu import require_exact

        require_exact(spec)
    # Without a window of its own a layer would take the model's, and skip keys that the program reads.
    cache = copy.copy(vllm_config.cache_config)
    cache.sliding_window = None
    layer: nn.Module = Attention(
        spec.heads, spec.head_dim, spec.scale, num_kv_heads=spec.kv_heads, cache_config=cache,
        logits_soft_cap=spec.softcap or None, per_layer_sliding_window=spec.window or None,
        prefix=f"{prefix}.layers.{spec.layer}.attn".lstrip("."), attn_backend=backend,
    )  # fmt: skip
    return layer


def _attention_of(device: torch.device) -> tuple[type[Any], type[Any]]:
    """vLLM's backend and the program's context for a device."""
    if device.type == "cuda":
        from precgraph.runtime.vllm.attention_gpu import FlashContext, OneSplitBackend

        return OneSplitBackend, FlashContext
    from precgraph.runtime.vllm.attention import ReferenceBackend, VllmContext

    return ReferenceBackend, VllmContext


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """torch's default dtype and device, as a trainer's process has them: vLLM constructs models under its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
