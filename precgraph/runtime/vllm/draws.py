"""The draws of an engine's requests, whichever runner of vLLM's asks for them: the state of each request's random
numbers, and what is noted of it.

Neither of vLLM's log-probability modes is what a trainer needs (``processed_logprobs`` is normalised again after top-p
and top-k, ``raw_logprobs`` is taken before the temperature), and its draws depend on the batch. Here both come from
:func:`precgraph.runtime.sampling.sample`: a request's i-th token depends on its logits, its parameters and the i-th
number of its own seed, as in :class:`precgraph.runtime.engine.Engine`. A generator of torch is never touched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.outputs import LogprobsTensors

from precgraph.errors import InputError
from precgraph.runtime.logprobs import chosen_logprobs
from precgraph.runtime.sampling import MAX_SEED, Rows, Sampled, SamplingParams, ranks, sample
from precgraph.runtime.vllm.params import of_vllm, own_args

UNREAD = 1024  # records of ended requests that wait for who may never ask: a client with a name of its own, for one
PENDING = 4096  # steps whose kept masses stay on the device
_AHEAD = 64  # random numbers of a request that are made at once
_log = init_logger("vllm.precgraph")  # below vLLM's own logger, whose level and handlers it shares

Weights = tuple[int, int]  # their version, and the number of the update that brought them: two may have one version


@dataclass(frozen=True, slots=True)
class Record:
    """What is noted of a request that asks for it: the weights that it ran on, and the kept mass by the token's index
    where top-k or top-p apply.
    """

    weights: set[Weights] = field(default_factory=set)
    kept_mass: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Request:
    """The state of one request's draws; ``uniforms`` are its random numbers so far, by the token's index. ``logprobs``
    is how many of the likeliest tokens it wants to hear of, None if no log-probability at all. ``source`` is what the
    runner has of it: a name may be used again.
    """

    source: Any
    params: SamplingParams
    logprobs: int | None
    generator: random.Random
    record: Record | None
    uniforms: list[float] = field(default_factory=list)

    def uniform(self, index: int) -> float:
        if index >= len(self.uniforms):  # hundreds of requests ask at each step: many at a time
            self.uniforms += [self.generator.random() for _ in range(index + _AHEAD - len(self.uniforms))]
        return self.uniforms[index]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests in the order of their rows; most steps have those of the step before."""

    sources: list[int]  # by their identities; the states keep them alive
    weights: Weights
    states: list[_Request]
    rows: Rows
    recorded: list[tuple[int, Record]]  # rows whose kept mass was asked for
    logprobs: int | None  # the most that a request wants


class Draws:
    """What the samplers of both runners share.

    On a GPU nothing here waits for the device, so that vLLM may schedule the next step meanwhile; but for kept masses
    that nobody asked for in ``PENDING`` steps.
    """

    def __init__(self, seed: int, weights: Callable[[], Weights]) -> None:
        """``seed`` is that of requests without one; ``weights`` is asked at each step which there are."""
        self._seeds = random.Random(seed)
        self._weights = weights
        self._requests: dict[str, _Request] = {}
        self._batch: _Batch | None = None
        self._records: dict[str, Record] = {}
        self._expected: set[str] = set()
        self._unread: list[tuple[list[tuple[Record, int, int]], Tensor]] = []  # record, token's index, row

    def draw(
        self, logits: Tensor, names: list[str], sources: list[Any], indices: Sequence[int], running: Container[str]
    ) -> tuple[Tensor, LogprobsTensors | None]:
        """One token for each row of ``logits [N, V]``: ids ``[N]`` int64, and what vLLM is told of log-probabilities.

        Row i is the request ``names[i]`` at its token ``indices[i]``; ``sources[i]``, an object of its own for each
        request, has vLLM's ``sampling_params``. ``running`` are the names that the runner still has. A prefill that is
        not finished may draw too: what is drawn for an index last is what counts.
        """
        if len(names) != logits.shape[0]:
            raise InputError(f"{logits.shape[0]} rows of logits for {len(names)} requests: is speculative decoding on?")
        batch = self._batch_of(names, sources, running, logits.device)
        uniforms = [state.uniform(i) for state, i in zip(batch.states, indices, strict=True)]
        drawn = sample(logits.float(), batch.rows, uniforms)
        self._record(batch, indices, drawn)
        count = batch.logprobs
        return drawn.ids, None if count is None else _logprobs(logits, drawn, batch.rows, count)

    def warm_up(self, logits: Tensor) -> None:
        """Compile what a draw needs; ``logits [N, V]`` are anybody's."""
        params = [SamplingParams(), SamplingParams(top_p=0.5)][: logits.shape[0]]
        rows = Rows.of(params, logits.device)
        _logprobs(logits[:2], sample(logits[:2].float(), rows, [0.5] * len(params)), rows, 1)

    def expect(self, names: list[str]) -> None:
        """Keep the records of these names until they are taken, however many; of others, ``UNREAD``. In place of those
        that were expected before."""
        self._expected = set(names)

    def take(self, names: list[str]) -> dict[str, Record]:
        """The records of requests that have ended, as far as there are any; then they are forgotten."""
        self._read()
        self._expected.difference_update(names)
        return {name: self._records.pop(name) for name in names if name in self._records}

    def _read(self) -> None:
        for places, kept in self._unread:
            masses = kept.tolist()
            for record, index, row in places:
                record.kept_mass[index] = masses[row]
        self._unread.clear()

    def _drop(self) -> None:
        """Forget the oldest records of requests that have ended, if too many wait."""
        if len(self._records) - len(self._expected) <= UNREAD:
            return
        running = {id(state.record) for state in self._requests.values()}
        ended = [n for n, r in self._records.items() if n not in self._expected and id(r) not in running]
        if len(ended) > UNREAD:
            self._read()
            dropped = ended[: len(ended) - UNREAD // 2]  # many at a time: reading waits for the device
            for name in dropped:
                del self._records[name]
            _log.warning("precgraph: %d records of requests were never asked for, and are dropped", len(dropped))

    def _batch_of(self, names: list[str], sources: list[Any], running: Container[str], device: torch.device) -> _Batch:
        weights, identities = self._weights(), list(map(id, sources))
        if self._batch is None or self._batch.sources != identities or self._batch.weights != weights:
            states = [self._state(*request, running) for request in zip(names, sources, strict=True)]
            noted = [(i, s.record) for i, s in enumerate(states) if s.record is not None]
            for _, record in noted:
                record.weights.add(weights)
            recorded = [(i, record) for i, record in noted if states[i].params.truncated]
            rows = Rows.of([s.params for s in states], device)
            wanted = max((s.logprobs for s in states if s.logprobs is not None), default=None)
            self._batch = _Batch(identities, weights, states, rows, recorded, wanted)
        return self._batch

    def _state(self, name: str, source: Any, running: Container[str]) -> _Request:
        state = self._requests.get(name)
        if state is None or state.source is not source:
            params = source.sampling_params
            seed, record = own_args(params)
            seed = params.seed if seed is None else seed
            generator = random.Random(self._seeds.randint(0, MAX_SEED) if seed is None else seed)
            noted = None if record is None else self._records.setdefault(record, Record())
            state = self._requests[name] = _Request(source, of_vllm(params), params.logprobs, generator, noted)
            for gone in [n for n in self._requests if n not in running]:
                del self._requests[gone]
            self._drop()
        return state

    def _record(self, batch: _Batch, indices: Sequence[int], drawn: Sampled) -> None:
        if batch.recorded:
            self._unread.append(([(record, indices[row], row) for row, record in batch.recorded], drawn.kept_mass))
            if len(self._unread) >= PENDING:
                self._read()


def _logprobs(logits: Tensor, drawn: Sampled, rows: Rows, count: int) -> LogprobsTensors:
    """The drawn token's log-probability, then those of the ``count`` likeliest, and the drawn one's rank from 1."""
    ids, logprobs = drawn.ids[:, None], drawn.logprobs[:, None]
    if count:
        likeliest = logits.topk(count, dim=-1).indices
        others = [chosen_logprobs(logits, column, rows.temperature) for column in likeliest.unbind(1)]
        ids, logprobs = torch.cat((ids, likeliest), 1), torch.stack((drawn.logprobs, *others), 1)
    return LogprobsTensors(
        logprob_token_ids=ids.to(torch.int32), logprobs=logprobs, selected_token_ranks=ranks(logits, drawn.ids)
    )
