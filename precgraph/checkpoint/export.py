"""Write a model as a Hugging Face block FP8 checkpoint, by the same quantiser that the training forward uses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from precgraph.checkpoint.carried import RECIPE
from precgraph.checkpoint.fp8 import SCALE, not_finite, quantize_tiled, require_finite
from precgraph.checkpoint.memory import ModelTensors
from precgraph.checkpoint.selection import Selection, ignored, select
from precgraph.checkpoint.whole import whole
from precgraph.errors import InputError, NonFiniteError, RecipeError, UnsupportedModelError
from precgraph.loading import find, load_config_model, load_model
from precgraph.recipe import Recipe
from precgraph.stored import BlockFp8
from precgraph.weight_files import INDEX, SINGLE, Checkpoint

_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*.model", "LICENSE*",
)  # fmt: skip
Shard = tuple[str, list[str]]
Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: how many tensors in FP8 and in the model's dtype, files and bytes.

    ``zeros`` are the FP8 weights that are all zero: a model may begin with such ones, and files that were allocated and
    never written hold nothing else. ``ragged`` counts the FP8 weights that end within a block. transformers 5.19 takes
    the size of a block to be rows / blocks when it dequantises them on a machine without a GPU, which is then an error
    or wrong (192 rows in 2 blocks).
    """

    folder: Path
    quantized: int
    kept: int
    shards: int
    nbytes: int
    zeros: tuple[str, ...]
    ragged: int


def export(
    model: str | Path | PreTrainedModel,
    output: str | Path,
    recipe: Recipe | None = None,
    step: Step = lambda _: None,
) -> Exported:
    """Write ``model`` (a checkpoint's directory, a .gguf, or a model in memory) to the new directory ``output``.

    Without ``recipe``: the one that the model was compiled with, or :meth:`Recipe.jet_rl` if it was not.

    Weights of the layers that the recipe quantises become E4M3 ``X.weight`` [N, K] and fp32 ``X.weight_scale_inv``
    [ceil(N/r), ceil(K/c)], the bytes of the training forward; all else keeps the model's dtype. One shard of the
    source becomes one of the result and only one is in memory. The directory appears whole or not at all.

    Raises InputError (the output exists, a source that does not fit its config or is all zero), NonFiniteError (naming
    the weight), RecipeError (nothing to quantise, or blocks that this layout cannot hold), UnsupportedModelError
    (experts that no table of transformers takes apart, or whose blocks lie across two of a checkpoint's tensors).
    """
    final = Path(output).expanduser()
    if final.exists():
        raise InputError("exists already", path=str(final), remedy="name a directory that does not exist")
    if recipe is None:
        compiled = getattr(model, "precgraph", None)
        recipe = Recipe.jet_rl() if compiled is None else compiled.recipe
    step("reading the model")
    source = _from_model(model) if isinstance(model, PreTrainedModel) else _from_path(model, step)
    step("asking the recipe which layers are quantised")
    selection = select(source.model, recipe)
    _require_served(selection)
    with whole(final) as folder:
        counts = _write(source, selection, recipe, folder, step)
    return Exported(final, *counts, ragged=_ragged(selection))


# ------------------------------------------------------------------------------------------ source


@dataclass(frozen=True, slots=True)
class _Source:
    model: PreTrainedModel  # on the meta device where the weights are in files
    config: dict[str, Any]
    shards: list[Shard]
    read: Callable[[str], Tensor]
    extras: Callable[[Path], None]


def _from_path(model: str | Path, step: Step) -> _Source:
    found = find(model)
    if found.gguf:
        step("dequantising the GGUF")
        return _from_model(load_model(model), gguf=found.config)
    if not found.weights or not Path(found.weights).is_dir():
        raise InputError("has no weights here", path=str(model), remedy="pass the directory of a checkpoint")
    checkpoint = Checkpoint(found.weights)
    checkpoint.require_masters()
    built = load_config_model(model)
    unread = ignored(built)
    by_shard: dict[str, list[str]] = {shard: [] for shard in checkpoint.shards}
    for name, entry in checkpoint.entries.items():
        if not unread(name):
            by_shard[entry.shard].append(name)

    def extras(folder: Path) -> None:
        for pattern in _COPIED:
            for path in checkpoint.folder.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)

    return _Source(built, checkpoint.config, list(by_shard.items()), checkpoint.read, extras)


def _from_model(model: PreTrainedModel, gguf: Path | None = None) -> _Source:
    tensors = ModelTensors(model)
    config = json.loads(model.config.to_json_string(use_diff=False))
    # A compiled model's class is made at run time; what loads the checkpoint is the class that it was made from.
    config["architectures"] = [
        next(c for c in type(model).__mro__ if c.__module__.startswith("transformers.")).__name__
    ]

    def extras(folder: Path) -> None:
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        if gguf is not None:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)

    return _Source(model, config, [(SINGLE, list(tensors.entries))], tensors.read, extras)


def _require_served(selection: Selection) -> None:
    if selection.format.dtype != "float8_e4m3fn":
        raise RecipeError(f"weights in {selection.format} have no such layout", remedy="quantise weights to e4m3")
    for name, shape in selection.shapes.items():
        if len(shape) > 2 and (name in selection.dtypes or name in selection.quantized):
            raise UnsupportedModelError(
                f"transformers has no rule that takes this tensor of {len(shape)} dimensions apart into experts",
                path=name, remedy="register_checkpoint_conversion_mapping of transformers takes one",
            )  # fmt: skip
    modules = {name.removesuffix(".weight") for name in selection.quantized}
    # Loaders match the names of modules in the model, in which all experts of a layer are one.
    modules |= {p.path.rpartition(".")[0] for n, p in selection.parts.items() if n in selection.quantized}
    for kept in selection.kept:
        for module in sorted(modules):
            # transformers takes each entry for a regular expression that need only match the start, or for the end.
            if re.match(re.escape(kept), module) or module.endswith(kept):
                raise RecipeError(
                    f"{kept!r} is left out and {module!r} is not, and transformers' matching of skip lists cannot tell "
                    "them apart",
                    path=module, remedy=f"add {module!r} to select.skip too",
                )  # fmt: skip


def _ragged(selection: Selection) -> int:
    block = selection.format.block
    shapes = [selection.shapes[name] for name in selection.quantized]
    return sum(any(size > b and size % b for size, b in zip(shape, block, strict=True)) for shape in shapes)


# ------------------------------------------------------------------------------------------- write


def _write(
    source: _Source, selection: Selection, recipe: Recipe, folder: Path, step: Step
) -> tuple[int, int, int, int, tuple[str, ...]]:
    missing = selection.shapes.keys() - selection.tied.keys()
    table: dict[str, str] = {}
    zeros: list[str] = []
    quantized = kept = nbytes = 0
    for i, (shard, names) in enumerate(source.shards):
        step(f"quantising {shard}, file {i + 1} of {len(source.shards)}")
        tensors: dict[str, Tensor] = {}
        for name, tensor in _checked(source, names, selection):
            missing -= {name}
            if name in selection.quantized:
                tensors[name], tensors[name + SCALE] = _quantized(name, tensor, selection)
                quantized += 1
                zeros += [] if tensor.any() else [name]
            else:
                tensors[name] = _kept(name, tensor, selection.dtypes.get(name, tensor.dtype))
                kept += 1
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        nbytes += sum(t.nbytes for t in tensors.values())
        table |= dict.fromkeys(tensors, shard)
    if missing:
        raise InputError(
            f"the source lacks {sorted(missing)[0]!r}, one of {len(missing)} tensors", remedy="restore the checkpoint"
        )
    if len(zeros) == quantized:
        raise InputError(
            f"all {quantized} weights to quantise are zero, as in files that were allocated and never written",
            remedy="restore the checkpoint",
        )
    if len(source.shards) > 1:
        _json(folder / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(table.items()))})
    config = {k: v for k, v in source.config.items() if k not in ("torch_dtype", "dtype")}
    skip = tuple(sorted(selection.kept))
    quantization = BlockFp8(selection.format.block, skip).to_dict()
    _json(folder / "config.json", {**config, "dtype": "bfloat16", "quantization_config": quantization})
    source.extras(folder)
    recipe.save(folder / RECIPE)
    return quantized, kept, len(source.shards), nbytes, tuple(zeros)


def _checked(source: _Source, names: Iterable[str], selection: Selection) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of what is written, compared with the model that the config describes."""
    for name in names:
        if name in selection.tied:
            if not torch.equal(source.read(name), source.read(selection.tied[name])):
                raise InputError(
                    f"is tied to {selection.tied[name]!r} by the config, and differs from it in the file", path=name,
                    remedy="set tie_word_embeddings as the model was trained",
                )  # fmt: skip
            continue
        if name not in selection.shapes:
            raise UnsupportedModelError(
                "a checkpoint of this model has no tensor of this name (it may store experts otherwise)", path=name,
                remedy="load the model and export it from memory",
            )  # fmt: skip
        tensor = source.read(name)
        if tuple(tensor.shape) != selection.shapes[name]:
            raise InputError(
                f"has shape {list(tensor.shape)}, and the config says {list(selection.shapes[name])}", path=name,
                remedy="restore the checkpoint, or correct its config",
            )  # fmt: skip
        yield name, tensor


def _quantized(name: str, tensor: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    try:
        return quantize_tiled(tensor, selection.format)
    except NonFiniteError as error:
        raise not_finite(name, selection.format.source) from error


def _kept(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    out = tensor.to(dtype).contiguous()
    require_finite(name, out)
    return out


def _json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
