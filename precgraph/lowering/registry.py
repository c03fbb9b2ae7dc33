"""The kernel registry: (operator, annotation, backend) -> kernel record.

A record names the numerics that its kernel computes. Two kernels with one numerics id give the same bits, by a test;
the id, not the function, is what graphs are compared by. Backends register themselves when they are first asked for;
their libraries are looked for only on the device that they are for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, fx

from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.graph import arguments, function_name, op_name, precision, tensor

Serves = Callable[[fx.Node], bool]


class Pack(Protocol):
    """A weight in the layout of a kernel family, kept by the weight store and updated in place."""

    @classmethod
    def create(cls, master: Tensor, fmt: Format | None) -> Self:
        """Allocate for ``master [N, K]``, quantised to ``fmt`` or, with None, in its own dtype; and fill.

        A class that also has ``create_group(masters, fmt) -> list`` gets the weights of a projection group together.
        One that has ``storage() -> list`` of all its tensors, copies too, may be updated inside a CUDA graph.
        """
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
_MODULES = {
    "reference": "precgraph.lowering.reference",
    "triton": "precgraph.lowering.triton.kernels",
    "flash_attention_4": "precgraph.lowering.flash_attention_4",
    "flash_attention": "precgraph.lowering.flash_attention",
    "deep_gemm": "precgraph.lowering.deep_gemm",
    "cuda": "precgraph.lowering.cuda.wgrad",
}
# What a caller can ask for, and the backends that are then asked in turn.
BACKENDS = {
    "reference": ("reference",),
    "triton": ("triton", "reference"),
    "triton_flash": ("triton", "flash_attention_4", "flash_attention", "reference"),
    "deep_gemm": ("cuda", "deep_gemm", "flash_attention_4", "flash_attention", "triton", "reference"),
}
AUTO = {"cuda": "deep_gemm"}  # elsewhere the reference
# The remedy where a kernel cannot run, for those who call and those who type.
TAKE_REFERENCE = 'take the backend reference (--backend reference; in Python backend="reference")'


def register(*kernels: Kernel) -> None:
    """Add records; two of one backend must not serve the same node."""
    for kernel in kernels:
        _KERNELS.setdefault((kernel.op, kernel.backend), []).append(kernel)


def backends(backend: str, device: torch.device) -> tuple[str, ...]:
    """The backends to ask, in order, for a name that a caller gave or for ``auto``, which goes by ``device``.

    LoweringError if a backend that was asked for by name cannot run on ``device``.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise LoweringError(f"no backend is called {backend!r}", remedy=f"choose auto or one of {', '.join(BACKENDS)}")
    names = BACKENDS[AUTO.get(device.type, "reference") if backend == "auto" else backend]
    if backend != "auto":
        # triton_flash is no module
        problem = unavailable(backend if backend in _MODULES else names[0], device)
        if problem is not None:
            raise problem
    for name in names:
        importlib.import_module(_MODULES[name])
    return names


@functools.cache
def unavailable(name: str, device: torch.device) -> LoweringError | None:
    """Why a backend cannot run on ``device``, with the remedy; None if it can."""
    find: Callable[[torch.device], LoweringError | None] | None
    find = getattr(importlib.import_module(_MODULES[name]), "unavailable", None)
    return find(device) if find else None


def not_hopper(needs: str, device: torch.device) -> LoweringError | None:
    """That ``needs`` (``"FP8 GEMMs need"``) a Hopper GPU, where ``device`` is none."""
    found = f"a {device.type.upper()}"
    if device.type == "cuda":
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        if found == "9.0":
            return None
    return LoweringError(f"{needs} compute capability 9.0 (H100, H200), not {found}", remedy=TAKE_REFERENCE)


def select(node: fx.Node, names: Iterable[str], device: torch.device) -> Kernel:
    """The kernel of the first backend that serves ``node``.

    A GPU kernel gives way to another GPU kernel if its library is missing (and says so by its numerics id), never to
    the reference, which would be hundreds of times slower: that is a LoweringError, like a node that nothing serves.
    """
    missing: list[LoweringError] = []
    for name in names:
        kernel = next((k for k in _KERNELS.get((op_name(node), name), ()) if k.serves(node)), None)
        if kernel is None or (name == "reference" and missing):
            continue
        problem = unavailable(name, device)
        if problem is None:
            return kernel
        missing.append(problem)
    if op_name(node).startswith("aten.") or op_name(node) == "getitem":
        return _as_it_is(node)
    p = precision(node)
    if missing:
        raise LoweringError(missing[0].message, path=p.module, remedy=missing[0].remedy)
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
    known = True if name == "getitem" or _token_local(node, name) else None
    return Kernel(name, "aten", node.target, numerics=name, serves=lambda _: True, row_invariant=known)  # type: ignore[arg-type]


def _token_local(node: fx.Node, name: str) -> bool:
    """Whether a token's result is known to depend on that token alone, with the same bits in any batch."""
    if name in _ELEMENTWISE:
        return True
    if name not in _ALONG_DIMS:
        return False
    given = arguments(node)
    source = given.get("input", given.get("self", given.get("tensors")))
    source = source[0] if isinstance(source, list | tuple) else source
    dims = given.get("dim", _ALONG_DIMS[name])
    if not isinstance(source, fx.Node) or "tensor" not in source.meta or dims is None:
        return False
    shape = tensor(source).shape
    along = {d % len(shape) for d in (dims if isinstance(dims, list | tuple) else (dims,))}
    return not any(isinstance(size, str) for axis, size in enumerate(shape) if axis in along)


# Elementwise in one way for vector and scalar tails, or moves of whole values.
_ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "pow.Tensor_Scalar", "rsqrt.default",
        "sqrt.default", "exp.default", "cos.default", "sin.default", "to.dtype", "to.device", "_to_copy.default",
        "view.default", "reshape.default", "transpose.int", "permute.default", "unsqueeze.default", "squeeze.dim",
        "expand.default", "clone.default", "unflatten.int", "flatten.using_ints", "relu.default", "abs.default",
        "maximum.default", "minimum.default", "clamp.default", "embedding.default", "sym_size.int", "where.self",
        "contiguous.default", "alias.default", "pad.default", "zeros_like.default", "bitwise_not.default",
        "masked_fill.Scalar",
    )
)  # fmt: skip
# These work along dimensions, by default the one given: not along the tokens, or a token would depend on others.
_ALONG_DIMS = {
    "aten.mean.dim": None, "aten.max.dim": None, "aten.amax.default": None, "aten.softmax.int": None,
    "aten.topk.default": -1,
    "aten.slice.Tensor": 0, "aten.cat.default": 0, "aten.chunk.default": 0,
    "aten.split_with_sizes.default": 0, "aten.gather.default": None, "aten.scatter.value": None,
}  # fmt: skip
