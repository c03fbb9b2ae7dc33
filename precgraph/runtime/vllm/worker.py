"""What our worker adds to vLLM's: the sampler, and the calls that :class:`precgraph.vllm.LLM` makes to every worker."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from precgraph.errors import DigestError, InputError, SyncError, UnsupportedModelError
from precgraph.runtime.vllm import (
    RUNNER,
    dummy,  # noqa: F401 - registers its loader
)
from precgraph.runtime.vllm.config import asks_for_v2, own_options
from precgraph.runtime.vllm.draws import Draws
from precgraph.runtime.vllm.ipc import Opened
from precgraph.runtime.vllm.model import PrecGraphForCausalLM
from precgraph.runtime.vllm.replies import replies
from precgraph.runtime.vllm.sampler import ExactSampler
from precgraph.runtime.vllm.sync import Manifest, Receiver, checksum, entries, read_tensors
from precgraph.runtime.vllm.weights import RolloutStore

_log = init_logger("vllm.precgraph")  # below vLLM's own logger, whose level and handlers it shares


def _runner_class(v2: bool) -> type[Any]:
    place = "vllm.v1.worker.gpu.model_runner" if v2 else "vllm.v1.worker.gpu_model_runner"
    return importlib.import_module(place).GPUModelRunner  # type: ignore[no-any-return]


class ExactWorker:
    """Mixed in before a worker class of vLLM's."""

    model_runner: Any
    vllm_config: Any
    _receiver: Receiver | None = None
    _opened: Opened | None = None
    _away = False  # weights of the engine's own are out of the device's memory, while it sleeps

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        runner, v2 = self.model_runner, asks_for_v2()
        if not isinstance(runner, _runner_class(v2)):  # another would draw with vLLM's own sampler
            raise UnsupportedModelError(
                f"vLLM chose the model runner of {type(runner).__module__} although {RUNNER}={int(v2)}",
                remedy=f"set {RUNNER} in every process of the engine",
            )
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._require_digest()
        if not v2:  # which asks the model for a sampler
            # Or each step would wait for the tokens of the step before: vLLM takes any processor of logits, so our
            # gate too, for one that reads them.
            runner.input_batch.logitsprocs_need_output_token_ids = False
            runner.sampler = ExactSampler(runner.sampler, runner, self._model().draws(self.vllm_config))

    def compile_or_warm_up_model(self) -> Any:
        sizes = self._model().sizes.steps
        if sizes:
            _log.info("precgraph: running %d sizes of a step; minutes if no kernel is compiled yet", len(sizes))
            self._warm_up(sizes)
        done = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.model_runner.sampler.serving = True
        return done

    @torch.inference_mode()
    def _warm_up(self, sizes: Sequence[int]) -> None:
        """Run the program once at each size, before graphs are captured and requests arrive."""
        model, scheduler = self._model(), self.vllm_config.scheduler_config
        for size in tqdm(sorted(sizes, reverse=True), desc="precgraph: compiling kernels, sizes of a step"):
            if size <= scheduler.max_num_batched_tokens:
                hidden = self.model_runner._dummy_run(
                    size, skip_eplb=True, cudagraph_runtime_mode=CUDAGraphMode.NONE
                )[0]  # fmt: skip
            if size <= model.sizes.fit(scheduler.max_num_seqs):
                logits = model.compute_logits(hidden[:1].expand(size, -1).contiguous())
        self._draws().warm_up(logits)

    def sleep(self, level: int = 1) -> None:
        store = self._model().compiled.store
        if isinstance(store, RolloutStore):
            self._away = True
            if level > 1:
                store.invalid = "sleep(level=2) has discarded the weights"
        elif level > 1:
            raise InputError("level 2 would discard the trainer's weights", remedy="use sleep(level=1)")
        super().sleep(level)  # type: ignore[misc]

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)  # type: ignore[misc]
        if tags is None or "weights" in tags:
            self._away = False

    def shutdown(self) -> None:
        """The cache's memory comes back although the model, or who started the engine, is still referred to: the V2
        runner of 0.26 leaves it to the attention layers, and keeps its graphs."""
        layers = list(self.vllm_config.compilation_config.static_forward_context.values())  # vLLM clears it
        super().shutdown()  # type: ignore[misc]
        for layer in layers:
            layer.kv_cache = torch.tensor([])
        runner = getattr(self, "model_runner", None)  # none in a worker that did not come so far
        if getattr(runner, "cudagraph_manager", None) is not None:
            runner.cudagraph_manager = None  # type: ignore[union-attr]
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # ----------------------------------------------------------------------------------- calls
    @property
    def unheard(self) -> bool:
        """Whether another engine's reply is shown for this one's: of several behind one server vLLM asks all, shows
        the first's reply alone, and an exception of any."""
        parallel = self.vllm_config.parallel_config
        return parallel.data_parallel_index > 0 and not parallel.data_parallel_external_lb

    @replies
    def precgraph_state(self) -> dict[str, Any]:
        """``digest`` of the program that runs, ``version`` and ``checksum`` of the weights that it runs on."""
        self._require_awake()
        model = self._model()
        store = model.compiled.store
        return {
            "digest": model.digest,
            "version": store.version,
            "checksum": None if getattr(store, "invalid", None) else checksum(entries(model.weights())),
        }

    @replies
    def precgraph_serving(self) -> list[int] | None:
        """Version of the weights and number of the update that brought them, or None if they may not be served; unlike
        :meth:`precgraph_state` it reads none of them."""
        model = self._model()
        return None if getattr(model.compiled.store, "invalid", None) else list(model.serves())

    @replies
    def precgraph_begin(self, manifest: dict[str, Any]) -> None:
        self._require_awake()
        model = self._model()
        store = model.compiled.store
        if not isinstance(store, RolloutStore):
            raise SyncError(
                "this engine runs on the trainer's own weights", remedy="call llm.sync() after actor.sync()"
            )
        receiver = self._receiver = self._receiver or Receiver(model.digest, model.weights())
        receiver.begin(Manifest.from_json(manifest), store.version)

    @replies
    def precgraph_update_file(self, path: str) -> None:
        self._update(read_tensors(path))

    @replies
    def precgraph_update_ipc(self, handles: dict[str, Any]) -> None:
        self._opened = self._opened or Opened()
        self._update(self._opened.of(handles))

    @replies
    def precgraph_finish(self) -> str:
        """Install the update; returns the checksum of what is installed, computed from it."""
        self._require_awake()
        if self._receiver is None:
            raise SyncError("no update has begun", remedy="call begin first")
        manifest, tensors = self._receiver.finish()
        model = self._model()
        store = model.compiled.store
        assert isinstance(store, RolloutStore)
        store.install(tensors, manifest.version)
        self._receiver.abort()
        found = checksum(entries(model.weights()))
        if found != manifest.checksum:
            store.invalid = f"the weights of version {manifest.version} are not what the trainer sent"
            raise SyncError(store.invalid, remedy="sync again; until then the engine serves nothing")
        return found

    @replies
    def precgraph_abort(self) -> None:
        if self._receiver is not None:
            self._receiver.abort()

    @replies
    def precgraph_expect(self, records: list[str]) -> None:
        """These records will be taken, when the last of their requests has ended."""
        self._draws().expect(records)

    @replies
    def precgraph_take(self, records: list[str]) -> dict[str, Any]:
        """``digest`` of the program, and by their names the records of requests that have ended."""
        taken = self._draws().take(records)
        found = {n: {"weights": sorted(map(list, r.weights)), "kept_mass": r.kept_mass} for n, r in taken.items()}
        return {"digest": self._model().digest, "records": found}

    @replies
    def precgraph_addresses(self) -> dict[str, int]:
        """Where each tensor that a kernel reads begins; an update must not change it."""
        store = self._model().compiled.store
        if isinstance(store, RolloutStore):
            return store.addresses()
        found = {path: t.data_ptr() for path, t in store.masters.items()}
        for key, pack in store.packs.items():
            found |= {f"{key}.{name}": t.data_ptr() for name, t in pack.tensors().items()}
        return found

    # --------------------------------------------------------------------------------- helpers
    def _model(self) -> PrecGraphForCausalLM:
        model = self.model_runner.get_model()
        assert isinstance(model, PrecGraphForCausalLM)
        return model

    def _draws(self) -> Draws:
        draws = self.model_runner.sampler.draws
        assert isinstance(draws, Draws)
        return draws

    def _update(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._receiver is None:
            raise SyncError("no update has begun", remedy="call begin first")
        try:
            self._receiver.update(tensors)
        except SyncError:
            self._receiver.abort()
            raise

    def _require_awake(self) -> None:
        if self._away:
            raise SyncError("the engine sleeps, and its weights are not in memory", remedy="wake it, then ask again")

    def _require_digest(self) -> None:
        """With ``additional_config={"precgraph": {"digest": ...}}`` a worker that would run another program stops."""
        wanted, found = own_options(self.vllm_config.additional_config).get("digest"), self._model().digest
        if wanted is not None and wanted != found:
            raise DigestError(
                f"this engine would run program {found[:12]}, the trainer runs {wanted[:12]}",
                remedy="use one recipe, one precgraph and one torch on both sides",
            )
