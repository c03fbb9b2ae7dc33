"""spec: well-formedness of a graph, as rules that are run after each pass when checking is on."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from precgraph import ops
from precgraph.errors import GraphError
from precgraph.graph import PrecisionGraph, precision, tensor
from precgraph.passes.rewrite import is_call

Check = Callable[[fx.Node], bool]
_QUANTIZERS = (ops.quantize, ops.quantize_dispatched)


def _annotated(node: fx.Node) -> bool:
    return "precision" in node.meta


def _plain_format_matches_dtype(node: fx.Node) -> bool:
    fmt = precision(node).format
    return "tensor" not in node.meta or fmt.is_quantized or fmt.dtype == tensor(node).dtype


def _quantizer_states_its_format(node: fx.Node) -> bool:
    return not is_call(node, *_QUANTIZERS) or precision(node).format in node.args


def _only_quantizers_make_codes(node: fx.Node) -> bool:
    return is_call(node, *_QUANTIZERS) or not precision(node).format.is_quantized


def _nothing_is_quantized_twice(node: fx.Node) -> bool:
    return not (is_call(node, *_QUANTIZERS) and is_call(node.args[0], *_QUANTIZERS))


def _quantized_linear_reads_codes(node: fx.Node) -> bool:
    if not is_call(node, ops.linear, ops.expert_linear):
        return True
    operands = [precision(a).format.is_quantized for a in node.args[:2] if isinstance(a, fx.Node)]
    return operands in ([True, True], [False, False])


def _backward_is_not_read_by_forward(node: fx.Node) -> bool:
    return precision(node).phase == "backward" or all(precision(a).phase != "backward" for a in node.all_input_nodes)


SPEC: tuple[tuple[str, Check], ...] = (
    ("every node is annotated", _annotated),
    ("a plain format is the dtype of the value", _plain_format_matches_dtype),
    ("a quantiser's annotation is the format it applies", _quantizer_states_its_format),
    ("only quantisers make codes", _only_quantizers_make_codes),
    ("no value is quantised twice", _nothing_is_quantized_twice),
    ("a linear reads two quantised operands or none", _quantized_linear_reads_codes),
    ("the forward does not read the backward", _backward_is_not_read_by_forward),
)


def check_spec(graph: PrecisionGraph, after: str) -> None:
    """GraphError, naming the rule, the node and the pass, for the first node that breaks a rule."""
    for node in graph:
        for statement, holds in SPEC:
            if not holds(node):
                module = precision(node).module if "precision" in node.meta else ""
                raise GraphError(
                    f"after {after}: node {node.name} breaks the rule that {statement}", path=module or None
                )
    graph.graph.lint()
