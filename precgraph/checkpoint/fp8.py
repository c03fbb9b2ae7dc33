"""Block FP8 as Hugging Face stores it: ``X.weight`` holds codes, ``X.weight_scale_inv`` what they are multiplied by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from precgraph.errors import InputError, NonFiniteError, UnsupportedModelError
from precgraph.format import Format
from precgraph.quantizer import QTensor, quantize
from precgraph.weight_files import Checkpoint, Entry

SCALE = "_scale_inv"  # after the name of a weight
CODES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_SCALES = ("F32", "BF16", "F8_E8M0")
Tile = tuple[slice, slice, tuple[slice, slice]]
"""Rows and columns of a weight, and where the scales of its blocks are."""
_TILE = 4096  # columns: a tile of 128 rows then stays in a core's cache, five times as fast as a whole weight


@dataclass(frozen=True, slots=True)
class Problem:
    """A weight and scale that do not belong together: ``kind`` is "missing scale", "unconsumed scale", "scale dtype" or
    "scale shape"."""

    kind: str
    name: str
    message: str


class Fp8Checkpoint(Checkpoint):
    """A block FP8 checkpoint. ``weights`` are the names of the quantised weights; ``problems`` what does not fit.

    :meth:`qtensor` and :meth:`items` raise InputError on any problem of what they read: FP8 codes are never returned
    without their scale, and a scale that nothing uses is never passed over.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.quantization = self.stored.require_fp8()
        self.weights = [name for name, e in self.entries.items() if e.dtype in CODES]
        self.problems = [p for name, e in self.entries.items() if (p := self._problem(name, e)) is not None]

    def _problem(self, name: str, entry: Entry) -> Problem | None:
        if entry.dtype in CODES:
            scale = self.entries.get(name + SCALE)
            if scale is None:
                return Problem("missing scale", name, f"the weight is {entry.dtype} and {name + SCALE!r} is not there")
            if scale.dtype not in _SCALES:
                return Problem("scale dtype", name, f"the scale is {scale.dtype}, not one of {', '.join(_SCALES)}")
            wanted = self.scale_shape(entry.shape)
            if scale.shape != wanted:
                return Problem(
                    "scale shape", name,
                    f"the scale of a {list(entry.shape)} weight is {list(scale.shape)}, not {list(wanted)}",
                )  # fmt: skip
        if name.endswith(SCALE):
            weight = self.entries.get(name.removesuffix(SCALE))
            if weight is None or weight.dtype not in CODES:
                found = "is not there" if weight is None else f"is {weight.dtype}"
                return Problem("unconsumed scale", name, f"nothing uses the scale: its weight {found}")
        return None

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Blocks of a weight's last two dimensions."""
        r, c = self.quantization.block
        return (*shape[:-2], -(-shape[-2] // r), -(-shape[-1] // c)) if len(shape) > 1 else ()

    def require_complete(self) -> None:
        """InputError for the first of ``problems``."""
        for p in self.problems:
            raise InputError(
                f"{p.message}; {len(self.problems)} such {'problem' if len(self.problems) == 1 else 'problems'} in "
                f"{self.folder}",
                path=p.name, remedy="export the checkpoint again",
            )  # fmt: skip

    def format(self, name: str) -> Format:
        """What the file says of a quantised weight: its dtype and blocks; other rules are not in it."""
        r, c = self.quantization.block
        return Format(dtype=CODES[self.entries[name].dtype], granularity=f"{r}x{c}")

    def scale(self, name: str) -> Tensor:
        """The fp32 scales of a quantised weight (bf16 and E8M0 ones convert exactly)."""
        return self.read(name + SCALE).to(torch.float32)

    def qtensor(self, name: str) -> QTensor:
        """A quantised 2-D weight with its scales; the codes are the file's bytes, zero padded to whole blocks."""
        for p in self.problems:
            if p.name == name:
                raise InputError(p.message, path=name, remedy="export the checkpoint again")
        codes, fmt = self.read(name), self.format(name)
        if codes.ndim != 2:
            raise UnsupportedModelError(
                f"the FP8 weight has {codes.ndim} dimensions", path=name, remedy="store 2-D ones"
            )
        (r, c), (n, k) = fmt.block, codes.shape
        padded = codes
        if n % r or k % c:
            padded = F.pad(codes.view(torch.uint8), (0, -k % c, 0, -n % r)).view(codes.dtype)
        return QTensor(padded, self.scale(name), codes.shape, fmt)

    def items(self) -> Iterator[tuple[str, QTensor | Tensor]]:
        """Every weight, quantised ones with their scales, one at a time in the files' order."""
        self.require_complete()
        for name, entry in self.entries.items():
            if not name.endswith(SCALE):
                yield name, self.qtensor(name) if entry.dtype in CODES else self.read(name)


def quantize_tiled(weight: Tensor, fmt: Format, *, checked: bool = True) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and fp32 scales [ceil(N/r), ceil(K/c)] of a 2-D weight: the bytes that a checkpoint stores.

    The same as :func:`precgraph.quantizer.quantize` gives, but without the padding, and a cache-sized tile at a time.
    """
    (r, c), (n, k) = fmt.block, weight.shape
    codes = torch.empty(n, k, dtype=fmt.torch_dtype)
    scales = torch.empty(-(-n // r), -(-k // c), dtype=torch.float32)
    for rows, cols, blocks in tiles(n, k, fmt.block):
        part = quantize(weight[rows, cols], fmt, checked=checked)
        codes[rows, cols] = part.codes[: rows.stop - rows.start, : cols.stop - cols.start]
        scales[blocks] = part.scales
    return codes, scales


def not_finite(name: str, dtype: str) -> NonFiniteError:
    """Of a master that is read as ``dtype``. A quantiser's own error would name rows of a tile."""
    return NonFiniteError(f"holds NaN or infinity as {dtype}", path=name, remedy="restore it from a checkpoint")


def require_finite(name: str, tensor: Tensor) -> None:
    """NonFiniteError for a master that is not quantised and holds NaN or infinity."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise not_finite(name, str(tensor.dtype).removeprefix("torch."))


def tiles(n: int, k: int, block: tuple[int, int]) -> Iterator[Tile]:
    """Cache-sized tiles of whole blocks that cover [n, k]; the last ones may be ragged."""
    r, c = block
    wide = max(c, _TILE // c * c)
    for top in range(0, n, r):
        for left in range(0, k, wide):
            bottom, right = min(top + r, n), min(left + wide, k)
            blocks = slice(top // r, -(-bottom // r)), slice(left // c, -(-right // c))
            yield slice(top, bottom), slice(left, right), blocks
