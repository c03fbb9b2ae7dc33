"""Packing: masks from lengths, ids that are never touched, and splits that change nothing."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from precgraph.runtime import sizes
from precgraph.runtime.engine import Completion, Engine
from precgraph.runtime.sampling import SamplingParams
from tests.rollouts import pair
from trainer.batch import MicroBatch, Sample, cells, fingerprint, micro_batches
from trainer.errors import AlignmentError, RolloutError
from trainer.rollout import as_sample, sample_groups
from trainer.tasks import Item

CPU = torch.device("cpu")


def sample(prompt: list[int], tokens: list[int], serial: str = "0.0.0", group: int = 0) -> Sample:
    return Sample(
        serial, group, "item", tuple(prompt), tuple(tokens), (-1.0,) * len(tokens), (1.0,) * len(tokens), False, 1,
        fingerprint(prompt, tokens),
    )  # fmt: skip


def one(samples: list[Sample], order: list[int] | None = None) -> MicroBatch:
    (micro,) = micro_batches(samples, order if order is not None else range(len(samples)), 0, 4096, CPU)
    return micro


def targets(micro: MicroBatch) -> list[int]:
    """The ids that the rows predict."""
    return micro.ids[0, micro.rows + 1].tolist()


def test_layout_by_hand() -> None:
    micro = one([sample([7, 8], [3, 4, 5]), sample([9], [6])])
    assert micro.ids.shape == (1, 128) and micro.ids[0, :7].tolist() == [7, 8, 3, 4, 5, 9, 6]
    assert micro.bounds.tolist() == [0, 5, 7, 128]
    assert micro.rows.tolist() == [1, 2, 3, 5] and targets(micro) == [3, 4, 5, 6]
    assert micro.sequence.tolist() == [0, 0, 0, 1] and micro.place.tolist() == [0, 1, 2, 0]
    assert micro.padding == {(7, 128)}


@pytest.mark.parametrize("tokens", [[5, 6, 2], [2, 2, 2], [5, 6, 0], [0], [9, 3, 9]])
def test_masks_come_from_lengths_and_not_from_values(tokens: list[int]) -> None:
    """End tokens (2, or 0 as in the padding), repeated ones and special ids (9) all count, once each."""
    micro = one([sample([1, 2], tokens), sample([2, 0], [4])])
    assert targets(micro)[: len(tokens)] == tokens
    assert torch.bincount(micro.sequence).tolist() == [len(tokens), 1]


def test_on_a_gpu_a_micro_batch_has_one_of_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """640 tokens become 768 by another sequence of padding; rows and ids stay where they are."""
    samples = [sample([1] * 99, [2] * 501), sample([3], [4])]
    plain = one(samples)
    monkeypatch.setattr(sizes, "FILLED", {"cpu"})
    micro = one(samples)
    assert plain.ids.shape == (1, 640) and micro.ids.shape == (1, 768)
    assert micro.bounds.tolist() == [*plain.bounds.tolist(), 768] and torch.equal(micro.rows, plain.rows)
    assert torch.equal(micro.ids[:, :640], plain.ids) and micro.padding == {(602, 640), (640, 768)}
    micro.verify(samples)


def test_a_response_without_a_token_is_left_out() -> None:
    samples = [sample([1, 2], []), sample([3], [4, 5])]
    micro = one(samples)
    assert micro.sequence.unique().tolist() == [1]
    micro.verify(samples)
    assert list(micro_batches([samples[0]], [0], 0, 4096, CPU)) == []


def test_cells_begin_at_multiples_of_128_and_do_not_depend_on_the_micro_batch() -> None:
    samples = [sample([1] * 40, [2] * (30 + i), str(i)) for i in range(12)]
    parts = {size: list(micro_batches(samples, range(12), 256, size, CPU)) for size in (128, 512, 4096)}
    assert [len(p) for p in parts.values()] == [4, 2, 1]
    whole = parts[4096][0]
    for split in parts.values():
        assert all(m.ids.shape[1] % 128 == 0 for m in split)
        assert torch.equal(torch.cat([m.ids for m in split], 1), whole.ids)
        assert torch.equal(torch.cat([m.sequence for m in split]), whole.sequence)


def test_a_sequence_longer_than_a_cell_gets_one_of_its_own() -> None:
    samples = [sample([1] * 10, [2] * 10), sample([1] * 300, [2] * 100), sample([1], [2])]
    assert cells(samples, range(3), 128) == [[0], [1], [2]]
    assert cells(samples, [2, 0], 0) == [[2, 0]]


def test_groups_travel_with_samples_through_shuffles_and_drops() -> None:
    samples = [sample([g], [10 * g + j], f"0.{g}.{j}", group=g) for g in range(3) for j in range(4)]
    micro = one(samples, [11, 2, 7, 0, 5])  # shuffled, most of them dropped; group 2 has one left
    found = [(samples[i].group, t) for i, t in zip(micro.sequence.tolist(), targets(micro), strict=True)]
    assert found == [(2, 23), (0, 2), (1, 13), (0, 0), (1, 11)]


def test_verify_notices_any_changed_id() -> None:
    samples = [sample([7, 8], [3, 4, 5]), sample([9], [6])]
    micro = one(samples)
    micro.verify(samples)
    for position in range(7):
        ids = micro.ids.clone()
        ids[0, position] += 1
        with pytest.raises(AlignmentError, match="sampled"):
            replace(micro, ids=ids).verify(samples)


def test_verify_notices_responses_that_moved_by_one_row() -> None:
    samples = [sample([i], [i + 10], str(i)) for i in range(4)]
    moved = [replace(s, tokens=samples[i - 1].tokens) for i, s in enumerate(samples)]
    with pytest.raises(AlignmentError):
        one(moved).verify(moved)


# --------------------------------------------------------------------------------------- contract


def completion(prompt: list[int], tokens: list[int], version: int = 1, reason: str = "stop") -> Completion:
    return Completion(prompt, tokens, [-1.0] * len(tokens), [1.0] * len(tokens), reason, version, 0, 0)


def test_completions_become_samples() -> None:
    got = as_sample(completion([1, 2], [3, 0]), [1, 2], "item", 5, "0.5.0", 1)
    assert got.tokens == (3, 0) and not got.truncated and got.group == 5
    assert as_sample(completion([1], [3], reason="length"), [1], "item", 0, "s", 1).truncated


def test_another_prompt_or_other_weights_are_refused() -> None:
    with pytest.raises(AlignmentError, match="another prompt"):
        as_sample(completion([1, 2], [3]), [2, 1], "item", 0, "s", 1)
    with pytest.raises(AlignmentError, match="weights version 4, the trainer has 5"):
        as_sample(completion([1], [3], version=4), [1], "item", 0, "s", 5)


def test_missing_and_miscounted_log_probabilities() -> None:
    broken = replace(completion([1], [3, 4, 5]), logprobs=[-0.1, None, -0.2])  # type: ignore[list-item]
    got = as_sample(broken, [1], "item", 0, "s", 1).logprobs
    assert got[0] == -0.1 and got[1] != got[1] and got[2] == -0.2
    with pytest.raises(RolloutError, match="3 tokens, 2 log-probabilities"):
        as_sample(replace(broken, logprobs=[-0.1, -0.2]), [1], "item", 0, "s", 1)


def test_the_trainers_groups_draw_each_sample_by_a_seed_of_its_own() -> None:
    engine = Engine(pair("qwen2")[1], self_check=False)
    item = Item("0", "", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = sample_groups(engine, [(item, [1, 2, 3])] * 2, 4, SamplingParams(max_tokens=6, seed=1), (1, 0))
    assert len({tuple(c.token_ids) for group in groups for c in group}) == 8
