"""Runs a program's segments, under autograd where gradients are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from precgraph.errors import NumericsStateError, StaleWeightsError
from precgraph.lowering.program import Program, Segment
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
        checkpoint: bool = False,
    ) -> list[Any]:
        """Run ``segments`` (all by default) on ``values``: the program's inputs, ``context``, earlier values.

        With gradients enabled, each segment is one autograd node whose backward is the graph's; ``checkpoint`` makes
        it keep its inputs only and compute the rest again. Autocast does not reach inside.
        """
        require_numerics_state()
        live = dict(values)
        segments = self.program.segments if segments is None else segments
        with _no_autocast(next(iter(self.store.masters.values())).device):
            for index, segment in enumerate(segments):
                self._run_segment(segment, live, checkpoint)
                later = {*outputs, "context"}.union(*(s.inputs for s in segments[index + 1 :]))
                for name in [n for n in live if n not in later]:
                    del live[name]
        return [live[name] for name in outputs]

    def _run_segment(self, segment: Segment, live: dict[str, Any], checkpoint: bool) -> None:
        call = _Call(self, segment, live, checkpoint)
        border = [n for n in segment.inputs if n in segment.gradients or n in segment.sinks]
        names = [*border, *segment.parameters]
        tensors = [live[n] for n in border] + [self.store.masters[p] for p in segment.parameters]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            results = _SegmentFunction.apply(call, names, *tensors)  # type: ignore[no-untyped-call]
        else:
            results = call.forward(frozenset())[0]
        live.update(zip(segment.outputs, results, strict=True))

    def constants(self) -> dict[str, Any]:
        """Masters under their nodes' names, and packs: what every step may read."""
        masters = {n.name: self.store.masters[str(n.target)] for n in self.program.graph if n.op == "get_attr"}
        return {**masters, **self.store.values()}


@dataclass
class _Call:
    """One run of one segment."""

    runner: Runner
    segment: Segment
    values: Mapping[str, Any]
    checkpoint: bool

    def __post_init__(self) -> None:
        self.inputs = {n: self.values[n] for n in (*self.segment.inputs, "context") if n in self.values}
        self.version = self.runner.store.version

    def forward(self, wanted: frozenset[str]) -> tuple[list[Any], dict[str, Any]]:
        """Outputs, and what the gradients of ``wanted`` need."""
        block, saved = self.segment.forward(wanted)
        results = block.run(self._values(self.inputs), checked=self.runner.checked)
        count = len(self.segment.outputs)
        return list(results[:count]), dict(zip(saved, results[count:], strict=True))

    def backward(
        self, wanted: frozenset[str], saved: Mapping[str, Any], grads: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Gradients of ``wanted`` by name."""
        if self.version != self.runner.store.version:
            raise StaleWeightsError(
                f"weights version {self.version} made this forward, {self.runner.store.version} is in the store",
                remedy="call backward() before actor.sync()",
            )
        block = self.segment.backward(wanted)
        results = iter(block.run(self._values({**saved, **grads, **self._context()}), checked=self.runner.checked))
        out: dict[str, Tensor] = {}
        for name in sorted(wanted):
            for _ in self.segment.contributions(name):
                part = next(results)
                out[name] = out[name] + part if name in out else part
        return out

    def _context(self) -> dict[str, Any]:
        return {"context": self.inputs["context"]} if "context" in self.inputs else {}

    def _values(self, own: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.runner.constants(), **own}


class _SegmentFunction(torch.autograd.Function):
    """A segment as one autograd node: forward and backward are the graph's own programs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, names: list[str], *tensors: Tensor) -> tuple[Any, ...]:
        segment = call.segment
        ctx.call, ctx.names = call, names
        ctx.wanted = frozenset(n for n, needed in zip(names, ctx.needs_input_grad[2:], strict=True) if needed)
        outputs, saved = call.forward(frozenset() if call.checkpoint else ctx.wanted)
        if call.checkpoint:
            saved = {n: call.inputs[n] for n in segment.inputs}
        ctx.kept = {n: v for n, v in saved.items() if not isinstance(v, Tensor)}
        ctx.tensor_names = [n for n, v in saved.items() if isinstance(v, Tensor)]
        ctx.save_for_backward(*(saved[n] for n in ctx.tensor_names))
        call.inputs = {n: v for n, v in call.inputs.items() if n == "context"}
        call.values = {}
        ctx.mark_non_differentiable(
            *(o for n, o in zip(segment.outputs, outputs, strict=True) if n not in segment.gradients)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        segment = call.segment
        saved = {**ctx.kept, **dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True))}
        with _no_autocast(grads[0].device):
            if call.checkpoint:
                call.inputs = {**call.inputs, **saved}
                saved = call.forward(ctx.wanted)[1]
            arriving = {
                segment.gradients[n]: g for n, g in zip(segment.outputs, grads, strict=True) if n in segment.gradients
            }
            result = call.backward(ctx.wanted, saved, arriving)
        return (None, None, *(result.get(n) for n in ctx.names))


def require_numerics_state() -> None:
    """NumericsStateError if a global switch would change the program's fp32 arithmetic."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise NumericsStateError(
            f"float32 matmul precision is {precision!r}, which rounds fp32 operands",
            remedy="call torch.set_float32_matmul_precision('highest')",
        )
    if float(torch.tensor(1e-40) * 1.0) == 0.0:
        raise NumericsStateError("subnormal numbers are flushed to zero", remedy="call torch.set_flush_denormal(False)")


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
