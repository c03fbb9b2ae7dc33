"""What the trace asks about an exported program's nodes (module, derivative, writes), and of an export that failed."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from precgraph.errors import TraceError, UnsupportedModelError
from precgraph.graph import arguments, defaults

WRAPPER = "model_"  # attribute under which the wrapper holds the traced module
# What has no defined value, and what stands for it.
DEFINED: dict[Any, Any] = {torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default}


class Differentiable:
    """Whether autograd has a derivative for an operator: tried out once per operator and kinds of arguments."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], bool] = {}

    def __call__(self, node: fx.Node) -> bool:
        """False if no output requires a gradient although every floating-point argument does."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return True
        arguments = pytree.tree_leaves((node.args, node.kwargs))
        kinds = (fake(a).dtype if is_tensor(a) else a for a in arguments if is_tensor(a) or isinstance(a, torch.dtype))
        key = (node.target, *kinds)
        if key not in self.known:
            self.known[key] = self._try(node)
        return self.known[key]

    @staticmethod
    def _try(node: fx.Node) -> bool:
        args, kwargs = pytree.tree_map(_meta_argument, (list(node.args), dict(node.kwargs)))
        try:
            with torch.enable_grad():
                results = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
        except (NotImplementedError, RuntimeError):  # it has no meta kernel: assume what is true of almost all
            return True
        return any(isinstance(r, Tensor) and r.requires_grad for r in results)


def _meta_argument(argument: Any) -> Any:
    """An argument as it was in the traced call, tensors without data and requiring a gradient."""
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta["val"]
    if not isinstance(value, Tensor):
        return pytree.tree_map(_hint, value)
    meta = torch.empty([_hint(d) for d in value.shape], dtype=value.dtype, device="meta")
    return meta.requires_grad_(meta.is_floating_point() or meta.is_complex())


def _hint(size: Any) -> Any:
    """The size that a symbolic one had in the traced call."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def is_tensor(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), Tensor)


def pure_twin(node: fx.Node) -> Any:
    """The operator without a write that stands for ``node``, which writes into a value that has no other name.

    That value is an operator's own result, no view of anything, and nothing is a view of it; None for any other node.
    """
    target, name = node.target, str(node.target)
    if not isinstance(target, torch._ops.OpOverload) or not name.partition(".")[2].partition(".")[0].endswith("_"):
        return None
    written = node.args[0]
    if not isinstance(written, fx.Node) or not is_tensor(written) or fake(written).dtype != fake(node).dtype:
        return None
    made = written.args[0] if written.target is operator.getitem else written
    aliases = [u for u in written.users if u is not node and (u.target is operator.getitem or _makes_views(u))]
    if not isinstance(made, fx.Node) or made.op != "call_function" or _makes_views(made) or aliases:
        return None
    namespace, base, overload = name.split(".")
    twin = getattr(getattr(torch.ops, namespace), base.removesuffix("_"), None)
    return getattr(twin, overload, None)


def written_slice(node: fx.Node) -> fx.Node | None:
    """The value into whose slice ``node`` copies, if it is new memory that has no other name; else None."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return None
    part: Any = node.args[0]
    if part.target is not torch.ops.aten.slice.Tensor or len(part.users) != 1 or len(part.args) > 4:
        return None
    base: Any = part.args[0]
    others = [u for u in base.users if u.target is not torch.ops.aten.slice.Tensor and u < part]
    written = [u for u in base.users if u.target is torch.ops.aten.slice.Tensor and len(u.users) != 1 and u < part]
    new = base.target in DEFINED and not others and not written
    return base if new and fake(part).dtype == fake(node.args[1]).dtype else None  # type: ignore[arg-type]


def _makes_views(node: fx.Node) -> bool:
    """Whether a result may share its storage with an argument; an operator that is not torch's counts as such."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"
    if node.target in (torch.ops.aten.to.dtype, torch.ops.aten.contiguous.default, torch.ops.aten.reshape.default):
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def require_pure(node: fx.Node) -> None:
    """TraceError for an operator that writes into its arguments, UnsupportedModelError for one that draws numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    where = module_path(node) or "the model"
    if node.target._schema.is_mutable:
        raise TraceError(
            f"{node.target} writes into its argument, and nodes of a graph must not change each other's values",
            path=where,
            remedy="write it out of place, for example y = y * 2 or torch.where",
        )
    if str(node.target) in ("aten.item.default", "aten._local_scalar_dense.default"):
        raise TraceError(
            "a number is read out of a tensor, and a program has tensors only",
            path=where,
            remedy="compute with the tensor",
        )
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    if draws and {**defaults(node.target), **arguments(node)}.get("dropout_p") != 0:
        raise UnsupportedModelError(
            f"{node.target} draws random numbers, which have no exact rollout",
            path=where,
            remedy="set its dropout to 0" if "dropout" in str(node.target._schema) else None,
        )


def fake(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def module_path(node: fx.Node) -> str:
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    deepest = stack[-1] if stack else ""
    path = "" if deepest.startswith("_empty") else deepest.removeprefix(WRAPPER).removeprefix(".")
    return re.sub(r"@\d+", "", path)


def explain(model: nn.Module, error: Exception) -> str:
    """Why torch.export could not follow ``model``, in one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "Constraints violated" in first:  # of torch's text, which advises environment variables of its own
        first = "what it does depends on how many tokens there are (torch.export: constraints violated)"
    return (
        f"module {where(model, error)!r} cannot be traced: {first}. Control flow that depends on values of tensors "
        "cannot be part of a program; rewrite it with tensor operations"
    )


def where(model: nn.Module, error: Exception) -> str:
    """Path of the innermost module of ``model`` that an error was raised in."""
    frames = []
    at = error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            frames.append(owner)
        at = at.tb_next
    paths = {id(m): name for name, m in model.named_modules()}
    return next((paths[id(m)] for m in reversed(frames) if paths.get(id(m))), type(model).__name__)
