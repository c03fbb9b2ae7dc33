"""Runs of a program that show every value: one segment at a time, so that no more than a layer's values are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from precgraph.errors import UnsupportedModelError
from precgraph.formats import QTensor
from precgraph.graph import PrecisionGraph
from precgraph.lowering.program import Observe, PackKey, Program, build_program
from precgraph.runtime.contexts import PackedContext
from precgraph.runtime.runner import Runner, require_numerics_state
from precgraph.runtime.store import WeightStore
from precgraph.verify.numerics import Comparison, Numerics

Step = Callable[[str], None]


class Run:
    """A lowered program of a causal language model on the tokens ``ids [T]``, one sequence, segment by segment.

    ``store`` holds the masters; packs are made in it when a segment needs them, and :meth:`release` drops them.
    """

    def __init__(self, graph: PrecisionGraph, store: WeightStore, ids: Tensor) -> None:
        if not graph.causal_lm:
            raise UnsupportedModelError("only causal language models run on probe tokens")
        self.program: Program = build_program(graph)
        self.store = store
        ids = ids.to(store.device)
        positions = torch.arange(len(ids), device=ids.device)
        self.live: dict[str, Any] = {
            "input_ids": ids[None], "position_ids": positions[None], "context": PackedContext((0, len(ids)))
        }  # fmt: skip

    @property
    def graph(self) -> PrecisionGraph:
        return self.program.graph

    @property
    def segments(self) -> tuple[str, ...]:
        """Names, in the order in which they run."""
        return tuple(s.name for s in self.program.segments)

    def weights(self, index: int) -> dict[str, tuple[PackKey, Any]]:
        """The quantised weights that a segment reads, by node: key and pack."""
        found = self.program.weights(self.program.segments[index])
        self.store.require(found.values())
        return {name: (key, self.store.packs[key]) for name, key in found.items()}

    def segment(self, index: int, observe: Observe, packs: Mapping[str, Any] | None = None) -> None:
        """Run one segment, after those before it. ``observe`` is shown its quantised weights, then each value, and
        says what to go on with (weights are only shown); ``packs`` take the place of packs of these keys."""
        segment = self.program.segments[index]
        for name, (key, pack) in self.weights(index).items():
            if key.format is not None:
                observe(name, quantized(pack, key, self.store.masters[key.path]))
        block, _ = segment.forward()
        self.store.require(key for key in self.program.packs if str(key) in block.inputs)
        require_numerics_state()
        inputs = {name: self.live[name] for name in (*segment.inputs, "context") if name in self.live}
        with torch.no_grad(), torch.autocast(self.store.device.type, enabled=False):
            results, _ = Runner(self.program, self.store).forward(
                segment, frozenset(), {**inputs, **(packs or {})}, observe
            )
        self.live.update(zip(segment.outputs, results, strict=True))
        self._forget(index)

    def _forget(self, index: int) -> None:
        """Drop what no later segment reads."""
        later = {n for s in self.program.segments[index + 1 :] for n in s.inputs} | {"context"}
        self.live = {name: value for name, value in self.live.items() if name in later}

    def release(self) -> None:
        """Drop the packs that were made, for all runs on this store."""
        self.store.packs.clear()


def quantized(pack: Any, key: PackKey, master: Tensor) -> QTensor:
    """A pack's codes and scales as the value of the weight's quantiser."""
    assert key.format is not None
    stored = pack.tensors()
    return QTensor(stored["codes"], stored["scales"], master.shape, key.format)


def compare_runs(train: Run, infer: Run, ids: Tensor, step: Step = lambda _: None) -> Numerics:
    """Run both programs and the rollout once more on the training side's values; layer by layer, in step.

    All three runs begin here: pass runs that have not run yet. Quantised weights are dropped layer by layer.
    """
    comparison = Comparison(train.graph, infer.graph, ids)
    forced = Run(infer.graph, infer.store, ids)
    stages = _stages(train.segments, infer.segments)
    for number, (ours, theirs) in enumerate(stages):
        step(f"comparing values: {number + 1} of {len(stages)}")
        held = _run(train, ours, comparison.infer_of)

        def own(name: str, value: Any, held: Mapping[str, Any] = held) -> Any:
            if comparison.train_of.get(name) in held:
                comparison.own(name, held[comparison.train_of[name]], value)
            return value

        def same_inputs(name: str, value: Any, held: Mapping[str, Any] = held) -> Any:
            if comparison.train_of.get(name) in held:
                return comparison.same_inputs(name, held[comparison.train_of[name]], value)
            return value

        for index in theirs:
            infer.segment(index, own)
            forced.segment(index, same_inputs, _training_packs(train, forced, ours, index, comparison))
        train.release()
        infer.release()
    return comparison.result()


def _stages(train: Sequence[str], infer: Sequence[str]) -> list[tuple[range, range]]:
    """Which segments run in step: one by one where both programs have the same, all at once where they do not."""
    if train == infer:
        return [(range(k, k + 1), range(k, k + 1)) for k in range(len(train))]
    return [(range(len(train)), range(len(infer)))]


def _run(run: Run, indices: Iterable[int], wanted: Mapping[str, str]) -> dict[str, Any]:
    """The values of some segments that have a counterpart."""
    held: dict[str, Any] = {}

    def keep(name: str, value: Any) -> Any:
        if name in wanted:
            held[name] = value
        return value

    for index in indices:
        run.segment(index, keep)
    return held


def _training_packs(train: Run, infer: Run, ours: Iterable[int], theirs: int, comparison: Comparison) -> dict[str, Any]:
    """The training side's packs under the keys of the rollout's, where the rollout's kernels can read them."""
    packs = {name: entry for index in ours for name, entry in train.weights(index).items()}
    found = {}
    for name, (key, _) in infer.weights(theirs).items():
        other = packs.get(comparison.train_of.get(name, ""))
        if other is None or key.format is None or other[0].format is None:
            continue
        if other[0].pack is key.pack and other[0].format.block == key.format.block:
            found[str(key)] = other[1]
    return found
