"""The kernel registry: (operator, annotation, backend) -> kernel record.

A record names the numerics that its kernel computes. Two kernels with one numerics id give the same bits, by a test;
the id, not the function, is what graphs are compared by. Backends register themselves when they are first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, fx

from precgraph.errors import LoweringError
from precgraph.formats import Format
from precgraph.graph import function_name, op_name, precision

Serves = Callable[[fx.Node], bool]


class Pack(Protocol):
    """A weight in the layout of a kernel family, kept by the weight store and updated in place."""

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        """Allocate for ``master [N, K]``, quantised to ``fmt`` or, with None, in its own dtype; and fill."""
        ...

    def update(self, master: Tensor) -> None:
        """Refill from ``master`` without moving any storage."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name (``codes``, ``scales`` ...), for checks, checksums and transport."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an operator.

    ``run`` has the operator's signature (plus ``context=`` if ``context``: the sequences of attention). ``pack`` is
    the layout in which ``run`` wants weight operands. ``row_invariant``: a token's result does not depend on which or
    how many other tokens are computed with it; None where it is not known. ``library`` is name and version of the
    code behind the kernel where that is not precgraph or torch.
    """

    op: str
    backend: str
    run: Callable[..., Any]
    numerics: str
    serves: Serves
    row_invariant: bool | None = True
    deterministic: bool = True
    context: bool = False
    pack: type[Pack] | None = None
    library: str = ""


_KERNELS: dict[tuple[str, str], list[Kernel]] = {}
_MODULES = {"reference": "precgraph.lowering.reference"}
AUTO = {"cpu": ("reference",), "cuda": ("reference",), "meta": ("reference",)}


def register(*kernels: Kernel) -> None:
    """Add records; two of one backend must not serve the same node."""
    for kernel in kernels:
        _KERNELS.setdefault((kernel.op, kernel.backend), []).append(kernel)


def backends(backend: str, device: torch.device) -> tuple[str, ...]:
    """The backends to ask, in order: a named one alone, or what ``auto`` means on ``device``."""
    names = AUTO.get(device.type, ("reference",)) if backend == "auto" else (backend,)
    for name in names:
        if name not in _MODULES:
            raise LoweringError(f"no backend is called {name!r}", remedy=f"choose auto or one of {', '.join(_MODULES)}")
        importlib.import_module(_MODULES[name])
    return names


def select(node: fx.Node, names: Iterable[str]) -> Kernel:
    """The kernel of the first backend that serves ``node``; LoweringError, with what each lacks, if none does."""
    for name in names:
        for kernel in _KERNELS.get((op_name(node), name), ()):
            if kernel.serves(node):
                return kernel
    if op_name(node).startswith("aten.") or op_name(node) == "getitem":
        return _as_it_is(node)
    p = precision(node)
    raise LoweringError(
        f"no kernel of {', '.join(names)} serves {op_name(node)} making {p.format} "
        f"(compute {p.compute}, accumulate {p.accumulate}, {dict(p.rules)}) from "
        f"{', '.join(str(precision(a).format) for a in node.all_input_nodes)}",
        path=p.module,
        remedy="change the recipe's rule for it, or the backend",
    )


def _as_it_is(node: fx.Node) -> Kernel:
    """torch's own kernel for an operator that the passes kept as it is."""
    name = function_name(node.target)
    known = name == "getitem" or name in _ROW_INVARIANT
    return Kernel(
        name, "aten", node.target, numerics=name, serves=lambda _: True, row_invariant=True if known else None  # type: ignore[arg-type]
    )  # fmt: skip


# aten operators whose result for a token is a function of that token alone, in one way for vector and scalar tails.
_ROW_INVARIANT = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "pow.Tensor_Scalar", "rsqrt.default",
        "sqrt.default", "exp.default", "cos.default", "sin.default", "to.dtype", "_to_copy.default", "view.default",
        "reshape.default", "transpose.int", "permute.default", "unsqueeze.default", "squeeze.dim", "slice.Tensor",
        "cat.default", "expand.default", "clone.default", "unflatten.int", "flatten.using_ints", "relu.default",
        "abs.default", "maximum.default", "minimum.default", "clamp.default", "embedding.default", "sym_size.int",
        "mean.dim", "amax.default", "topk.default", "softmax.int", "where.self", "contiguous.default", "alias.default",
    )
)  # fmt: skip
