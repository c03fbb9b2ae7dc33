"""Which part of a rollout owns its mismatch with the training side: parts are given back to it, one at a time.

A part is a role (a table of the recipe: activations, weights, norms ...), a layer or a kind of module. With the part as
the training side has it and everything else as the rollout has it, the log-probabilities of the probe tokens are
compared again; what has gone is the part's share. Shares are of k3, which is Δ²/2 to second order, because the squares
of independent errors add up, and their absolute values do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from precgraph.checking import lowered
from precgraph.errors import CheckError, LoweringError, RecipeError
from precgraph.graph import op_name, precision
from precgraph.lowering.program import Block, block_of
from precgraph.probe import Pair, Run, Step
from precgraph.recipe import BACKWARD_RULES, Recipe
from precgraph.verify.inclusion import Inclusion
from precgraph.verify.numerics import LogProbs, mismatch, next_logprobs
from precgraph.verify.report import masked

BY = ("roles", "layers", "modules")
_OPERANDS = ("activation", "weight")  # of linears
_BACKWARD = [key for table, key in BACKWARD_RULES if table == "linear"]


@dataclass(frozen=True, slots=True)
class Part:
    """One part given back: what mismatch is left ``without`` it, and the ``share`` of k3 that it owned.

    ``problem`` says why it cannot be given back alone; then nothing was measured.
    """

    name: str
    without: LogProbs | None = None
    share: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Bisection:
    """The ``total`` mismatch and the ``parts``, the largest share first."""

    by: str
    total: LogProbs
    parts: tuple[Part, ...]

    @property
    def explained(self) -> float:
        """Sum of the shares: 1 if the parts act independently of one another."""
        return sum(p.share for p in self.parts)

    def interaction(self) -> str:
        """What the sum of the shares says, in words."""
        if not self.total.k3:
            return "the log-probabilities do not differ, so there is nothing to share out"
        words = f"single effects add up to {self.explained:.0%} of the mismatch: "
        worse = [p.name for p in self.parts if p.share < -0.05]
        if self.explained > 1.1:
            words += "they overlap, so shares say which parts matter most and are no fractions of a whole"
        elif self.explained < 0.9:
            words += "what is missing needs several parts at once, or one that cannot be given back alone"
        else:
            words += "the parts act nearly independently" if not worse else "gains and losses balance"
        return words + (
            f"; errors of {', '.join(worse)} cancel others, so giving them back makes it worse" * bool(worse)
        )


def bisect(pair: Pair, ids: Tensor, by: str = "roles", step: Step = lambda _: None) -> Bisection:
    """Measure every part of one kind on the tokens ``ids [T]``, at least 2. CheckError: there is no such part."""
    search = _Search(pair, ids, step)
    parts = list({"roles": search.roles, "layers": search.layers, "modules": search.modules}[by]())
    if not parts and search.total.k3:
        raise CheckError(
            f"the two programs differ in no {by[:-1]}", remedy=f"try --by {BY[0] if by != BY[0] else BY[1]}"
        )
    order = sorted(parts, key=lambda p: (bool(p.problem), -p.share, p.name))
    return Bisection(by, search.total, tuple(order))


class _Search:
    def __init__(self, pair: Pair, ids: Tensor, step: Step) -> None:
        self.pair, self.ids, self.step = pair, ids, step
        step("running the training side")
        self.train = pair.run("train", ids)
        self.wanted = self._logprobs(self.train)
        step("running the rollout")
        self.before: list[dict[str, Any]] = []  # what enters each segment of the rollout
        infer = pair.run("infer", ids)
        for index in range(len(infer.segments)):
            self.before.append(dict(infer.live))
            infer.segment(index, _same)
        self.infer = infer
        self.total = mismatch(self.wanted, self._score(infer))

    def _logprobs(self, run: Run, start: int = 0, observe: Callable[[str, Any], Any] | None = None) -> Tensor:
        for index in range(start, len(run.segments)):
            run.segment(index, observe or _same)
        return self._score(run)

    def _score(self, run: Run) -> Tensor:
        (output,) = run.program.outputs
        return next_logprobs(run.live[output], self.ids)

    def _part(self, name: str, logprobs: Tensor) -> Part:
        left = mismatch(self.wanted, logprobs)
        return Part(name, left, 1 - left.k3 / self.total.k3 if self.total.k3 else 0.0)

    # ------------------------------------------------------------------------------------ roles
    def roles(self) -> Iterator[Part]:
        """One table of the recipe at a time; operands of linears that must go together, together; and so the others."""
        ours, theirs = self.pair.sides[0].recipe, self.pair.sides[1].recipe
        found = [name for name in _roles(ours) if _take(theirs, ours, [name], check=False) != theirs]
        failed: list[Part] = []
        for name in found:
            part = self._role(ours, theirs, [name])
            if part.problem:
                failed.append(part)
            else:
                yield part
        if any(p.name in _OPERANDS for p in failed):
            failed = [p for p in failed if p.name not in _OPERANDS]
            yield self._role(ours, theirs, _OPERANDS)
        together = self._role(ours, theirs, [p.name for p in failed]) if len(failed) > 1 else None
        yield from failed if together is None or together.problem else [together]

    def _role(self, ours: Recipe, theirs: Recipe, names: Sequence[str]) -> Part:
        name = " + ".join(names)
        self.step(f"giving back {name}")
        try:
            recipe = _take(theirs, ours, names)
            graph = lowered(self.pair.trace, "infer", recipe, self.pair.backend, self.pair.device)
        except (RecipeError, LoweringError) as error:
            what = error.message.partition(" (compute ")[0]  # what follows is the node's rule, as a table
            beside = " so, beside the rollout's other rules" if isinstance(error, LoweringError) else ""
            return Part(name, problem=f"cannot be given back alone: {what}{beside}")
        return self._part(name, self._logprobs(Run(graph, self.pair.store, self.ids)))

    # ------------------------------------------------------------------------------------ layers
    def layers(self) -> Iterator[Part]:
        """One segment at a time; those before it are as the rollout has run them already."""
        if self.train.segments != self.infer.segments:
            raise CheckError("the two programs are not cut into the same layers", remedy="use --by modules")
        names = Names(self.pair)
        for index, name in enumerate(self.infer.segments):
            if not names.differ(name):
                continue
            self.step(f"giving back {name} ({index + 1} of {len(self.infer.segments)})")
            run = self.pair.run("infer", self.ids)
            run.live = dict(self.before[index])
            try:
                self._exchange(run, index, names)
            except KeyError as error:
                yield Part(name, problem=f"cannot be given back alone: the other side has no value {error}")
                continue
            yield self._part(name, self._logprobs(run, index + 1))

    def _exchange(self, run: Run, index: int, names: Names) -> None:
        """Run a segment of the rollout by the training side's program."""
        other = self.pair.run("train", self.ids)
        segment = other.program.segments[index]
        other.live |= {t: run.live[names.infer(t)] for t in segment.inputs if t not in other.live}
        other.segment(index, _same)
        run.live |= {i: other.live[names.train(i)] for i in run.program.segments[index].outputs}

    # ------------------------------------------------------------------------------------ modules
    def modules(self) -> Iterator[Part]:
        """One kind of module at a time, in all layers together, each with its quantisers and weights."""
        names = Names(self.pair)
        kinds = names.kinds()
        for number, kind in enumerate(kinds):
            self.step(f"giving back {kind} ({number + 1} of {len(kinds)})")
            substitute = Substitute(self.pair, names, [kind], self.ids)
            logprobs = self._logprobs(substitute.run, observe=substitute)
            if substitute.left:
                yield Part(kind, problem="cannot be given back alone: a fused kernel makes it together with others")
            else:
                yield self._part(kind, logprobs)


def _same(_: str, value: Any) -> Any:
    return value


def _roles(recipe: Recipe) -> list[str]:
    """The tables of a recipe that the forward depends on; the linear rule by its operands, and the rest as gemm."""
    tables = [f.name for f in dataclasses.fields(recipe) if f.name not in ("name", "linear", "gradient")]
    return [*_OPERANDS, "gemm", *("gate" if t == "activation" else t for t in tables)]


def _take(recipe: Recipe, other: Recipe, roles: Sequence[str], *, check: bool = True) -> Recipe:
    """``recipe`` with these roles as ``other`` has them; RecipeError if they do not fit the rest."""
    linear: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for role in roles:
        if role in _OPERANDS:
            linear[role] = getattr(other.linear, role)
        elif role == "gemm":
            keys = (f.name for f in dataclasses.fields(other.linear))
            linear |= {k: getattr(other.linear, k) for k in keys if k not in (*_OPERANDS, *_BACKWARD)}
        else:
            name = "activation" if role == "gate" else role
            tables[name] = getattr(other, name)
    rule = replace(recipe.linear, **linear)
    try:
        return replace(recipe, linear=rule, **tables)
    except RecipeError:
        if check:
            raise
        return other  # it differs, which is all that is asked


class Names:
    """Which node of one program is which of the other, and where they differ."""

    def __init__(self, pair: Pair) -> None:
        self.inclusion = Inclusion(pair.graphs["train"], pair.graphs["infer"])
        self.inclusion.run()
        self.pairs = self.inclusion.alignment

    def infer(self, name: str) -> str:
        return name if name == "context" else self.pairs.to_infer[name]

    def train(self, name: str) -> str:
        return self.pairs.to_train[name]

    def differ(self, segment: str) -> bool:
        """Whether a finding, or what follows from one, is at a node of this segment."""
        check = self.inclusion
        found = [check.infer.records[i] for i in check.owner_i if i in check.forward and self._own(i)]
        found += [check.train.records[t] for t in check.owner_t if t in check.train_forward]
        return any(record.precision.segment == segment for record in found)

    def _own(self, name: str) -> bool:
        """Whether a node differs itself, rather than in what it is given."""
        check = self.inclusion
        own = check.found[check.owner_i[name]].node == name
        return own or name not in self.pairs.to_train or bool(check.following.get(name) or check.differing.get(name))

    def kinds(self) -> list[str]:
        """Module paths, with * for the number of the layer, of operators that differ or read a quantiser that does."""
        check = self.inclusion
        found: dict[str, None] = {}
        for i in check.infer.forward:
            record = check.infer.records[i]
            if i not in self.pairs.to_train or not check.infer.is_operator(i) or record.op in ("quantize", "getitem"):
                continue
            t = self.pairs.to_train[i]
            reads = [q for q in check.infer.operands[i].values() if check.infer.records[q].op == "quantize"]
            inside = [p for p in check.train.operands[t].values() if p in check.owner_t]
            if (i in check.owner_i and self._own(i)) or inside or any(q in check.owner_i for q in reads):
                found[masked(record.precision.module)] = None
        return list(found)


class Substitute:
    """Shown the rollout's values, it puts the training side's in the place of what some kinds of modules make.

    The training side's nodes of these modules, and the quantisers in front of them, run on the rollout's own values.
    ``left`` are values that were never shown, and so not replaced.
    """

    def __init__(self, pair: Pair, names: Names, kinds: Collection[str], ids: Tensor) -> None:
        self.run, self.other = pair.run("infer", ids), pair.run("train", ids)
        self.names = names
        nodes = {n.name: n for n in self.other.graph}
        forward = names.inclusion.train_forward
        self.group = {n for n in nodes.values() if n.name in forward and masked(precision(n).module) in kinds}
        self.blocks: dict[str, Block] = {}
        self.kept: set[str] = set()
        for node in self.group:
            if self._leaves(node) and node.name in names.pairs.to_infer:
                inside = self._inside(node)
                block = block_of([n for n in self.other.graph if n in inside], [node.name])
                self.blocks[names.infer(node.name)] = block
                self.kept |= {names.pairs.to_infer[name] for name in block.inputs if name in names.pairs.to_infer}
        self.left = set(self.blocks)
        self.values: dict[str, Any] = dict(self.run.live)

    def _leaves(self, node: fx.Node) -> bool:
        """Whether a plain value of the group is read outside of it, if only through a quantiser."""
        if not _computes(node):
            return False
        readers = [u for u in node.users if u.name in self.names.inclusion.train_forward]
        quantizers = [u for u in readers if op_name(u) == "quantize"]
        readers += [v for u in quantizers for v in u.users if v.name in self.names.inclusion.train_forward]
        return any(u not in self.group and u not in quantizers for u in readers)

    def _inside(self, node: fx.Node) -> set[fx.Node]:
        """What the training side runs for a value: its module, quantisers, and operators that the rollout lacks."""
        inside, stack = {node}, [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                own = source in self.group or op_name(source) in ("quantize", "getitem")
                mine = own or source.name not in self.names.pairs.to_infer
                made = source.op == "call_function" and precision(source).phase == "forward"
                if mine and made and source not in inside:
                    inside.add(source)
                    stack.append(source)
        return inside

    def __call__(self, name: str, value: Any) -> Any:
        if name in self.blocks:
            value = self._computed(self.blocks[name])
            self.left.discard(name)
        if name in self.kept:
            self.values[name] = value
        return value

    def _computed(self, block: Block) -> Any:
        inputs = {}
        for name in block.inputs:
            i = self.names.pairs.to_infer.get(name, name)
            inputs[name] = self.values[i] if i in self.values else self.other.constant(name)
        return block.run(inputs)[0]


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node) != "quantize" and precision(node).phase == "forward"
