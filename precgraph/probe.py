"""Runs of a program that show every value: one segment at a time, so that no more than a layer's values are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from precgraph.capture import Capture, CaptureWriter
from precgraph.checking import lowered, require_same_program
from precgraph.errors import CheckError, InputError, UnsupportedModelError
from precgraph.gguf_files import parsed_once
from precgraph.graph import PrecisionGraph
from precgraph.loading import find, load_config_model, load_model
from precgraph.lowering.program import Observe, PackKey, Program, build_program
from precgraph.quantizer import QTensor
from precgraph.runtime.contexts import PackedContext
from precgraph.runtime.runner import Runner, require_numerics_state
from precgraph.runtime.store import WeightStore
from precgraph.stacks.pair import Resolved, parse, resolve_for
from precgraph.trace import Trace, trace
from precgraph.verify.modules import ModuleComparison, module_outputs
from precgraph.verify.numerics import Comparison, Numerics
from precgraph.verify.values import Fingerprint, fingerprint

Step = Callable[[str], None]


@dataclass
class Pair:
    """A model with its weights and the lowered programs of its sides, by mode."""

    family: str
    vocabulary: int
    positions: int | None
    device: torch.device
    backend: str
    trace: Trace
    sides: tuple[Resolved, Resolved]
    graphs: dict[str, PrecisionGraph]
    store: WeightStore

    def run(self, mode: str, ids: Tensor) -> Run:
        """The program of one mode on these tokens."""
        return Run(self.graphs[mode], self.store, ids)

    def require(self, ids: Tensor) -> None:
        """InputError for tokens that the model does not have, or more than it has positions for."""
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            raise InputError(
                f"the tokens are {int(ids.min())}..{int(ids.max())}, outside the vocabulary 0..{self.vocabulary - 1}",
                remedy="use tokens of this model's tokenizer",
            )
        if self.positions is not None and len(ids) > self.positions:
            raise InputError(
                f"{len(ids)} tokens exceed the model's max_position_embeddings of {self.positions}",
                remedy="take fewer: what it computes beyond is of no model that was trained",
            )


def load_pair(model: str, train: str, infer: str, backend: str, env: Mapping[str, str], step: Step) -> Pair:
    """The model's weights and the programs of both sides, as ``--train`` and ``--infer`` name them.

    Without ``infer`` there is the training side alone. Weights go to the GPU if there is one, unless the reference
    backend was asked for.
    """
    named = parse(train), parse(infer or train)  # a name that is none costs no reading of weights
    source = find(model)
    with parsed_once():
        if served := dict.fromkeys(side.checkpoint for side in named if side.checkpoint):
            # On the meta device: another program is told before weights are read.
            described = load_config_model(source, warn=False)
            for checkpoint in served:
                require_same_program(model, described, None, checkpoint)
        step(f"reading the weights of {model}")
        loaded: Any = load_model(source)
    device = torch.device("cuda" if torch.cuda.is_available() and backend != "reference" else "cpu")
    loaded = loaded.to(device)
    step(f"tracing {type(loaded).__name__}")
    traced = trace(loaded)
    sides = resolve_for(traced.graph, named, env)
    graphs = {}
    for mode, side, spec in (("train", sides[0], train), ("infer", sides[1], infer)):
        if spec:
            step(f"building the program of {spec}")
            graphs[mode] = lowered(traced, mode, side.recipe, backend, device)
    store = WeightStore(traced.tensors)
    config = loaded.config.get_text_config()
    vocabulary, positions = int(config.vocab_size), getattr(config, "max_position_embeddings", None)
    return Pair(type(loaded).__name__, vocabulary, positions, device, backend, traced, sides, graphs, store)


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

    def constant(self, name: str) -> Any:
        """The pack or master that a step reads under this name; KeyError for any other name."""
        key = self._packs.get(name)
        if key is not None:
            self.store.require([key])
            return self.store.packs[key]
        return self.store.masters[self._masters[name]]

    @cached_property
    def _packs(self) -> dict[str, PackKey]:
        return {str(key): key for key in self.program.packs}

    @cached_property
    def _masters(self) -> dict[str, str]:
        return {n.name: str(n.target) for n in self.graph if n.op == "get_attr"}

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
                segment, frozenset(), {**inputs, **(packs or {})}, observe=observe
            )
        self.live.update(zip(segment.outputs, results, strict=True))
        self._forget(index)

    def _forget(self, index: int) -> None:
        """Drop what no later segment reads and is no output."""
        later = {n for s in self.program.segments[index + 1 :] for n in s.inputs} | {"context", *self.program.outputs}
        self.live = {name: value for name, value in self.live.items() if name in later}

    def release(self) -> None:
        """Drop the packs that were made, for all runs on this store."""
        self.store.packs.clear()


def parameter_hashes(graph: PrecisionGraph, store: WeightStore) -> dict[str, Fingerprint]:
    """Hashes of the masters that a program reads, by path."""
    return {path: fingerprint(store.masters[path]) for path in graph.parameters if path in store.masters}


def quantized(pack: Any, key: PackKey, master: Tensor) -> QTensor:
    """A pack's codes and scales as the value of the weight's quantiser."""
    assert key.format is not None
    stored = pack.tensors()
    return QTensor(stored["codes"], stored["scales"], master.shape, key.format)


def compare_runs(
    train: Run, infer: Run, ids: Tensor, step: Step = lambda _: None, writer: CaptureWriter | None = None
) -> Numerics:
    """Run both programs and the rollout once more on the training side's values; layer by layer, in step.

    All three runs begin here: pass runs that have not run yet. Quantised weights are dropped layer by layer. ``writer``
    gets every value of the rollout.
    """
    comparison = Comparison(train.graph, infer.graph, ids)
    forced = Run(infer.graph, infer.store, ids)
    stages = _stages(train.segments, infer.segments)
    for number, (ours, theirs) in enumerate(stages):
        step(f"comparing values: segment {number + 1} of {len(stages)}")
        held = _run(train, ours, comparison.infer_of)

        def own(name: str, value: Any, held: Mapping[str, Any] = held) -> Any:
            if writer is not None:
                writer.add(name, value)
            if comparison.train_of.get(name) in held:
                comparison.own(name, held[comparison.train_of[name]], value)
            return value

        def same_inputs(name: str, value: Any, held: Mapping[str, Any] = held) -> Any:
            t = comparison.train_of.get(name, "")
            return comparison.same_inputs(name, held[t], value) if t in held else value

        for index in theirs:
            infer.segment(index, own)
            forced.segment(index, same_inputs, _training_packs(train, forced, ours, index, comparison))
        train.release()
        infer.release()
    return comparison.result()


def compare_with_capture(train: Run, capture: Capture, ids: Tensor, step: Step = lambda _: None) -> Numerics:
    """Run the training side on a capture's tokens, beside the captured values, and once more *on* these values.

    A capture of modules' outputs (another engine's) has no program to give values to: only the first run is made.
    """
    if capture.graph is None:
        return _compare_modules(train, capture, ids, step)
    comparison = Comparison(train.graph, capture.graph, ids)
    comparison.parameters(parameter_hashes(train.graph, train.store), capture.parameters)
    forced = Run(train.graph, train.store, ids)
    for index in range(len(train.segments)):
        step(f"comparing values: segment {index + 1} of {len(train.segments)}")

        def own(name: str, value: Any) -> Any:
            i = comparison.infer_of.get(name, "")
            if i in capture:
                comparison.own(i, value, capture.value(i))
            elif i:
                comparison.lacking.add(i)
            return value

        def same_inputs(name: str, value: Any) -> Any:
            i = comparison.infer_of.get(name, "")
            return comparison.same_inputs(i, value, capture.value(i), towards_train=False) if i in capture else value

        train.segment(index, own)
        forced.segment(index, same_inputs)
        train.release()
    return comparison.result()


def compare_captures(train: Capture, infer: Capture) -> Numerics:
    """Two captures. Nothing runs, so a node counts as a cause only if all that it reads was captured equal."""
    if not torch.equal(train.ids, infer.ids):
        raise CheckError(
            f"{infer.path} was captured on other tokens than {train.path}", remedy="capture both on the same tokens"
        )
    if train.graph is None or infer.graph is None:
        ours, theirs = train.modules(), infer.modules()
        comparison = ModuleComparison(ours, theirs, train.ids)
        for module in comparison.order:
            comparison.add(module, train.value(ours[module]), infer.value(theirs[module]))
        return comparison.result()
    nodes = Comparison(train.graph, infer.graph, train.ids)
    nodes.parameters(train.parameters, infer.parameters)
    for i, t in nodes.train_of.items():
        if t in train and i in infer:
            nodes.own(i, train.value(t), infer.value(i))
        elif t in train or i in infer:
            nodes.lacking.add(i)
    return nodes.result()


def _compare_modules(train: Run, capture: Capture, ids: Tensor, step: Step) -> Numerics:
    ours, theirs = module_outputs(train.graph), capture.modules()
    comparison = ModuleComparison(ours, theirs, ids)
    modules: dict[str, list[str]] = {}
    for module in comparison.order:
        modules.setdefault(ours[module], []).append(module)

    def show(name: str, value: Any) -> Any:
        for module in modules.get(name, ()):
            comparison.add(module, value, capture.value(theirs[module]))
        return value

    for index in range(len(train.segments)):
        step(f"comparing values: segment {index + 1} of {len(train.segments)}")
        train.segment(index, show)
        train.release()
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
