"""How a checkpoint's weights are stored, as its config says: the one reader of a ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precgraph.errors import InputError, UnsupportedModelError

SKIP_LISTS = ("modules_to_not_convert", "ignored_layers")  # transformers' name and vLLM's; the first that is given


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """Block FP8 as Hugging Face stores it: a scale for each block of ``block`` = (rows, columns) of a weight.

    ``skip`` are the modules whose weights are not quantised, as the file spells them.
    """

    block: tuple[int, int] = (128, 128)
    skip: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization_config`` that says so."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": list(self.skip),
        }

    def __str__(self) -> str:
        return f"FP8, blocks of {self.block[0]}x{self.block[1]}"


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Plain weights; or block FP8; or what nothing here reads, ``other``, in words such as "quant_method 'gptq'".

    ``path`` is the config that says so, for errors.
    """

    path: str = "config.json"
    fp8: BlockFp8 | None = None
    other: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], path: str = "config.json") -> StoredWeights:
        """From a model's config; InputError for a malformed one."""
        table = quantization_table(config, path)
        return cls(path) if table is None else cls.parse(table, path)

    @classmethod
    def parse(cls, table: Mapping[str, Any], path: str = "config.json") -> StoredWeights:
        """From a ``quantization_config``; InputError for block FP8 that is malformed.

        ``weight_block_size`` may be 128, [128] or [128, 128], as files in the wild have it.
        """
        method, scheme = table.get("quant_method"), table.get("activation_scheme", "dynamic")
        if method != "fp8":
            return cls(path, other=f"quant_method {method!r}")
        if scheme != "dynamic":  # only dynamic scales of activations depend on the token alone
            return cls(path, other=f"FP8 with activation_scheme {scheme!r}")
        if table.get("weight_block_size") is None:
            return cls(path, other="FP8 with one scale a tensor, no weight_block_size")
        return cls(path, BlockFp8(_block(table["weight_block_size"], path), _skip(table, path)))

    @property
    def plain(self) -> bool:
        """Whether the files hold the weights themselves."""
        return self.fp8 is None and not self.other

    def __str__(self) -> str:
        return str(self.fp8 or self.other or "plain")

    def require_plain(self) -> None:
        """UnsupportedModelError for weights that are no masters."""
        if not self.plain:
            raise UnsupportedModelError(
                f"the weights are stored quantised ({self}), and masters are bfloat16", path=self.path,
                remedy="use the checkpoint that they were made from, or dequantise it to bf16 first",
            )  # fmt: skip

    def require_readable(self) -> None:
        """UnsupportedModelError for weights that nothing here reads."""
        if self.other:
            raise UnsupportedModelError(
                f"the weights are stored quantised ({self}), in a way that nothing here reads", path=self.path,
                remedy='use the bf16 checkpoint that they were made from, or one with quant_method "fp8" in blocks',
            )  # fmt: skip

    def require_fp8(self) -> BlockFp8:
        """How block FP8 weights are stored; UnsupportedModelError for another method, InputError for plain weights."""
        self.require_readable()
        if self.fp8 is None:
            raise InputError("the config has no quantization_config", path=self.path, remedy="pass an FP8 checkpoint")
        return self.fp8


def quantization_table(config: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a model's config, None if it is absent or empty; InputError if it is no table."""
    table = config.get("quantization_config")
    if not isinstance(table, Mapping | None):
        raise InputError(
            f"quantization_config must be a table, not {table!r}", path=path,
            remedy='write what the quantiser wrote, such as {"quant_method": "fp8", ...}, or remove it',
        )  # fmt: skip
    return table or None


def _block(size: Any, path: str) -> tuple[int, int]:
    values = list(size) if isinstance(size, list | tuple) else [size]
    values = values * 2 if len(values) == 1 else values
    if len(values) != 2 or not all(type(v) is int and v > 0 for v in values):
        raise InputError(f"weight_block_size = {size!r} is not one or two sizes", path=path, remedy="write [128, 128]")
    return values[0], values[1]


def _skip(table: Mapping[str, Any], path: str) -> tuple[str, ...]:
    for key in SKIP_LISTS:
        if skip := table.get(key):
            if not isinstance(skip, list) or not all(isinstance(s, str) for s in skip):
                raise InputError(f"{key} = {skip!r} is no list of names", path=path, remedy="write a list of strings")
            return tuple(skip)
    return ()
