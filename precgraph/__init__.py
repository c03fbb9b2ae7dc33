"""precgraph: one precision graph for FP8 training and rollout, proved equal and run bit for bit.

Names are imported when they are first used, so that the command line starts without torch. The attention
implementation ``"precgraph"`` is registered with transformers when precgraph is imported after transformers, when any
name but an error's is first used, and by ``import precgraph.attention``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precgraph.checking import check
    from precgraph.errors import (
        CheckError,
        DigestError,
        GraphError,
        InputError,
        LoweringError,
        NonFiniteError,
        NumericsStateError,
        PrecGraphError,
        RecipeError,
        StaleWeightsError,
        SyncError,
        TraceError,
        UnsupportedModelError,
    )
    from precgraph.format import Format
    from precgraph.graph import PrecisionGraph
    from precgraph.recipe import Recipe
    from precgraph.runtime.compiled import compile
    from precgraph.runtime.scoring import token_logprobs
    from precgraph.verify import Report

__version__ = "0.1.0"

__all__ = [
    "CheckError", "DigestError", "Format", "GraphError", "InputError", "LoweringError", "NonFiniteError",
    "NumericsStateError", "PrecGraphError", "PrecisionGraph", "Recipe", "RecipeError", "Report",
    "StaleWeightsError", "SyncError", "TraceError", "UnsupportedModelError", "check", "compile", "token_logprobs",
]  # fmt: skip

_HOMES = {
    "Format": "precgraph.format", "PrecisionGraph": "precgraph.graph", "Recipe": "precgraph.recipe",
    "Report": "precgraph.verify", "check": "precgraph.checking", "compile": "precgraph.runtime.compiled",
    "token_logprobs": "precgraph.runtime.scoring",
}  # fmt: skip

if not TYPE_CHECKING:  # a type checker sees the imports above instead, and so knows every name

    def __getattr__(name: str) -> object:
        if name == "attention":
            return import_module("precgraph.attention")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _HOMES:
            import_module("precgraph.attention")
        value = getattr(import_module(_HOMES.get(name, "precgraph.errors")), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    if "transformers" in sys.modules:  # whoever has imported it may name the attention without touching anything here
        import_module("precgraph.attention")
