"""`Format`: how one value is stored. Plain data, without torch; `precgraph.quantizer` has its numerics."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from precgraph.errors import InputError, RecipeError

if TYPE_CHECKING:
    import torch

_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "int64": "int64",
    "int32": "int32",
    "complex64": "complex64",
    "bool": "bool",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_MAX = {
    "float8_e4m3fn": 1.75 * 2.0**8,
    "float8_e5m2": 1.75 * 2.0**15,
    "float16": (2 - 2.0**-10) * 2.0**15,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": (2 - 2.0**-52) * 2.0**1023,
}
_SMALLEST_NORMAL = 2.0**-126  # of fp32
_CHOICES = {
    "dtype": tuple(_SHORT),
    "scale_dtype": ("float32", "ue8m0", "ue8m0_log2"),
    "scale_rule": ("amax/max", "amax*(1/max)", "max/amax"),
    "divide": ("true", "reciprocal"),
    "source": ("bfloat16", "float16", "float32"),
    "requantize": ("none", "ue8m0"),
}
_GRANULARITY = r"[1-9][0-9]*x[1-9][0-9]*"


@dataclass(frozen=True, slots=True)
class Format:
    """How one value is stored; equal formats give equal bits.

    A plain format has only a ``dtype``. A quantised one (``dtype`` float8_e4m3fn or float8_e5m2) also has a
    ``granularity`` "ROWSxCOLS": the block that shares a scale, counted on the tensor flattened to [rows,
    cols]. Any field out of range is a `RecipeError`.
    """

    dtype: str = "bfloat16"
    granularity: str | None = None
    # "ue8m0": rounded up to a power of two before it is used, kept as fp32. "ue8m0_log2": the same by
    # exp2(ceil(log2(scale))), which can be one power too small just above a power of two.
    scale_dtype: str = "float32"
    scale_rule: str = "amax/max"
    divide: str = "true"
    amax_floor: float = 1e-12
    source: str = "bfloat16"  # what the input is rounded to before anything else
    requantize: str = "none"  # "ue8m0": quantised a second time, to powers of two by DeepGEMM's rule

    def __post_init__(self) -> None:
        self.validate()

    @classmethod
    def plain(cls, dtype: str) -> Format:
        """The unquantised format of a torch dtype name, for example ``Format.plain("bfloat16")``."""
        return cls(dtype=dtype)

    def validate(self) -> None:
        """Raise `RecipeError` unless every field has an allowed value and the fields fit together."""
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise RecipeError(f"format: {name} = {value!r} is unknown", remedy=f"use one of {', '.join(allowed)}")
        if self.dtype in _FP8:
            self._validate_blocks()
            return
        for field in fields(self)[1:]:
            if getattr(self, field.name) != field.default:
                raise RecipeError(
                    f"format: {field.name} = {getattr(self, field.name)!r} has no meaning for {self.dtype}",
                    remedy=f"leave it out, or use one of the dtypes {', '.join(_FP8)}",
                )

    def _validate_blocks(self) -> None:
        if not isinstance(self.granularity, str) or not re.fullmatch(_GRANULARITY, self.granularity):
            raise RecipeError(
                f"format: granularity = {self.granularity!r} does not describe the blocks of {self.dtype}",
                remedy='write ROWSxCOLS, for example "1x128"',
            )
        # A floor that leaves a zero or subnormal scale would make an all-zero block NaN, or depend on whether
        # the machine flushes subnormals.
        # "max/amax" needs none: it has a rule for zero, and its inverse stays normal.
        inverts = self.scale_rule == "max/amax"
        if inverts and self.scale_dtype == "ue8m0_log2":
            raise RecipeError(
                "format: scale_dtype = 'ue8m0_log2' is not defined for scale_rule = 'max/amax'",
                remedy="use scale_dtype = 'ue8m0'",
            )
        if inverts and self.divide != "true":
            raise RecipeError(
                "format: scale_rule = 'max/amax' multiplies by the inverse and has no division to choose",
                remedy="leave divide out",
            )
        smallest = 0.0 if inverts else self.max * _SMALLEST_NORMAL
        floor: object = self.amax_floor  # may come from a file
        if not isinstance(floor, float) or not smallest <= floor < math.inf:
            raise RecipeError(
                f"format: amax_floor = {self.amax_floor!r} is not a finite number of at least {smallest:.2g}",
                remedy="the usual floor is 1e-12",
            )

    @property
    def is_quantized(self) -> bool:
        """Whether values are stored as FP8 codes with scales."""
        return self.granularity is not None

    @property
    def powers_of_two(self) -> bool:
        """Whether the scales that a GEMM is given are powers of two."""
        return self.scale_dtype != "float32" or self.requantize != "none"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the stored values (of the codes, if quantised)."""
        import torch

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share one scale; an `InputError` for a plain format."""
        if self.granularity is None:
            raise InputError(f"the plain format {self} has no blocks", remedy="ask is_quantized first")
        rows, cols = self.granularity.split("x")
        return int(rows), int(cols)

    @property
    def max(self) -> float:
        """Largest finite value of a floating dtype: 448 for e4m3, 57344 for e5m2; else an `InputError`."""
        if self.dtype not in _MAX:
            raise InputError(f"the format {self} has no largest value", remedy="ask for it of floating formats")
        return _MAX[self.dtype]

    def __str__(self) -> str:
        """Short and unambiguous: "bf16", "e4m3 1x128", and every rule that is not the default."""
        if self.granularity is None:
            return _SHORT[self.dtype]
        words = [_SHORT[self.dtype], self.granularity]
        defaults = {field.name: field.default for field in fields(self)}
        if self.scale_dtype != defaults["scale_dtype"]:
            words.append(self.scale_dtype)
        if self.scale_rule != defaults["scale_rule"]:
            words.append(self.scale_rule)
        if self.divide != defaults["divide"]:
            words.append(f"{self.divide} divide")
        if self.amax_floor != defaults["amax_floor"]:
            words.append(f"floor {self.amax_floor!r}")
        if self.source != defaults["source"]:
            words.append(f"of {_SHORT[self.source]}")
        if self.requantize != defaults["requantize"]:
            words.append(f"then {self.requantize}")
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Every rule spelled out, but for ``requantize`` where there is none; a plain format is its dtype alone.

        Holds only strings and one float.
        """
        if self.granularity is None:
            return {"dtype": self.dtype}
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.requantize == "none":
            del data["requantize"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Format:
        """The inverse of `to_dict`. `RecipeError`: a missing dtype, or an unknown key (names the nearest)."""
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}"
                raise RecipeError(f"format: unknown key {key!r}", remedy=hint)
        if "dtype" not in data:
            raise RecipeError("format: dtype is missing", remedy=f"use one of {', '.join(_SHORT)}")
        return cls(**data)
