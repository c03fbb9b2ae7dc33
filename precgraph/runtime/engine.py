"""The embedded rollout engine: continuous batching over a paged cache, small, on any device.

One call of the program serves all running requests: new prompts in chunks, the others one token each. Tokens and
log-probabilities of a request do not depend on what else runs, on the chunks, on the cache or on preemption: every
kernel is row-invariant, every request has random numbers of its own, and log-probabilities come from the function that
the trainer calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precgraph.errors import InputError, NonFiniteError, NumericsStateError, StaleWeightsError
from precgraph.runtime.cache import PagedCache, PagedContext, Span
from precgraph.runtime.compiled import Compiled
from precgraph.runtime.sampling import MAX_SEED, SamplingParams, require_finite, sample, warn_of_shared_seeds
from precgraph.runtime.scheduler import Chunk, Request, Scheduler
from precgraph.runtime.sizes import filled

__all__ = ["Completion", "Engine", "SamplingParams", "require_row_invariance", "run_paged"]

CACHE_BYTES = 1 << 30  # the default size of the cache, unless max_sequences of full length need less


@dataclass(frozen=True, slots=True)
class Completion:
    """One request's result.

    ``token_ids``: the sampled tokens, the stop token included. ``logprobs``: their log-probabilities after temperature
    (at temperature 1 if greedy), over the full vocabulary, bit for bit :func:`precgraph.token_logprobs` of the trainer.
    ``kept_mass``: per token, the share of that distribution that top-k and top-p left to draw from, 1.0 without them;
    a token was drawn with probability ``exp(logprob) / kept_mass``. ``finish_reason``: ``"stop"`` or ``"length"``.
    ``cached_tokens``: how many tokens of the prompt were found in the prefix cache when the request started.
    ``prompt_index``: which prompt of the call it continues.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    kept_mass: list[float]
    finish_reason: str
    weights_version: int
    cached_tokens: int
    prompt_index: int


class Engine:
    """Generates from a model compiled with ``mode="infer"``, with the weights that its store holds.

    ``max_batch_tokens`` bounds the tokens of one call, so long prompts are prefilled in chunks; ``max_sequences`` the
    requests that run at a time. The cache has ``cache_blocks`` blocks of ``block_size`` tokens; by default enough for
    ``max_sequences`` sequences of the model's full length, within 1 GiB. ``prefix_caching`` lets prompts that begin
    alike share blocks, also across calls, until the weights change. ``self_check`` runs
    :func:`require_row_invariance` first.

    Raises InputError for a model that is not a compiled rollout, and what the check raises.
    """

    def __init__(
        self,
        rollout: Any,
        *,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        block_size: int = 16,
        cache_blocks: int | None = None,
        prefix_caching: bool = True,
        self_check: bool = True,
    ) -> None:
        compiled: Compiled | None = getattr(rollout, "precgraph", None)
        if compiled is None or compiled.mode != "infer" or not compiled.graph.causal_lm:
            raise InputError(
                "the engine needs a causal language model compiled for rollout",
                remedy='pass precgraph.compile(actor, mode="infer"), which shares the weights of what is trained; '
                'where nothing is, precgraph.compile(model, mode="infer")',
            )
        limits = {"max_batch_tokens": max_batch_tokens, "max_sequences": max_sequences, "block_size": block_size}
        for name, value in {**limits, "cache_blocks": 1 if cache_blocks is None else cache_blocks}.items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer from 1, not {value!r}")
        if self_check:
            require_row_invariance(rollout)
        self._compiled = compiled
        config = rollout.config.get_text_config()
        self._vocabulary: int = config.vocab_size
        self._max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._max_batch_tokens, self._max_sequences = max_batch_tokens, max_sequences
        if cache_blocks is None:
            wanted = max_sequences * -(-(self._max_length or 4096) // block_size)
            fitting = CACHE_BYTES // (block_size * PagedCache.bytes_per_token(compiled.graph))
            cache_blocks = max(1, min(wanted, fitting))
        self.cache = PagedCache(compiled.graph, compiled.store.device, cache_blocks, block_size, reuse=prefix_caching)

    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Sample ``n`` continuations of every prompt; ``params`` are one for all, or one a prompt.

        Results in the order of the prompts, the ``n`` of a prompt one after another. A request without a seed draws one
        from torch's global generator, which is otherwise left alone; requests that share one get a UserWarning.
        ``progress`` shows a bar on stderr. StaleWeightsError if the masters have changed since ``actor.sync()``;
        InputError, before anything runs, for a prompt that is empty, too long, or holds ids outside the vocabulary.
        """
        store, pool = self._compiled.store, self.cache.pool
        self._compiled.ready()
        version = store.version
        requests = self._requests(prompt_token_ids, params)
        warn_of_shared_seeds([(r.prompt, r.params) for r in requests], stacklevel=2)
        scheduler = Scheduler(pool, requests, self._max_batch_tokens, self._max_sequences)
        pool.serve(version)
        try:
            # Not inference_mode: what kernels keep for later calls must stay usable in training.
            with torch.no_grad(), _progress_bar(requests, shown=progress) as update:
                while scheduler.unfinished:
                    if store.version != version:
                        raise StaleWeightsError(
                            f"weights version {version} became {store.version} during generate()",
                            remedy="call actor.sync() between calls",
                        )
                    finished = self._step(scheduler.schedule())
                    for request in finished:
                        scheduler.finish(request)
                    update()
        except BaseException:
            pool.reset()  # blocks that were promised may not have been written
            raise
        return [_completion(r, version) for r in requests]

    def _step(self, chunks: Sequence[Chunk]) -> list[Request]:
        """Compute the chunks in one call, sample where a request's tokens are all computed; returns who is done."""
        ready: list[Request] = []
        ends: list[int] = []
        row = 0
        for chunk in chunks:
            row += chunk.stop - chunk.start
            if chunk.stop == len(chunk.request.tokens):
                ready.append(chunk.request)
                ends.append(row - 1)
        hidden = run_paged(
            self._compiled, self.cache, [(c.request.tokens, c.request.blocks, c.start, c.stop) for c in chunks]
        )
        if not ready:
            return []
        # Decoding needs every row: indices would only be copied to the device.
        if len(ends) < row:
            ends += [0] * (filled(len(ends), hidden.device) - len(ends))
            hidden = hidden[:, torch.tensor(ends, device=hidden.device)]
        logits = self._compiled.logits(hidden)[: len(ready)]
        sampled = sample(logits, [r.params for r in ready], [r.draw.random() for r in ready])
        columns = sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.kept_mass.tolist()
        require_finite(torch.tensor(columns[1]))  # a GPU has not been asked yet
        for request, token, logprob, kept in zip(ready, *columns, strict=True):
            request.append(token, logprob, kept)
        return [r for r in ready if r.finish_reason]

    # ------------------------------------------------------------------------------------ requests
    def _requests(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        if not isinstance(prompts, Sized) or not isinstance(params, SamplingParams | Sized):
            raise InputError(
                f"generate takes prompts and their params, not {type(prompts).__name__} and {type(params).__name__}",
                remedy="pass a list of lists of token ids, and SamplingParams",
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if not all(isinstance(p, SamplingParams) for p in each) or len(each) != len(prompts):
            raise InputError(f"params must be one SamplingParams, or a sequence of {len(prompts)}: one a prompt")
        checked = [(self._prompt(i, prompt, p), p) for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))]
        return [Request(list(ids), one, _seed(one), i) for i, (ids, p) in enumerate(checked) for one in p.each()]

    def _prompt(self, index: int, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The ids of prompt ``index`` as integers; InputError for what cannot be served."""
        name = f"prompt {index}"
        ids = prompt_ids(name, prompt, self._vocabulary)
        require_in_vocabulary(f"stop_token_ids of {name}", params.stop_token_ids, self._vocabulary)
        self._require_room(
            f"{name} of {len(ids)} tokens and max_tokens={params.max_tokens}", len(ids) + params.max_tokens
        )
        return ids

    def _require_room(self, what: str, length: int) -> None:
        """InputError if a sequence of ``length`` tokens is too long for the model or for the whole cache."""
        if self._max_length is not None and length > self._max_length:
            raise InputError(
                f"{what} exceed the model's max_position_embeddings of {self._max_length}",
                remedy="shorten the prompt or lower max_tokens",
            )
        pool = self.cache.pool
        needed = pool.blocks_for(length - 1)  # the last token is sampled, never read
        if needed > pool.count:
            raise InputError(
                f"{what} need {needed} cache blocks of {pool.block_size} tokens, more than all {pool.count}",
                remedy=f"create the engine with cache_blocks={needed} or more, or lower max_tokens",
            )


def run_paged(
    compiled: Compiled, cache: PagedCache, parts: Sequence[tuple[Sequence[int], Sequence[int], int, int]]
) -> Tensor:
    """Hidden states ``[1, T, C]`` of ``(tokens, blocks, start, stop)``: positions ``start .. stop - 1`` of each.

    ``blocks`` are the sequence's pages, which hold its positions before ``start`` and get these. Rows that fill the
    call up follow, sequences of one token in the block that the cache keeps for them. The caller has asked whether
    ``compiled`` is ready.
    """
    device, pool = compiled.store.device, cache.pool
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    for tokens, blocks, start, stop in parts:
        spans.append(Span(len(ids), len(ids) + stop - start, start, blocks))
        ids.extend(tokens[start:stop])
        positions.extend(range(start, stop))
        slots.extend(cache.slots(blocks, start, stop))
    count = len(ids)
    for row in range(count, filled(count, device)):
        spans.append(Span(row, row + 1, 0, (pool.count,)))
        ids.append(0)
        positions.append(0)
        slots.append(pool.count * pool.block_size)
    flat = torch.tensor([ids, positions, slots], device=device)
    return compiled.run_body(flat[None, 0], flat[None, 1], PagedContext(cache, flat[2], spans))


def require_row_invariance(model: Any) -> None:
    """NumericsStateError unless a compiled ``model`` gives a token the same bits in a batch and alone; NonFiniteError
    for one that gives it NaN.

    Shown on 17 tokens of two sequences against the last one decoded from the cache, through hidden states and logits:
    enough to catch a library whose kernels pick their order of summation by the number of rows.
    """
    compiled: Compiled = model.precgraph
    compiled.ready()
    variant = sorted({k.op for k in compiled.kernels().values() if k.row_invariant is False})
    if variant:
        raise NumericsStateError(
            f"{', '.join(variant)} run on kernels whose result depends on the batch: rollouts would not be exact",
            remedy='use a recipe with arithmetic = "exact", or Engine(..., self_check=False) to do without',
        )
    size, count, other = 16, 9, 8
    cache = PagedCache(compiled.graph, compiled.store.device, 2, size, reuse=False)
    tokens = [(7919 * i + 1) % model.config.get_text_config().vocab_size for i in range(count + other)]
    with torch.no_grad():
        batch = run_paged(compiled, cache, [(tokens[count:], [1], 0, other), (tokens, [0], 0, count)])
        batch = batch[:, other + count - 2 : other + count]
        alone = run_paged(compiled, cache, [(tokens, [0], count - 1, count)])
        logits, own = compiled.logits(batch)[1:], compiled.logits(alone)
    if bool((logits.isnan() | own.isnan()).any()):  # which equals nothing, itself neither
        raise NonFiniteError(
            "the model makes NaN of the tokens of the engine's check",
            remedy="compile(..., checked=True) names the node that makes it",
        )
    if not (torch.equal(batch[:, 1:], alone) and torch.equal(logits, own)):
        raise NumericsStateError(
            "on this machine a token's bits differ between a batch and decoding alone",
            remedy="run `precgraph doctor --exact` to find the kernel, and choose another backend",
        )


def _completion(request: Request, version: int) -> Completion:
    sampled = request.tokens[len(request.prompt) :]
    return Completion(
        request.prompt,
        sampled,
        request.logprobs,
        request.kept_mass,
        request.finish_reason,
        version,
        request.cached or 0,
        request.prompt_index,
    )


def _seed(params: SamplingParams) -> int:
    """The request's seed; only a request that draws without one takes a number from torch's global generator."""
    if params.seed is not None or params.greedy:
        return params.seed or 0
    return int(torch.randint(MAX_SEED, ()))


@contextmanager
def _progress_bar(requests: Sequence[Request], *, shown: bool) -> Iterator[Callable[[], None]]:
    """A function to call after every step; the bar counts sampled tokens and expects none after a stop."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=None)

        def update() -> None:
            sampled = sum(len(r.logprobs) for r in requests)
            expected = sum(len(r.logprobs) if r.finish_reason else r.params.max_tokens for r in requests)
            bar.update(task, completed=sampled, total=expected)

        yield update


def prompt_ids(name: str, prompt: Sequence[int], vocabulary: int) -> list[int]:
    """The ids of a prompt as integers; InputError, with the prompt's ``name``, for what are none."""
    try:
        ids = [operator.index(t) for t in prompt]
    except TypeError:
        remedy = "pass a list of lists of integers"
        raise InputError(f"{name} is not a sequence of token ids", remedy=remedy) from None
    if not ids:
        raise InputError(f"{name} is empty", remedy="begin it with the tokenizer's start token")
    require_in_vocabulary(name, ids, vocabulary)
    return ids


def require_in_vocabulary(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """InputError for the first id that no token has."""
    outside = [t for t in ids if not 0 <= t < vocabulary]
    if outside:
        raise InputError(f"{name} holds {outside[0]}, outside the vocabulary 0..{vocabulary - 1}")
