"""Predicates on GEMM nodes that the GPU backends share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from precgraph.formats import Format
from precgraph.graph import precision


def fp8(left: str, right: str) -> Callable[[fx.Node], bool]:
    """Exact arithmetic, fp32 sums, E4M3 operands of these granularities."""
    return lambda node: _exact(node) and _operands(node, 0, _is_e4m3(left)) and _operands(node, 1, _is_e4m3(right))


def bf16(output: str) -> Callable[[fx.Node], bool]:
    """Exact arithmetic, fp32 sums, bf16 operands, this output dtype."""
    return lambda node: (
        _exact(node) and _operands(node, 0, _is_bf16) and _operands(node, 1, _is_bf16)
        and precision(node).format == Format.plain(output)
    )  # fmt: skip


def _exact(node: fx.Node) -> bool:
    return precision(node).rule("arithmetic") == "exact" and precision(node).accumulate == "float32"


def _operands(node: fx.Node, index: int, holds: Callable[[Format], bool]) -> bool:
    operand: Any = node.args[index]
    return all(holds(precision(n).format) for n in (operand if isinstance(operand, list | tuple) else [operand]))


def _is_e4m3(granularity: str) -> Callable[[Format], bool]:
    return lambda fmt: fmt.dtype == "float8_e4m3fn" and fmt.granularity == granularity


def _is_bf16(fmt: Format) -> bool:
    return fmt == Format.plain("bfloat16")
