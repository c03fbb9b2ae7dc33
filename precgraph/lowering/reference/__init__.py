"""Reference kernels: plain torch on any device, bitwise row-invariant, the oracle of every other backend.

Nodes of ``aten`` arithmetic get the upstream definitions of :mod:`precgraph.ops` themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from precgraph import ops
from precgraph.format import Format
from precgraph.graph import precision
from precgraph.lowering.reference import elementwise, experts, gemm
from precgraph.lowering.reference.attention import attend, attend_packed_backward
from precgraph.lowering.registry import Kernel, Serves, register
from precgraph.runtime.contexts import AttentionContext, PackedContext


def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: ops.AttentionSpec, *, context: AttentionContext
) -> tuple[Tensor, Tensor]:
    """Every sequence of the context on its own; a context without a backward gets an empty log-sum-exp."""
    out = q.new_empty(q.shape[1], spec.heads, spec.head_dim)
    lse = torch.empty(q.shape[1], spec.heads, dtype=torch.float32, device=q.device)
    for s in context.sequences(spec.layer, k, v):
        out[s.start : s.stop], lse[s.start : s.stop] = attend(
            q[0, s.start : s.stop], s.keys, s.values, s.position, spec, need_lse=True
        )
    return out.flatten(1).unsqueeze(0), lse


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: ops.AttentionSpec, *,
    context: PackedContext,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(dq, dk, dv)`` of packed sequences."""
    return attend_packed_backward(dy, q, k, v, out, lse, context.bounds, spec)


def _exact(node: fx.Node) -> bool:
    return precision(node).rule("arithmetic") == "exact"


def _aten(node: fx.Node) -> bool:
    return precision(node).rule("arithmetic") == "aten"


def _any(_: fx.Node) -> bool:
    return True


def _computes(dtype: str, serves: Serves = _exact) -> Serves:
    return lambda node: serves(node) and precision(node).compute == dtype


def _operands(node: fx.Node) -> list[Any]:
    return [precision(a).format for a in node.all_input_nodes]


Blocks = Callable[[tuple[int, int], tuple[int, int]], int]  # of both operands -> the length of a group, or 0


def _along_columns(x: tuple[int, int], weight: tuple[int, int]) -> int:
    """FProp: one row a scale, both grouped alike along K."""
    return x[1] if x[0] == 1 and x[1] == weight[1] else 0


def _along_rows_of_weight(dy: tuple[int, int], weight: tuple[int, int]) -> int:
    """DGrad: one row a scale, both grouped alike along N."""
    return dy[1] if dy[0] == 1 and dy[1] == weight[0] else 0


def _along_tokens(dy: tuple[int, int], x: tuple[int, int]) -> int:
    """WGrad: one column of dy a scale, both grouped alike along tokens."""
    return dy[0] if dy[1] == 1 and dy[0] == x[0] else 0


def _fp8(blocks: Blocks, *, exact: bool, output: str = "bfloat16") -> Serves:
    """FP8 operands in such blocks, whose groups have (or have not) an exact sum in float64.

    E4M3 values are multiples of 2^-9 below 2^9, E5M2 ones of 2^-16 below 2^16: a group of 128 E4M3 products fits 43
    bits, one with an E5M2 operand does not fit float64's 53, and its sum depends on the order.
    """

    def serves(node: fx.Node) -> bool:
        pairs = list(zip(_formats(node.args[0]), _formats(node.args[1]), strict=True))
        if not _exact(node) or not _sums_in_fp32(node, output):
            return False
        if not all(a.is_quantized and b.is_quantized and blocks(a.block, b.block) for a, b in pairs):
            return False
        bits = (_BITS[a.dtype] + _BITS[b.dtype] + math.log2(blocks(a.block, b.block)) for a, b in pairs)
        return (max(bits) <= 53) == exact

    return serves


_BITS = {"float8_e4m3fn": 18, "float8_e5m2": 32}


def _formats(operand: Any) -> list[Format]:
    return [precision(n).format for n in (operand if isinstance(operand, list | tuple) else [operand])]


def _slices(node: fx.Node) -> bool:
    return precision(node).rule("slices") == "apart"


def _whole(node: fx.Node) -> bool:
    return not _slices(node)


def _plain_operands(node: fx.Node, output: str = "bfloat16") -> bool:
    formats = _operands(node)[:2]
    return _exact(node) and not any(f.is_quantized for f in formats) and _sums_in_fp32(node, output)


def _plain_sums(node: fx.Node) -> bool:
    return _plain_operands(node, "float32")


def _wide_result(node: fx.Node) -> bool:
    return _exact(node) and _sums_in_fp32(node, "float32")


def _sums_in_fp32(node: fx.Node, output: str) -> bool:
    """Products summed in fp32, the result rounded to ``output``."""
    return precision(node).accumulate == "float32" and precision(node).format.dtype == output


def _linear_aten(node: fx.Node) -> bool:
    formats = _operands(node)
    return _aten(node) and not any(f.is_quantized for f in formats) and _sums_in_fp32(node, formats[0].dtype)


def _head_aten(node: fx.Node) -> bool:
    return _linear_aten(node) and precision(node).compute == _operands(node)[0].dtype


def _head(node: fx.Node) -> bool:
    p = precision(node)
    return _exact(node) and p.compute == "bfloat16" and p.format.dtype == "float32"


def _norm(reduction: str, serves: Serves, cast: str = "before_weight") -> Serves:
    """A norm computed in fp32 whose sum and last rounding follow these rules."""

    def holds(node: fx.Node) -> bool:
        p = precision(node)
        rules = (p.rule("reduction"), p.rule("cast"))
        return serves(node) and p.compute == "float32" and rules == (reduction, cast)

    return holds


def _attention(node: fx.Node) -> bool:
    p = precision(node)
    return p.compute == "float32" and p.rule("probabilities") == "bfloat16"


def _bf16_rope(node: fx.Node) -> bool:
    return precision(node).compute == "bfloat16" and _table(node) == "bfloat16"


def _wide_rope(node: fx.Node) -> bool:
    """A rotation in fp32: rounded once, but for torch's own backward of an fp32 table."""
    return precision(node).compute == "float32" and not _wide_rope_aten(node)


def _wide_rope_aten(node: fx.Node) -> bool:
    return _aten(node) and precision(node).compute == "float32" and _table(node) == "float32"


def _table(node: fx.Node) -> str:
    return precision(node.args[1]).format.dtype  # type: ignore[arg-type]


def _reference(op: Callable[..., Any], run: Callable[..., Any], serves: Serves, rule: str, **more: Any) -> Kernel:
    return Kernel(op.__name__, "reference", run, f"reference.{op.__name__}.{rule}", serves, **more)


def _upstream(op: Callable[..., Any], serves: Serves = _aten, **more: Any) -> Kernel:
    return Kernel(op.__name__, "reference", op, f"aten.{op.__name__}", serves, **{"row_invariant": False, **more})


_BACKWARD = {"row_invariant": False}

register(
    # moves and roundings: one definition in every arithmetic
    _upstream(ops.embedding, _any, row_invariant=True),
    _upstream(ops.embedding_backward, _any),
    _upstream(ops.split_heads, _any, row_invariant=True),
    _upstream(ops.merge_heads, _any, row_invariant=True),
    _upstream(ops.add, _any, row_invariant=True),
    _upstream(ops.cast, _any, row_invariant=True),
    _upstream(ops.accumulate_grad, _any, row_invariant=True),
    _upstream(ops.vjp, _any),
    _upstream(ops.rope_table, _any, row_invariant=True),
    _upstream(ops.rope, _bf16_rope, row_invariant=True),
    _upstream(ops.rope_backward, _bf16_rope, row_invariant=True),
    _reference(ops.quantize, ops.quantize, _whole, "v1"),
    _reference(ops.quantize, experts.quantize_slices, _slices, "v1_slices"),
    _reference(ops.quantize_dispatched, ops.quantize_dispatched, _any, "v1", row_invariant=False),
    # GEMMs
    _reference(ops.linear, gemm.fp8_linear, _fp8(_along_columns, exact=True), "fp8_exact_groups",
               pack=gemm.Float64Weight),
    _reference(ops.linear_dgrad, gemm.fp8_dgrad, _fp8(_along_rows_of_weight, exact=True), "fp8_exact_groups",
               pack=gemm.Float64Weight),
    _reference(ops.linear_dgrad, gemm.fp8_dgrad, _fp8(_along_rows_of_weight, exact=False), "fp8_float64_groups",
               pack=gemm.Float64Weight, **_BACKWARD),
    _reference(ops.linear_wgrad, gemm.fp8_wgrad, _fp8(_along_tokens, exact=True), "fp8_exact_groups", **_BACKWARD),
    _reference(ops.linear_wgrad, gemm.fp8_wgrad, _fp8(_along_tokens, exact=False), "fp8_float64_groups", **_BACKWARD),
    _reference(ops.linear_wgrad, gemm.fp8_wgrad_sums, _fp8(_along_tokens, exact=True, output="float32"),
               "fp8_exact_groups", **_BACKWARD),
    _reference(ops.linear_wgrad, gemm.fp8_wgrad_sums, _fp8(_along_tokens, exact=False, output="float32"),
               "fp8_float64_groups", **_BACKWARD),
    _reference(ops.linear, gemm.tiled_linear, _plain_operands, "tiles16", pack=gemm.Float32Weight),
    _reference(ops.lm_head, gemm.tiled_logits, _head, "tiles16", pack=gemm.Float32Weight),
    _reference(ops.linear_dgrad, gemm.plain_dgrad, _plain_operands, "fp32", pack=gemm.Float32Weight, **_BACKWARD),
    _reference(ops.linear_wgrad, gemm.plain_wgrad, _plain_operands, "fp32", **_BACKWARD),
    _reference(ops.linear_wgrad, gemm.plain_wgrad_sums, _plain_sums, "fp32", **_BACKWARD),
    _reference(ops.bias_grad, gemm.bias_grad, _exact, "fp32", **_BACKWARD),
    _upstream(ops.linear, _linear_aten),
    _upstream(ops.lm_head, _head_aten),
    _upstream(ops.linear_dgrad, _linear_aten),
    _upstream(ops.linear_wgrad, _linear_aten),
    _upstream(ops.bias_grad),
    # experts
    _reference(ops.expert_linear, experts.linear(gemm.fp8_linear), _fp8(_along_columns, exact=True),
               "fp8_exact_groups", pack=experts.Float64Experts),
    _reference(ops.expert_dgrad, experts.dgrad(gemm.fp8_dgrad), _fp8(_along_rows_of_weight, exact=True),
               "fp8_exact_groups", pack=experts.Float64Experts, **_BACKWARD),
    _reference(ops.expert_wgrad, experts.fp8_wgrad, _fp8(_along_tokens, exact=True), "fp8_exact_groups", **_BACKWARD),
    _reference(ops.expert_linear, experts.linear(gemm.tiled_linear), _plain_operands, "tiles16",
               pack=experts.Float32Experts),
    _reference(ops.expert_dgrad, experts.dgrad(gemm.plain_dgrad), _plain_operands, "fp32",
               pack=experts.Float32Experts, **_BACKWARD),
    _reference(ops.expert_wgrad, experts.plain_wgrad, _plain_operands, "fp32", **_BACKWARD),
    _upstream(ops.expert_linear, _linear_aten), _upstream(ops.expert_dgrad, _linear_aten),
    _upstream(ops.expert_wgrad, _linear_aten),
    _reference(ops.wide_linear, experts.wide_linear, _wide_result, "tiles16", pack=gemm.Float32Weight),
    _reference(ops.wide_linear_backward, experts.wide_linear_backward, _exact, "fp32", **_BACKWARD),
    _upstream(ops.wide_linear), _upstream(ops.wide_linear_backward),
    _upstream(ops.combine, _any, row_invariant=True),
    _reference(ops.combine_backward, experts.combine_backward, _exact, "pieces512", **_BACKWARD),
    _upstream(ops.combine_backward),
    _reference(ops.top_k, experts.top_k, _exact, "first_of_equals"), _upstream(ops.top_k),
    _upstream(ops.top_k_backward, _any),
    _reference(ops.row_sum, experts.row_sum, _exact, "pieces512"), _upstream(ops.row_sum),
    # around them
    _reference(ops.rms_norm, elementwise.rms_norm, _norm("pieces512", _exact), "pieces512"),
    _reference(ops.rms_norm_backward, elementwise.rms_norm_backward, _norm("pieces512", _exact), "pieces512",
               **_BACKWARD),
    _upstream(ops.rms_norm, _norm("aten", _aten)),
    _upstream(ops.rms_norm_backward, _norm("aten", _aten)),
    _reference(ops.wide_rms_norm, elementwise.wide_rms_norm, _norm("pieces512", _exact, "after_weight"), "pieces512"),
    _reference(ops.wide_rms_norm_backward, elementwise.wide_rms_norm_backward,
               _norm("pieces512", _exact, "after_weight"), "pieces512", **_BACKWARD),
    _upstream(ops.wide_rms_norm, _norm("aten", _aten, "after_weight")),
    _upstream(ops.wide_rms_norm_backward, _norm("aten", _aten, "after_weight")),
    _reference(ops.rope, elementwise.wide_rope, _wide_rope, "fp32"),
    _reference(ops.rope_backward, elementwise.wide_rope_backward, _wide_rope, "fp32"),
    _upstream(ops.rope, _wide_rope_aten, row_invariant=True),
    _upstream(ops.rope_backward, _wide_rope_aten, row_invariant=True),
    _reference(ops.polar_table, elementwise.polar_table, _exact, "fp32"), _upstream(ops.polar_table),
    _reference(ops.polar_rope, elementwise.polar_rope, _exact, "fp32"), _upstream(ops.polar_rope),
    _reference(ops.polar_rope_backward, elementwise.polar_rope_backward, _exact, "fp32"),
    _upstream(ops.polar_rope_backward),
    _reference(ops.softcap, elementwise.softcap, _computes("float32"), "composed"),
    _reference(ops.softcap_backward, elementwise.softcap_backward, _computes("float32"), "composed"),
    _upstream(ops.softcap), _upstream(ops.softcap_backward),
    _reference(ops.activate, elementwise.activate, _computes("float32"), "composed"),
    _reference(ops.activate_backward, elementwise.activate_backward, _computes("float32"), "composed"),
    _reference(ops.gated, elementwise.gated, _computes("float32"), "composed"),
    _reference(ops.gated_backward, elementwise.gated_backward, _computes("float32"), "composed"),
    _upstream(ops.activate, _computes("float32", _aten)), _upstream(ops.activate_backward, _computes("float32", _aten)),
    _upstream(ops.gated, _computes("float32", _aten)), _upstream(ops.gated_backward, _computes("float32", _aten)),
    _reference(ops.attention, attention, _attention, "tiles", context=True),
    _reference(ops.attention_backward, attention_backward, _attention, "fp32", context=True, **_BACKWARD),
)  # fmt: skip
