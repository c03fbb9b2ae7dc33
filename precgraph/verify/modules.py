"""Outputs of modules, as another engine captured them, against a program's: where the first one differs.

Nothing is known of how the other engine makes them, so the order of the modules is all that there is: what differs
after the first need not be wrong by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from precgraph.errors import CheckError
from precgraph.graph import PrecisionGraph
from precgraph.verify.numerics import LogProbs, Measured, Numerics, mismatch, next_logprobs
from precgraph.verify.program import Program
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES
from precgraph.verify.values import Delta, compare

_LAYER = re.compile(r"(.*\.)?(layers|h|blocks)\.\d+")


def module_outputs(graph: PrecisionGraph) -> dict[str, str]:
    """For each module that makes a plain tensor, the node that is its output: the last one in it or below it.

    Quantisers are left out: they stand in the module whose value they read, for those who read it next.
    """
    program = Program(graph, "captured")
    found: dict[str, str] = {}
    for name in program.forward:
        record = program.records[name]
        if not program.is_operator(name) or record.op == "quantize" or record.tensor is None:
            continue
        if record.precision.phase != "forward":
            continue
        parts = record.precision.module.split(".") if record.precision.module else []
        for size in range(1, len(parts) + 1):
            found[".".join(parts[:size])] = name
    return dict(sorted(found.items(), key=lambda item: program.forward.index(item[1])))


class ModuleComparison:
    """Takes pairs of outputs in the order of ``order``. ``ours`` and ``theirs`` are the modules of both sides.

    CheckError if they have no module in common.
    """

    def __init__(self, ours: Iterable[str], theirs: Iterable[str], ids: Tensor) -> None:
        ours, others = list(ours), set(theirs)
        self.ids = ids
        self.order = [module for module in ours if module in others]
        self.ours = ours
        self.missing = sorted(others - set(ours))  # on the training side
        if not self.order:
            first = ", ".join(sorted(others)[:3])
            raise CheckError(
                f"none of the {len(others)} captured tensors ({first} ...) is named after a module of the model",
                remedy=f"name them by module path, such as {ours[len(ours) // 2] if ours else 'lm_head'}",
            )
        self._deltas: dict[str, Delta] = {}
        self._logprobs: LogProbs | None = None

    def add(self, module: str, ours: Any, theirs: Any) -> None:
        """The outputs of one module: ``[tokens, features]``, or with a leading 1.

        Two floating point dtypes are compared as the numbers that they hold. CheckError for what does not fit.
        """
        a, b = self._rows(ours, module), self._rows(theirs, module)
        if a.shape != b.shape:
            raise CheckError(
                f"its output is {list(b.shape)} on one side and {list(a.shape)} on the other", path=module,
                remedy="capture [tokens, features] of the module of this name",
            )  # fmt: skip
        for rows in (a, b):
            # bf16 that was stored as fp32 is the same numbers; codes without scales and indices are none.
            if not rows.is_floating_point() or rows.dtype.itemsize < 2:
                raise CheckError(
                    f"its output was captured as {_dtype(rows)}", path=module,
                    remedy="capture what the engine passes on: bf16, fp16 or fp32, dequantised",
                )  # fmt: skip
        self._deltas[module] = compare(a, b, module)
        if module == "lm_head" and len(self.ids) > 1:
            self._logprobs = mismatch(next_logprobs(a, self.ids), next_logprobs(b, self.ids))

    def _rows(self, value: Any, module: str) -> Tensor:
        if not isinstance(value, Tensor):
            raise CheckError("its output is no plain tensor", path=module, remedy="leave it out")
        tokens = len(self.ids)
        rows = value.squeeze(0) if value.dim() > 1 and value.shape[0] == 1 and tokens > 1 else value
        if rows.dim() == 0 or rows.shape[0] != tokens:
            raise CheckError(
                f"its output is {list(value.shape)}, and {tokens} tokens were captured", path=module,
                remedy="capture [tokens, features] of one unpadded sequence",
            )  # fmt: skip
        return rows.reshape(tokens, -1)

    def result(self) -> Numerics:
        """The findings: the first module that differs, and what was not captured."""
        compared = [m for m in self.order if m in self._deltas]
        differing = [m for m in compared if self._deltas[m].differs]
        first = self._measured(differing[0]) if differing else None
        found = (_finding("hidden state", differing[0], "", len(differing) - 1),) if differing else ()
        absent = [_finding("not captured", m, "the training side has no such module") for m in self.missing]
        if self.order[-1] != self.ours[-1]:
            many = f"{len(self.order)} of {len(self.ours)} modules were captured"
            absent.append(_finding("not captured", "", f"{many}, and nothing after {self.order[-1]} was compared"))
        return Numerics(
            Report(len(compared), found, (), unit="modules", not_proved=tuple(absent)), first, (),
            tuple(self._growth(compared)), self._logprobs, len(differing),
        )  # fmt: skip

    def _measured(self, module: str) -> Measured:
        return Measured("", module, "module", module, self._deltas[module])

    def _growth(self, compared: list[str]) -> Iterator[tuple[str, Delta]]:
        """Whole layers and what is outside them, if whole layers were captured; otherwise everything."""
        layers = [m for m in compared if _LAYER.fullmatch(m)]
        for module in compared:
            if not layers or module in layers or not re.search(r"(^|\.)(layers|h|blocks)\.\d+\.", module):
                yield module, self._deltas[module]


def _finding(kind: str, module: str, message: str, inherited: int = 0) -> Finding:
    rule = RULES[kind]
    words = message or f"differs: {rule.words}"
    return Finding(rule.code, module, "", "module", (), (), (), words, rule.remedy, inherited)


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
