"""Trace a model into a raw :class:`~precgraph.graph.PrecisionGraph` with ``torch.export``.

Hugging Face causal language models become a program over packed tokens, ``input_ids [1, T]`` and
``position_ids [1, T]`` to logits, with attention as one opaque node. Any other module is traced with example inputs.
The model itself is left as it was; parameters are referred to by path, so the program runs on the model's own objects.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from precgraph import experts
from precgraph.attention import IMPLEMENTATION
from precgraph.content import content
from precgraph.errors import InputError, TraceError, UnsupportedModelError
from precgraph.exported import (
    DEFINED,
    WRAPPER,
    Differentiable,
    explain,
    fake,
    module_path,
    pure_twin,
    require_pure,
    where,
    written_slice,
)
from precgraph.format import Format
from precgraph.graph import Parameter, Precision, PrecisionGraph, TensorSpec, annotate, precision, with_rules
from precgraph.mixers import require_attention
from precgraph.skeleton import allocated

_DROPPED = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.alias.default")
# How the path of a module inside a layer begins: the layer's own path, which names its segment.
LAYER = re.compile(r"(?:.*?\.)?layers\.\d+(?=\.|$)|.*?\.h\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Trace:
    """A raw graph and the tensors that its parameter nodes read: the model's own parameters and buffers."""

    graph: PrecisionGraph
    tensors: dict[str, Tensor]


def trace(model: nn.Module, example_inputs: Sequence[Tensor] | None = None) -> Trace:
    """Trace ``model`` on whatever device its parameters are, the meta device included; where only they are on meta, as
    those of :func:`precgraph.skeleton.skeleton`, the graph is that of the model with its weights.

    ``example_inputs`` are needed for modules that are not Hugging Face causal language models; the second-to-last
    dimension of each, at least 2, counts tokens and may vary later. Raises UnsupportedModelError for models that
    cannot be served exactly and TraceError, naming the module, for those that torch.export cannot follow.
    """
    require_supported(model)
    language_model = isinstance(model, PreTrainedModel) and example_inputs is None
    with _quiet(model), allocated(model) if language_model else nullcontext():
        program = _export(model, language_model, example_inputs)
    if program.graph_signature.buffers_to_mutate:
        raise UnsupportedModelError(
            f"buffer {next(iter(program.graph_signature.buffers_to_mutate.values()))!r} is written in forward; "
            "a program whose state changes as it runs has no exact rollout"
        )
    return _Builder(model, program, language_model).build()


# ------------------------------------------------------------------------------------------ export


class _CausalLM(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model_ = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.model_(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits


class _Module(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model_ = model

    def forward(self, *args: Tensor) -> Any:
        return self.model_(*args)


def _export(
    model: nn.Module, language_model: bool, example_inputs: Sequence[Tensor] | None
) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("T", min=1, max=1 << 20)
    if language_model:
        device = next(model.parameters()).device
        ids = torch.zeros(1, 16, dtype=torch.long, device=device)
        args: tuple[Tensor, ...] = (ids, torch.arange(16, device=device)[None])
        wrapper: nn.Module = _CausalLM(model)
        shapes: Any = ({1: tokens}, {1: tokens})
    else:
        args = _check_examples(model, example_inputs)
        wrapper = _Module(model)
        shapes = (tuple({a.dim() - 2: tokens} for a in args),)
    try:
        with redirect_stderr(StringIO()) as said:  # where it fails, torch prints what there is of the graph
            program = torch.export.export(wrapper, args, dynamic_shapes=shapes, strict=False)
        sys.stderr.write(said.getvalue())
        return program
    except UnsupportedModelError as error:  # of attention or experts, which say what is not served
        raise UnsupportedModelError(
            error.message, path=error.path or where(model, error), remedy=error.remedy
        ) from error
    except Exception as error:
        error.add_note(said.getvalue())  # a traceback shows it: --debug
        raise TraceError(explain(model, error)) from error


def _check_examples(model: nn.Module, example_inputs: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    if not example_inputs:
        raise InputError(
            f"{type(model).__name__} is not a Hugging Face causal language model: pass example_inputs=(tensor, ...)"
        )
    for i, x in enumerate(example_inputs):
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-2] < 2:
            raise InputError(f"example_inputs[{i}] must be a tensor [..., tokens, features] with at least 2 tokens")
    # torch.export makes one input of a tensor that is given twice.
    return tuple(x.clone() if any(x is y for y in example_inputs[:i]) else x for i, x in enumerate(example_inputs))


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Attention and experts opaque while tracing, and one mode: all are put back as they were.

    A language model's config has said that nothing drops out, so it is traced as for inference. Any other module is
    traced as in training: what it would do there alone (dropout, batch statistics) must not go unseen.
    """
    training = {m: m.training for m in model.modules()}
    before = str(model.config._attn_implementation) if isinstance(model, PreTrainedModel) else ""
    chosen = getattr(model.config, "_experts_implementation", None) if isinstance(model, PreTrainedModel) else None
    try:
        model.train(not isinstance(model, PreTrainedModel))
        if isinstance(model, PreTrainedModel):
            model.set_attn_implementation(IMPLEMENTATION)
            if chosen is not None:
                model.set_experts_implementation(experts.IMPLEMENTATION)
        yield
    finally:
        if isinstance(model, PreTrainedModel):
            model.set_attn_implementation(before)
            if chosen is not None:
                model.set_experts_implementation(chosen)
        for module, flag in training.items():
            module.training = flag


# --------------------------------------------------------------------------------------- what is refused


def require_supported(model: nn.Module) -> None:
    """UnsupportedModelError, with the module path and what to do, for what has no exact program."""
    config = getattr(model, "config", None)
    if config is not None:
        _require_config(config)
    head = getattr(model, "get_output_embeddings", None)  # of Hugging Face's models
    if head is not None and head() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language model head; of Hugging Face's models, causal ones have programs",
            remedy="pass the ...ForCausalLM of its family; a reward or value model needs no exact rollout: leave it "
            "uncompiled",
        )
    if isinstance(model, PreTrainedModel):
        require_attention(model)
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedModelError(f"module {path!r} drops out with p = {module.p}; set it to 0")
        if hasattr(module, "lora_A"):
            raise UnsupportedModelError(f"module {path!r} is a LoRA layer; merge it first (merge_and_unload)")
        if hasattr(module, "base_layer"):
            raise UnsupportedModelError(f"module {path!r} ({name}) wraps another layer; unwrap the adapter first")
    for path, parameter in model.named_parameters():
        if parameter.dtype != torch.bfloat16:
            raise UnsupportedModelError(
                f"the parameter is {_dtype_name(parameter.dtype)}; master weights are bfloat16",
                path=path,
                remedy="load with from_pretrained(..., dtype=torch.bfloat16), or cast a module without RoPE with .to()",
            )
    for path, buffer in model.named_buffers():
        if path.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise UnsupportedModelError(
                f"RoPE's frequencies are {_dtype_name(buffer.dtype)}: model.to(dtype) has rounded them",
                path=path,
                remedy="load with from_pretrained(..., dtype=torch.bfloat16), which keeps them float32",
            )


def _require_config(config: Any) -> None:
    keys = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    if dropping := [f"config.{key} = {getattr(config, key)}" for key in keys if getattr(config, key, 0)]:
        them = "it" if len(dropping) == 1 else "them"
        raise UnsupportedModelError(f"{', '.join(dropping)}; set {them} to 0: dropout has no exact rollout")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [r.get("rope_type", r.get("type")) for r in (rope, *(v for v in rope.values() if isinstance(v, dict)))]
    for kind in ("dynamic", "longrope"):
        if kind in kinds:
            raise UnsupportedModelError(
                f"rope type {kind!r} makes frequencies depend on the total length, so a token's prefill and decode "
                "differ; exactness is impossible (use linear, yarn or llama3 scaling)"
            )


# ------------------------------------------------------------------------------------------- build


class _Builder:
    """Copies an exported program into a graph on the model's own parameters."""

    def __init__(self, model: nn.Module, program: torch.export.ExportedProgram, language_model: bool) -> None:
        self.model = model
        self.program = program
        self.language_model = language_model
        self.graph = fx.Graph()
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, Parameter] = {}
        self.names = _Names(model)
        self.segment = "embed" if language_model else "model"
        self.stopped = False  # inside torch.no_grad()
        self.differentiable = Differentiable()

    def build(self) -> Trace:
        signature = self.program.graph_signature
        attributes = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        env: dict[fx.Node, Any] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                env[node] = self._input(node, attributes.get(node.name)) if node.users else None
        self._copy(self.program.graph_module, env)
        output = next(iter(reversed(self.program.graph.nodes)))
        self._output([env[n] if isinstance(n, fx.Node) else n for n in output.args[0]])
        self.graph.eliminate_dead_code()
        self.graph.lint()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                annotate(node, segment=precision(next(iter(node.users))).segment)
        graph = PrecisionGraph(
            self.graph, self.parameters, family=type(self.model).__name__, causal_lm=self.language_model
        )
        return Trace(graph, self.tensors)

    def _copy(self, owner: fx.GraphModule, env: dict[fx.Node, Any]) -> None:
        for node in owner.graph.nodes:
            if node.op != "call_function":
                continue
            if str(node.target) in _DROPPED or (str(node.target) == "aten.dropout.default" and node.args[1] == 0):
                env[node] = env[node.args[0]]
            elif "wrap_with_set_grad_enabled" in str(node.target):
                body, values = getattr(owner, node.args[1].target), [env[a] for a in node.args[2:]]
                env[node] = self._inline(body, values, stopped=not node.args[0])
            elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
                env[node] = env[node.args[0]][node.args[1]]
            elif (pure := pure_twin(node)) is not None:  # readers of the old value come before, others get the new one
                env[node] = env[node.args[0]] = self._call(node, env, pure)
            elif (base := written_slice(node)) is not None:
                env[base] = self._scatter(node, env[base], env)
            else:
                env[node] = self._call(node, env)

    def _inline(self, body: fx.GraphModule, values: list[Any], *, stopped: bool) -> list[Any]:
        """A block under ``torch.no_grad()`` (``stopped``) or ``torch.enable_grad()``."""
        env = dict(zip([n for n in body.graph.nodes if n.op == "placeholder"], values, strict=True))
        before, self.stopped = self.stopped, stopped
        self._copy(body, env)
        self.stopped = before
        return [env[n] for n in next(iter(reversed(body.graph.nodes))).args[0]]

    def _input(self, node: fx.Node, attribute: str | None) -> fx.Node:
        if attribute is None:
            new = self.graph.placeholder(node.name)
            role = "index" if not fake(node).is_floating_point() else "activation"
            return self._annotated(new, node, role=role)
        path = self._parameter(attribute)
        new = self.graph.create_node("get_attr", path)
        role = "buffer" if self.parameters[path].buffer else "master"
        return self._annotated(new, node, role=role, module=path.rpartition(".")[0])

    def _parameter(self, attribute: str) -> str:
        """The canonical path of an exported attribute: the first of the names that share one tensor."""
        path = attribute.removeprefix(WRAPPER + ".")
        value = self.names.tensors.get(path)
        if value is None:
            value = self.program.constants[attribute]
            names = [path]
        else:
            names = self.names.of(value)
        buffer = not self.names.is_weight(value)
        self.tensors[names[0]] = value
        self.parameters[names[0]] = Parameter(
            tuple(value.shape), _dtype_name(value.dtype), value.requires_grad, buffer, tuple(names[1:]),
            content(self.model, names[0], value) if buffer else "",
        )  # fmt: skip
        return names[0]

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], pure: Any = None) -> fx.Node:
        if pure is None:
            require_pure(node)
        new = self.graph.node_copy(node, lambda n: env[n])
        new.target = pure or DEFINED.get(node.target, node.target)
        new.meta.clear()
        self._annotated(new, node, role="activation", module=module_path(node))
        if self.stopped or not self.differentiable(node):
            new.meta["precision"] = with_rules(precision(new), gradient="stopped")
        return new

    def _scatter(self, node: fx.Node, base: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        """``copy_(slice(base, dim, start, end), x)`` as the new value of ``base``."""
        part, x = node.args[:2]
        args = (base, env[x], *part.args[1:])  # type: ignore[index, union-attr]
        new = self.graph.call_function(torch.ops.aten.slice_scatter.default, args)
        return self._annotated(new, part.args[0], role="activation", module=module_path(node))  # type: ignore[union-attr, arg-type]

    def _annotated(self, new: fx.Node, old: fx.Node, *, role: str, module: str = "") -> fx.Node:
        if new.op == "call_function" and self.language_model:
            layer = LAYER.match(module)
            if layer:
                self.segment = layer.group(0)
            elif self.segment != "embed" and "rotary" not in module:
                self.segment = "head"
        value = old.meta.get("val")
        if isinstance(value, Tensor):
            new.meta["tensor"] = _tensor_spec(value)
        first = value[0] if isinstance(value, tuple | list) else value
        plain = Format.plain(_dtype_name(first.dtype) if isinstance(first, Tensor) else "int64")
        new.meta["precision"] = Precision(plain, role=role, module=module, segment=self.segment)
        return new

    def _output(self, values: list[Any]) -> None:
        structure = self.program.call_spec.out_spec
        flat = structure is not None and structure.type in (tuple, list) and structure.num_nodes == len(values) + 1
        computed = [v for v in values if isinstance(v, fx.Node) and v.op == "call_function"]
        if len(set(computed)) != len(values) or not values or not (flat or structure.num_nodes == 1):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}.forward must return a tensor that it computes, or a tuple of some",
                remedy="return tensors instead of dicts, inputs, parameters, constants or None",
            )
        new = self.graph.output(tuple(values) if flat else values[0])
        first = values[0]
        new.meta.update(tensor=first.meta.get("tensor"), precision=first.meta["precision"])


class _Names:
    """All names of a model's parameters and buffers; those that share one tensor, in the model's order."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self._names: dict[int, list[str]] = {}
        for name, value in self.tensors.items():
            self._names.setdefault(id(value), []).append(name)
        self._kept = {
            id(buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }

    def of(self, value: Tensor) -> list[str]:
        """Every name of one tensor."""
        return self._names[id(value)]

    def is_weight(self, value: Tensor) -> bool:
        """Whether checkpoints hold the tensor: it is a parameter or a buffer of the model's state."""
        return isinstance(value, nn.Parameter) or id(value) in self._kept


def _tensor_spec(value: Tensor) -> TensorSpec:
    dims = tuple(d if isinstance(d, int) else re.sub(r"\bs\d+\b", "T", str(d)) for d in value.shape)
    return TensorSpec(_dtype_name(value.dtype), dims)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
