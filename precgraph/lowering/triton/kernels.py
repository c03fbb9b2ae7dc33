"""The Triton backend's records: which nodes its kernels serve, alone and in fusion groups.

Numerics ids are those of the reference where a test has shown the same bits. What has an id of its own: the GEMMs,
attention, the gradients of norm weights, which are summed over tokens in another order, and ``triton.rope_backward``,
which differs from ``aten.rope_backward`` in the sign of a zero: autograd adds the zeros of the other half to every
gradient, and -0 + 0 is +0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from precgraph import ops
from precgraph.errors import LoweringError
from precgraph.format import Format
from precgraph.graph import precision, tensor
from precgraph.lowering.attention_nodes import WIDTHS, is_flash, spec_of
from precgraph.lowering.fuse import Fused, Fusion, Of, register_fusion
from precgraph.lowering.gemm_nodes import bf16, fp8
from precgraph.lowering.packs import Fp8Weight, MasterWeight
from precgraph.lowering.registry import TAKE_REFERENCE, Kernel, register
from precgraph.lowering.triton import attention, gated, gemm, norm, norm_backward, quantize, rope
from precgraph.lowering.triton.primitives import rule
from precgraph.quantizer import QTensor

_ROWS, _TOKENS, _BLOCKS = "1x128", "128x1", "128x128"
Nodes = Sequence[fx.Node]


def unavailable(device: torch.device) -> LoweringError | None:
    """Why the Triton kernels cannot run on ``device``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return LoweringError(
            "the Triton kernels need a CUDA device with FP8 tensor cores (compute capability 9.0 or newer)",
            remedy=TAKE_REFERENCE,
        )
    return None


# --------------------------------------------------------------------------------- single operators


def _quantize(x: Tensor, fmt: Format) -> QTensor:
    """Activations and gradients; weights are quantised by their packs."""
    if fmt.granularity == _BLOCKS:
        return _quantize_blocks(x, fmt)
    return quantize.quantize_rows(x, fmt) if fmt.granularity == _ROWS else quantize.quantize_tokens(x, fmt)


def _quantize_blocks(x: Tensor, fmt: Format) -> QTensor:
    """An activation in 128x128 blocks, stored transposed, as a WGrad reads it."""
    flat = x.reshape(-1, x.shape[-1])
    codes, scales, codes_t, scales_t = quantize.new_weight(flat.shape, fmt, x.device)
    quantize.quantize_weight(flat, fmt, codes, scales, codes_t, scales_t)
    return QTensor(codes_t.t(), scales_t.t(), x.shape, fmt)


def _wide(run: Callable[..., Any]) -> Callable[..., Any]:
    """A rotation in fp32, rounded once."""
    return lambda x, cos, sin: run(x, cos, sin, wide=True)


def _exact(node: fx.Node) -> bool:
    return precision(node).rule("arithmetic") == "exact" and _bf16(node)


def _bf16(node: fx.Node) -> bool:
    """Whether the first operand is bf16, which the kernels' cast points are made for."""
    source = node.args[0]
    return isinstance(source, fx.Node) and precision(source).format == Format.plain("bfloat16")


def _quantizes(node: fx.Node) -> bool:
    fmt = node.args[1]
    assert isinstance(fmt, Format)
    if fmt.granularity not in (_ROWS, _TOKENS, _BLOCKS):
        return False
    try:
        rule(fmt, fmt.granularity)
    except LoweringError:
        return False
    return True


def _norms(node: fx.Node) -> bool:
    p = precision(node)
    return (
        _exact(node) and p.compute == "float32" and p.rule("reduction") == "pieces512"
        and p.rule("cast") == "before_weight"
    )  # fmt: skip


def _rotates(compute: str) -> Callable[[fx.Node], bool]:
    def serves(node: fx.Node) -> bool:
        table = node.args[1]
        assert isinstance(table, fx.Node)
        tables = ("bfloat16",) if compute == "bfloat16" else ("bfloat16", "float32")
        return _bf16(node) and precision(node).compute == compute and precision(table).format.dtype in tables

    return serves


def _gates(node: fx.Node) -> bool:
    return _exact(node) and precision(node).compute == "float32"


def _attends(node: fx.Node) -> bool:
    """Attention under a window, which FlashAttention-3 does not serve."""
    return is_flash(node, WIDTHS) and bool(spec_of(node).window)


def _kernel(op: str, run: Callable[..., Any], numerics: str, serves: Callable[[fx.Node], bool], **more: Any) -> Kernel:
    return Kernel(op, "triton", run, numerics, serves, **more)


register(
    # GEMMs where DeepGEMM is absent
    _kernel("linear", gemm.fp8_linear, "triton.fp8_tiles128", fp8(_ROWS, _BLOCKS), pack=Fp8Weight),
    _kernel("linear_dgrad", gemm.fp8_dgrad, "triton.fp8_tiles128", fp8(_ROWS, _BLOCKS), pack=Fp8Weight),
    _kernel("linear_wgrad", gemm.fp8_wgrad, "triton.fp8_tiles128", fp8(_TOKENS, _TOKENS), row_invariant=False),
    _kernel("linear", gemm.bf16_linear, "triton.bf16_tiles128", bf16("bfloat16"), pack=MasterWeight),
    _kernel("lm_head", gemm.bf16_logits, "triton.bf16_tiles128", bf16("float32"), pack=MasterWeight),
    _kernel("linear_dgrad", gemm.bf16_dgrad, "triton.bf16_tiles128", bf16("bfloat16"), pack=MasterWeight),
    _kernel("linear_wgrad", gemm.bf16_wgrad, "triton.bf16_tiles128", bf16("bfloat16"), row_invariant=False),
    _kernel("attention", attention.attention, "triton.attention_tiles64", _attends, context=True),
    # around them
    _kernel("add", ops.add, "aten.add", _bf16),
    _kernel("quantize", _quantize, "reference.quantize.v1", _quantizes),
    _kernel("rms_norm", norm.rms_norm, "reference.rms_norm.pieces512", _norms),
    _kernel(
        "rms_norm_backward", norm_backward.rms_norm_backward, "triton.rms_norm_backward", _norms, row_invariant=False
    ),
    _kernel("rope", rope.rope, "aten.rope", _rotates("bfloat16")),
    _kernel("rope", _wide(rope.rope), "reference.rope.fp32", _rotates("float32")),
    _kernel("rope_backward", rope.rope_backward, "triton.rope_backward", _rotates("bfloat16")),
    _kernel("rope_backward", _wide(rope.rope_backward), "reference.rope_backward.fp32", _rotates("float32")),
    _kernel("gated", gated.gated, "reference.gated.composed", _gates),
    _kernel("gated_backward", gated.gated_backward, "reference.gated_backward.composed", _gates),
)


# ------------------------------------------------------------------------------------------ groups


def _one(members: Nodes, target: Callable[..., Any]) -> fx.Node | None:
    """The only member that calls ``target``."""
    found = [n for n in members if n.target is target]
    return found[0] if len(found) == 1 else None


def _quantizers(members: Nodes, source: fx.Node) -> dict[str, fx.Node] | None:
    """The quantisers of ``source`` by granularity; None if there is one that the fused kernels do not know."""
    found: dict[str, fx.Node] = {}
    for node in members:
        if node.target is ops.quantize and node.args[0] is source:
            granularity = str(precision(node).format.granularity)
            if granularity not in (_ROWS, _TOKENS) or granularity in found:
                return None
            found[granularity] = node
    return found


def _formats(quantizers: dict[str, fx.Node]) -> tuple[Format | None, Format | None]:
    """The formats along rows and along tokens; None where there is no such quantiser."""
    rows, tokens = (quantizers.get(g) for g in (_ROWS, _TOKENS))
    return (precision(rows).format if rows else None), (precision(tokens).format if tokens else None)


def _getitems(members: Nodes, source: fx.Node) -> dict[int, fx.Node]:
    return {n.args[1]: n for n in members if n.target is operator.getitem and n.args[0] is source}  # type: ignore[misc]


def _norm_quantize(members: Nodes, escaping: frozenset[fx.Node]) -> Fused | None:
    """(add,) rms_norm, quantisers."""
    node, add = _one(members, ops.rms_norm), _one(members, ops.add)
    quantizers = _quantizers(members, node) if node else None
    if not node or quantizers is None or len(members) != 1 + bool(add) + len(quantizers):
        return None
    if add and node.args[0] is not add:
        return None
    outputs = [*([add] if add and add in escaping else []), *([node] if node in escaping else []), *quantizers.values()]
    wanted = ["sum" if n is add else "normed" if n is node else str(precision(n).format.granularity) for n in outputs]
    operands = (Of(add, 0), Of(add, 1)) if add else (Of(node, 0), None)
    args = (*operands, Of(node, 1), Of(node, 2), *_formats(quantizers), wanted)
    return Fused(_run_norm, args, tuple(outputs))


def _run_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rows: Format | None, tokens: Format | None,
    wanted: list[str],
) -> list[Any]:  # fmt: skip
    made = norm.fused_norm(
        x, residual, weight, eps, rows_fmt=rows, tokens_fmt=tokens, want_normed="normed" in wanted
    )  # fmt: skip
    values = {"sum": made.sum, "normed": made.normed, _ROWS: made.rows, _TOKENS: made.tokens}
    return [values[name] for name in wanted]


def _gated_quantize(members: Nodes, escaping: frozenset[fx.Node]) -> Fused | None:
    """gated, quantisers."""
    node = _one(members, ops.gated)
    quantizers = _quantizers(members, node) if node else None
    if not node or not quantizers or len(members) != 1 + len(quantizers):
        return None
    outputs = [*([node] if node in escaping else []), *quantizers.values()]
    wanted = ["value" if n is node else str(precision(n).format.granularity) for n in outputs]
    args = (Of(node, 0), Of(node, 1), Of(node, 2), *_formats(quantizers), wanted)
    return Fused(_run_gated, args, tuple(outputs))


def _run_gated(
    gate: Tensor, up: Tensor, activation: str, rows: Format | None, tokens: Format | None, wanted: list[str]
) -> list[Any]:
    made = gated.fused_gated(gate, up, activation, rows_fmt=rows, tokens_fmt=tokens, want_value="value" in wanted)
    values = {"value": made.value, _ROWS: made.rows, _TOKENS: made.tokens}
    return [values[name] for name in wanted]


def _gated_backward(members: Nodes, escaping: frozenset[fx.Node]) -> Fused | None:
    """gated_backward, both gradients, the same quantisers of each; gated itself, made again along tokens."""
    node, unit = _one(members, ops.gated_backward), _one(members, ops.gated)
    parts = _getitems(members, node) if node else {}
    if not node or set(parts) != {0, 1}:
        return None
    dgate, dup = (_quantizers(members, parts[i]) for i in (0, 1))
    again = _quantizers(members, unit) if unit else {}
    if dgate is None or dup is None or again is None or _formats(dgate) != _formats(dup) or _ROWS in again:
        return None
    if len(members) != 3 + len(dgate) + len(dup) + bool(unit) + len(again) or not (dgate or again):
        return None
    values = [p for p in parts.values() if p in escaping]
    outputs = [*values, *dgate.values(), *dup.values(), *again.values()]
    places = [
        *(("value", p.args[1]) for p in values),
        *((g, i) for i, part in enumerate((dgate, dup)) for g in part),
        *(("unit", 0) for _ in again),
    ]  # fmt: skip
    args = (Of(node, 0), Of(node, 1), Of(node, 2), Of(node, 3), *_formats(dgate), _formats(again)[1], places)
    return Fused(_run_gated_backward, args, tuple(outputs))


def _run_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, rows: Format | None, tokens: Format | None,
    unit: Format | None, places: list[tuple[str, int]],
) -> list[Any]:  # fmt: skip
    want_value = any(p[0] == "value" for p in places)
    made = gated.fused_gated_backward(
        dy, gate, up, activation, rows_fmt=rows, tokens_fmt=tokens, unit_fmt=unit, want_value=want_value
    )
    values = {
        "value": (made.dgate, made.dup), _ROWS: made.rows or (), _TOKENS: made.tokens or (), "unit": (made.unit,),
    }  # fmt: skip
    return [values[name][index] for name, index in places]


def _rotations(members: Nodes, escaping: frozenset[fx.Node]) -> Fused | None:
    """rope of q and of k, each after its rms_norm over a head, or neither; of one of them, with its norm."""
    turns = [n for n in members if n.target is ops.rope]
    norms = [n for t in turns for n in members if n is t.args[0]]
    if len(turns) not in (1, 2) or len(norms) not in (0, len(turns)) or len(members) != len(turns) + len(norms):
        return None
    if any(n.target is not ops.rms_norm or n in escaping or len(tensor(n).shape) != 4 for n in norms):
        return None
    xs = [Of(n, 0) for n in norms or turns]
    weights, eps = [Of(n, 1) for n in norms], Of(norms[0], 2) if norms else 0.0
    turn = turns[0]
    args = (xs, weights, eps, Of(turn, 1), Of(turn, 2), precision(turn).compute == "float32")
    return Fused(rope.rotate, args, tuple(turns))


def _norm_rope_backward(members: Nodes, escaping: frozenset[fx.Node]) -> Fused | None:
    """rope_backward, rms_norm_backward and its gradients."""
    before, node = _one(members, ops.rope_backward), _one(members, ops.rms_norm_backward)
    parts = _getitems(members, node) if node else {}
    if not before or not node or not parts or len(members) != 2 + len(parts) or len(tensor(before).shape) != 4:
        return None
    args = (
        Of(before, 0), Of(node, 1), Of(node, 2), Of(node, 3), Of(before, 1), Of(before, 2),
        precision(before).compute == "float32", list(parts),
    )  # fmt: skip
    return Fused(_run_norm_rope_backward, args, tuple(parts.values()))


def _run_norm_rope_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, wide: bool, parts: list[int]
) -> list[Tensor]:
    grads = rope.norm_rope_backward(dy, x, weight, eps, cos, sin, wide=wide)
    return [grads[i] for i in parts]


def _norm_backward(members: Nodes, escaping: frozenset[fx.Node]) -> Fused | None:
    """rms_norm_backward, its gradients, the sum with the residual's; rms_norm itself, made again along tokens."""
    node, add, normed = (_one(members, op) for op in (ops.rms_norm_backward, ops.add, ops.rms_norm))
    parts = _getitems(members, node) if node else {}
    again = _quantizers(members, normed) if normed else {}
    if not node or again is None or _ROWS in again or not (add or again):
        return None
    if len(members) != 1 + len(parts) + bool(add) + bool(normed) + len(again):
        return None
    dx = parts.pop(0, None)
    other = None
    if add:
        if dx is None or dx in escaping or dx not in add.args or add.args[0] is add.args[1]:
            return None
        other, dx = Of(add, 1 if add.args[0] is dx else 0), add
    made = {"dx": dx, "dweight": parts.get(1), "tokens": again.get(_TOKENS)}
    outputs = {name: n for name, n in made.items() if n}
    args = (Of(node, 0), Of(node, 1), Of(node, 2), Of(node, 3), other, _formats(again)[1], list(outputs))
    return Fused(_run_norm_backward, args, tuple(outputs.values()))


def _run_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, tokens: Format | None,
    wanted: list[str],
) -> list[Any]:  # fmt: skip
    made = norm_backward.fused_norm_backward(dy, x, weight, eps, residual, tokens_fmt=tokens)
    return [getattr(made, name) for name in wanted]


def _quantize_parts(members: Nodes, escaping: frozenset[fx.Node]) -> Fused | None:
    """Quantisers of one value, or of the output gradients of a projection group: the same formats of each."""
    if any(n.target is not ops.quantize for n in members):
        return None
    # A backward meets the linears of a group in reverse; DGrad reads their gradients in order.
    sources = list(dict.fromkeys(n.args[0] for n in members))[::-1]
    found = [_quantizers(members, s) for s in sources]  # type: ignore[arg-type]
    first = found[0]
    if not first or any(not f or _formats(f) != _formats(first) for f in found):
        return None
    first_of = {s: next(n for n in members if n.args[0] is s) for s in sources}
    places = [(g, i) for i, f in enumerate(found) for g in f or ()]
    outputs = tuple(n for f in found for n in (f or {}).values())
    return Fused(_run_quantize_parts, ([Of(first_of[s], 0) for s in sources], *_formats(first), places), outputs)


def _run_quantize_parts(
    parts: list[Tensor], rows: Format | None, tokens: Format | None, places: list[tuple[str, int]]
) -> list[QTensor]:
    made = dict(zip((_ROWS, _TOKENS), quantize.quantize_apart(parts, rows, tokens), strict=True))
    return [made[name][i] for name, i in places]


register_fusion(
    Fusion("norm", "triton", _norm_quantize),
    Fusion("gated", "triton", _gated_quantize),
    Fusion("gated_backward", "triton", _gated_backward),
    Fusion("rotated", "triton", _rotations),
    Fusion("rotated_backward", "triton", _norm_rope_backward),
    Fusion("norm_backward", "triton", _norm_backward),
    Fusion("quantisers", "triton", _quantize_parts),
)
