"""The sampler's records: what is noted of a request until somebody asks for it."""

from __future__ import annotations

import re
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precgraph.errors import InputError
from precgraph.runtime.sampling import SamplingParams, sample
from precgraph.runtime.vllm import RECORD, SEED

pytestmark = pytest.mark.vllm
PLAIN = SimpleNamespace(no_penalties=True, allowed_token_ids_mask=None, bad_words_token_ids={}, generators={})


class Played:
    """A sampler with a runner that is played: requests come, get tokens and go."""

    def __init__(self) -> None:
        from precgraph.runtime.vllm.draws import Draws
        from precgraph.runtime.vllm.sampler import ExactSampler

        self.weights = (1, 0)
        self.runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[]), requests={})
        inner: Any = torch.nn.Module()
        inner.logprobs_mode = "processed_logprobs"
        self.draws = Draws(0, lambda: self.weights)
        self.sampler = ExactSampler(inner, self.runner, self.draws)
        self.sampler.serving = True

    def begin(self, name: str, record: str | None, **params: Any) -> None:
        from vllm import SamplingParams as VllmParams

        own = {SEED: 7} if record is None else {SEED: 7, RECORD: record}
        asked = VllmParams(extra_args=own, **params)
        self.runner.requests[name] = SimpleNamespace(sampling_params=asked, output_token_ids=[])

    def step(self, logits: torch.Tensor, counted: bool = True) -> None:
        self.runner.input_batch.req_ids = list(self.runner.requests)
        drawn = self.sampler(logits, PLAIN).sampled_token_ids
        for request, token in zip(self.runner.requests.values(), drawn, strict=True):
            request.output_token_ids += [int(token)] * counted

    def take(self, *names: str) -> dict[str, tuple[set[tuple[int, int]], dict[int, float]]]:
        return {n: (r.weights, r.kept_mass) for n, r in self.draws.take(list(names)).items()}


def logits(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 300, generator=torch.Generator().manual_seed(seed))


def kept(x: torch.Tensor, params: SamplingParams) -> float:
    return float(sample(x[None], [params], [0.0]).kept_mass)


def test_records_are_taken_one_by_one() -> None:
    """A server's requests end at different times: asking for one leaves those of the others as they are."""
    played = Played()
    played.begin("a", "A", top_p=0.5)
    played.begin("b", None, top_p=0.5)
    played.begin("c", "C", top_k=3)
    steps = [logits(0, 3), logits(1, 3)]
    played.step(logits(9, 3), counted=False)  # a prefill in chunks draws too; what it draws does not count
    for x in steps:
        played.step(x)
    assert played.take("A") == {
        "A": ({(1, 0)}, {i: kept(x[0], SamplingParams(top_p=0.5)) for i, x in enumerate(steps)})
    }
    last = logits(2, 3)
    played.step(last)
    wanted = {i: kept(x[2], SamplingParams(top_k=3)) for i, x in enumerate([*steps, last])}
    assert played.take("C", "unknown") == {"C": ({(1, 0)}, wanted)} and all(0 < mass < 1 for mass in wanted.values())
    assert played.take("A", "C") == {}


def test_a_name_that_is_used_again_is_another_request() -> None:
    played, x = Played(), logits(0, 1)
    tokens = []
    for params in ({"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 0.0}):
        played.begin("a", None, **params)
        played.step(x)
        tokens += played.runner.requests["a"].output_token_ids
    wanted = [sample(x, [SamplingParams(temperature=t)], [Random(7).random()]).ids.item() for t in (0.0, 2.0, 0.0)]
    assert tokens == wanted and tokens[0] != tokens[1]


def test_a_request_that_may_draw_anything_has_a_version_and_no_mass() -> None:
    played = Played()
    played.begin("a", "A")
    played.begin("b", "B", temperature=0.0, top_p=0.5)
    played.step(logits(0, 2))
    assert played.take("A", "B") == {"A": ({(1, 0)}, {}), "B": ({(1, 0)}, {})}


def test_all_weights_that_a_request_ran_on() -> None:
    played = Played()
    played.begin("a", "A")
    played.step(logits(0, 1))
    played.weights = (2, 1)
    played.begin("b", "B")
    played.step(logits(0, 2))
    del played.runner.requests["a"]
    played.weights = (2, 2)  # another update of the same version
    played.begin("c", "C")
    played.step(logits(0, 2))
    assert played.take("A", "B", "C") == {
        "A": ({(1, 0), (2, 1)}, {}),
        "B": ({(2, 1), (2, 2)}, {}),
        "C": ({(2, 2)}, {}),
    }


def test_records_that_nobody_asks_for_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of those whose requests have ended; never one that runs, or that was announced."""
    from precgraph.runtime.vllm import draws

    monkeypatch.setattr(draws, "UNREAD", 4)
    played, said = Played(), []
    monkeypatch.setattr(draws._log, "warning", lambda text, *args: said.append(text % args))
    mine = [f"mine {i}" for i in range(9)]
    played.draws.expect(mine)
    played.begin("long", "L", top_p=0.5)
    for i, record in enumerate([*mine, *"ABCDEFG"]):
        played.begin(f"short {i}", record, top_p=0.5)
        played.step(logits(i, 2))
        del played.runner.requests[f"short {i}"]
        assert len(played.draws._records) <= len(mine) + 1 + 5
    assert said == ["precgraph: 3 records of requests were never asked for, and are dropped"]
    assert sorted(played.take(*"ABCDEFG")) == ["D", "E", "F", "G"]
    assert len(played.take("L")["L"][1]) == 16
    found = played.take(*mine)
    assert sorted(found) == mine and all(len(masses) == 1 for _, masses in found.values())


def test_masses_that_nobody_asks_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from precgraph.runtime.vllm import draws

    monkeypatch.setattr(draws, "PENDING", 4)
    played = Played()
    played.begin("a", "A", top_p=0.5)
    steps = [logits(i, 1) for i in range(11)]
    for x in steps:
        played.step(x)
        assert len(played.draws._unread) < 4
    assert played.take("A") == {
        "A": ({(1, 0)}, {i: kept(x[0], SamplingParams(top_p=0.5)) for i, x in enumerate(steps)})
    }


@pytest.mark.parametrize(("name", "value"), [("top_k", 2**63), ("top_k", 2**64), ("temperature", 1e19)])
def test_what_the_draw_would_refuse_is_refused_when_a_request_arrives(name: str, value: Any) -> None:
    """In a step the error would end the engine, and with it everybody's requests."""
    from vllm import SamplingParams as VllmParams

    from precgraph.runtime.vllm.params import require_exact

    require_exact(VllmParams(top_k=2**63 - 1))
    asked = VllmParams()
    setattr(asked, name, value)  # some versions' constructor refuses a temperature above 2
    with pytest.raises(InputError, match=rf"^SamplingParams\.{name} must be .*, not {re.escape(str(value))}$"):
        require_exact(asked)


@pytest.mark.parametrize("own", [{SEED: "1"}, {SEED: -1}, {SEED: 2**63}, {SEED: [1]}, {RECORD: 3}, {RECORD: ["a"]}])
def test_arguments_of_ours_of_another_kind_are_refused(own: dict[str, Any]) -> None:
    """They may come over HTTP, as vllm_xargs; the engine would die of them."""
    from vllm import SamplingParams as VllmParams

    from precgraph.runtime.vllm.params import require_exact

    require_exact(VllmParams(extra_args={SEED: 2**63 - 1, RECORD: "a", "theirs": [1]}))
    with pytest.raises(InputError, match=next(iter(own))):
        require_exact(VllmParams(extra_args=own))


def test_seeds_that_would_be_shared_are_refused() -> None:
    from vllm import SamplingParams as VllmParams

    from precgraph.runtime.vllm.params import request_of, require_exact

    require_exact(VllmParams(seed=2**63 - 1, n=2))
    for seed in (-4, 2**63, 2**64, True, 1.5, "a"):  # Python's generators take -4 for 4, torch's have 64 bits
        with pytest.raises(InputError, match=rf"^seed = {seed!r} must be an integer from 0 to 2\*\*63 - 1$"):
            request_of(VllmParams(seed=seed))
    for own in ({SEED: 1}, {RECORD: "a"}):
        with pytest.raises(InputError, match="n = 2 would share one"):
            require_exact(VllmParams(n=2, extra_args=own))


def test_data_parallel_engines_draw_apart() -> None:
    from precgraph.runtime.vllm.model import PrecGraphForCausalLM

    def first(index: int, seed: int | None) -> float:
        config = SimpleNamespace(
            model_config=SimpleNamespace(seed=seed), parallel_config=SimpleNamespace(data_parallel_index=index)
        )
        return PrecGraphForCausalLM.draws(SimpleNamespace(serves=None), config)._seeds.random()  # type: ignore[arg-type]

    assert first(0, None) == first(0, 0) == Random(0).random()
    assert len({first(index, seed) for index in range(3) for seed in (0, 1)}) == 6
