"""What compiled models refuse, before anything runs: models, inputs and labels that have no exact meaning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from precgraph.errors import InputError, UnsupportedModelError
from precgraph.graph import PrecisionGraph, TensorSpec, precision, tensor
from precgraph.lowering.program import Program
from precgraph.runtime.inputs import Packed


def require_labels(labels: Tensor, packed: Packed, vocab_size: int, logits_to_keep: int | Tensor) -> None:
    """InputError for labels that the loss would take for something else."""
    if labels.dtype != torch.int64 or labels.shape != packed.shape:
        raise InputError(
            f"labels must be int64 {list(packed.shape)} like input_ids, not {labels.dtype} {list(labels.shape)}"
        )
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        raise InputError("the loss needs the logits of every position", remedy="leave logits_to_keep out with labels")
    inside = torch.zeros(packed.shape, dtype=torch.bool, device=labels.device).flatten()
    inside[packed.where] = True
    ignored = labels == -100
    if not bool((ignored | inside.view(packed.shape)).all()):
        raise InputError("labels at masked positions would count in the loss", remedy="set them to -100")
    if not bool((ignored | ((labels >= 0) & (labels < vocab_size))).all()):
        raise InputError(f"labels lie outside the vocabulary 0..{vocab_size - 1}", remedy="-100 leaves a position out")


def require_inputs(name: str, graph: PrecisionGraph, args: Sequence[Tensor]) -> None:
    """InputError unless ``args`` have the dtypes and shapes that the module was traced with, but for token counts."""
    wanted = [tensor(n) for n in graph.placeholders if precision(n).phase == "forward"]
    if len(args) != len(wanted):
        raise InputError(f"{name} was traced with {len(wanted)} inputs, not {len(args)}")
    for i, (x, spec) in enumerate(zip(args, wanted, strict=True)):
        sizes = [d for d, size in zip(x.shape, spec.shape, strict=False) if not isinstance(size, str)]
        static = [size for size in spec.shape if not isinstance(size, str)]
        if x.dim() != len(spec.shape) or sizes != static or str(x.dtype).removeprefix("torch.") != spec.dtype:
            found = TensorSpec(str(x.dtype).removeprefix("torch."), tuple(x.shape))
            raise InputError(f"input {i} of {name} must be {spec}, not {found}", remedy="compile with such an example")


def require_own_forward(model: nn.Module) -> None:
    """The program is the forward of the model's class: what would run beside it, or instead of it, is refused."""
    if torch.is_inference_mode_enabled():
        raise InputError("compiling under torch.inference_mode() would lose the backward", remedy="leave it first")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise UnsupportedModelError("torch.compile has wrapped the model", remedy="pass the module itself")
    if "forward" in model.__dict__:
        raise UnsupportedModelError("forward was replaced on the instance", remedy="remove the wrapper first")
    if model._forward_hooks or model._forward_pre_hooks:
        raise UnsupportedModelError("hooks on the model itself would run twice", remedy="remove them before compiling")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedModelError("a program runs no backward hooks", path=path or None, remedy="remove them")
    for path, tensor_ in (*model.named_parameters(), *model.named_buffers()):
        if tensor_.is_meta:
            raise InputError("the tensor is on the meta device and has no values", path=path, remedy="load the weights")


def require_token_local(program: Program) -> None:
    """UnsupportedModelError for an operator that may mix the sequences of a batch, or round by its size."""
    for node in program.graph.refused():
        raise UnsupportedModelError(
            f"{node.meta['kernel'].op} is not known to treat each token alone, so trainer and rollout could differ",
            path=precision(node).module or None,
            remedy="a family needs a rule in precgraph/passes/raise_ops.py and an exact kernel for it",
        )
