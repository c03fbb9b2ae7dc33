"""Rows of keys and values in the pages of a cache: bytes by plain indexing, all other places as they were."""

from __future__ import annotations

import pytest
import torch

from precgraph.errors import InputError
from tests.gpu.device import DEVICE, KERNELS, sizes

pytestmark = KERNELS


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize(("heads", "width"), [(8, 128), (3, 64), (5, 80), (1, 256)])
@pytest.mark.parametrize("rows", sizes([1, 67, 1000], [1, 67]))
def test_pages(rows: int, heads: int, width: int, page: int) -> None:
    from precgraph.lowering.triton.pages import store_pages

    pages = 2 + rows // page
    projected = torch.randn(rows + 3, 2 * heads * width + 64, device=DEVICE).bfloat16()  # keys, values, another part
    keys, values = (projected[:, i * heads * width :][:, : heads * width].unflatten(1, (heads, width)) for i in (0, 1))
    slots = torch.randperm(pages * page, device=DEVICE)[:rows]
    if rows > 1:
        slots[rows // 2] = -1
    cache = torch.randn(pages, heads, page, 2 * width, device=DEVICE).bfloat16()  # as vLLM lays it out
    right = cache.clone()
    taken = slots >= 0
    at = (slots[taken] // page, slice(None), slots[taken] % page)
    right[at] = torch.cat((keys[:rows][taken], values[:rows][taken]), -1)
    store_pages(keys, values, *cache.transpose(1, 2).split(width, dim=-1), slots)
    assert torch.equal(cache.view(torch.int16), right.view(torch.int16))


def test_foreign_layouts_are_refused() -> None:
    from precgraph.lowering.triton.pages import store_pages

    keys, slots = torch.zeros(4, 2, 64, device=DEVICE, dtype=torch.bfloat16), torch.arange(4, device=DEVICE)
    pages = torch.zeros(3, 16, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="float32"):
        store_pages(keys, keys, pages.float(), pages.float(), slots)
    with pytest.raises(InputError, match="slots"):
        store_pages(keys[:3], keys[:3], pages, pages, slots)
    with pytest.raises(InputError, match="strides"):
        store_pages(keys, keys, *pages.transpose(2, 3).contiguous().transpose(2, 3).expand(2, -1, -1, -1, -1), slots)
    with pytest.raises(InputError, match="int32"):
        store_pages(keys, keys, pages, pages, slots.int())
    with pytest.raises(InputError, match="side by side"):
        store_pages(keys.transpose(0, 1).contiguous().transpose(0, 1), keys, pages, pages, slots)
