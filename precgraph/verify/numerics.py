"""Level numerics: where two programs first make other bits, which nodes do so by themselves, and how it grows.

Both programs run on the same tokens and show every value (:meth:`Comparison.own`): that says what really diverges, and
first where. A node that differs may only have been given other inputs, so the rollout runs a second time with each
value replaced by the training side's as soon as it has been compared (:meth:`Comparison.same_inputs`): a node that
differs then differs by itself, however much diverged before it. Which rule is to blame is what the graphs say
(:mod:`precgraph.verify.inclusion`); a node that differs by itself though its annotation does not is a finding of its
own. Values come from whoever runs the programs or reads a capture; nothing here runs anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from precgraph.errors import CheckError
from precgraph.graph import PrecisionGraph
from precgraph.quantizer import QTensor
from precgraph.runtime.logprobs import logprobs_from_logits
from precgraph.verify.inclusion import Inclusion
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES
from precgraph.verify.values import Delta, Fingerprint, compare


@dataclass(frozen=True, slots=True)
class Measured:
    """One node of the rollout's program and how its value differs: ``delta`` in the run, ``alone`` on equal inputs."""

    node: str
    module: str
    op: str
    segment: str
    delta: Delta
    alone: Delta | None = None


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probabilities of the probe tokens on both sides: Δ = training side - rollout, ``k3`` the mean of
    ``exp Δ - 1 - Δ`` (on tokens that the rollout sampled it estimates KL(rollout || training side))."""

    tokens: int
    differing: int
    mean: float
    largest: float
    k3: float


@dataclass(frozen=True, slots=True)
class Numerics:
    """The outcome: findings (``report``), the ``first`` node that differs, the ``causes`` that do so by themselves,
    ``growth`` from segment to segment, and the log-probabilities at the end. ``hidden`` nodes that are pairs were never
    shown (a fused kernel makes their values, or a capture lacks them), and so not compared."""

    report: Report
    first: Measured | None
    causes: tuple[Measured, ...]
    growth: tuple[tuple[str, Delta], ...]
    logprobs: LogProbs | None
    differing: int
    hidden: int = 0


def mismatch(train: Tensor, infer: Tensor) -> LogProbs:
    """Compare two vectors of log-probabilities."""
    delta = (train - infer).double()
    k3 = torch.expm1(delta) - delta
    count = max(delta.numel(), 1)
    return LogProbs(
        delta.numel(), int((delta != 0).sum()), float(delta.abs().sum()) / count,
        float(delta.abs().max()) if delta.numel() else 0.0, float(k3.sum()) / count,
    )  # fmt: skip


def next_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """``logits [1, T, V]`` to the log-probabilities ``[T - 1]`` of the tokens ``ids [T]`` that follow."""
    return logprobs_from_logits(logits.reshape(-1, logits.shape[-1])[:-1], ids[1:].to(logits.device)).cpu()


class Comparison:
    """Takes values of both programs, in the rollout's order, and says at the end what they mean.

    ``ids [T]`` are the probe tokens (None: no log-probabilities). CheckError as for a check of the graphs.
    """

    def __init__(self, train: PrecisionGraph, infer: PrecisionGraph, ids: Tensor | None = None) -> None:
        self.inclusion = Inclusion(train, infer)
        self.graphs = self.inclusion.run()
        self.ids = ids
        self.train, self.infer = self.inclusion.train, self.inclusion.infer
        to_train = self.inclusion.alignment.to_train
        self.train_of = {i: to_train[i] for i in self.infer.forward if i in to_train and self._is_value(i)}
        self.infer_of = {t: i for i, t in self.train_of.items()}
        self._deltas: dict[str, Delta] = {}
        self._alone: dict[str, Delta] = {}
        self._settled: dict[str, bool] = {}
        self._parameters: set[str] = set()
        self._logits = self.infer.principal(self.infer.output)
        self._logprobs: LogProbs | None = None
        self._forced = False
        self.lacking: set[str] = set()  # nodes whose values one side showed and the other's capture lacks

    def _is_value(self, name: str) -> bool:
        """Whether a node makes a value of its own: what a getitem takes out is compared with the rest of its source."""
        return self.infer.is_operator(name) and self.infer.records[name].op != "getitem"

    # ---------------------------------------------------------------------------------- values come in
    def own(self, name: str, ours: Any, theirs: Any) -> None:
        """Both values of a rollout's node in the run in which each side has its own inputs."""
        self._deltas[name] = self._compare(name, ours, theirs)
        if name == self._logits and self.ids is not None and isinstance(theirs, Tensor) and len(self.ids) > 1:
            self._logprobs = mismatch(next_logprobs(ours, self.ids), next_logprobs(theirs, self.ids))

    def same_inputs(self, name: str, ours: Any, theirs: Any, *, towards_train: bool = True) -> Any:
        """Both values of a node whose inputs were the training side's; returns the value to go on with.

        ``towards_train=False``: the inputs were the rollout's, and the training side's program goes on.
        """
        self._forced = True
        self._alone[name] = delta = self._compare(name, ours, theirs)
        given, made = (ours, theirs) if towards_train else (theirs, ours)
        value, replaced = swapped(given, made) if delta.differs else (made, True)
        self._settled[name] = replaced
        return value

    def parameters(self, train: Mapping[str, Fingerprint], infer: Mapping[str, Fingerprint]) -> None:
        """Hashes of both sides' parameters by path, where the two do not read the same tensors."""
        for i in self.infer.forward:
            if self.infer.records[i].op != "parameter" or i not in self.inclusion.alignment.to_train:
                continue
            t = self.inclusion.alignment.to_train[i]
            paths = self.train.records[t].parameter or "", self.infer.records[i].parameter or ""
            if train.get(paths[0]) != infer.get(paths[1]):
                self._parameters.add(i)

    def _compare(self, name: str, ours: Any, theirs: Any) -> Delta:
        where = f"{self.infer.records[name].precision.module} ({name})"
        return compare(self._read(name, ours), self._read(name, theirs), where)

    def _read(self, name: str, value: Any) -> Any:
        """What the forward reads of a value that has parts."""
        if not isinstance(value, tuple | list):
            return value
        users = {u for u, _ in self.infer.users[name] if u in self.inclusion.forward}
        places = {self.infer.records[u].attributes.get("arg1") for u in users}
        return [part for place, part in enumerate(value) if place in places]

    # ------------------------------------------------------------------------------------ what they mean
    def result(self) -> Numerics:
        """CheckError if no node was compared, or if none differs and the program's output was not compared."""
        if not self._deltas:
            raise CheckError("no value of the two sides could be compared", remedy="capture the same model's values")
        order = [i for i in self.infer.forward if i in self._deltas]
        causes = [i for i in order if self._is_cause(i)]
        report = self._report(order, causes)
        if report.ok and self._logits in self.train_of and self._logits not in self._deltas:
            raise CheckError(
                f"only {len(order)} of {len(self.train_of)} values could be compared, and not the logits",
                remedy="write the capture again: check --level numerics --capture",
            )
        differing = [i for i in order if self._deltas[i].differs]
        return Numerics(
            report, self._measured(differing[0]) if differing else None, tuple(map(self._measured, causes)),
            tuple(self._growth(order)), self._logprobs, len(differing), len(self.train_of) - len(order),
        )  # fmt: skip

    def _measured(self, name: str) -> Measured:
        r = self.infer.records[name]
        return Measured(
            name, r.precision.module, r.op, r.precision.segment, self._deltas.get(name, Delta()), self._alone.get(name)
        )

    def _is_cause(self, name: str) -> bool:
        """Whether a node differs though nothing that it reads does."""
        judged = self._alone if self._forced else self._deltas
        return name in judged and judged[name].differs and self._inputs_agree(name)

    def _inputs_agree(self, name: str) -> bool:
        return all(self._agrees(q) for q in self.infer.operands[name].values())

    def _agrees(self, name: str) -> bool:
        """Whether a value was (made) equal on both sides, as far as paired nodes say."""
        if self.infer.is_leaf(name):
            return name not in self._parameters
        if self._forced and name in self._settled:
            return self._settled[name]
        if not self._forced and name in self._deltas:
            return not self._deltas[name].differs
        return self._inputs_agree(name)

    def _report(self, order: Sequence[str], causes: Sequence[str]) -> Report:
        """What differs by itself, with the graphs' finding that explains it; other findings were not seen to act."""
        found, seen = self.inclusion.found, {i: self._blamed(i) for i in order}
        kept: list[Finding] = []
        place: dict[int | None, int] = {}  # of the graphs' findings among those that are kept
        owner: dict[str, int] = {}
        differs = {i: "parameter values" for i in self.infer.forward if i in self._parameters}
        for i in (*differs, *causes):
            index = None if i in differs else seen[i]
            if index is None:
                owner[i] = len(kept)
                kept.append(self._finding(i, differs.get(i, "other bits")))
            elif index not in place:
                place[index] = len(kept)
                kept.append(replace(found[index], message=f"{found[index].message}; measured: its bits differ"))
            owner.setdefault(i, place.get(index, 0))
        inherited = self._inherited(order, owner)
        notes: dict[str, list[Finding]] = {"no effect": [], "not separated": []}
        for index, finding in enumerate(found):
            if index not in place and not finding.code.startswith("PG9"):
                kind = self._unseen([i for i in order if seen[i] == index])
                notes[kind].append(_note(finding, kind))
        open_points = [*notes["not separated"], *([self._lack(len(order))] if self.lacking else [])]
        return Report(
            len(order), tuple(replace(f, inherited=inherited.get(k, 0)) for k, f in enumerate(kept)),
            tuple(notes["no effect"]), unit="values", not_proved=tuple(open_points),
        )  # fmt: skip

    def _lack(self, compared: int) -> Finding:
        """How much of the program a capture has."""
        rule = RULES["not captured"]
        words = f"a capture has {compared} of the {compared + len(self.lacking)} values; the others were not compared"
        return Finding(rule.code, "", "", "program", (), (), (), words, rule.remedy)

    def _unseen(self, nodes: Sequence[str]) -> str:
        """Why a finding of the graphs was not seen to act at these nodes: it changes nothing, or one cannot say."""
        judged = self._alone if self._forced else self._deltas
        return "no effect" if nodes and all(i in judged and self._inputs_agree(i) for i in nodes) else "not separated"

    def _inherited(self, order: Sequence[str], owner: Mapping[str, int]) -> dict[int, int]:
        """How many more nodes differ because of each finding: the first that their operands lead to."""
        owners = dict(owner)
        counts: dict[int, int] = defaultdict(int)
        compared = set(order)
        for i in self.infer.forward:
            if i in owners:
                continue
            above = next((owners[q] for q in self.infer.operands[i].values() if q in owners), None)
            if above is None or (i in compared and not self._deltas[i].differs):
                continue
            owners[i] = above
            counts[above] += i in compared
        return counts

    def _blamed(self, name: str) -> int | None:
        """Index of the graphs' finding that would make this node differ on equal inputs, if there is one."""
        check = self.inclusion
        index = check.owner_i.get(name)
        if index is not None and (check.found[index].node == name or check.following.get(name)):
            return index
        t = self.train_of[name]
        for q in self._through(name):
            if q not in check.alignment.to_train and q in check.owner_i:
                return check.owner_i[q]
            if q not in self._deltas and not self.infer.is_leaf(q):  # its value was never shown: a fused kernel's
                inner = check.owner_i.get(q)
                if inner is not None and check.found[inner].node == q:
                    return inner
        return next((check.owner_t[p] for p in self.train.operands[t].values() if p in check.owner_t), None)

    def _through(self, name: str) -> Iterator[str]:
        """What a node reads, and what is read through values that were not compared."""
        stack = list(self.infer.operands[name].values())
        seen: set[str] = set()
        while stack:
            q = stack.pop()
            if q not in seen:
                seen.add(q)
                yield q
                if q not in self._deltas:
                    stack.extend(self.infer.operands[q].values())

    def _finding(self, name: str, kind: str) -> Finding:
        r, rule = self.infer.records[name], RULES[kind]
        return Finding(rule.code, r.precision.module, name, r.op, (), (), (), f"differs: {rule.words}", rule.remedy)

    def _growth(self, order: Sequence[str]) -> Iterator[tuple[str, Delta]]:
        """For each segment, the value among those that later ones read (or the output) that differs most."""
        leaving: dict[str, Delta] = {}
        for i in order:
            segment = self.infer.records[i].precision.segment
            readers = self._readers(i)
            if any(self.infer.records[u].precision.segment != segment or u == self.infer.output for u in readers):
                delta = self._deltas[i]
                if segment not in leaving or delta.relative >= leaving[segment].relative:
                    leaving[segment] = delta
        yield from leaving.items()

    def _readers(self, name: str) -> Iterator[str]:
        for user, _ in self.infer.users[name]:
            if user in self.inclusion.forward:
                if self.infer.records[user].op == "getitem":
                    yield from self._readers(user)
                yield user


def _note(finding: Finding, kind: str) -> Finding:
    rule = RULES[kind]
    words = f"{finding.message} ({finding.code}); {rule.words}"
    return replace(finding, code=rule.code, message=words, remedy=rule.remedy, inherited=0)


def swapped(ours: Any, theirs: Any) -> tuple[Any, bool]:
    """``ours`` in the layout, format and device of ``theirs``, and whether that is possible; ``theirs`` if not."""
    if isinstance(theirs, tuple | list):
        pairs = [swapped(a, b) for a, b in zip(ours, theirs, strict=True)]
        return type(theirs)(v for v, _ in pairs), all(done for _, done in pairs)
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        value = _like(ours, theirs)
        return (theirs, False) if value is None else (value, True)
    if isinstance(ours, QTensor) and isinstance(theirs, QTensor):
        codes, scales = _like(ours.codes, theirs.codes), _like(ours.scales, theirs.scales)
        if codes is not None and scales is not None:
            return QTensor(codes, scales, theirs.shape, theirs.format), True
    return theirs, not isinstance(theirs, Tensor | QTensor)


def _like(ours: Tensor, theirs: Tensor) -> Tensor | None:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return None
    if ours.stride() == theirs.stride() and ours.device == theirs.device:
        return ours
    return torch.empty_like(theirs).copy_(ours)
