"""precgraph: one precision graph for FP8 training and rollout, proved equal and run bit for bit."""

from precgraph.errors import (
    CheckError,
    GraphError,
    InputError,
    LoweringError,
    NonFiniteError,
    NumericsStateError,
    PrecGraphError,
    RecipeError,
    StaleWeightsError,
    TraceError,
    UnsupportedModelError,
)
from precgraph.formats import Format
from precgraph.graph import PrecisionGraph
from precgraph.recipe import Recipe
from precgraph.runtime.compiled import compile, token_logprobs

__version__ = "0.1.0"

__all__ = [
    "CheckError", "Format", "GraphError", "InputError", "LoweringError", "NonFiniteError", "NumericsStateError",
    "PrecGraphError", "PrecisionGraph", "Recipe", "RecipeError", "StaleWeightsError", "TraceError",
    "UnsupportedModelError", "compile", "token_logprobs",
]  # fmt: skip
