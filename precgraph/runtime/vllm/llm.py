"""vLLM as a rollout engine: :class:`LLM` generates with the trainer's program and serves the trainer's weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from precgraph.checkpoint.carried import carried_recipe
from precgraph.errors import DigestError, InputError, PrecGraphError, StaleWeightsError, SyncError
from precgraph.loading import load_config_model
from precgraph.recipe import Recipe, require_recipe
from precgraph.runtime.compiled import Compiled
from precgraph.runtime.engine import Completion
from precgraph.runtime.sampling import require_finite, warn_of_shared_seeds
from precgraph.runtime.vllm import ARCHITECTURE, RECORD, RUNNER, register
from precgraph.runtime.vllm.alive import answered, deaths_end_steps, in_this_process, one_at_a_time
from precgraph.runtime.vllm.arguments import refuse, whole_digest
from precgraph.runtime.vllm.ipc import Handles
from precgraph.runtime.vllm.preserve import (
    IN_PROCESS,
    default_stream,
    environment,
    preserved_state,
    rare_full_collections,
)
from precgraph.runtime.vllm.replies import value_of
from precgraph.runtime.vllm.sync import Manifest, compiled_of, paths_of, policy, read_manifest, save_weights
from precgraph.runtime.vllm.versions import require_version


@dataclass(frozen=True, slots=True)
class Sample(Completion):
    """One request's result: a :class:`precgraph.runtime.engine.Completion` of the program with this ``digest``.

    ``weights_version`` is the trainer's, and ``logprobs`` those of a trainer with the same digest and weights.
    """

    digest: str


class LLM:
    """vLLM running the rollout program of ``model``, a checkpoint directory (or hub id) with bf16 weights, or a
    directory of ``precgraph export`` with FP8 weights, which are served as the bytes that they are.

    ``recipe`` defaults to the actor's, to the one that an export or a config.json brings, or to :meth:`Recipe.jet_rl`.
    With ``actor``, a model compiled for training or rollout, the engine runs in this process on the actor's own weight
    store: ``actor.sync()`` is all that an update takes. Without one it may run in processes of its own, and
    :meth:`sync` sends weights to it. ``digest``, from ``model.precgraph.digest`` or ``precgraph digest``, is what the
    engine must run; an actor brings its own.
    ``engine_args`` are those of ``vllm.LLM``; ``engine`` is that object.

    Raises UnsupportedModelError (vLLM's version, the model, parallelism that would change sums), RecipeError,
    InputError, or DigestError if ``digest`` is none, or not the actor's, or if a worker runs another program. A
    checkpoint that cannot be read is an InputError where the engine runs in this process; from a process of its own
    vLLM raises a RuntimeError, and its log has the cause.
    """

    def __init__(
        self,
        model: str | Path,
        recipe: Recipe | None = None,
        *,
        actor: Any = None,
        digest: str | None = None,
        **engine_args: Any,
    ) -> None:
        require_version()
        register()
        from precgraph.runtime.vllm.config import requests_checked, takes_v2  # which imports vLLM

        self._actor = None if actor is None else compiled_of(actor)
        require_recipe(recipe)
        self.recipe = recipe or (self._actor.recipe if self._actor else carried_recipe(model) or Recipe.jet_rl())
        self._digest = whole_digest(digest, self._actor)
        self._broken: str | None = None
        self._closed = self._asleep = False
        self._turn = RLock()
        self._handles = Handles()
        refuse(engine_args)
        # A bad model fails here, with a typed error, and not in a worker.
        self.vocabulary = int(load_config_model(model, warn=False).config.get_text_config().vocab_size)
        variables = {RUNNER: str(int(takes_v2())), **(IN_PROCESS if actor is not None else {})}
        with preserved_state(), environment(variables), requests_checked(), default_stream():
            self.engine = self._start(str(model), engine_args)
        self._group = self._groups()
        try:
            states = self._call("precgraph_state")
            self.digest: str = states[0]["digest"]
            self._require_digest([s["digest"] for s in states], self._digest or self.digest)
        except BaseException:
            self.shutdown()
            raise
        self._served: int = states[0]["version"]

    def _start(self, model: str, engine_args: dict[str, Any]) -> Any:
        import vllm

        from precgraph.runtime.vllm.config import GATE

        arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            **engine_args,
            "hf_overrides": {
                **engine_args.get("hf_overrides", {}),
                "architectures": [ARCHITECTURE], "precgraph": self.recipe.to_dict(),
                "quantization_config": None,  # an FP8 checkpoint's, for which vLLM would look for layers of its own
            },
        }  # fmt: skip
        if self._actor is not None:
            from precgraph.runtime.vllm.shared import LOAD_FORMAT, offer

            arguments |= {"load_format": LOAD_FORMAT, "model_loader_extra_config": {"trainer": offer(self._actor)}}
        engine = vllm.LLM(model=model, **arguments)
        served = engine.llm_engine.vllm_config.model_config
        served.logits_processors = served.logits_processors or [GATE]  # the front end asks it where no runner takes it
        return engine

    # ------------------------------------------------------------------------------- generate
    @one_at_a_time
    def generate(
        self, prompt_token_ids: Sequence[Sequence[int]], params: Any, *, progress: bool = False
    ) -> list[Sample]:
        """Sample ``n`` continuations of every prompt; results in their order, those of a prompt one after another.

        ``params`` are vLLM's ``SamplingParams`` or :class:`precgraph.runtime.sampling.SamplingParams`, one for all or
        one a prompt. A request without a seed takes one from torch's global generator; requests that share one get a
        UserWarning. InputError for parameters that an exact rollout refuses, StaleWeightsError if
        the weights are not complete or the actor has not synced, NonFiniteError if a token was drawn from logits that
        hold NaN or infinity. One that breaks off, by Ctrl-C too, leaves no request in the engine, nor anything in the
        prefix cache.
        """
        from precgraph.runtime.vllm.params import completion_fields, request_of, requests_of

        self._require_ready()
        served = self.engine.llm_engine.vllm_config.model_config
        requests = requests_of(prompt_token_ids, params, self.vocabulary, served)
        inputs = [{"prompt_token_ids": ids} for _, ids, _ in requests]
        asked = [request_of(p) for _, _, p in requests]
        warn_of_shared_seeds([(ids, p) for _, ids, p in requests], stacklevel=3)  # past one_at_a_time
        names = [p.extra_args.get(RECORD) for p in asked]
        cut = [name for name in names if name is not None]
        version = self._served
        try:
            if cut:
                self._call("precgraph_expect", cut)
            with rare_full_collections(), deaths_end_steps(self.engine.llm_engine.engine_core), default_stream():
                outputs = self.engine.generate(inputs, asked, use_tqdm=progress)
            records = self._call("precgraph_take", cut)[0]["records"] if cut else {}
        except BaseException as error:
            if self._broken is None:
                self._abandon(cut, error)
            elif isinstance(error, Exception) and not isinstance(error, PrecGraphError):  # a shutdown by another thread
                raise StaleWeightsError(self._broken, remedy="start a new engine") from error
            raise
        if self._version() != version:
            raise StaleWeightsError("the weights changed during generate()", remedy="call sync() between calls")
        masses = [records[name]["kept_mass"] if name else {} for name in names]
        samples = [
            Sample(**completion_fields(output, version, index, mass), digest=self.digest)
            for output, (index, _, _), mass in zip(outputs, requests, masses, strict=True)
        ]
        require_finite(torch.tensor([p for s in samples for p in s.logprobs]))
        return samples

    def _abandon(self, records: list[str], cause: BaseException) -> None:
        """End the requests of a generate() that broke off: vLLM would go on with them in the next."""
        from vllm import SamplingParams as VllmParams

        what = _broke_off("generate", cause)
        self._broken = f"{what}, and then the end of its requests did"  # unless all below is done
        try:
            front = self.engine.llm_engine
            front.abort_request(list(front.output_processor.request_states), internal=True)
            # A step after which the workers have let go of them, and which shows that the engine can step.
            last = [{"prompt_token_ids": [0]}], VllmParams(max_tokens=1, temperature=0.0)
            self._answer(partial(self.engine.generate, *last, use_tqdm=False))
            self._call("precgraph_take", records)
            self._reset_prefix_cache()  # vLLM enters keys before the step that writes them
        except Exception as error:
            self._broken = f"{what}, and then the end of its requests with {type(error).__name__}: {error}"
        else:
            self._broken = None

    def _require_ready(self) -> None:
        self._require_alive()
        if self._asleep:
            raise StaleWeightsError("the engine sleeps", remedy="call wake(), then generate")
        if self._actor is not None:
            self._actor.require_current()
            if self._actor.store.version != self._served:
                self.sync()
            return
        if None in self._call("precgraph_serving"):
            raise StaleWeightsError("the engine's weights are not complete", remedy="sync the weights, then generate")

    def _version(self) -> int:
        return self._actor.store.version if self._actor is not None else self._served

    # ----------------------------------------------------------------------------------- sync
    @one_at_a_time
    def sync(self, source: Any = None, *, route: str | None = None) -> int:
        """Serve new weights, and forget what the prefix cache holds of the old; returns their version.

        Without ``source``: the actor's, in this process, which ``actor.sync()`` has already refreshed in place. With a
        path, or several: files of :func:`save_weights`. With a compiled model: its policy, through ``route`` ``"ipc"``
        (same GPU, CUDA IPC; the default on GPUs) or ``"file"`` (a temporary file). An update that is incomplete,
        damaged, or another program's is refused with SyncError or DigestError, and the old weights go on serving.
        SyncError, too, while requests run that :attr:`engine` was given directly: with an actor, whose weights are new
        already, abort them.
        InputError for any other source, and for a route where none is taken.
        """
        self._require_alive()
        compiled = hasattr(source, "precgraph")
        if route is not None and (self._actor is not None or not compiled):
            raise InputError("a route goes with a compiled model, to an engine without an actor", remedy="leave it out")
        if running := self.engine.llm_engine.get_num_unfinished_requests():
            raise SyncError(
                f"requests are running ({running}), and keys of the older weights with them",
                remedy="finish or abort them, then sync",
            )
        try:
            if self._actor is not None:
                version = self._version_of(self._actor, source)
            elif source is None:
                raise InputError("nothing to sync from", remedy="pass a compiled model or the path of a weights file")
            elif compiled:
                version = self._send(source, route)
            else:
                version = self._send_files(paths_of(source))
            self._reset_prefix_cache()
        except PrecGraphError:
            raise
        except BaseException as error:  # Ctrl-C: the worker may have the new weights, and keys of the old ones
            self._broken = _broke_off("sync", error)
            raise
        self._served = version
        return version

    def _version_of(self, actor: Compiled, source: Any) -> int:
        """The version of the actor's store, which ``source`` may name again."""
        remedy = "call sync() without a source"
        if source is not None and not hasattr(source, "precgraph"):
            raise InputError("this engine runs on its actor's weights, and reads no file", remedy=remedy)
        actor.require_current()
        if source is not None and compiled_of(source).store is not actor.store:
            raise SyncError("this engine runs on its actor's weights", remedy=remedy)
        return actor.store.version

    def _send(self, model: Any, route: str | None) -> int:
        if route not in (None, "ipc", "file"):
            raise InputError(f"route must be 'ipc' or 'file', not {route!r}")
        compiled = compiled_of(model)
        self._require_digest([self.digest], compiled.digest)
        route = route or ("ipc" if compiled.store.device.type == "cuda" else "file")
        if route == "file":
            with tempfile.TemporaryDirectory(prefix="precgraph-") as folder:
                path = Path(folder) / "weights.safetensors"
                return self._install(
                    save_weights(model, path), [partial(self._call, "precgraph_update_file", str(path))]
                )
        manifest, tensors = policy(model)
        return self._install(manifest, [partial(self._send_handles, tensors)])

    def _send_handles(self, tensors: Mapping[str, Tensor]) -> None:
        told = self._handles.of(tensors)
        try:
            self._call("precgraph_update_ipc", told)
        except PrecGraphError:
            if self._broken is None:  # it was refused by a worker that had first dropped what it was not told
                self._handles.taken()
            raise
        self._handles.taken()

    def _send_files(self, paths: list[Path]) -> int:
        found = [m for m in map(read_manifest, paths) if m is not None]
        if not found or any(m != found[0] for m in found):
            raise SyncError(
                "the files hold no manifest, or not one and the same", path=str(paths[0]),
                remedy="write them with precgraph.vllm.save_weights",
            )  # fmt: skip
        files = list(map(str, paths))
        try:
            return self._install(found[0], [partial(self._call, "precgraph_update_file", file) for file in files])
        except (SyncError, DigestError) as error:
            if self._broken is not None or error.path in files:
                raise
            where = [files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more", error.path]
            raise type(error)(error.message, path=": ".join(filter(None, where)), remedy=error.remedy) from None

    def _install(self, manifest: Manifest, parts: Sequence[Callable[[], object]]) -> int:
        """Have the workers take an update, whose parts are sent once they have agreed to it."""
        try:
            self._call("precgraph_begin", manifest.to_json())
            for send in parts:
                send()
            checksums = self._call("precgraph_finish")
        except PrecGraphError:
            if self._broken is None:
                self._call("precgraph_abort")
            raise
        if set(checksums) != {manifest.checksum}:
            self._broken = "the engine reports other weights than were sent"
            raise SyncError(self._broken, remedy="start a new engine")
        return manifest.version

    def state(self) -> dict[str, Any]:
        """``digest``, ``version`` and ``checksum`` that every worker reports, computed from what it runs on."""
        self._require_alive()
        states = self._call("precgraph_state")
        if any(s != states[0] for s in states):
            raise SyncError("the workers differ in their weights", remedy="sync again")
        state: dict[str, Any] = states[0]
        return state

    def _reset_prefix_cache(self) -> None:
        if not self.engine.reset_prefix_cache():
            self._broken = "the prefix cache still holds keys and values of older weights"
            raise StaleWeightsError(
                self._broken, remedy="finish or abort all requests before a sync; start a new engine"
            )

    # ---------------------------------------------------------------------------------- sleep
    def sleep(self, level: int = 1) -> None:
        """Free the cache, and at level 2 the weights too; needs ``enable_sleep_mode=True``. Until :meth:`wake`,
        :meth:`generate` is an error, and :meth:`sync` and :meth:`state` are where the weights are the engine's own."""
        self._require_alive()
        if level > 1 and self._actor is not None:
            raise InputError("level 2 would discard the actor's weights", remedy="use sleep(level=1)")
        self._asleep = True
        self.engine.sleep(level=level)

    def wake(self) -> None:
        """Take the memory again; after level 2 the engine serves nothing until a :meth:`sync`."""
        self._require_alive()
        self.engine.wake_up()
        self._reset_prefix_cache()
        self._asleep = False

    def shutdown(self) -> None:
        """End the engine and its processes. One in this process ends vLLM's groups, which all there share."""
        if self._closed:
            return
        self._broken = "the engine was shut down"
        try:
            self.engine.llm_engine.engine_core.shutdown()
        finally:
            self._handles.release()
        self._closed = True

    # -------------------------------------------------------------------------------- helpers
    def _require_alive(self) -> None:
        if self._broken is not None:
            raise StaleWeightsError(self._broken, remedy="start a new engine")
        if self._groups() is not self._group:
            raise StaleWeightsError(
                "another engine of this process was shut down or forgotten, and vLLM's groups with it",
                remedy="start a new engine, or keep one engine a process",
            )

    def _groups(self) -> Any:
        """What vLLM's engines in this process share, as one of it; None for an engine in a process of its own."""
        from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

        shared = in_this_process(self.engine.llm_engine.engine_core) and model_parallel_is_initialized()
        return get_tp_group() if shared else None

    def _call(self, method: str, *args: Any) -> list[Any]:
        """A method of every worker; its typed errors are raised here."""
        try:
            answers = self._answer(partial(self.engine.collective_rpc, method, args=args))
        except PrecGraphError:
            raise
        except Exception as error:
            self._broken = f"the engine failed in {method}: {type(error).__name__}: {error}"
            raise SyncError(self._broken, remedy="start a new engine; no file was changed") from error
        return [value_of(answer) for answer in answers]

    def _answer(self, call: Callable[[], Any]) -> Any:
        return answered(self.engine.llm_engine.engine_core, call)

    def _require_digest(self, found: Sequence[str], wanted: str) -> None:
        for digest in found:
            if digest != wanted:
                raise DigestError(
                    f"the engine runs program {digest[:12]}, the trainer {wanted[:12]}",
                    remedy="use one recipe, one precgraph and one torch on both sides; precgraph digest prints it",
                )


def _broke_off(method: str, cause: BaseException) -> str:
    return f"{method}() broke off with {type(cause).__name__}: {cause}".removesuffix(": ")
