"""Checkpoints on disk: read lazily, and written as block FP8 in Hugging Face's layout."""

from precgraph.checkpoint.export import Exported, export
from precgraph.checkpoint.fp8 import Fp8Checkpoint, quantize_tiled
from precgraph.checkpoint.layout import Part, layout
from precgraph.checkpoint.memory import ModelTensors, open_masters
from precgraph.checkpoint.selection import Selection, select
from precgraph.checkpoint.whole import whole
from precgraph.stored import BlockFp8
from precgraph.weight_files import Checkpoint

__all__ = [
    "BlockFp8",
    "Checkpoint",
    "Exported",
    "Fp8Checkpoint",
    "ModelTensors",
    "Part",
    "Selection",
    "export",
    "layout",
    "open_masters",
    "quantize_tiled",
    "select",
    "whole",
]
