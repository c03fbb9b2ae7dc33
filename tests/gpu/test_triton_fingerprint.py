"""Fingerprints of many tensors in one launch, against torch's on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from precgraph.lowering.triton.fingerprint import weighted_sums
from precgraph.runtime.vllm import sync
from precgraph.runtime.vllm.sync import describe, fingerprint
from tests.gpu.device import DEVICE, INTERPRETED, KERNELS, sizes

pytestmark = KERNELS

BLOCK = sizes(8 << 21, 8 << 13)  # bytes of a block
SIZES = (
    0, 1, 7, 8, 9, 4096 * 8 - 8, 4096 * 8, 4096 * 8 + 8, BLOCK - 8, BLOCK, BLOCK + 8, 3 * BLOCK + 4096 * 8 + 5,
    5 * BLOCK,
)  # fmt: skip


def noise(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, blocks of 2**13 words, and the kernel in the place of torch on the CPU."""
    if INTERPRETED:
        monkeypatch.setattr(sync, "_BLOCK", BLOCK // 8)
        monkeypatch.setattr(sync, "_weighted_sums", lambda words, _: weighted_sums(words, BLOCK // 8, sync._GOLDEN))


def right(x: Tensor) -> int:
    """torch's on the CPU."""
    return int(sync._weighted_sum(sync._words(x))) % (1 << 64)


def test_sizes_alone_and_together() -> None:
    made = {str(size): noise(size) for size in SIZES}
    together = describe({name: x.to(DEVICE) for name, x in made.items()}, 1, "")
    assert together == describe(made, 1, "")
    for name, x in made.items():
        assert together.tensors[name].fingerprint == fingerprint(x.to(DEVICE)) == right(x), name


@pytest.mark.parametrize("offset", [1, 3, 8, 16, 24])
def test_views_that_begin_elsewhere(offset: int) -> None:
    for size in (8, 4096 * 8, BLOCK + 8, BLOCK + 13):
        x = noise(size + offset)
        assert fingerprint(x.to(DEVICE)[offset:]) == right(x[offset:]), size


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32])
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    x = noise(640 * 1024 * dtype.itemsize).view(dtype).view(640, 1024)
    for view in (slice(None), slice(0, 576), slice(1, 578)):  # whole, and padded columns of a matrix cut off
        assert fingerprint(x.to(DEVICE)[:, view]) == right(x[:, view]), view
    assert fingerprint(x.to(DEVICE)[0, 0]) == right(x[0, 0]), "a scalar"


def test_one_changed_bit_is_seen_in_every_block() -> None:
    x = noise(2 * BLOCK + 16).to(DEVICE)
    seen = {fingerprint(x)}
    for at in (0, 7, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 15):
        x[at] ^= 128
        seen.add(fingerprint(x))
    assert len(seen) == 7
