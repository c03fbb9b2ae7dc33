"""Rollout engines behind one interface, and the collection of a step's samples.

An engine takes token ids and returns token ids with log-probabilities and the weights version that made them. What it
returns is checked against its contract here, so that nothing downstream has to trust it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from precgraph.runtime.engine import Engine
from precgraph.runtime.sampling import SamplingParams
from trainer.batch import Sample, fingerprint
from trainer.config import Config, RolloutTable
from trainer.errors import AlignmentError, PrecGraphError, RolloutError, TaskError
from trainer.precision import Pair
from trainer.tasks import Item, Stream, Task, encode

LONG_PROMPTS = 100  # so many prompts in a row beyond the context are a misconfiguration, not bad luck


class Completion(Protocol):
    """What an engine returns for a request; precgraph's and the vLLM plugin's results have these fields."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float | None]: ...
    @property
    def kept_mass(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def weights_version(self) -> int: ...


class Rollout(Protocol):
    """A rollout engine that serves the actor's current weights.

    ``generate`` samples one completion a prompt, in order; log-probabilities are over the full vocabulary after
    temperature. ``digest`` identifies the program. ``sleep`` frees the cache while the trainer needs the memory, and
    ``wake`` gets it back; both may be called twice.
    """

    digest: str

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Sequence[Completion]: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class EmbeddedRollout:
    """precgraph's own engine on a program that shares the actor's weight store: no copy, nothing to transfer.

    ``exact=False`` is for programs whose bits depend on the batch (torch's own kernels), which the engine refuses
    otherwise.
    """

    def __init__(self, program: Any, table: RolloutTable, *, exact: bool = True) -> None:
        self.program = program
        self.digest: str = program.precgraph.digest
        self._table = table
        self._check = exact
        self._engine: Engine | None = None
        self.wake()

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Sequence[Completion]:
        self.wake()
        assert self._engine is not None
        return self._engine.generate(prompts, params)

    def sleep(self) -> None:
        self._engine = None  # the cache is the engine's only tensor; the weights are the actor's

    def wake(self) -> None:
        if self._engine is None:
            t = self._table
            self._engine = Engine(
                self.program, max_batch_tokens=t.max_batch_tokens, max_sequences=t.max_sequences,
                cache_blocks=t.cache_blocks or None, self_check=self._check,
            )  # fmt: skip
            self._check = False  # the machine does not change between steps


def require_engine(config: Config, device: torch.device) -> None:
    """ConfigError if the engine cannot serve the configuration on that device: said before a model is loaded."""
    if config.rollout.engine == "vllm":
        from trainer.rollout_vllm import require_vllm

        require_vllm(config, device)


def build_rollout(pair: Pair, config: Config) -> Rollout:
    """The engine that ``rollout.engine`` names, for the pair's arm."""
    if config.rollout.engine == "vllm":
        from trainer.rollout_vllm import vllm_rollout

        return vllm_rollout(pair, config)
    return EmbeddedRollout(pair.program, config.rollout, exact=config.precision.arm == "exact")


# -------------------------------------------------------------------------------------- collection


@dataclass
class Collected:
    """A step's samples, group after group, and their raw rewards.

    ``dropped`` counts groups that dynamic sampling replaced, ``too_long`` prompts that do not fit the context.
    ``sampled`` are reward, length and whether it was truncated, of each response that was drawn, those of the replaced
    groups too: what is left without them says little of the policy, and of a perfect one nothing is left.
    """

    samples: list[Sample] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    dropped: int = 0
    rounds: int = 0
    too_long: int = 0
    sampled: list[tuple[float, int, bool]] = field(default_factory=list)


@dataclass
class Collector:
    """Draws prompts, samples them and scores the responses, until a step has its groups."""

    config: Config
    rollout: Rollout
    task: Task
    tokenizer: Any
    stops: tuple[int, ...]
    stream: Stream
    context: int | None  # the model's longest sequence

    def collect(self, step: int, version: int, *, note: Callable[[str], None] = lambda _: None) -> Collected:
        """The groups of a step. ``version`` is the weights version that the trainer will score with."""
        table, out = self.config.rollout, Collected()
        limit = table.max_rounds if table.dynamic else 1
        while len(out.samples) < table.groups * table.samples and out.rounds < limit:
            wanted = table.groups - len(out.samples) // table.samples
            prompts = [self._prompt(out) for _ in range(wanted)]
            note(f"rollout {out.rounds + 1}" if out.rounds else "rollout")
            seed = (self.config.run.seed, step, out.rounds)
            completions = sample_groups(self.rollout, prompts, table.samples, self.params(), seed)
            self._take(out, prompts, completions, step, version)
            out.rounds += 1
        return out

    def params(self, temperature: float | None = None) -> SamplingParams:
        """How responses are sampled; at another ``temperature``, from the whole distribution."""
        table = self.config.rollout
        if temperature is not None:
            return SamplingParams(table.max_tokens, temperature, stop_token_ids=self.stops)
        return SamplingParams(table.max_tokens, table.temperature, table.top_p, table.top_k, self.stops)

    def _prompt(self, out: Collected) -> tuple[Item, list[int]]:
        item, ids, skipped = draw(self.config, self.task, self.tokenizer, self.stream, self.context)
        out.too_long += skipped
        return item, ids

    def _take(
        self,
        out: Collected,
        prompts: list[tuple[Item, list[int]]],
        completions: list[list[Completion]],
        step: int,
        version: int,
    ) -> None:
        for (item, ids), group in zip(prompts, completions, strict=True):
            number = out.dropped + len(out.samples) // self.config.rollout.samples
            samples = [as_sample(c, ids, item.id, number, f"{step}.{number}.{j}", version) for j, c in enumerate(group)]
            texts = [self.text(s.tokens) for s in samples]
            rewards = [self.task.score(item, text) for text in texts]
            out.sampled += [(r, len(s.tokens), s.truncated) for r, s in zip(rewards, samples, strict=True)]
            if self.config.rollout.dynamic and len(set(rewards)) == 1:
                out.dropped += 1
                continue
            out.samples += samples
            out.rewards += rewards
            out.texts += texts

    def text(self, tokens: Sequence[int]) -> str:
        """A response's text for the reward: without special tokens. The ids stay as they are."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def draw(
    config: Config, task: Task, tokenizer: Any, stream: Stream, context: int | None
) -> tuple[Item, list[int], int]:
    """The stream's next prompt that leaves room for ``rollout.max_tokens`` in the context, and how many did not.
    TaskError if none does."""
    limit = config.rollout.max_tokens
    for skipped in range(LONG_PROMPTS):
        item = task.items[stream.next()]
        ids = encode(tokenizer, item, config.task)
        if not ids:
            raise TaskError("the prompt has no tokens", path=item.id, remedy="check task.prompt")
        if fits(ids, limit, context):
            return item, ids, skipped
    assert context is not None  # nothing exceeds none
    raise TaskError(
        f"{LONG_PROMPTS} prompts in a row exceed the model's context of {context} tokens, this one with {len(ids)} "
        f"tokens and rollout.max_tokens = {limit}",
        path=item.id,
        remedy="shorten the prompts" if len(ids) >= context else f"--set rollout.max_tokens={context - len(ids)} fits",
    )


def fits(prompt: Sequence[int], limit: int, context: int | None) -> bool:
    """Whether the model's context has room for a prompt and a response of ``limit`` tokens."""
    return context is None or len(prompt) + limit <= context


def sample_groups(
    rollout: Rollout,
    prompts: Sequence[tuple[Item, list[int]]],
    count: int,
    params: SamplingParams,
    seed: tuple[int, ...],
) -> list[list[Completion]]:
    """``count`` completions of each prompt, each with a seed of its own. RolloutError if the engine dies."""
    each = [replace(params, seed=seed_of(*seed, i)) for i in range(len(prompts) * count)]
    try:
        flat = rollout.generate([ids for _, ids in prompts for _ in range(count)], each)
    except PrecGraphError:
        raise
    except Exception as error:
        raise RolloutError(
            f"the rollout engine died: {type(error).__name__}: {error}", remedy="the step is discarded; resume the run"
        ) from error
    if len(flat) != len(each):
        raise RolloutError(f"the rollout engine returned {len(flat)} completions of {len(each)}")
    return [list(flat[i : i + count]) for i in range(0, len(flat), count)]


def seed_of(*parts: int) -> int:
    """A request's seed, from the run's seed and the request's place in it: nothing to save, nothing to restore."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def as_sample(
    completion: Completion, prompt: Sequence[int], item: str, group: int, serial: str, version: int
) -> Sample:
    """A checked sample. AlignmentError for another prompt's completion or other weights; RolloutError for bad
    lengths."""
    tokens = tuple(completion.token_ids)
    if list(completion.prompt_token_ids) != list(prompt):
        raise AlignmentError(f"sample {serial}: the engine answered another prompt than the one it was given")
    if completion.weights_version != version:
        raise AlignmentError(
            f"sample {serial} comes from weights version {completion.weights_version}, the trainer has {version}",
            remedy="call sync() after every optimiser step, before the rollout",
        )
    if not len(tokens) == len(completion.logprobs) == len(completion.kept_mass):
        raise RolloutError(
            f"sample {serial}: {len(tokens)} tokens, {len(completion.logprobs)} log-probabilities, "
            f"{len(completion.kept_mass)} kept masses"
        )
    logprobs = tuple(math.nan if v is None else v for v in completion.logprobs)
    return Sample(
        serial, group, item, tuple(prompt), tokens, logprobs, tuple(completion.kept_mass),
        completion.finish_reason == "length", version, fingerprint(prompt, tokens),
    )  # fmt: skip
