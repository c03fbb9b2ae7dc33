"""Requests of the embedded engine, and who computes what in its next step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from precgraph.runtime.cache import ROOT, BlockPool
from precgraph.runtime.sampling import SamplingParams


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way.

    ``tokens`` are the prompt and what has been sampled; ``blocks`` their pages, which hold the first ``computed`` of
    them. ``draw`` gives one number a sampled token. ``cached`` is how many tokens the prefix cache had at first.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    prompt_index: int
    draw: random.Random = field(init=False)
    tokens: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    finish_reason: str = ""
    cached: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    prefix: int = ROOT  # of the full blocks that are computed

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.draw = random.Random(self.seed)  # Python promises the same numbers in every version

    def append(self, token: int, logprob: float, kept: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.kept_mass.append(kept)
        if token in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.logprobs) == self.params.max_tokens:
            self.finish_reason = "length"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``start .. stop - 1`` of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int


class Scheduler:
    """Who computes what in the next call: first come, first served; the latest one gives way when blocks run out."""

    def __init__(self, pool: BlockPool, requests: Sequence[Request], max_tokens: int, max_sequences: int) -> None:
        self.pool, self.max_tokens, self.max_sequences = pool, max_tokens, max_sequences
        self.waiting = deque(requests)
        self.running: list[Request] = []

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Chunk]:
        """Chunks of at most ``max_tokens`` tokens, never none: the first running request always goes on."""
        chunks: list[Chunk] = []
        budget = self.max_tokens
        for request in list(self.running):
            if not budget or request not in self.running or not self._make_room(request):
                break
            budget -= self._take(request, budget, chunks)
        while budget and self.waiting and len(self.running) < self.max_sequences and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            budget -= self._take(self.running[-1], budget, chunks)
        return chunks

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)

    def _take(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Plan the request's next tokens and publish the blocks that they fill; returns how many."""
        start = request.computed
        request.computed = min(len(request.tokens), start + budget)
        chunks.append(Chunk(request, start, request.computed))
        size = self.pool.block_size
        for i in range(start // size, request.computed // size):
            request.prefix = self.pool.publish(
                request.prefix, tuple(request.tokens[i * size : (i + 1) * size]), request.blocks[i]
            )
        return request.computed - start

    def _admit(self, request: Request) -> bool:
        """Give a waiting request the blocks of all its tokens, cached ones first; False if they are not there.

        Its last token is always computed, for its logits.
        """
        pool = self.pool
        found, prefix = pool.acquire(request.tokens, (len(request.tokens) - 1) // pool.block_size)
        missing = pool.blocks_for(len(request.tokens)) - len(found)
        if missing > pool.available:
            pool.release(found)
            return False
        request.blocks = found + pool.allocate(missing)
        request.computed, request.prefix = len(found) * pool.block_size, prefix
        if request.cached is None:
            request.cached = request.computed
        return True

    def _make_room(self, request: Request) -> bool:
        """Blocks for the request's newest token, at the cost of later ones; False if it had to give way itself."""
        missing = self.pool.blocks_for(len(request.tokens)) - len(request.blocks)
        while missing > self.pool.available:
            latest = self.running.pop()
            self.pool.release(latest.blocks)
            latest.blocks, latest.computed, latest.prefix = [], 0, ROOT
            self.waiting.appendleft(latest)
            if latest is request:
                return False
        request.blocks += self.pool.allocate(missing)
        return True
