"""Runs a program's segments, under autograd where gradients are wanted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from precgraph.errors import InputError, NumericsStateError, StaleWeightsError
from precgraph.lowering.program import Block, Names, Observe, Program, Segment
from precgraph.quantizer import QTensor
from precgraph.runtime.store import WeightStore


@dataclass(frozen=True)
class Runner:
    """A program on the tensors of a store. ``parameters`` are the masters that may get gradients, by path."""

    program: Program
    store: WeightStore
    checked: bool = False

    def run(
        self,
        values: Mapping[str, Any],
        outputs: Sequence[str],
        *,
        segments: Sequence[Segment] | None = None,
        checkpoint: Collection[str] = (),
    ) -> list[Any]:
        """Run ``segments`` (all by default) on ``values``: the program's inputs, ``context``, earlier values.

        With gradients enabled, each segment is one autograd node whose backward is the graph's; what is made in those
        named in ``checkpoint``, and in modules inside a segment whose paths it has, is not kept but computed again.
        Autocast does not reach inside.
        """
        require_numerics_state()
        live = dict(values)
        segments = self.program.segments if segments is None else segments
        last = {name: i for i, segment in enumerate(segments) for name in segment.inputs}
        with _no_autocast(self.store.device):
            for i, segment in enumerate(segments):
                inside = (p for p in checkpoint if p == segment.name or p.startswith(f"{segment.name}."))
                self._run_segment(segment, live, frozenset(inside))
                for name in (*segment.inputs, *segment.outputs):
                    if last.get(name, i) <= i and name not in outputs:
                        live.pop(name, None)
        return [live[name] for name in outputs]

    def run_block(self, block: Block, values: Mapping[str, Any]) -> Sequence[Any]:
        """The outputs of a forward block of the program on ``values``, without gradients."""
        require_numerics_state()
        with _no_autocast(self.store.device), torch.no_grad():  # none may grow out of the kernels' own operations
            return block.run(self._values(block, values), checked=self.checked)

    def _run_segment(self, segment: Segment, live: dict[str, Any], checkpoint: Names) -> None:
        inputs = {n: live[n] for n in (*segment.inputs, "context") if n in live}
        border = [n for n in segment.inputs if n in segment.gradients or n in segment.sinks]
        names = [*border, *segment.parameters]
        tensors = [live[n] for n in border] + [self.store.masters[p] for p in segment.parameters]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            call = _Call(self, segment, inputs, checkpoint)
            results = _SegmentFunction.apply(call, names, *tensors)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():  # a rollout has no backward: none may grow out of the kernels' own operations
                results = self.forward(segment, frozenset(), inputs)[0]
        live.update(zip(segment.outputs, results, strict=True))

    def forward(
        self, segment: Segment, wanted: Names, inputs: Mapping[str, Any], *, checkpoint: Names = frozenset(),
        observe: Observe | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
        """Outputs of a segment, and what it keeps for the gradients of ``wanted``; ``observe`` is shown every value."""
        block, saved = segment.forward(wanted, checkpoint)
        results = block.run(self._values(block, inputs), checked=self.checked, observe=observe)
        count = len(segment.outputs)
        return list(results[:count]), dict(zip(saved, results[count:], strict=True))

    def backward(
        self, segment: Segment, wanted: Names, values: Mapping[str, Any], *, checkpoint: Names
    ) -> dict[str, Tensor]:
        """Gradients of ``wanted`` by name, from what the forward kept and the gradients of the outputs."""
        again, block = segment.again(wanted, checkpoint), segment.backward(wanted)
        made = again.run(self._values(again, values), checked=self.checked)
        values = {**values, **dict(zip(again.outputs, made, strict=True))}
        results = iter(block.run(self._values(block, values), checked=self.checked))
        out: dict[str, Tensor] = {}
        for name in sorted(wanted):
            for _ in segment.contributions(name):
                part = next(results)
                out[name] = out[name] + part if name in out else part
        return out

    def keep_main_gradients(self, segment: Segment, result: dict[str, Tensor]) -> None:
        """Add gradients that are wider than their masters to ``main_grad``, and leave them out of ``result``."""
        for path in segment.parameters:
            grad, master = result.get(path), self.store.masters[path]
            if grad is not None and grad.dtype != master.dtype:
                before: Tensor | None = getattr(master, "main_grad", None)
                if before is not None and (before.dtype != grad.dtype or before.shape != grad.shape):
                    raise InputError(
                        f"main_grad is {before.dtype} {list(before.shape)}, and gets {grad.dtype} {list(grad.shape)}",
                        path=path, remedy="leave it to the backward: set it to None after the optimiser's step",
                    )  # fmt: skip
                master.main_grad = grad if before is None else before.add_(grad)  # type: ignore[attr-defined]
                del result[path]

    def masters_of(self, segment: Segment, wanted: Names) -> list[str]:
        """Paths of the masters that the segment reads itself, not through a pack."""
        reads = dict.fromkeys((*segment.forward(wanted)[0].inputs, *segment.backward(wanted).inputs))
        return [self._paths[name] for name in reads if name in self._paths]

    def _values(self, block: Block, own: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that a block reads: its own values, masters, packs."""
        return {name: own[name] if name in own else self._constants[name] for name in block.inputs}

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Masters' paths by the names of the nodes that read them."""
        return {n.name: str(n.target) for n in self.program.graph if n.op == "get_attr"}

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """Masters and packs by name; both stay the same objects for as long as the store lives."""
        return {**{name: self.store.masters[path] for name, path in self._paths.items()}, **self.store.values()}


@dataclass
class _Call:
    """One differentiable run of one segment."""

    runner: Runner
    segment: Segment
    inputs: Mapping[str, Any] | None  # given up once the forward has run: autograd keeps what is needed
    checkpoint: Names

    def begin(self, wanted: Names) -> None:
        """Remember which weights the forward is about to use."""
        store = self.runner.store
        self.version, self.paths = store.version, self.runner.masters_of(self.segment, wanted)
        self.marks = store.marks(self.paths)

    def require_same_weights(self) -> None:
        """StaleWeightsError if the backward would meet other weights than the forward."""
        store = self.runner.store
        if self.version != store.version:
            raise StaleWeightsError(
                f"weights version {self.version} made this forward, {store.version} is in the store",
                remedy="call backward() before actor.sync()",
            )
        for path, before, now in zip(self.paths, self.marks, store.marks(self.paths), strict=True):
            if before != now:
                raise StaleWeightsError(
                    "the weight was changed after the forward that this backward belongs to",
                    path=path,
                    remedy="call backward() before optimizer.step()",
                )


_SAVED = object()  # in the place of a tensor that autograd keeps

pytree.register_pytree_node(
    QTensor,
    lambda q: ([q.codes, q.scales], (q.shape, q.format)),
    lambda parts, rest: QTensor(*parts, *rest),
)


class _SegmentFunction(torch.autograd.Function):
    """A segment as one autograd node: forward and backward are the graph's own programs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, names: list[str], *tensors: Tensor) -> tuple[Any, ...]:
        segment, inputs = call.segment, call.inputs
        assert inputs is not None
        ctx.call, ctx.names, ctx.context = call, names, inputs.get("context")
        ctx.wanted = frozenset(n for n, needed in zip(names, ctx.needs_input_grad[2:], strict=True) if needed)
        call.begin(ctx.wanted)
        outputs, saved = call.runner.forward(segment, ctx.wanted, inputs, checkpoint=call.checkpoint)
        call.inputs = None
        # All tensors, codes and scales too, go through autograd, which frees them after the backward.
        leaves, ctx.tree = pytree.tree_flatten(saved)
        ctx.save_for_backward(*(v for v in leaves if isinstance(v, Tensor)))
        ctx.others = [_SAVED if isinstance(v, Tensor) else v for v in leaves]
        plain = (o for n, o in zip(segment.outputs, outputs, strict=True) if n not in segment.gradients)
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        segment, runner = call.segment, call.runner
        require_numerics_state()
        call.require_same_weights()
        tensors = iter(ctx.saved_tensors)
        leaves = [next(tensors) if v is _SAVED else v for v in ctx.others]
        saved = {**pytree.tree_unflatten(leaves, ctx.tree), "context": ctx.context}
        with _no_autocast(runner.store.device):
            arriving = {
                segment.gradients[n]: g for n, g in zip(segment.outputs, grads, strict=True) if n in segment.gradients
            }
            result = runner.backward(segment, ctx.wanted, {**saved, **arriving}, checkpoint=call.checkpoint)
            runner.keep_main_gradients(segment, result)
        return (None, None, *(result.get(n) for n in ctx.names))


def require_numerics_state() -> None:
    """NumericsStateError if a global switch would change the program's fp32 arithmetic."""
    # Each backend is asked: the process-wide getter fails once torch's newer switches have been used.
    for name, backend in (("CUDA", torch.backends.cuda.matmul), ("the CPU", torch.backends.mkldnn.matmul)):  # type: ignore[attr-defined]
        if backend.fp32_precision not in ("none", "ieee"):
            raise NumericsStateError(
                f"float32 matmul precision is {backend.fp32_precision!r} on {name}, which rounds fp32 operands",
                remedy="call torch.set_float32_matmul_precision('highest')",
            )
    if subnormals_are_flushed():
        raise NumericsStateError("subnormal numbers are flushed to zero", remedy="call torch.set_flush_denormal(False)")


def subnormals_are_flushed() -> bool:
    """Whether this thread's arithmetic takes subnormal numbers for zero."""
    # In Python's own float64, for the flag is the thread's whatever the width, and every step of a rollout asks.
    return math.ulp(0.0) * 1.0 == 0.0


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
