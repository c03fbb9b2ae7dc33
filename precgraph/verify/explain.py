"""Why the bytes of a quantised weight are not those of the training side's rule: hypotheses, tried one after another.

Each hypothesis predicts codes and scales from the masters. It explains a weight only if every byte agrees.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from precgraph.checkpoint.fp8 import Tile, quantize_tiled, tiles
from precgraph.errors import RecipeError
from precgraph.format import Format
from precgraph.quantizer import QTensor, dequantize, quantize

# Values of each rule that stacks use, and so those worth trying.
_VALUES: dict[str, tuple[str | float, ...]] = {
    "source": ("bfloat16", "float32", "float16"),
    "scale_rule": ("amax/max", "amax*(1/max)", "max/amax"),
    "divide": ("true", "reciprocal"),
    "amax_floor": (1e-12, 1e-10, 1e-8, 1e-4, 0.0),
    "scale_dtype": ("float32", "ue8m0", "ue8m0_log2"),
    "requantize": ("none", "ue8m0"),
}
# Projections that engines keep in one tensor, in the order of its rows.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
DAMAGE = 0.01  # share of a weight's bytes up to which a difference looks like damage


@dataclass(frozen=True, slots=True)
class Explanation:
    """``kind`` is a key of the rules table, or "format", with the ``format`` that made the bytes."""

    kind: str
    detail: str = ""
    format: Format | None = None


@dataclass(slots=True)
class Weight:
    """One weight whose bytes differ: its master, what the rule makes of it, and what is stored (codes as uint8)."""

    name: str
    master: Tensor
    format: Format
    codes: Tensor
    scales: Tensor
    stored_codes: Tensor
    stored_scales: Tensor

    def matches(self, codes: Tensor, scales: Tensor) -> bool:
        """Whether codes and scales are the stored bytes."""
        return torch.equal(scales, self.stored_scales) and torch.equal(as_bytes(codes), self.stored_codes)

    @property
    def same_codes(self) -> bool:
        return torch.equal(self.codes, self.stored_codes)

    @property
    def same_scales(self) -> bool:
        return torch.equal(self.scales, self.stored_scales)


class Explainer:
    """Explains weights of one checkpoint. What explained a weight is tried first on the next.

    ``master`` reads a master by name; ``shapes`` are those of all quantised weights, the candidates for a swap.
    """

    def __init__(self, master: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.master = master
        self.shapes = shapes
        self._last: list[Format] = []

    def explain(self, w: Weight) -> Explanation:
        """The first hypothesis that agrees in every byte; else what kind of difference it is."""
        if not bool((w.stored_scales.isfinite() & (w.stored_scales > 0)).all()):
            return Explanation("scale value", "not every scale is a positive finite number")
        fmt = self._format(w)
        if fmt is not None:
            return Explanation("format", format=fmt)
        for kind, predict in (("requantised", _requantised), ("codes transposed", _transposed)):
            for detail, codes, scales in predict(w):
                if w.matches(codes, scales):
                    return Explanation(kind, detail)
        if w.same_codes:
            return _scales_only(w)
        if self._shifted_grid(w):
            return Explanation("block grid", "blocks were counted in the fused weight, across its parts")
        other = self._other(w)
        if other:
            return Explanation("swapped", f"the codes are those of {other}")
        return _unexplained(w)

    def _format(self, w: Weight) -> Format | None:
        """The format with the fewest rules changed that makes every byte; formats are tried on one tile first."""
        tile = _first_difference(w)
        if tile is None:
            return None
        for fmt in [*self._last, *_alternatives(w)]:
            if not tile_matches(tile, w.master, fmt, w.stored_codes, w.stored_scales):
                continue
            if w.matches(*quantize_tiled(w.master, fmt, checked=False)):
                if fmt not in self._last:
                    self._last.insert(0, fmt)
                return fmt
        return None

    def _shifted_grid(self, w: Weight) -> bool:
        for family in _FUSED:
            found = re.fullmatch(rf"(.*\.)({'|'.join(family)})(\.weight)", w.name)
            if not found:
                continue
            names = [f"{found[1]}{part}{found[3]}" for part in family]
            if not all(n in self.shapes for n in names):
                continue
            sizes = [self.shapes[n][0] for n in names]
            if all(size % w.format.block[0] == 0 for size in sizes):
                continue
            codes, _ = quantize_tiled(torch.cat([self.master(n) for n in names]), w.format, checked=False)
            start = sum(sizes[: family.index(found[2])])
            return torch.equal(as_bytes(codes)[start : start + w.master.shape[0]], w.stored_codes)
        return False

    def _other(self, w: Weight) -> str:
        """The weight of the same shape whose codes these are."""
        rows, cols, _ = next(tiles(w.master.shape[0], w.master.shape[1], w.format.block))
        for name, shape in self.shapes.items():
            if name == w.name or shape != tuple(w.master.shape):
                continue
            part, _ = quantize_tiled(self.master(name)[rows, cols], w.format, checked=False)
            if torch.equal(as_bytes(part), w.stored_codes[rows, cols]):
                codes, _ = quantize_tiled(self.master(name), w.format, checked=False)
                if torch.equal(as_bytes(codes), w.stored_codes):
                    return name
        return ""


def as_bytes(codes: Tensor) -> Tensor:
    """FP8 codes as uint8, since floats compare -0 equal to 0 and NaN different from itself."""
    return codes.view(torch.uint8)


def tile_matches(
    tile: Tile, master: Tensor, fmt: Format, codes: Tensor, scales: Tensor, *, checked: bool = False
) -> bool:
    """Whether ``fmt`` makes of a tile of ``master`` what codes (as uint8) and scales are there."""
    rows, cols, blocks = tile
    made = quantize(master[rows, cols], fmt, checked=checked)
    wanted = codes[rows, cols]
    return torch.equal(made.scales, scales[blocks]) and torch.equal(
        as_bytes(made.codes)[: wanted.shape[0], : wanted.shape[1]], wanted
    )


def changes(wanted: Format, found: Format) -> list[str]:
    """Names of the rules in which two formats differ."""
    return [f.name for f in fields(Format) if getattr(wanted, f.name) != getattr(found, f.name)]


def _alternatives(w: Weight) -> Iterator[Format]:
    """Every other format that could have made scales like the stored ones, those with the fewest changes first."""
    powers = bool((w.stored_scales.view(torch.int32) & 0x007FFFFF == 0).all())
    found = []
    for values in itertools.product(*_VALUES.values()):
        chosen = dict(zip(_VALUES, values, strict=True))
        if w.master.dtype == torch.bfloat16 and chosen["source"] not in (w.format.source, "bfloat16"):
            continue  # every source that holds bf16 exactly is the same
        try:
            fmt = replace(w.format, **chosen)  # type: ignore[arg-type]
        except RecipeError:  # rules that exclude each other
            continue
        if fmt != w.format and fmt.powers_of_two == powers:
            found.append(fmt)
    yield from sorted(found, key=lambda fmt: len(changes(w.format, fmt)))


def _first_difference(w: Weight) -> Tile | None:
    """The tile with the first byte that differs; None if the stored scales have another shape."""
    if w.stored_scales.shape != w.scales.shape:
        return None
    for tile in tiles(w.master.shape[0], w.master.shape[1], w.format.block):
        rows, cols, blocks = tile
        same_codes = torch.equal(w.codes[rows, cols], w.stored_codes[rows, cols])
        if not same_codes or not torch.equal(w.scales[blocks], w.stored_scales[blocks]):
            return tile
    return None


def _scales_only(w: Weight) -> Explanation:
    """The codes are right, and the scales are not."""
    stored, wanted = w.stored_scales, w.scales
    rounded = torch.exp2(torch.ceil(torch.log2(wanted.double()))).float()
    for kind, detail, value in (
        ("scale rounded after", "the codes were made with scales that were not powers of two yet", rounded),
        ("scale transposed", "the scales lie [K, N]", wanted.t().contiguous()),
        ("scale transposed", "the scales lie [K, N] in the shape of [N, K]", wanted.t().reshape(wanted.shape)),
        ("scale inverted", "the scales are what codes are divided by", wanted.reciprocal()),
        ("scale inverted", "the scales are what codes are divided by", 1 / wanted.double()),
        ("scale in bf16", "the codes were made with the fp32 scales", wanted.bfloat16().float()),
    ):
        if torch.equal(stored, value.to(torch.float32)):
            return Explanation(kind, detail)
    off = int((stored != wanted).sum()) if stored.shape == wanted.shape else wanted.numel()
    return Explanation("scale stale", f"{off} of {wanted.numel()} scales are not those of these codes")


def _requantised(w: Weight) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Quantised, dequantised and quantised once more."""
    powers = bool((w.stored_scales.view(torch.int32) & 0x007FFFFF == 0).all())
    for source in dict.fromkeys((w.format.source, "float32")):
        first = replace(w.format, source=source, scale_dtype="float32", requantize="none")
        second = replace(first, source="float32", scale_dtype="ue8m0" if powers else "float32")
        once = _padded(*quantize_tiled(w.master, first, checked=False), first)
        for via in (torch.float32, torch.bfloat16):
            words = f"quantised to {first}, dequantised to {str(via).removeprefix('torch.')}, quantised to {second}"
            yield words, *quantize_tiled(dequantize(once, via), second, checked=False)


def _padded(codes: Tensor, scales: Tensor, fmt: Format) -> QTensor:
    (r, c), (n, k) = fmt.block, codes.shape
    full = torch.nn.functional.pad(as_bytes(codes), (0, -k % c, 0, -n % r)).view(codes.dtype)
    return QTensor(full, scales, codes.shape, fmt)


def _transposed(w: Weight) -> Iterator[tuple[str, Tensor, Tensor]]:
    n, k = w.master.shape
    if n == k:
        yield "the weight lies [K, N]", *quantize_tiled(w.master.t(), w.format, checked=False)


def _unexplained(w: Weight) -> Explanation:
    """No rule makes these bytes: is it damage, an older weight, or another weight altogether?"""
    wrong = int((~w.stored_codes.view(w.format.torch_dtype).float().isfinite()).sum())
    if wrong:
        return Explanation("damaged", f"{wrong} of {w.codes.numel()} codes are NaN, which no finite weight becomes")
    off = int((w.codes != w.stored_codes).sum())
    if w.same_scales and off <= DAMAGE * w.codes.numel():
        return Explanation("damaged", f"{off} of {w.codes.numel()} codes differ under equal scales")
    scales = w.stored_scales if w.stored_scales.shape == w.scales.shape else w.stored_scales.t().contiguous()
    value = dequantize(_padded(w.stored_codes.view(w.format.torch_dtype), scales, w.format))
    master = w.master.float()
    error = float((value - master).norm() / master.norm().clamp(min=1e-30))
    if error < 0.5:
        return Explanation("stale weights", f"the weight differs by {error:.1%} from the master, in no rule's way")
    return Explanation("other weights", f"the weight differs by {error:.0%} from the master")
