"""Made-up reports for the tests of formats: known findings, and names that a hostile checkpoint could have."""

from __future__ import annotations

from typing import Any

from precgraph.report import build
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES

HOSTILE = [
    "<script>alert(1)</script>",
    "model.layers.0.mlp\n::error title=x::y",
    "a::b,c%0A",
    'x" onload="alert(1)',
    "model.层.プロジ.é",
    "]]><!--",
    "{{ 7 * 7 }}{% raw %}",
    "\x00\x1b[31m\x07",
    ".".join(["very_long_component"] * 10)[:200],
]


def finding(key: str = "amax_floor", module: str = "model.layers.0.mlp", **changes: Any) -> Finding:
    """A finding of one rule."""
    rule = RULES[key]
    values: dict[str, Any] = {
        "code": rule.code, "module": module, "node": "quantize_1", "op": "quantize", "attributes": (key,),
        "train": ("1e-10",), "infer": ("0.0001",), "message": f"differs in {rule.words}", "remedy": rule.remedy,
    }  # fmt: skip
    return Finding(**{**values, **changes})


def graph_context(**changes: Any) -> dict[str, Any]:
    """What a document of level graph says besides its findings."""
    return {
        "level": "graph", "model": "m", "sides": {"train": "jet_rl", "infer": "jet_rl"}, "family": "LlamaForCausalLM",
        "backend": "reference", "device": "cpu", "recipes": {"train": {"name": "a"}, "infer": {"name": "b"}},
        "stacks": {"train": None, "infer": None}, "digests": {"train": "1", "infer": "2"},
        "compared": {"nodes": 9, "linears": 3, "quantized_linears": 2, "kernels": {"k": 9}}, "parts": [], **changes,
    }  # fmt: skip


def document(*violations: Finding, notes: Any = (), not_proved: Any = (), **options: Any) -> dict[str, Any]:
    """A document of level graph with these findings."""
    context = graph_context(**options.pop("context", {}))
    return build(Report(9, violations, notes, not_proved=not_proved), context, **options)


def hostile_part() -> dict[str, Any]:
    """A drawing whose every text is hostile."""
    nodes = [
        {
            "name": f"n{i}", "op": name, "module": name, "value": name, "numerics": name, "side": "both",
            "reads": [name], "outside": False,
        }
        for i, name in enumerate(HOSTILE)
    ]  # fmt: skip
    edges = [[f"n{i}", f"n{i + 1}", "x"] for i in range(len(HOSTILE) - 1)]
    return {"segment": HOSTILE[0], "layers": 2, "nodes": nodes, "edges": edges, "left_out": 0}


def hostile_document() -> dict[str, Any]:
    """A document in which every text that a checkpoint or recipe can set is hostile."""
    found = [
        finding(module=name, node=f"n{i}", op=name, train=(name,), infer=(name,), message=name, remedy=name)
        for i, name in enumerate(HOSTILE)
    ]
    context = {
        "model": HOSTILE[0], "family": HOSTILE[0], "sides": {"train": HOSTILE[0], "infer": HOSTILE[2]},
        "subject": HOSTILE[1], "parts": [hostile_part()], "recipes": {"train": {"x": HOSTILE[0]}, "infer": {}},
    }  # fmt: skip
    return document(*found, context=context)
