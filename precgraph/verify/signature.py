"""What differs between two aligned nodes, from their records alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from precgraph.format import Format
from precgraph.graph import Record, defaults

# A rule that selects kernels and says nothing that the numerics ids, once there, do not.
_SELECTS_KERNEL = "rule.arithmetic"


@dataclass(frozen=True, slots=True)
class Difference:
    """One attribute of a pair of nodes, with both values in words."""

    attribute: str
    train: str
    infer: str
    kind: str = ""  # "operand" or "parameter" where the attribute is the place of an edge


def local_differences(t: Record, i: Record, *, kernels: bool) -> dict[str, Difference]:
    """Operator, annotation, tensor and attributes; edges are the caller's. ``kernels``: both graphs are lowered."""
    if t.op != i.op:
        return {"operator": Difference("operator", t.op, i.op)}
    if t.op == "output":
        return {}  # repeats the annotation of the value that it returns
    found = [*_formats(t.precision.format, i.precision.format), *_annotation(t, i), *_attributes(t, i)]
    p, q = t.precision, i.precision
    if kernels and p.numerics != q.numerics:
        found.append(Difference("numerics", str(p.numerics), str(q.numerics)))
    elif kernels and p.numerics is not None:
        found = [d for d in found if d.attribute != _SELECTS_KERNEL]
    out: dict[str, Difference] = {}
    for d in found:
        out.setdefault(d.attribute, d)
    return out


def _annotation(t: Record, i: Record) -> Iterator[Difference]:
    p, q = t.precision, i.precision
    for name in ("role", "compute", "accumulate"):
        yield from _unequal(name, getattr(p, name), getattr(q, name))
    rules, others = dict(p.rules), dict(q.rules)
    for name in dict.fromkeys((*rules, *others)):
        yield from _unequal(f"rule.{name}", rules.get(name), others.get(name))
    if t.tensor is not None and i.tensor is not None:
        yield from _unequal("dtype", t.tensor.dtype, i.tensor.dtype)
        if t.op == "parameter":
            yield from _unequal("shape", t.tensor.shape, i.tensor.shape)


def _formats(p: Format, q: Format) -> Iterator[Difference]:
    if p == q:
        return
    if p.is_quantized != q.is_quantized:
        yield Difference("format", str(p), str(q))
        return
    for f in fields(p):
        yield from _unequal(f.name, getattr(p, f.name), getattr(q, f.name))


def _attributes(t: Record, i: Record) -> Iterator[Difference]:
    """Constant arguments; one that is an edge on the other side is compared with the edges."""
    ours, theirs = _normal(t), _normal(i)
    places = {place for place, _ in (*t.operands, *i.operands)}
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if name in places or (_same(a, b) and (name in ours) == (name in theirs)):
            continue
        if t.op == "quantize" and name == "fmt" and isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _formats(Format.from_dict(a), Format.from_dict(b))
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in dict.fromkeys((*a, *b)):
                yield from _unequal(f"{name}.{key}", a.get(key), b.get(key))
        else:
            yield from _unequal(name, a, b)


def _normal(record: Record) -> dict[str, Any]:
    """The attributes, with the defaults of aten's schemas filled in."""
    filled = _defaults(record.op) if record.op.startswith("aten.") else {}
    return {**filled, **record.attributes}


@functools.cache
def _defaults(op: str) -> dict[str, Any]:
    _, packet, overload = op.split(".")
    return defaults(getattr(getattr(torch.ops.aten, packet), overload))


def _unequal(name: str, a: object, b: object) -> Iterator[Difference]:
    if not _same(a, b):
        yield Difference(name, _text(a), _text(b))


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _text(value: object) -> str:
    return "none" if value is None else str(value)
