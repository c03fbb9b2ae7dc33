"""Checkpoints on disk: read lazily, and written as block FP8 in Hugging Face's layout."""

from precgraph.checkpoint.export import Exported, export
from precgraph.checkpoint.files import Checkpoint
from precgraph.checkpoint.fp8 import Fp8Checkpoint, Quantization, quantize_tiled
from precgraph.checkpoint.layout import Part, layout
from precgraph.checkpoint.selection import Selection, select

__all__ = [
    "Checkpoint",
    "Exported",
    "Fp8Checkpoint",
    "Part",
    "Quantization",
    "Selection",
    "export",
    "layout",
    "quantize_tiled",
    "select",
]
