"""Reference attention: the same bits however a sequence is cut, close to the exact formula in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from precgraph.errors import InputError
from precgraph.lowering.reference.attention import (
    KEY_TILE,
    attend,
    attend_backward,
    attend_packed,
    attend_packed_backward,
)
from precgraph.ops import AttentionSpec

LENGTH = 400
BF16_UNIT = 2.0**-8  # largest relative error of rounding to bf16
LENGTHS = (1, 7, 127, 128, 129, 300, 400)


def make_spec(heads: int, kv_heads: int, dim: int, window: int = 0, softcap: float = 0.0) -> AttentionSpec:
    return AttentionSpec(
        scale=dim**-0.5,
        window=window,
        softcap=softcap,
        layer=0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
    )


# Group sizes 1, 2, 3, 4, 8; widths 16 to 128; windows of one key, shorter and longer than a key tile.
SPECS = [
    make_spec(4, 4, 16),
    make_spec(4, 2, 32, softcap=5.0),
    make_spec(9, 3, 64),
    make_spec(9, 3, 64, window=100),
    make_spec(6, 2, 64, window=1),
    make_spec(8, 2, 96, window=64, softcap=20.0),
    make_spec(8, 1, 128),
    make_spec(4, 1, 128, window=130, softcap=50.0),  # query 256 sees key 127, the last of its key tile
]
each_spec = pytest.mark.parametrize(
    "spec",
    SPECS,
    ids=lambda s: f"{s.heads}q{s.kv_heads}kv-width{s.head_dim}-window{s.window}-cap{s.softcap:g}",
)


def inputs(spec: AttentionSpec, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as a fused projection makes them: column slices of one [length, all heads * width] tensor."""
    generator = torch.Generator().manual_seed(seed)
    total = spec.heads + 2 * spec.kv_heads
    fused = torch.randn(length, total * spec.head_dim, generator=generator).bfloat16()
    fused[:, : spec.heads * spec.head_dim] *= 3  # sharp rows as well as flat ones
    by_head = fused.view(length, total, spec.head_dim)
    q, k, v = by_head.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    return q, k, v


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def exact_scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """[H, S, S] of the definition, in the dtype of q and k; -inf where the key is not visible."""
    keys = k.repeat_interleave(spec.heads // spec.kv_heads, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position = torch.arange(q.shape[0])
    behind = position[:, None] - position
    visible = (behind >= 0) & (behind < (spec.window or q.shape[0]))
    return scores.masked_fill(~visible, -torch.inf)


def exact(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    values = v.repeat_interleave(spec.heads // spec.kv_heads, dim=1)
    return torch.einsum("hij,jhd->ihd", exact_scores(q, k, spec).softmax(-1), values)


@each_spec
@pytest.mark.parametrize("thread_count", [1, 2])
def test_a_query_has_the_same_bits_however_it_is_called(spec: AttentionSpec, thread_count: int) -> None:
    q, k, v = inputs(spec)
    with threads(1):
        out, lse = attend(q, k, v, 0, spec, need_lse=True)

    def check(low: int, high: int, keys: int) -> None:
        got, got_lse = attend(q[low:high], k[:keys], v[:keys], low, spec, need_lse=True)
        assert torch.equal(got, out[low:high]), (low, high, keys)
        assert torch.equal(got_lse, lse[low:high]), (low, high, keys)

    generator = torch.Generator().manual_seed(1)
    positions = {n - 1 for n in LENGTHS} | set(torch.randint(LENGTH, (40,), generator=generator).tolist())
    with threads(thread_count):
        for position in sorted(positions):  # decode, the cache exactly as long as it must be, and longer
            check(position, position + 1, position + 1)
        check(200, 201, LENGTH)
        for length in LENGTHS:  # prefill alone
            check(0, length, length)
        for low, high in ((3, 5), (100, 229), (127, 129), (128, 400), (255, 300)):  # after a cached prefix
            check(low, high, high)
        for _ in range(3):  # a whole sequence in random chunks
            cuts = sorted({0, LENGTH, *torch.randint(LENGTH, (6,), generator=generator).tolist()})
            for low, high in pairwise(cuts):
                check(low, high, high)


def test_every_position_decodes_to_the_bits_of_the_prefill() -> None:
    spec = make_spec(9, 3, 64)
    q, k, v = inputs(spec, seed=2)
    out = attend(q, k, v, 0, spec)
    decoded = [attend(q[i : i + 1], k[: i + 1], v[: i + 1], i, spec) for i in range(LENGTH)]
    assert torch.equal(torch.cat(decoded), out)


@each_spec
def test_strides_do_not_matter(spec: AttentionSpec) -> None:
    q, k, v = inputs(spec)
    out = attend(q, k, v, 0, spec)
    assert not q.is_contiguous()
    assert torch.equal(attend(q.contiguous(), k.contiguous(), v.contiguous(), 0, spec), out)
    head_major = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(attend(head_major[0], head_major[1], head_major[2], 0, spec), out)


@each_spec
def test_other_tokens_of_the_tile_do_not_matter(spec: AttentionSpec) -> None:
    """Neither the values of neighbouring queries nor those of later keys reach a row, however large."""
    q, k, v = (x.clone() for x in inputs(spec))
    position = 261
    alone = attend(q, k, v, 0, spec)[position]
    q[position + 1 :] *= 1e4
    k[position + 1 :] = -1e4
    v[position + 1 :] = 1e30
    q[:position] = 7
    assert torch.equal(attend(q, k, v, 0, spec)[position], alone)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.window], ids=lambda s: f"window{s.window}")
def test_skipping_key_tiles_before_the_window_changes_no_bit(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(spec)
    skipped = attend(q, k, v, 0, spec, need_lse=True)
    monkeypatch.setattr(import_module(attend.__module__), "_first_visible", lambda query, spec: 0)
    visited = attend(q, k, v, 0, spec, need_lse=True)
    assert torch.equal(skipped[0], visited[0])
    assert torch.equal(skipped[1], visited[1])


@each_spec
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_is_within_its_roundings_of_the_exact_formula(spec: AttentionSpec, length: int) -> None:
    """Each P is off by at most one bf16 rounding, and so is the result; 2^-12 covers the fp32 arithmetic.

    With u = 2^-8: |out - exact| <= u * sum_j p_j |v_j| / l  (P)  +  u * |out|  (result), up to terms in u².
    """
    q, k, v = inputs(spec, length, seed=3)
    out, lse = attend(q, k, v, 0, spec, need_lse=True)
    q64, k64, v64 = q.double(), k.double(), v.double()
    want, spread = exact(q64, k64, v64, spec), exact(q64, k64, v64.abs(), spec)
    bound = (BF16_UNIT * (spread + want.abs())) * (1 + BF16_UNIT) + 2.0**-12 * spread
    assert ((out.double() - want).abs() <= bound).all()
    want_lse = exact_scores(q64, k64, spec).logsumexp(-1).T
    assert (lse.double() - want_lse).abs().max() <= 1e-4


@each_spec
def test_the_roundings_are_the_documented_ones(spec: AttentionSpec) -> None:
    """The same steps in float64, rounded only where the docstring says so, give nearly always the same bf16.

    An fp32 error of about 1e-6 may carry a P or an output over a rounding boundary, in under one output of a
    thousand. Leaving P unrounded changes a quarter of them, summing P after its rounding a twentieth.
    """
    q, k, v = inputs(spec, seed=8)
    scores = exact_scores(q.double(), k.double(), spec)
    values = v.double().repeat_interleave(spec.heads // spec.kv_heads, dim=1)

    def emulate(round_p: bool, round_sum: bool) -> Tensor:
        acc, total = torch.zeros_like(q, dtype=torch.float64), torch.zeros(spec.heads, LENGTH, 1).double()
        top = torch.full_like(total, -1e30)
        for start in range(0, LENGTH, KEY_TILE):
            tile = slice(start, start + KEY_TILE)
            new_top = torch.maximum(top, scores[..., tile].amax(-1, keepdim=True))
            p = torch.exp(scores[..., tile] - new_top)
            rescale, top, rounded = torch.exp(top - new_top), new_top, p.bfloat16().double()
            total = total * rescale + (rounded if round_sum else p).sum(-1, keepdim=True)
            product = torch.einsum("hij,jhd->ihd", rounded if round_p else p, values[tile])
            acc = acc * rescale.transpose(0, 1) + product
        return (acc / total.transpose(0, 1)).bfloat16()

    out = attend(q, k, v, 0, spec)

    def differing(other: Tensor) -> float:
        return float((out != other).double().mean())

    assert differing(emulate(round_p=True, round_sum=False)) < 0.002
    if spec.window != 1:  # one visible key: P is 1, exact under every rule
        assert differing(emulate(round_p=False, round_sum=False)) > 0.02
        assert differing(emulate(round_p=True, round_sum=True)) > 0.02


@each_spec
@pytest.mark.parametrize("length", [1, 129, 700])
def test_backward_against_float64_autograd(spec: AttentionSpec, length: int) -> None:
    """Relative error of each gradient at most 2u: one bf16 rounding of it, one of ``out`` inside delta."""
    q, k, v = inputs(spec, length, seed=4)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    out, lse = attend(q, k, v, 0, spec, need_lse=True)
    got = attend_backward(dout, q, k, v, out, lse, spec)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(exact(leaves[0], leaves[1], leaves[2], spec), leaves, dout.double())
    scale = want[2].norm()  # one visible key: dq and dk are 0 exactly, and rounding noise here
    for name, x, y in zip("qkv", got, want, strict=True):
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        error = (x.double() - y).norm()
        limit = 2 * BF16_UNIT * (y.norm() if length > 1 and spec.window != 1 else scale)
        assert error <= limit, (name, float(error / limit))


@each_spec
def test_packed_sequences_equal_each_alone(spec: AttentionSpec) -> None:
    bounds = [0, 5, 134, 134, 135, 400]  # the third sequence is empty
    q, k, v = (x[None] for x in inputs(spec, seed=6))
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(1, LENGTH, spec.heads * spec.head_dim, generator=generator).bfloat16()
    out, lse = attend_packed(q, k, v, bounds, spec)
    assert out.shape == dout.shape
    assert lse.shape == (LENGTH, spec.heads)
    grads = attend_packed_backward(dout, q, k, v, out, lse, bounds, spec)
    for low, high in pairwise(bounds):
        one = [x[0, low:high].contiguous() for x in (q, k, v)]
        alone, alone_lse = attend(one[0], one[1], one[2], 0, spec, need_lse=True)
        assert torch.equal(out[0, low:high], alone.flatten(1))
        assert torch.equal(lse[low:high], alone_lse)
        one_dout = dout[0, low:high].view(alone.shape)
        alone_grads = attend_backward(one_dout, one[0], one[1], one[2], alone, alone_lse, spec)
        for x, y in zip(grads, alone_grads, strict=True):
            assert torch.equal(x[0, low:high], y)
    again = attend_packed_backward(dout, q, k, v, out, lse, bounds, spec)
    assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))


def test_autocast_does_not_reach_the_products() -> None:
    spec = make_spec(4, 2, 32)
    q, k, v = inputs(spec, 150)
    out, lse = attend(q, k, v, 0, spec, need_lse=True)
    grads = attend_backward(q, q, k, v, out, lse, spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q, k, v, 0, spec), out)
        again = attend_backward(q, q, k, v, out, lse, spec)
    assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))


def test_a_visible_nan_is_never_hidden() -> None:
    spec = make_spec(4, 2, 32)
    for which in (1, 2):
        operands = [x.clone() for x in inputs(spec, 300)]
        operands[which][140] = torch.nan
        out = attend(operands[0], operands[1], operands[2], 0, spec)
        assert out[140:].isnan().all()
        assert out[:128].isfinite().all()


def test_wrong_arguments_are_refused() -> None:
    spec = make_spec(4, 2, 32)
    q, k, v = inputs(spec, 20)
    with pytest.raises(InputError, match="bfloat16"):
        attend(q.float(), k, v, 0, spec)
    with pytest.raises(InputError, match="do not fit 4 heads"):
        attend(k, k, v, 0, spec)
    with pytest.raises(InputError, match="need as many keys, got 20"):
        attend(q, k, v, 1, spec)
    with pytest.raises(InputError, match="not of one whole sequence"):
        attend_backward(q[:5], q[:5], k, v, q[:5], torch.zeros(5, 4), spec)
    for bounds in ([0, 12, 8, 20], [0, 19], [1, 20], []):
        with pytest.raises(InputError, match="do not divide 20 tokens"):
            attend_packed(q[None], k[None], v[None], bounds, spec)
    with pytest.raises(InputError, match="are not .1, T, heads, width"):
        attend_packed(q, k, v, [0, 20], spec)
