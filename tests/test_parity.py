"""Train and rollout give the same bits: ``max |Δ log-prob| == 0.0``, however the tokens are batched.

The reference of every case is each sequence alone in the FP8 rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import precgraph
from precgraph.runtime import sizes
from precgraph.runtime.compiled import Compiled
from precgraph.runtime.contexts import Attended
from tests.families import CAUSAL_LMS, VOCABULARY, causal_lm

LENGTHS = (1, 7, 127, 128, 129, 300)


class Pair(NamedTuple):
    """A policy compiled for both sides, sequences, and what the rollout says of each alone."""

    actor: Any
    rollout: Any
    sequences: list[Tensor]
    logits: list[Tensor]
    logprobs: list[Tensor]


def sequences(lengths: Sequence[int], vocabulary: int = VOCABULARY) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def make_pair(model: PreTrainedModel, rows: list[Tensor], **options: Any) -> Pair:
    actor = precgraph.compile(model, "train", **options)
    rollout = precgraph.compile(actor, "infer")
    logits = [rollout(row[None]).logits[0] for row in rows]
    return Pair(actor, rollout, rows, logits, [precgraph.token_logprobs(rollout, row[None])[0] for row in rows])


@pytest.fixture(scope="module", params=CAUSAL_LMS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return make_pair(causal_lm(request.param), sequences(LENGTHS))


def padded(rows: Sequence[Tensor], side: str, extra: int = 0) -> tuple[Tensor, Tensor]:
    """Ids ``[B, S]`` and mask; padding holds arbitrary ids."""
    width = max(len(r) for r in rows) + extra
    ids = torch.randint(0, VOCABULARY, (len(rows), width), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def valid(values: Tensor, mask: Tensor) -> list[Tensor]:
    """Each row's values at its tokens."""
    return [v[m.bool()] for v, m in zip(values, mask, strict=True)]


def scored(values: Tensor, mask: Tensor) -> list[Tensor]:
    """Each row's log-probabilities: entries whose token and successor are both there."""
    return [v[(m[1:] & m[:-1]).bool()] for v, m in zip(values, mask, strict=True)]


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and torch.equal(a, b), f"length {len(b)}: {(a - b).abs().max()}"


def test_trainer_alone(pair: Pair) -> None:
    """Under gradients, whose forward also makes what the backward saves."""
    for row, logits, logprobs in zip(pair.sequences, pair.logits, pair.logprobs, strict=True):
        out = pair.actor(row[None]).logits
        assert out.dtype == torch.float32 and out.requires_grad
        assert torch.equal(out[0].detach(), logits)
        assert torch.equal(precgraph.token_logprobs(pair.actor, row[None])[0].detach(), logprobs)


@torch.no_grad()
def test_logprobs_are_log_softmax(pair: Pair) -> None:
    for row, logits, logprobs in zip(pair.sequences, pair.logits, pair.logprobs, strict=True):
        wanted = torch.log_softmax(logits[:-1], -1).gather(1, row[1:, None])[:, 0]
        assert torch.equal(logprobs, wanted)
        at = precgraph.token_logprobs(pair.rollout, row[None], temperature=0.7)[0]
        assert torch.equal(at, torch.log_softmax(logits[:-1] / torch.tensor(0.7), -1).gather(1, row[1:, None])[:, 0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair: Pair, side: str) -> None:
    ids, mask = padded(pair.sequences, side, extra=5)
    for model in (pair.actor, pair.rollout):
        with torch.no_grad():
            out = model(ids, attention_mask=mask).logits
        assert_equal(valid(out, mask), pair.logits)
        assert not out[~mask.bool()].any()
    assert_equal(scored(precgraph.token_logprobs(pair.actor, ids, mask).detach(), mask), pair.logprobs)


@torch.no_grad()
@pytest.mark.parametrize("size", range(1, 10))
def test_batch_sizes(pair: Pair, size: int) -> None:
    """Batches of equal rows are not padded; mixed ones are, on alternating sides."""
    picked = [1 + (i + size) % 3 for i in range(size)]  # of lengths 7, 127, 128
    ids, mask = padded([pair.sequences[i] for i in picked], "left" if size % 2 else "right")
    for model in (pair.actor, pair.rollout):
        found = scored(precgraph.token_logprobs(model, ids, mask), mask)
        assert_equal(found, [pair.logprobs[i] for i in picked])
    same = pair.sequences[1].expand(size, -1)
    assert_equal(list(pair.rollout(same).logits), [pair.logits[1]] * size)


@torch.no_grad()
def test_packed(pair: Pair) -> None:
    """Restarting positions and cu_seq_lens both divide one row; the other sequences change nothing."""
    order = (3, 0, 5, 1, 4, 2)
    rows = [pair.sequences[i] for i in order]
    ids = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
    bounds = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).int()
    for model in (pair.actor, pair.rollout):
        for given in ({"position_ids": positions}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
            out = model(ids, **given).logits[0]
            assert_equal(out.split([len(r) for r in rows]), [pair.logits[i] for i in order])
        for given in ({"position_ids": positions}, {"cu_seq_lens": bounds}):
            out = precgraph.token_logprobs(model, ids, **given)[0]
            parts = torch.cat((out, out.new_zeros(1))).split([len(r) for r in rows])
            assert_equal([p[:-1] for p in parts], [pair.logprobs[i] for i in order])
            assert all(p[-1] == 0 for p in parts)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
def test_threads(pair: Pair, threads: Callable[[int], None], count: int) -> None:
    threads(count)
    assert torch.get_num_threads() == count
    ids, mask = padded([pair.sequences[i] for i in (0, 1, 4)], "left")
    for model in (pair.actor, pair.rollout):
        assert_equal(valid(model(ids, attention_mask=mask).logits, mask), [pair.logits[i] for i in (0, 1, 4)])
        assert torch.equal(precgraph.token_logprobs(model, pair.sequences[4][None])[0], pair.logprobs[4])


def test_autocast(pair: Pair) -> None:
    row = pair.sequences[4][None]
    with torch.autocast("cpu", torch.bfloat16):
        for model in (pair.actor, pair.rollout):
            assert torch.equal(model(row).logits[0], pair.logits[4])
            assert torch.equal(precgraph.token_logprobs(model, row)[0], pair.logprobs[4])


def test_eval_changes_no_bit(pair: Pair) -> None:
    row = pair.sequences[4][None]
    for model in (pair.actor, pair.rollout):
        for training in (True, False):
            model.train(training)
            assert torch.equal(model(row).logits[0], pair.logits[4])
            with torch.no_grad():
                assert torch.equal(model(row).logits[0], pair.logits[4])


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_to_keep(pair: Pair, side: str) -> None:
    """Columns of the padded batch, as Hugging Face counts them: a number from the end, or indices in any order."""
    ids, mask = padded(pair.sequences[:3], side)
    for model in (pair.actor, pair.rollout):
        full = model(ids, attention_mask=mask).logits
        for keep in (1, 5, ids.shape[1], ids.shape[1] + 3, torch.tensor([126]), torch.tensor([3, 0, 3])):
            columns = slice(-keep, None) if isinstance(keep, int) else keep
            assert torch.equal(model(ids, attention_mask=mask, logits_to_keep=keep).logits, full[:, columns])


def test_gradient_of_logits_to_keep(pair: Pair) -> None:
    ids, mask = padded(pair.sequences[:3], "left")
    norm = pair.actor.model.norm.weight
    weights = torch.randn(3, 4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    (kept,) = torch.autograd.grad((pair.actor(ids, attention_mask=mask, logits_to_keep=4).logits * weights).sum(), norm)
    (full,) = torch.autograd.grad((pair.actor(ids, attention_mask=mask).logits[:, -4:] * weights).sum(), norm)
    torch.testing.assert_close(kept, full, rtol=2**-7, atol=0.0)  # the same terms beside zeros, summed in one order


class Chunks:
    """A cache of one sequence, by hand: keys and values so far, per layer."""

    def __init__(self) -> None:
        self.position = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def sequences(self, layer: int, k: Tensor, v: Tensor) -> Iterator[Attended]:
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        yield Attended(0, k.shape[1] - self.position, self.position, k[0], v[0])

    def run(self, model: Any, ids: Tensor) -> Tensor:
        """Logits of the next tokens of the sequence."""
        positions = torch.arange(self.position, self.position + len(ids))
        hidden = model.precgraph.hidden(ids[None], positions[None], self)
        self.position += len(ids)
        out: Tensor = model.precgraph.logits(hidden)
        return out


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(1,) * 40, (100, 29), (128, 1, 128, 43), (7, 121, 1, 171)])
def test_chunked_prefill_and_decode(pair: Pair, chunks: tuple[int, ...]) -> None:
    cache = Chunks()
    row = pair.sequences[-1][: sum(chunks)]
    found = torch.cat([cache.run(pair.rollout, part) for part in row.split(chunks)])
    assert torch.equal(found, pair.logits[-1][: len(row)])


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])  # whose router masks with infinity
def test_checked_mode_gives_the_same_bits(family: str) -> None:
    rows = sequences((7, 129))
    plain, checked = make_pair(causal_lm(family), rows), make_pair(causal_lm(family), rows, checked=True)
    assert_equal(checked.logits, plain.logits)
    for row, logits in zip(rows, plain.logits, strict=True):
        with torch.enable_grad():
            assert torch.equal(checked.actor(row[None]).logits[0], logits)


@torch.no_grad()
def test_rows_have_their_own_temperature(pair: Pair) -> None:
    ids, mask = padded(pair.sequences[1:4], "right")
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    found = precgraph.token_logprobs(pair.actor, ids, mask, temperature=temperatures)
    for row, temperature, values in zip(pair.sequences[1:4], temperatures.tolist(), scored(found, mask), strict=True):
        alone = precgraph.token_logprobs(pair.rollout, row[None], temperature=temperature)[0]
        assert torch.equal(values, alone)
    with pytest.raises(precgraph.InputError, match="3 rows"):
        precgraph.token_logprobs(pair.actor, ids, mask, temperature=torch.ones(2))
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(precgraph.InputError, match="temperature must be at least"):
            precgraph.token_logprobs(pair.actor, ids, mask, temperature=bad)


@pytest.mark.parametrize("side", ["left", "right"])
def test_some_rows_alone(pair: Pair, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any entries in any order, with the bits that they have among all; lm_head sees no other row."""
    ids, mask = padded(pair.sequences[1:4], side, extra=3)
    temperature = torch.tensor([0.5, 1.0, 2.0])
    whole, entropy = precgraph.token_logprobs(pair.actor, ids, mask, temperature=temperature, entropy=True)
    rows = (mask[:, 1:] & mask[:, :-1]).bool().flatten().nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))][:40]
    seen: list[int] = []
    compiled = type(pair.actor.precgraph)
    logits = compiled.logits
    monkeypatch.setattr(
        compiled, "logits", lambda self, hidden: [seen.append(hidden.shape[1]), logits(self, hidden)][1]
    )
    for model in (pair.actor, pair.rollout):
        some = precgraph.token_logprobs(model, ids, mask, temperature=temperature, entropy=True, rows=rows)
        assert torch.equal(some[0], whole.flatten()[rows]) and torch.allclose(some[1], entropy.flatten()[rows])
    assert seen == [40, 40]
    norm = pair.actor.model.norm.weight
    wanted, found = (
        torch.autograd.grad(x.sum(), norm)[0]
        for x in (
            whole.flatten()[rows],
            precgraph.token_logprobs(pair.actor, ids, mask, temperature=temperature, rows=rows),
        )
    )
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-2)
    assert precgraph.token_logprobs(pair.actor, ids, mask, rows=rows[:0]).shape == (0,)
    ends = (mask[:, :-1].bool() & ~(mask[:, 1:] & mask[:, :-1]).bool()).flatten().nonzero().flatten()
    empty = (~mask[:, :-1].bool()).flatten().nonzero().flatten()
    for bad in (empty[:1], *([ends[:1]] if len(ends) else [])):
        with pytest.raises(precgraph.InputError, match="predicts nothing"):
            precgraph.token_logprobs(pair.actor, ids, mask, rows=torch.cat([rows, bad]))
    for bad in (rows.int(), rows[None], torch.tensor([-1]), torch.tensor([whole.numel()])):
        with pytest.raises(precgraph.InputError, match="rows must be"):
            precgraph.token_logprobs(pair.actor, ids, mask, rows=bad)
    with pytest.raises(precgraph.InputError, match="rows must be a tensor, not list"):
        precgraph.token_logprobs(pair.actor, ids, mask, rows=[0])  # type: ignore[call-overload]
    with pytest.raises(precgraph.InputError, match="input_ids must be a tensor, not NoneType"):
        precgraph.token_logprobs(pair.actor, None)  # type: ignore[call-overload]


def test_rows_that_fill_a_call_up_add_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: 37 rows are scored as 48, with the same values and the same gradient."""
    ids, rows = pair.sequences[2][None], torch.arange(37)

    def both() -> list[Tensor]:
        values = precgraph.token_logprobs(pair.actor, ids, rows=rows)
        return [values.detach(), *torch.autograd.grad(values.sum(), [pair.actor.model.norm.weight])]

    plain = both()
    monkeypatch.setattr(sizes, "FILLED", {"cpu"})
    seen: list[int] = []
    logits = Compiled.logits
    monkeypatch.setattr(Compiled, "logits", lambda self, h: [seen.append(h.shape[1]), logits(self, h)][1])
    assert_equal(both(), plain)
    assert set(seen) == {48}


@torch.no_grad()
def test_packed_rows_end_with_their_sequence(pair: Pair) -> None:
    """A packed sequence's last token predicts nothing, although another sequence follows."""
    ids, bounds = (
        torch.cat(pair.sequences[1:4])[None],
        torch.tensor([0, *(len(s) for s in pair.sequences[1:4])]).cumsum(0),
    )
    rows = torch.tensor([int(bounds[1]), int(bounds[2]) - 2, 0])
    some = precgraph.token_logprobs(pair.actor, ids, cu_seq_lens=bounds, rows=rows)
    assert torch.equal(some, torch.stack([pair.logprobs[2][0], pair.logprobs[2][-1], pair.logprobs[1][0]]))
    with pytest.raises(precgraph.InputError, match="predicts nothing"):
        precgraph.token_logprobs(pair.actor, ids, cu_seq_lens=bounds, rows=bounds[1:2] - 1)


def test_long_batches_are_scored_in_pieces(pair: Pair) -> None:
    """More rows than token_logprobs holds logits for, with a temperature for each row of the batch."""
    ids = pair.sequences[-1].expand(3, -1)
    temperature = torch.tensor([1.0, 0.5, 1.0])
    logprobs, entropy = precgraph.token_logprobs(pair.actor, ids, temperature=temperature, entropy=True)
    assert_equal([logprobs[0].detach(), logprobs[2].detach()], [pair.logprobs[-1]] * 2)
    p = torch.log_softmax(pair.logits[-1][:-1].double(), -1)
    torch.testing.assert_close(entropy[0].double(), -(p.exp() * p).sum(-1), rtol=1e-5, atol=0.0)
    norm = pair.actor.model.norm.weight
    (found,) = torch.autograd.grad(logprobs[0].sum(), norm)
    logits = pair.actor(ids[:1]).logits[0, :-1]
    wanted_loss = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).sum()
    (wanted,) = torch.autograd.grad(wanted_loss, norm)
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-2)


@torch.no_grad()
def test_a_rollout_grows_no_autograd_graph(pair: Pair) -> None:
    """Under gradients it must not hand out the partial gradients of the operations inside its kernels."""
    with torch.enable_grad():
        assert not pair.rollout(pair.sequences[1][None]).logits.requires_grad
        assert not precgraph.token_logprobs(pair.rollout, pair.sequences[1][None]).requires_grad


@torch.no_grad()
@pytest.mark.slow
def test_smollm2(smollm2: PreTrainedModel) -> None:
    """Real weights; a batch padded on both sides, packed, in chunks, and under gradients."""
    rows = sequences((5, 29, 1), smollm2.config.vocab_size)
    pair = make_pair(smollm2, rows)
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        assert_equal(valid(pair.actor(ids, attention_mask=mask).logits, mask), pair.logits)
    with torch.enable_grad():
        assert torch.equal(precgraph.token_logprobs(pair.actor, rows[1][None])[0].detach(), pair.logprobs[1])
    positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
    packed = pair.rollout(torch.cat(rows)[None], position_ids=positions).logits[0]
    assert_equal(packed.split([len(r) for r in rows]), pair.logits)
    cache = Chunks()
    chunks = [cache.run(pair.rollout, part) for part in rows[1].split((11, 1, 1, 16))]
    assert torch.equal(torch.cat(chunks), pair.logits[1])
