"""From the caller's padded or packed batch to packed tokens, and back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from precgraph.errors import InputError

POSITIONS = 2**24  # RoPE multiplies positions in fp32, which tells no more integers apart


@dataclass(frozen=True, slots=True)
class Packed:
    """The valid tokens of a batch ``[B, S]``, row after row.

    ``ids, positions [1, T]``; ``bounds`` cumulative starts of the sequences; ``where [T]`` flat indices into ``B·S``.
    """

    ids: Tensor
    positions: Tensor
    bounds: tuple[int, ...]
    where: Tensor
    shape: tuple[int, int]

    def unpack(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """Scatter ``values [n, ...]`` of packed tokens (at ``rows``, or all) into ``[B, S, ...]``, 0 elsewhere."""
        where = self.where if rows is None else self.where[rows]
        size = self.shape[0] * self.shape[1]
        out = values.new_zeros((size, *values.shape[1:])).index_copy(0, where, values)
        return out.view(*self.shape, *values.shape[1:])


def pack(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    vocab_size: int | None = None,
) -> Packed:
    """Pack ``input_ids [B, S]``.

    With a mask ``[B, S]`` (padding left or right), positions are ``cumsum(mask) - 1`` unless given: a rollout's
    positions, where Hugging Face would count the padding. Without one, every row is a sequence, or, if B is 1, the
    sequences begin where ``position_ids`` do not continue or where ``cu_seq_lens`` say.
    """
    require_values("input_ids", input_ids)
    others = {"attention_mask": attention_mask, "position_ids": position_ids, "cu_seq_lens": cu_seq_lens}
    for name, given in others.items():
        if given is not None:
            require_values(name, given)
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"input_ids must be int64 or int32 [batch, tokens], not {_describe(input_ids)}")
    rows, width = input_ids.shape
    mask = _check_mask(attention_mask, input_ids)
    if position_ids is not None:
        if position_ids.shape == (1, width):
            position_ids = position_ids.expand(rows, -1)
        if position_ids.shape != input_ids.shape or position_ids.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"position_ids must be integers {list(input_ids.shape)} like input_ids, not {_describe(position_ids)}"
            )
    lengths = mask.sum(1).tolist()
    if cu_seq_lens is not None:
        bounds = _check_cu_seq_lens(cu_seq_lens, rows, width, mask)
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])[None].to(input_ids.device)
        positions = positions if position_ids is None else position_ids
    else:
        positions = mask.cumsum(1) - 1 if position_ids is None else position_ids
        bounds = _bounds(lengths, positions[0] if rows == 1 and bool(mask.all()) else None)
    where = mask.flatten().nonzero().flatten()
    if where.numel() == 0:
        raise InputError("the batch holds no token: every position is masked")
    ids = input_ids.flatten()[where]
    if vocab_size is not None and ids.device.type == "cpu" and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise InputError(
            f"input_ids hold {int(ids.min())}..{int(ids.max())}, outside the vocabulary 0..{vocab_size - 1}"
        )
    flat = positions.flatten()[where].long()
    if position_ids is not None:
        _require_positions(flat, bounds)
    return Packed(ids[None].long(), flat[None], bounds, where, (rows, width))


def require_values(name: str, given: object) -> None:
    """InputError, naming the argument, unless it is a tensor that holds its values: dense, and not of device meta."""
    if not isinstance(given, Tensor):
        raise InputError(f"{name} must be a tensor, not {type(given).__name__}", remedy="pass torch.tensor(...)")
    if given.is_meta or given.is_nested or given.layout is not torch.strided:
        kind = "of device meta" if given.is_meta else "nested" if given.is_nested else str(given.layout)
        raise InputError(f"{name} must be a dense tensor with values, not one {kind}", remedy="pass its dense values")


def _require_positions(positions: Tensor, bounds: tuple[int, ...]) -> None:
    """A sequence whose positions jump or restart would silently attend over what was meant to be separate."""
    least, most = int(positions.min()), int(positions.max())
    if least < 0 or most >= POSITIONS:
        raise InputError(
            f"position_ids hold {least}..{most}, outside 0..{POSITIONS - 1}",
            remedy="count a sequence's tokens from 0, or leave position_ids out",
        )
    continues = positions.diff() == 1
    continues[torch.tensor(bounds[1:-1], dtype=torch.long, device=positions.device) - 1] = True
    if not bool(continues.all()):
        at = int((~continues).nonzero()[0])
        raise InputError(
            f"position_ids jump from {int(positions[at])} to {int(positions[at + 1])} inside a sequence",
            remedy="pack several sequences into one row without padding, or leave position_ids out",
        )


def _check_mask(mask: Tensor | None, input_ids: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask must be [batch, tokens] = {tuple(input_ids.shape)}, not {_describe(mask)}",
            remedy="pass the tokenizer's 2-D mask; causality and windows are part of the program",
        )
    valid = mask.bool()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            "attention_mask holds other values than 0 and 1",
            remedy="pass the tokenizer's 2-D mask; additive masks and sequence numbers mean something else",
        )
    starts = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0]
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise InputError(
            f"attention_mask has a hole in row {row}", remedy="pad on one side only, or pack sequences into one row"
        )
    return valid


def _check_cu_seq_lens(cu_seq_lens: Tensor, rows: int, width: int, mask: Tensor) -> tuple[int, ...]:
    if cu_seq_lens.dtype not in (torch.int64, torch.int32) or cu_seq_lens.shape[-1:].numel() != cu_seq_lens.numel():
        raise InputError(f"cu_seq_lens must be int64 or int32 [sequences + 1], not {_describe(cu_seq_lens)}")
    bounds = tuple(cu_seq_lens.flatten().tolist())
    rising = all(a < b for a, b in pairwise(bounds))
    if rows != 1 or not bool(mask.all()) or bounds[:1] != (0,) or bounds[-1] != width or not rising:
        raise InputError(f"cu_seq_lens {list(bounds)} must rise from 0 to {width} over a batch of one unmasked row")
    return bounds


def _bounds(lengths: list[int], positions: Tensor | None) -> tuple[int, ...]:
    """Cumulative starts: one sequence a row, or of one packed row where positions do not continue."""
    if positions is not None:
        breaks = ((positions[1:] - positions[:-1]) != 1).nonzero().flatten() + 1
        if bool((positions[breaks] != 0).any()):
            at = int(breaks[positions[breaks] != 0][0])
            raise InputError(
                f"position_ids jump from {int(positions[at - 1])} to {int(positions[at])}",
                remedy="sequences packed into one row restart at 0; otherwise say where they begin in cu_seq_lens",
            )
        return (0, *breaks.tolist(), positions.shape[0])
    bounds = [0]
    for length in lengths:
        if length:
            bounds.append(bounds[-1] + length)
    return tuple(bounds)


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
