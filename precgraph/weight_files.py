"""A directory of safetensors, opened lazily: names, dtypes and shapes first, one tensor at a time after that.

Nothing in a checkpoint is executed: pickled weights are refused, and what an index says is compared with the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from precgraph.errors import InputError, UnsupportedModelError
from precgraph.stored import StoredWeights
from precgraph.tables import read_table

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_CODES = ("F8_", "F6_", "F4")  # the dtypes of safetensors that hold no value without a scale
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor: its file, dtype (safetensors' name, such as ``F8_E4M3``) and shape."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The config and safetensors of a directory. ``entries`` are its tensors by name, ``shards`` its files in order.

    Tensors are mapped, not read, so what is resident is what a caller looks at. InputError for a directory without
    safetensors, pickled weights, a file that is cut off, and an index that does not fit its files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.config = _config(self.folder)
        self.shards = _shards(self.folder)
        self._open = {shard: _opened(self.folder / shard) for shard in self.shards}
        self.entries: dict[str, Entry] = {}
        for shard, file in self._open.items():
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in self.entries:
                    raise _twice(self.folder, name, self.entries[name].shard, shard)
                part = file.get_slice(name)
                self.entries[name] = Entry(shard, str(part.get_dtype()), tuple(part.get_shape()))
        _require_index(self.folder, self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        """Names, file by file."""
        return iter(self.entries)

    def read(self, name: str) -> Tensor:
        """The tensor of that name, mapped from its file."""
        try:
            tensor: Tensor = self._open[self.entries[name].shard].get_tensor(name)
        except KeyError:
            raise InputError(f"there is no tensor {name!r}", path=str(self.folder)) from None
        except SafetensorError as error:
            raise InputError(f"{name!r} cannot be read: {error}", path=str(self.folder)) from error
        return tensor

    @property
    def stored(self) -> StoredWeights:
        """How its config says that its weights are stored."""
        return StoredWeights.of(self.config, str(self.folder / "config.json"))

    def require_masters(self) -> None:
        """UnsupportedModelError for weights that are no masters, by the config or by what the files hold."""
        self.stored.require_plain()
        require_masters(self.folder, self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum((self.folder / shard).stat().st_size for shard in self.shards)


def require_masters(folder: Path, entries: Mapping[str, Entry]) -> None:
    """UnsupportedModelError for codes among the tensors of ``folder``, whatever its config says: transformers would
    read them as values, without the scales that they are to be multiplied by."""
    for name, entry in entries.items():
        integers = entry.dtype.startswith(("I", "U")) and name.endswith(".weight")  # others are tables of positions
        if integers or entry.dtype.startswith(_CODES):
            raise UnsupportedModelError(
                f"{name} is stored in {entry.dtype}, so these are no masters", path=str(folder / entry.shard),
                remedy="name the bf16, fp16 or fp32 checkpoint that was quantised, or dequantise this one to bf16",
            )  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        raise InputError("is a file", path=str(folder), remedy="pass the directory of a checkpoint's safetensors")
    if not folder.is_dir():
        raise InputError("no such directory", path=str(folder), remedy="pass a checkpoint's directory")
    if not (folder / "config.json").is_file():
        raise InputError("holds no config.json", path=str(folder), remedy="pass a checkpoint's directory")
    return read_table(folder / "config.json")


def link_without_target(path: Path) -> str:
    """Of a path that is not there, in words: "a link to ..., which is not there", or nothing if it is no link."""
    return f"a link to {path.readlink()}, which is not there" if path.is_symlink() and not path.exists() else ""


def _shards(folder: Path) -> list[str]:
    """The files that every reader takes, transformers and vLLM too; InputError where they would take different ones.

    transformers reads SINGLE before it looks for an index. vLLM 0.32 reads what the index names, and without an index
    every file, the later over the earlier ones. A file that an index leaves out is read by neither.
    """
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        shards = sorted(set(_weight_map(folder).values()))
        if SINGLE in found and shards != [SINGLE]:
            other = next(shard for shard in shards if shard != SINGLE)
            raise InputError(
                f"holds {SINGLE}, and an index that names {other}: some loaders read the one, some the other",
                path=str(folder), remedy=f"remove {SINGLE}, or {INDEX} and its files",
            )  # fmt: skip
        for shard in shards:
            if not (folder / shard).is_file():
                why = link_without_target(folder / shard)
                raise InputError(
                    f"the index names {shard}, which is {why or 'not there'}", path=str(folder), remedy="copy it too"
                )
        return shards
    if SINGLE in found:
        _require_one_of_each(folder, [name for name in found if name != SINGLE])
        return [SINGLE]
    if len(found) == 1:
        return found
    if found:
        raise InputError(
            f"holds {len(found)} safetensors and no {INDEX}", path=str(folder), remedy="copy the index too"
        )
    pickled = any(True for pattern in _PICKLES for _ in folder.glob(pattern))
    raise InputError(
        "holds pickled weights, which are never read" if pickled else "holds no *.safetensors",
        path=str(folder), remedy="save the model with save_pretrained, which writes safetensors",
    )  # fmt: skip


def _require_one_of_each(folder: Path, others: list[str]) -> None:
    """No tensor of SINGLE is in another file: only the names are read."""
    names = set(_opened(folder / SINGLE).keys())
    for other in others:
        if twice := names.intersection(_opened(folder / other).keys()):
            raise _twice(folder, min(twice), SINGLE, other)


def _twice(folder: Path, name: str, first: str, second: str) -> InputError:
    return InputError(
        f"{name!r} is in {first} and in {second}", path=str(folder), remedy="remove the file that does not belong here"
    )


def _weight_map(folder: Path) -> dict[str, str]:
    table = read_table(folder / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InputError("has no weight_map", path=str(folder / INDEX), remedy="restore the file")
    for name, shard in table.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InputError(
                f"says that {name!r} is in {shard!r}, which is not a safetensors file of this directory",
                path=str(folder / INDEX), remedy="restore the file",
            )  # fmt: skip
    return table


def _require_index(folder: Path, entries: dict[str, Entry]) -> None:
    if not (folder / INDEX).is_file():
        return
    table = _weight_map(folder)
    for name in sorted(table.keys() | entries.keys()):
        said, found = table.get(name), entries[name].shard if name in entries else None
        if said != found:
            raise InputError(
                f"{name!r} is in {found or 'no file'}, and the index says {said or 'nothing'}",
                path=str(folder / INDEX), remedy="restore the index, or the file",
            )  # fmt: skip


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        why = link_without_target(path) or f"not a whole safetensors file: {error}"
        raise InputError(f"is {why}", path=str(path), remedy="copy it again") from error
