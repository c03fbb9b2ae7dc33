"""Predicates on GEMM nodes, and groups of them, that the GPU backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from precgraph import ops
from precgraph.format import Format
from precgraph.graph import precision
from precgraph.lowering.fuse import Fused, Match, Of
from precgraph.lowering.packs import adjacent
from precgraph.quantizer import QTensor


def fp8(left: str, right: str, output: str = "bfloat16") -> Callable[[fx.Node], bool]:
    """Exact arithmetic, fp32 sums, E4M3 operands of these granularities, this output dtype."""
    return lambda node: (
        _exact(node) and _operands(node, 0, _is_e4m3(left)) and _operands(node, 1, _is_e4m3(right))
        and precision(node).format == Format.plain(output)
    )  # fmt: skip


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


def joint_wgrads(run: Callable[[QTensor, QTensor], Tensor], dys: Sequence[QTensor], x: QTensor) -> list[Tensor]:
    """WGrads ``[N_i, K]`` by ``run`` of linears that read one value: one GEMM where gradients lie side by side."""
    joint = adjacent(dys)
    if joint is None:
        return [run(d, x) for d in dys]
    return list(run(joint, x).split([d.shape[-1] for d in dys]))


def wgrads(run: Callable[[QTensor, QTensor], Tensor], serves: Callable[[fx.Node], bool]) -> Match:
    """The WGrads ``run`` of linears that read one value as one call, in the order of the linears."""

    def match(members: Sequence[fx.Node], escaping: frozenset[fx.Node]) -> Fused | None:
        x = members[0].args[1]
        members = members[::-1]  # a backward meets the last linear first
        if any(n.target is not ops.linear_wgrad or n.args[1] is not x or not serves(n) for n in members):
            return None
        return Fused(partial(joint_wgrads, run), ([Of(n, 0) for n in members], Of(members[0], 1)), tuple(members))

    return match
