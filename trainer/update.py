"""Scoring a step's samples and updating the actor with them.

Per-token values of a step are flat tensors ``[n]`` in the order of the samples; micro-batches read and write them by
index. With one optimiser step a rollout, the training forward itself gives the trainer's log-probabilities at the
weights that sampled: nothing is scored twice, and the ratio is exactly 1.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import precgraph
from trainer import loss
from trainer.batch import MicroBatch, Sample, micro_batches
from trainer.config import Config
from trainer.errors import AlignmentError
from trainer.loss import Terms
from trainer.optim import MasterOptimizer
from trainer.precision import Pair

Note = Callable[[str], None]


@dataclass
class Tokens:
    """A step's per-token values, each ``[n]``; NaN where a value is not known.

    ``rollout`` and ``trainer`` are log-probabilities at the weights that sampled, ``old`` those that ratios refer to.
    """

    rollout: Tensor
    trainer: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor
    sequence: Tensor
    place: Tensor
    starts: Tensor  # of each sample, [samples]

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Tokens:
        """Known: the rollout's side. Missing log-probabilities are NaN."""
        lengths = torch.tensor([len(s.tokens) for s in samples], dtype=torch.int64)
        n = int(lengths.sum())
        starts = lengths.cumsum(0) - lengths
        sequence = torch.repeat_interleave(torch.arange(len(samples)), lengths)
        rollout = torch.tensor([v for s in samples for v in s.logprobs], dtype=torch.float32)
        unknown = [torch.full((n,), float("nan"), dtype=torch.float32, device=device) for _ in range(4)]
        moved = (t.to(device) for t in (sequence, torch.arange(n) - starts[sequence], starts))
        return cls(rollout.to(device), *unknown, *moved)

    def index(self, micro: MicroBatch) -> Tensor:
        """Where the response tokens of a micro-batch are in here."""
        return self.starts[micro.sequence] + micro.place


@dataclass
class Result:
    """What an update did: ``measures`` for the record, ``seconds`` by phase, ``tokens`` that each phase computed."""

    tokens: Tokens
    measures: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, device: torch.device) -> Result:
        """Of a step without a sample: nothing was updated."""
        return cls(Tokens.of([], device), {**_Sums(skipped=1).measures(), "update/codes_changed": 0.0})


class Updater:
    """Turns samples and advantages into optimiser steps of ``pair.actor``."""

    def __init__(self, pair: Pair, optimizer: MasterOptimizer, config: Config, device: torch.device) -> None:
        self.pair, self.optimizer, self.config, self.device = pair, optimizer, config, device

    def prepare(self, samples: Sequence[Sample], note: Note = lambda _: None) -> Result:
        """Score what must be scored before the first optimiser step; no state changes.

        AlignmentError if ids or weights version are not those of the samples.
        """
        version = self.pair.actor.precgraph.store.version
        for sample in samples:
            if sample.version != version:
                raise AlignmentError(
                    f"sample {sample.serial} comes from weights version {sample.version}, the trainer has {version}",
                    remedy="score samples before the next update",
                )
        result = Result(Tokens.of(samples, self.device))
        everyone = range(len(samples))
        if self.pair.reference is not None:
            with self._timed(result, "reference", note):
                self._score(self.pair.reference, samples, everyone, result, "reference", result.tokens.reference)
        if self.config.scores_first:
            with self._timed(result, "score", note):
                self._score(self.pair.actor, samples, everyone, result, "score", result.tokens.trainer)
            result.tokens.old = result.tokens.trainer
        elif self.config.updates > 1:
            result.tokens.old = result.tokens.rollout
        return result

    @torch.enable_grad()  # a reward with a model of its own may have turned gradients off for the whole process
    def update(
        self,
        samples: Sequence[Sample],
        advantages: Tensor,
        kept: Sequence[bool],
        result: Result,
        note: Note = lambda _: None,
    ) -> None:
        """Take the optimiser steps and sync. ``advantages [samples]``; ``kept``: whose tokens count in the loss."""
        table = self.config.algorithm
        live = [k and (table.kl > 0 or float(a) != 0.0) for k, a in zip(kept, advantages.tolist(), strict=True)]
        sums = _Sums()
        before = _codes(self.pair.actor)
        with self._timed(result, "update", note):
            if table.batches == 1 and not self.config.scores_first:  # the first step's forward scores all others
                rest = [i for i, l in enumerate(live) if not l]
                self._score(self.pair.actor, samples, rest, result, "update", result.tokens.trainer)
            for _ in range(table.epochs):
                for part in _chunks(range(len(samples)), table.batches):
                    # Samples without a gradient (equal rewards) count in the denominator as long as they are kept.
                    counted = [k and i in part for i, k in enumerate(kept)]
                    self._step(samples, [i for i in part if live[i]], advantages, counted, result, sums)
        with self._timed(result, "sync", note):
            changed = _changed(before, _codes(self.pair.actor, copy=False))
        result.measures.update(sums.measures(), **{"update/codes_changed": changed})

    def _step(
        self,
        samples: Sequence[Sample],
        order: Sequence[int],
        advantages: Tensor,
        counted: Sequence[bool],
        result: Result,
        sums: _Sums,
    ) -> None:
        """One optimiser step with the gradients of ``order``, if there are any; ``counted`` says whose tokens weigh."""
        table, tokens = self.config.algorithm, result.tokens
        lengths = [len(s.tokens) for s in samples]
        each = loss.token_weights(lengths, list(counted), table.aggregation, self.config.rollout.max_tokens)
        weights = torch.tensor(each, dtype=torch.float32, device=self.device)
        if not any(each[i] for i in order):
            sums.skipped += 1
            return
        for micro in self._micro_batches(samples, order):
            at = tokens.index(micro)
            new, entropy = self._logprobs(self.pair.actor, micro)
            # Not known: with one optimiser step a rollout, and where the rollout gave none. Then the ratio is 1.
            old = torch.where(tokens.old[at].isnan(), new.detach(), tokens.old[at])
            if sums.steps == 0:  # still the weights that sampled
                tokens.trainer[at] = torch.where(tokens.trainer[at].isnan(), new.detach(), tokens.trainer[at])
            tokens.entropy[at] = torch.where(tokens.entropy[at].isnan(), entropy, tokens.entropy[at])
            names, local = micro.sequence.unique_consecutive(return_inverse=True)
            importance, masked = loss.correction(
                old, tokens.rollout[at], local, len(names), table.correction, table.correction_cap
            )
            reference = tokens.reference[at] if self.pair.reference is not None else None
            terms = loss.policy_loss(
                new, old, advantages[micro.sequence], weights[micro.sequence], importance, reference, table
            )
            terms.loss.backward()
            sums.add(terms, importance, masked)
            result.computed["update"] = result.computed.get("update", 0) + micro.ids.shape[1]
        done = self.optimizer.step()
        start = self._now()
        self.pair.actor.sync()
        spent = self._now() - start
        for phase, seconds in (("sync", spent), ("update", -spent)):
            result.seconds[phase] = result.seconds.get(phase, 0.0) + seconds
        sums.steps += 1
        sums.last = done

    # ------------------------------------------------------------------------------------- scoring
    def _micro_batches(self, samples: Sequence[Sample], order: Sequence[int]) -> Iterator[MicroBatch]:
        train = self.config.train
        for micro in micro_batches(samples, order, train.cell_tokens, train.micro_batch_tokens, self.device):
            micro.verify(samples)
            yield micro

    @torch.no_grad()
    def _score(
        self, model: Any, samples: Sequence[Sample], order: Sequence[int], result: Result, phase: str, out: Tensor
    ) -> None:
        for micro in self._micro_batches(samples, order):
            at = result.tokens.index(micro)
            out[at], entropy = self._logprobs(model, micro)
            if model is self.pair.actor:
                result.tokens.entropy[at] = entropy
            result.computed[phase] = result.computed.get(phase, 0) + micro.ids.shape[1]

    def _logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities (with gradient) and entropies (without) of the response tokens of a micro-batch."""
        scored = precgraph.token_logprobs(
            model, micro.ids, cu_seq_lens=micro.bounds, temperature=self.config.rollout.temperature, entropy=True,
            rows=micro.rows,
        )  # fmt: skip
        return scored[0], scored[1].detach()

    @contextmanager
    def _timed(self, result: Result, phase: str, note: Note) -> Iterator[None]:
        note(phase)
        start = self._now()
        yield
        result.seconds[phase] = result.seconds.get(phase, 0.0) + self._now() - start

    def _now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class _Sums:
    """Sums over the micro-batches of an update."""

    loss: float = 0.0
    tokens: int = 0
    clipped: float = 0.0
    kl: float = 0.0
    weight: float = 0.0
    sequences: int = 0
    masked: int = 0
    steps: int = 0
    skipped: int = 0
    last: dict[str, float] = field(default_factory=dict)

    def add(self, terms: Terms, importance: Tensor, masked: Tensor) -> None:
        self.loss += float(terms.loss.detach())
        self.tokens += terms.ratio.numel()
        self.clipped += float(terms.clipped.sum())
        self.kl += float(terms.kl.double().sum())
        self.weight += float(importance.double().sum())
        self.sequences += masked.numel()
        self.masked += int(masked.sum())

    def measures(self) -> dict[str, Any]:
        tokens, steps = max(self.tokens, 1), max(self.steps, 1)
        return {
            "loss": self.loss / steps,
            "clip/share": self.clipped / tokens,
            "kl/reference": self.kl / tokens,
            "correction/weight_mean": self.weight / tokens if self.tokens else 1.0,
            "correction/masked": self.masked / max(self.sequences, 1),
            "update/steps": self.steps,
            "update/skipped": self.skipped,
            "update/grad_norm": self.last.get("grad_norm", 0.0),
            "update/lr": self.last.get("lr", 0.0),
        }


def _chunks(order: range, count: int) -> list[range]:
    """``order`` in ``count`` contiguous parts of nearly equal size; empty parts stay, as steps that are skipped."""
    borders = [len(order) * i // count for i in range(count + 1)]
    return [order[a:b] for a, b in itertools.pairwise(borders)]


def _codes(actor: Any, *, copy: bool = True) -> dict[str, Tensor]:
    """The FP8 codes of each weight, as bytes, by its path; in one layout where there are several."""
    out: dict[str, Tensor] = {}
    for key, pack in actor.precgraph.store.packs.items():
        codes = pack.tensors().get("codes")
        if codes is not None and key.path not in out:
            raw = codes.view(torch.uint8)
            out[key.path] = raw.clone() if copy else raw
    return out


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The share of codes that differ; 0 for a program without any."""
    total = sum(t.numel() for t in before.values())
    return sum(int((before[k] != after[k]).sum()) for k in before) / total if total else 0.0
