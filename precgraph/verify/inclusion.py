"""Inclusion: is the rollout's program inside the training forward? All root causes, by node.

Both graphs are aligned (:mod:`precgraph.verify.align`) and compared node by node and edge by edge. A pair that
differs counts as matched and the walk goes on, so that one run finds every root cause; what differs only because of
something upstream (a kernel's numerics id because an operand has another format, a dtype that follows an operand's)
is counted with its cause. Operands of additions and multiplications are unordered: IEEE arithmetic commutes.

Works on :meth:`PrecisionGraph.records` and shares no code with the passes that build graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from precgraph.errors import CheckError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, Record
from precgraph.recipe import BACKWARD_RULES
from precgraph.verify.align import Aligner, Alignment
from precgraph.verify.program import Program, canonicalise, describe, lineage, same_tensor
from precgraph.verify.regions import Region, Regions
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES, rule
from precgraph.verify.signature import Difference, local_differences

_QUANTIZERS = ("quantize", "quantize_dispatched")
# Attributes that may follow from the dtype of an operand.
_FOLLOWS_OPERAND = ("dtype", "compute")


def check_inclusion(train: PrecisionGraph, infer: PrecisionGraph) -> Report:
    """Compare the forward of ``infer`` with the forward inside ``train``, and their backwards where both have one.

    What only the training graph has (saved copies, the backward) is allowed; a difference that touches only the
    backward is a note; what the graphs cannot decide is in ``not_proved``. CheckError: there is nothing to compare, or
    only one graph is lowered. Linear in the number of nodes and edges.
    """
    return Inclusion(train, infer).run()


class Inclusion:
    """The check as an object: after :meth:`run`, which nodes are pairs and which finding each node differs by."""

    def __init__(self, train: PrecisionGraph, infer: PrecisionGraph) -> None:
        self.graphs = train, infer
        self.train, self.infer = Program(train, "training"), Program(infer, "rollout")
        canonicalise(self.train, self.infer)
        self.alignment = Alignment()
        if self.train.is_lowered != self.infer.is_lowered:
            which = "training" if self.train.is_lowered else "rollout"
            raise CheckError(
                f"only the {which} graph is lowered, so kernels cannot be compared", remedy=RULES["not_lowered"].remedy
            )
        self.kernels = self.train.is_lowered
        self.forward, self.train_forward = set(self.infer.forward), set(self.train.forward)
        self.differing: dict[str, dict[str, Difference]] = {}  # rollout node -> what is reported of it
        self.following: dict[str, dict[str, Difference]] = {}  # what differs there because an operand does
        self.owner_i: dict[str, int] = {}  # rollout node -> index of the finding that it is or inherits
        self.owner_t: dict[str, int] = {}  # the same for training nodes that have no counterpart
        self.found: list[Finding] = []
        self.places: list[tuple[bool, int]] = []  # of each finding: is it in the backward only, and where
        self.inherited: dict[int, int] = defaultdict(int)

    def run(self) -> Report:
        ts, is_ = self._align()
        self.regions = Regions(self.train, self.infer, self.alignment, ts, is_)
        self.order = {i: k for k, i in enumerate(is_)}
        pairs = [i for i in is_ if i in self.alignment.to_train]
        for i in pairs:
            self._pair(self.alignment.to_train[i], i)
        for region in self.regions.all:
            self._region(region)
        for i in pairs:
            self._own(i)
        violations, notes = [], []
        for k in sorted(range(len(self.found)), key=self.places.__getitem__):
            finding = replace(self.found[k], inherited=self.inherited[k])
            if self.places[k][0]:
                notes.append(_as_note(finding))
            else:
                violations.append(finding)
        compared = sum(i in self.forward for i in pairs)
        return Report(
            compared, tuple(violations), (*notes, *self._recipe_notes()), not_proved=tuple(self._not_proved())
        )

    def _align(self) -> tuple[list[str], list[str]]:
        """Align the forwards, then the backwards if both have one; returns the names in scope, in program order."""
        ts, is_ = self.train.forward, self.infer.forward
        Aligner(self.train, self.infer, self.alignment, ts, is_).run()
        if not any(self.infer.is_operator(i) and i in self.alignment.to_train for i in is_):
            raise CheckError("the two graphs have no operator in common", remedy="pass two programs of one model")
        if self.train.has_backward and self.infer.has_backward:
            Aligner(self.train, self.infer, self.alignment, self.train.rest, self.infer.rest).run()
            ts, is_ = list(self.train.records), list(self.infer.records)
        return ts, is_

    # ------------------------------------------------------------------------------------ one pair
    def _pair(self, t: str, i: str) -> None:
        """Sort what differs at this pair into what is its own and what follows from something upstream."""
        ours, theirs = self.train.records[t], self.infer.records[i]
        found = local_differences(ours, theirs, kernels=self.kernels)
        self.differing[i], self.following[i] = found, {}
        if "operator" in found:
            return
        if ours.op == "parameter":
            found.update(self._parameter(t, i))
        edges, formats_differ = self._edges(t, i, "rule.gemm" in found)
        follows = self._follows(t, i, found)
        found.update(edges)
        if formats_differ or len(found.keys() - follows) > 1:
            follows = [*follows, "numerics"]
        self.following[i] = {name: found.pop(name) for name in follows if name in found}

    def _parameter(self, t: str, i: str) -> dict[str, Difference]:
        a, b = self.train.tensor(t), self.infer.tensor(i)
        found = {}
        ours, theirs = self.train.content(t), self.infer.content(i)
        if ours and theirs and ours != theirs:
            found["content"] = Difference("content", f"sha256 {ours[:12]}", f"sha256 {theirs[:12]}")
        renamed = i in self.alignment.by_structure and self.train.module(t) != self.infer.module(i)
        if not same_tensor(a, b) and not renamed:
            found["parameter"] = Difference("parameter", describe(self.train, t), describe(self.infer, i))
        return found

    def _follows(self, t: str, i: str, found: Mapping[str, Difference]) -> list[str]:
        """Attributes that are what they are because of an operand: what a getitem's source has too, dtypes."""
        pairs = list(self._operand_pairs(t, i))
        if self.infer.records[i].op == "getitem":
            (p, q) = pairs[0]
            source = {**self.differing.get(q, {}), **self.following.get(q, {})}
            if self.alignment.to_infer.get(p) != q or "operator" in source:
                return [name for name in found if name != "arg1"]
            return [name for name, d in found.items() if name != "arg1" and source.get(name) == d]
        dtypes = [(a, b) for p, q in pairs if (a := _dtype(self.train, p)) != (b := _dtype(self.infer, q))]
        return [n for n in _FOLLOWS_OPERAND if n in found and (found[n].train, found[n].infer) in dtypes]

    def _operand_pairs(self, t: str, i: str) -> Iterator[tuple[str, str]]:
        ours, theirs = self.train.operands[t], self._operands(t, i)
        yield from ((producer, theirs[place]) for place, producer in ours.items() if place in theirs)

    # ------------------------------------------------------------------------------------ its edges
    def _edges(self, t: str, i: str, gemm_differs: bool) -> tuple[dict[str, Difference], bool]:
        """Edges that do not lead to one another, and whether any operand's format differs."""
        ours, theirs = self.train.operands[t], self._operands(t, i)
        found: dict[str, Difference] = {}
        formats_differ = False
        for place in dict.fromkeys((*ours, *theirs)):
            p, q = ours.get(place), theirs.get(place)
            if p is None or q is None:
                found[place] = self._one_sided(t, i, place, p, q)
                continue
            a, b = self.train.records[p].precision.format, self.infer.records[q].precision.format
            formats_differ |= a != b or _dtype(self.train, p) != _dtype(self.infer, q)
            if gemm_differs and a.is_quantized != b.is_quantized:
                found[place] = Difference(place, str(a), str(b), "format")
            elif self.alignment.to_infer.get(p) != q and not self.regions.explains(p, q):
                found[place] = self._edge(place, p, q)
        return found, formats_differ

    def _operands(self, t: str, i: str) -> Mapping[str, str]:
        """The rollout's operands, in the training side's order where their order changes nothing."""
        ours, theirs = self.train.operands[t], self.infer.operands[i]
        return self._ordered(ours, theirs) if self.train.commutes(t) and self.infer.commutes(i) else theirs

    def _ordered(self, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Mapping[str, str]:
        """The other's operands in the order in which they agree with ours, if either order does."""
        swapped = dict(zip(theirs, reversed(list(theirs.values())), strict=True))

        def agreeing(operands: Mapping[str, str]) -> int:
            return sum(self.alignment.to_infer.get(p) == operands.get(place) for place, p in ours.items())

        return max(theirs, swapped, key=agreeing)

    def _edge(self, place: str, p: str, q: str) -> Difference:
        if self.train.is_leaf(p) and self.infer.is_leaf(q):
            return Difference(place, describe(self.train, p), describe(self.infer, q), "parameter")
        sides = ((self.train, p), (self.infer, q))
        words = [describe(*side) for side in sides]
        if words[0] == words[1]:
            words = [lineage(*side) for side in sides]
        formats = [program.records[n].precision.format for program, n in sides]
        return Difference(place, f"{words[0]} ({formats[0]})", f"{words[1]} ({formats[1]})", "operand")

    def _one_sided(self, t: str, i: str, place: str, p: str | None, q: str | None) -> Difference:
        a = describe(self.train, p) if p else str(self.train.records[t].attributes.get(place)).lower()
        b = describe(self.infer, q) if q else str(self.infer.records[i].attributes.get(place)).lower()
        return Difference(place, a, b, "operand")

    # ------------------------------------------------------------------------------------ findings
    def _region(self, region: Region) -> None:
        """Operators of one side only: one finding, unless they are the quantisers of linears that report it."""
        consumers = region.consumers
        if region.only_quantizers and consumers and all("rule.gemm" in self.differing.get(c, {}) for c in consumers):
            return
        t, i = region.last_t, region.last_i
        kind = "operator" if t and i else "missing operator" if t else "extra operator"
        program, name = (self.infer, i) if i else (self.train, t)
        assert name is not None
        at = min((self.order[c] for c in (*consumers, *region.is_)), default=len(self.order))
        backward = self.forward.isdisjoint(region.is_) and self.train_forward.isdisjoint(region.ts)
        values = (_chain(self.train, region.ts), _chain(self.infer, region.is_))
        index = self._add(program, name, {kind: Difference(kind, *values)}, (backward, at))
        self.owner_i.update(dict.fromkeys(region.is_, index))
        self.owner_t.update(dict.fromkeys(region.ts, index))

    def _own(self, i: str) -> None:
        t, found = self.alignment.to_train[i], self.differing[i]
        if not self._follows_a_cause(t, i):
            following = self.following.pop(i)
            if len(found) + len(following) > 1:
                following.pop("numerics", None)  # follows from the node's other differences
            found.update(following)
        if found:
            self.owner_i[i] = self._add(self.infer, i, found, (i not in self.forward, self.order[i]))
            return
        above = (
            *(self.owner_i.get(q) for q in self.infer.operands[i].values()),
            *(self.owner_t.get(p) for p in self.train.operands[t].values()),
        )
        owner = next((o for o in above if o is not None), None)
        if owner is not None:
            self.owner_i[i] = owner
            if i != self.infer.output:
                self.inherited[owner] += 1

    def _follows_a_cause(self, t: str, i: str) -> bool:
        """Whether an operand differs in itself, has no counterpart, or follows from such a one: all are reported."""
        return any(
            self.alignment.to_infer.get(p) != q or self.differing.get(q) or self.following.get(q)
            for p, q in self._operand_pairs(t, i)
        )

    def _add(self, program: Program, name: str, found: Mapping[str, Difference], place: tuple[bool, int]) -> int:
        record = program.records[name]
        # A linear that is quantised on one side has other operands for that reason.
        found = dict(sorted(found.items(), key=lambda item: item[0] != "rule.gemm"))
        rules = [RULES[d.kind] if d.kind else rule(d.attribute) for d in found.values()]
        first = rules[0]
        words = "; ".join(dict.fromkeys(r.words for r in rules))
        self.found.append(
            Finding(
                first.code, record.precision.module, name, record.op,
                tuple(found), tuple(d.train for d in found.values()), tuple(d.infer for d in found.values()),
                f"differs in {words}", first.remedy, codes=tuple(r.code for r in rules),
                quantises=_quantises(record),
            )
        )  # fmt: skip
        self.places.append(place)
        return len(self.found) - 1

    # ------------------------------------------------------------------------------------ notes
    def _not_proved(self) -> Iterator[Finding]:
        """What neither graph says, and the rollout's numbers may depend on."""
        if not self.kernels:
            yield _note("not_lowered", message="neither graph is lowered, so no kernels were compared")
        yield from self._row_invariance()
        for i in self.infer.forward:
            t = self.alignment.to_train.get(i)
            if t is None or self.infer.records[i].op != "parameter":
                continue
            a, b, module = describe(self.train, t), describe(self.infer, i), self.infer.records[i].precision.module
            same = a == b or same_tensor(self.train.tensor(t), self.infer.tensor(i))
            if i in self.alignment.by_structure and not same:
                yield _note("renamed", module, i, "parameter", {"parameter": Difference("parameter", a, b)})
            known = [bool(program.content(n)) for program, n in ((self.train, t), (self.infer, i))]
            one_model = self.train.tensor_record(t) is self.infer.tensor_record(i)  # both programs are of one trace
            if self.infer.tensor_record(i).buffer and not all(known) and not one_model:
                words = ["known" if k else "not known" for k in known]
                yield _note("no content", module, i, "parameter", {"content": Difference("content", *words)})

    def _recipe_notes(self) -> Iterator[Finding]:
        """Backward rules of the recipes, where the rollout has no backward whose nodes could be compared."""
        a, b = (graph.recipe for graph in self.graphs)
        if a is None or b is None or (self.train.has_backward and self.infer.has_backward):
            return
        if ("weight" in a.get("linear", {})) != ("weight" in b.get("linear", {})):
            return  # the forward differs, and every linear says so
        for table, key in BACKWARD_RULES:
            ours, theirs = a.get(table, {}).get(key), b.get(table, {}).get(key)
            if ours != theirs:
                name = f"{table}.{key}"
                yield _note("backward", "", "", "recipe", {name: Difference(name, _flat(ours), _flat(theirs))})

    def _row_invariance(self) -> Iterator[Finding]:
        if self.kernels and not any("kernel" in node.meta for node in self.graphs[1]):
            yield _note("row_invariant", message="the rollout's graph was read from data, which has no kernels")
        refused = set(self.graphs[1].refused())
        for node in self.graphs[1]:
            kernel = node.meta.get("kernel")
            if kernel is None or node.name not in self.forward or kernel.row_invariant:
                continue
            record = self.infer.records[node.name]
            known = "not row-invariant" if kernel.row_invariant is False else "not known to be row-invariant"
            message = f"{record.op} ({kernel.numerics}) is {known}"
            note = _note("row_invariant", record.precision.module, record.name, record.op, message=message)
            yield note.with_refusal() if node in refused else note


def _note(
    kind: str, module: str = "", node: str = "", op: str = "graph", found: Mapping[str, Difference] | None = None,
    message: str = "",
) -> Finding:  # fmt: skip
    r, differences = RULES[kind], found or {}
    return Finding(
        r.code, module, node, op, tuple(differences), tuple(d.train for d in differences.values()),
        tuple(d.infer for d in differences.values()), message or r.words, r.remedy,
    )  # fmt: skip


def _as_note(f: Finding) -> Finding:
    r = RULES["backward"]
    return replace(f, code=r.code, remedy=r.remedy, message=f"{f.message} ({f.code}), in the backward only")


def _quantises(record: Record) -> str:
    """Of a quantiser what it quantises; what is saved for the backward is an activation."""
    if record.op not in _QUANTIZERS:
        return ""
    return "activation" if record.precision.role == "saved" else record.precision.role


def _chain(program: Program, names: Sequence[str]) -> str:
    return ", ".join(f"{program.records[n].op} to {program.records[n].precision.format}" for n in names) or "none"


def _dtype(program: Program, name: str) -> str:
    """The dtype of a value before it was quantised."""
    record = program.records[name]
    return record.tensor.dtype if record.tensor is not None else record.precision.format.dtype


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(Format.from_dict(value))
    return "none" if value is None else str(value)
