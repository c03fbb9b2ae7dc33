"""Where a checkpoint's tensors are in a model: published checkpoints hold experts one by one, models in 3-D tensors.

Names follow transformers' own conversion tables (5.16 and newer), by which ``save_pretrained`` writes and stock engines
read: ``mlp.experts.7.gate_proj.weight``, or ``block_sparse_moe.experts.7.w1.weight``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint's tensor as a part of the model's tensor ``path``: all of it, or rows of one expert's slice."""

    path: str
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)

    def of(self, tensor: Tensor) -> Tensor:
        """The part, a view."""
        return tensor if self.expert is None else tensor[self.expert, slice(*self.rows)]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape."""
        return whole if self.expert is None else (self.rows[1] - self.rows[0], whole[2])


def layout(model: nn.Module) -> dict[str, Part]:
    """Every name that a checkpoint of ``model`` may have (tied ones too), in the order of the model's state.

    3-D tensors that transformers' table does not take apart keep their name and all their dimensions.
    """
    known: list[Any] = []
    if isinstance(model, PreTrainedModel):
        known = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    converters = [c for c in known if isinstance(c, WeightConverter) and _stacks(c)]
    renamings: list[Any] = [c.reverse_transform() for c in reversed(known) if isinstance(c, WeightRenaming)]
    found: dict[str, Part] = {}
    for path, tensor in model.state_dict().items():
        for name, part in _parts(path, tuple(tensor.shape), converters):
            found[rename_source_key(name, renamings, [], reverse=True)[0] if renamings else name] = part
    return found


def _stacks(converter: Any) -> bool:
    """Whether a rule stacks matrices to a 3-D tensor, those of several sources one below the other."""
    first, *rest = converter.operations
    joins = [isinstance(op, Concatenate) and op.dim == 1 for op in rest]
    stacked = isinstance(first, MergeModulelist) and first.dim == 0 and len(rest) <= 1 and all(joins)
    return stacked and len(converter.target_patterns) == 1 and all(s.count("*") == 1 for s in converter.source_patterns)


def _parts(path: str, shape: tuple[int, ...], converters: list[Any]) -> list[tuple[str, Part]]:
    converter = next((c for c in converters if path.endswith(c.target_patterns[0])), None)
    if len(shape) != 3 or converter is None:
        return [(path, Part(path))]
    before, sources = path.removesuffix(converter.target_patterns[0]), converter.source_patterns
    height = shape[1] // len(sources)
    return [
        (before + source.replace("*", str(expert)), Part(path, expert, (i * height, (i + 1) * height)))
        for expert in range(shape[0])
        for i, source in enumerate(sources)
    ]
