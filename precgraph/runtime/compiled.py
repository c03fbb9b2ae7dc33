"""The compiled model: a dynamic subclass of the model's own class whose forward runs a program."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from precgraph.errors import InputError, LoweringError, UnsupportedModelError
from precgraph.graph import PrecisionGraph, output_node, tensor
from precgraph.lowering.lower import lower, target
from precgraph.lowering.program import Program, Segment, build_program
from precgraph.lowering.registry import Kernel
from precgraph.passes.pipeline import RECOMPUTE, build
from precgraph.recipe import Recipe, require_recipe
from precgraph.runtime.accept import require_inputs, require_labels, require_own_forward, require_token_local
from precgraph.runtime.checkpointing import checkpointed
from precgraph.runtime.contexts import AttentionContext, OwnAttention, PackedContext
from precgraph.runtime.inputs import Packed, pack
from precgraph.runtime.places import Places
from precgraph.runtime.runner import Runner
from precgraph.runtime.store import WeightStore
from precgraph.trace import Trace, require_supported, trace


@dataclass(repr=False)
class Compiled:
    """What a compiled model carries under ``model.precgraph``: its trace, program, store and options."""

    trace: Trace
    mode: str
    recipe: Recipe
    backend: str
    checked: bool
    store: WeightStore
    runner: Runner
    places: Places  # what the model was made of when it was compiled
    example_inputs: Sequence[Tensor] | None = None
    recompute: str = "cheap"

    def __repr__(self) -> str:
        """One line: the fields hold every weight."""
        return (
            f"Compiled({self.mode!r}, recipe {self.recipe.name!r}, digest {self.digest[:16]}, "
            f"weights version {self.store.version})"
        )

    def __reduce__(self) -> Any:
        raise InputError(
            "a compiled model cannot be pickled", remedy="save_pretrained() or state_dict() keep its weights"
        )

    @property
    def graph(self) -> PrecisionGraph:
        """The lowered graph that runs."""
        return self.runner.program.graph

    @property
    def digest(self) -> str:
        """The digest of :attr:`graph`."""
        return self.runner.program.digest

    def kernels(self) -> dict[str, Kernel]:
        """The kernel that runs each node, by node name."""
        return self.runner.program.kernels()

    # -------------------------------------------------------------------- causal language models
    def hidden(
        self, ids: Tensor, positions: Tensor, context: AttentionContext, *, checkpoint: Collection[str] = ()
    ) -> Tensor:
        """``ids, positions [1, T]`` to the hidden states ``[1, T, C]`` that enter the head (final norm, lm_head).

        ``checkpoint`` names the segments, and modules inside them, that the backward computes again.
        """
        self.ready()
        return self.run_body(ids, positions, context, checkpoint=checkpoint)

    def run_body(
        self, ids: Tensor, positions: Tensor, context: AttentionContext | OwnAttention, *,
        checkpoint: Collection[str] = (),
    ) -> Tensor:  # fmt: skip
        """:meth:`hidden` for engines, which call :meth:`ready` once before many steps.

        Segment by segment where there may be a backward, else in one block.
        """
        program = self.runner.program
        *body, head = program.segments
        enters = _hidden_inputs(head)
        values = {"input_ids": ids, "position_ids": positions, "context": context}
        if self.mode == "infer" or not torch.is_grad_enabled():
            results = self.runner.run_block(program.body, values)
        else:
            results = self.runner.run(values, enters, segments=body, checkpoint=checkpoint)
        hidden: Tensor = results[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The head segment: hidden states ``[1, N, C]`` of any rows to logits ``[N, V]``."""
        program = self.runner.program
        if hidden.shape[1] == 0:  # nothing to score: kernels need not know of it
            spec = tensor(output_node(program.graph.graph))
            return hidden.new_zeros((0, int(spec.shape[-1])), dtype=getattr(torch, spec.dtype))
        values = {_hidden_inputs(program.segments[-1])[0]: hidden}
        logits: Tensor = self.runner.run(values, program.outputs, segments=program.segments[-1:])[0]
        return logits[0]

    def ready(self) -> None:
        """Before each run: the model is still made of the same modules and tensors, and the store of the masters.

        Training always runs on the current masters, with a backward for the parameters that are trainable now; a
        rollout refuses a store that the masters have left behind.
        """
        if self.mode == "infer":
            self.require_current()
            return
        self.places.require_same()
        if self.store.stale:
            self.store.refresh()
        if self.store.trainable() != {p for p, info in self.graph.parameters.items() if info.trainable}:
            self.runner = self._with_trainable(self.store.trainable())

    def require_current(self) -> None:
        """Before the store's weights serve anybody: they are those of the model as it is now, or StaleWeightsError."""
        self.places.require_same()
        self.store.require_fresh()

    def _with_trainable(self, paths: set[str]) -> Runner:
        """The program again, with the backward of these parameters."""
        raw = self.trace.graph.copy()
        raw.parameters = {p: replace(info, trainable=p in paths) for p, info in raw.parameters.items()}
        program = build_lowered(raw, self.mode, self.recipe, self.backend, self.store.device, self.recompute)
        self.store.require(program.packs)
        return replace(self.runner, program=program)


def _hidden_inputs(head: Segment) -> list[str]:
    """The one value that enters the head segment."""
    if len(head.inputs) != 1:
        raise UnsupportedModelError(
            f"the head reads {', '.join(head.inputs)}: logits must depend on the last hidden states alone",
            remedy="give every layer modules of its own; parameters may be shared",
        )
    return list(head.inputs)


class CompiledModule:
    """Mixed in before a model's own class; parameters, state and everything but the forward are the model's."""

    precgraph: Compiled
    own_class: ClassVar[type[nn.Module]]  # the class that was compiled

    def sync(self) -> int:
        """Refresh the quantised weights from the masters, in place; returns the new weights version.

        Call it after ``optimizer.step()``: rollouts that share the store then serve the new weights. StaleWeightsError
        for a model whose parameters were replaced since it was compiled: the store has the old ones.
        """
        self.precgraph.places.require_same()
        return self.precgraph.store.refresh()

    def __copy__(self) -> Any:
        return _shallow(self, type(self))  # type: ignore[arg-type]  # mixed into a module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a compiled model cannot be pickled", remedy="save_pretrained() or state_dict() keep its weights"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A compiled copy with parameters, a trace and a store of its own, as for a frozen reference model."""
        own, twin = self.precgraph, copy.deepcopy(_original(self), memo)
        return _compiled(twin, own.mode, own.recipe, own.backend, own.checked, None, own.recompute, own.example_inputs)


class CompiledCausalLM(CompiledModule):
    """Forward of compiled Hugging Face causal language models."""

    main_input_name: ClassVar[str] = "input_ids"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile(actor) runs the program as it is
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """The model's own call: ``input_ids [B, S]`` to logits ``[B, S, V]`` (0 where masked), loss if ``labels``.

        With a mask and no ``position_ids``, positions are ``cumsum(mask) - 1``. One unmasked row whose positions
        restart, or ``cu_seq_lens_q``, is a packed batch. InputError for what has no exact program: a KV cache,
        embeddings as input, 4-D masks, hidden states or attentions as output.
        """
        packed = _packed(
            self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, kwargs
        )
        names = checkpointed(self, self.precgraph.runner.program)
        hidden = self.precgraph.hidden(packed.ids, packed.positions, PackedContext(packed.bounds), checkpoint=names)
        logits = _kept_logits(self.precgraph, hidden, packed, logits_to_keep)
        loss = None
        if labels is not None:
            vocabulary = self.config.get_text_config().vocab_size  # type: ignore[attr-defined]
            require_labels(labels, packed, vocabulary, logits_to_keep)
            extra = {k: v for k, v in kwargs.items() if k == "num_items_in_batch" and v is not None}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, **extra)  # type: ignore[attr-defined]
        if not kwargs.get("return_dict", self.config.return_dict):  # type: ignore[attr-defined]
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)  # type: ignore[arg-type]


class CompiledPlain(CompiledModule):
    """Forward of other compiled modules: positional tensors as in the example inputs."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Tensor) -> Any:
        compiled = self.precgraph
        program = compiled.runner.program
        require_inputs(type(self).__name__, compiled.graph, args)
        compiled.ready()
        values = dict(zip(program.inputs, args, strict=True))
        results = compiled.runner.run(values, program.outputs, checkpoint=checkpointed(self, program))
        return tuple(results) if isinstance(output_node(compiled.graph.graph).args[0], tuple) else results[0]


def _packed(
    model: Any, input_ids: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None,
    past_key_values: Any, inputs_embeds: Tensor | None, use_cache: bool | None, kwargs: dict[str, Any],
) -> Packed:  # fmt: skip
    if past_key_values is not None or use_cache:
        raise InputError(
            "a compiled model has no KV cache of Hugging Face's", remedy="generate with precgraph.runtime.engine.Engine"
        )
    if inputs_embeds is not None or input_ids is None:
        raise InputError("a compiled model takes input_ids", remedy="pass token ids instead of embeddings")
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name):
            raise InputError(
                f"{name}=True: a compiled program keeps no intermediate values", remedy="ask the original model"
            )
    own = ("input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep")
    known = {"num_items_in_batch", "return_dict", "output_hidden_states", "output_attentions", "cu_seq_lens_q",
             "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}  # fmt: skip
    unknown = sorted(k for k, v in kwargs.items() if k not in known and v is not None)
    if unknown:
        raise InputError(
            f"unknown argument {unknown[0]!r} of a compiled model's forward",
            remedy=f"it takes {', '.join((*own, *sorted(known)))}",
        )
    bounds = kwargs.get("cu_seq_lens_q")
    packed = pack(input_ids, attention_mask, position_ids, bounds, model.config.get_text_config().vocab_size)
    keys, index = kwargs.get("cu_seq_lens_k"), kwargs.get("seq_idx")
    if keys is not None and (bounds is None or not torch.equal(keys, bounds)):
        raise InputError("cu_seq_lens_k must equal cu_seq_lens_q: queries and keys are the same tokens")
    if index is not None:
        starts = (index.flatten().diff() != 0).nonzero().flatten() + 1
        if tuple(starts.tolist()) != packed.bounds[1:-1]:
            raise InputError("seq_idx divides the batch otherwise than position_ids or cu_seq_lens_q do")
    return packed


def _kept_logits(compiled: Compiled, hidden: Tensor, packed: Packed, logits_to_keep: int | Tensor) -> Tensor:
    """Logits of the kept positions, counted in the padded batch as Hugging Face counts them."""
    if isinstance(logits_to_keep, Tensor) and (logits_to_keep.dim() != 1 or logits_to_keep.is_floating_point()):
        raise InputError(f"logits_to_keep must be a count or a vector of positions, not {list(logits_to_keep.shape)}")
    if isinstance(logits_to_keep, int) and logits_to_keep == 0:
        return packed.unpack(compiled.logits(hidden))
    width = packed.shape[1]
    columns = torch.arange(width, device=hidden.device)
    columns = columns[-logits_to_keep:] if isinstance(logits_to_keep, int) else columns[logits_to_keep]
    row_of = torch.full((packed.shape[0] * width,), -1, device=hidden.device)
    row_of[packed.where] = torch.arange(packed.where.numel(), device=hidden.device)
    kept = row_of.view(packed.shape)[:, columns].flatten()  # rows of hidden, -1 where masked
    logits = compiled.logits(hidden[:, kept[kept >= 0]])
    out = logits.new_zeros((kept.numel(), logits.shape[-1])).index_copy(0, (kept >= 0).nonzero().flatten(), logits)
    return out.view(packed.shape[0], -1, logits.shape[-1])


# ----------------------------------------------------------------------------------------- compile


def compile(
    model: nn.Module,
    mode: str = "train",
    recipe: Recipe | None = None,
    backend: str = "auto",
    *,
    example_inputs: Sequence[Tensor] | None = None,
    checked: bool = False,
    recompute: str | None = None,
) -> Any:
    """Compile ``model`` for training or rollout; the result is a model of the same class on the same parameters.

    ``mode="train"`` runs the training program, forward and backward; ``mode="infer"`` the rollout program. Compiling
    a compiled model for the other mode shares its weights store. ``recipe`` defaults to that of a compiled ``model``,
    or to :meth:`Recipe.jet_rl`. ``backend`` is ``auto`` or a name of the registry; what was picked is in
    ``model.precgraph.kernels()``. ``example_inputs`` are needed for modules that are not causal language models.
    ``checked`` makes every node that yields NaN or infinity, and every unnoticed weight write, an error.
    ``recompute`` changes memory and time, no bit: ``"cheap"`` (or None, for a model that is not compiled yet) makes
    norms, rotations, activations and quantised operands again in the backward where that saves memory, ``"none"``
    keeps them.

    Raises TraceError, UnsupportedModelError, RecipeError, LoweringError or NonFiniteError, naming the module.
    """
    if mode not in ("train", "infer"):
        raise InputError(f"mode must be 'train' or 'infer', not {mode!r}")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"compile takes a torch module, not {type(model).__name__}",
            remedy="load a model with AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16)",
        )
    require_recipe(recipe)
    if recompute is not None and recompute not in RECOMPUTE:
        raise InputError(f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    if isinstance(example_inputs, Tensor):
        raise InputError("example_inputs must be a sequence of tensors", remedy="pass example_inputs=(x,)")
    shared = model.__dict__.get("precgraph")
    if isinstance(shared, Compiled):
        return _compiled(
            _original(model), mode, recipe or shared.recipe, shared.backend if backend == "auto" else backend,
            checked or shared.checked, shared, recompute or shared.recompute, shared.example_inputs,
        )  # fmt: skip
    require_own_forward(model)
    require_supported(model)
    return _compiled(
        model, mode, recipe or Recipe.jet_rl(), backend, checked, None, recompute or "cheap", example_inputs
    )


def _original(model: Any) -> nn.Module:
    """The model of its own class behind a compiled one, on the same parameters."""
    original = _shallow(model, type(model).own_class)
    del original.__dict__["precgraph"]
    return original


def _shallow(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Another module of class ``kind`` on the same parameters, buffers and submodules."""
    twin = kind.__new__(kind)
    twin.__dict__.update(model.__dict__)
    return twin


def _compiled(
    model: nn.Module, mode: str, recipe: Recipe, backend: str, checked: bool, shared: Compiled | None,
    recompute: str, example_inputs: Sequence[Tensor] | None = None,
) -> Any:  # fmt: skip
    for key, served in (("edge", ("bfloat16",)), ("master", ("bfloat16", "float32"))):
        if (value := getattr(recipe.gradient, key)) not in served:
            raise LoweringError(
                f"gradient.{key} = {value!r} describes another stack; here it is {' or '.join(served)}",
                remedy=f'set gradient.{key} = "{served[0]}"',
            )
    traced = shared.trace if shared else trace(model, example_inputs)
    if not traced.tensors:
        raise UnsupportedModelError(f"{type(model).__name__} has no parameter or buffer: there is nothing to compile")
    device = target(traced.tensors.values())
    program = build_lowered(traced.graph, mode, recipe, backend, device, recompute)
    require_token_local(program)
    masters = dict(traced.tensors)
    store = shared.store if shared else WeightStore(masters, checked=checked)
    if checked:
        store.watch()
    store.require(program.packs)
    mixin = CompiledCausalLM if isinstance(model, PreTrainedModel) and traced.graph.causal_lm else CompiledPlain
    own = type(model)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "own_class": own}
    result: Any = _shallow(model, type(own.__name__, (mixin, own), names))
    runner = Runner(program, store, checked)
    result.__dict__["precgraph"] = Compiled(
        traced, mode, recipe, backend, checked, store, runner, Places.of(model), example_inputs, recompute
    )
    return result


def build_lowered(
    raw: PrecisionGraph, mode: str, recipe: Recipe, backend: str, device: torch.device, recompute: str = "cheap"
) -> Program:
    """Passes, lowering and segmentation of one mode."""
    return build_program(lower(build(raw, mode, recipe, recompute=recompute), backend, device))
