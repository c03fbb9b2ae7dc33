"""The record of a step and of an evaluation: everything that is measured, by name."""

from __future__ import annotations

import itertools
import json
import math
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from trainer.errors import TaskError
from trainer.files import replace_text
from trainer.loss import degenerate
from trainer.metrics import Record, foreign, mean, mismatch
from trainer.rollout import Collected, fits, sample_groups
from trainer.tasks import Task, encode
from trainer.update import Result

if TYPE_CHECKING:
    from trainer.loop import Trainer


def measure(trainer: Trainer, collected: Collected, result: Result, version: int) -> Record:
    """The record of the step that ``trainer`` has just made."""
    config, samples, tokens = trainer.config, collected.samples, result.tokens
    record: Record = {
        "step": trainer.step,
        "graph/digest": trainer.pair.digest,
        "rollout/digest": trainer.rollout.digest,
    }
    record |= _responses(trainer, collected)
    record |= result.measures
    if bool((known := ~tokens.entropy.isnan()).any()):
        record["entropy/mean"] = mean(tokens.entropy, known)
    record |= mismatch(
        tokens.rollout, tokens.trainer, tokens.entropy, tokens.place, tokens.sequence, [s.serial for s in samples],
        config.metrics.threshold,
    )  # fmt: skip
    record |= foreign(record, config.metrics.names)
    record |= {
        "weights/version": version,
        "weights/of_samples": sorted({s.version for s in samples}),
        "data/position": trainer.stream.position,
        "data/dropped_groups": collected.dropped,
        "data/too_long": collected.too_long,
        "data/rounds": collected.rounds,
        "memory/peak_gb": _memory(trainer.device),
    }
    computed = result.computed | {"rollout": sum(length for _, length, _ in collected.sampled)}
    for phase, seconds in result.seconds.items():
        record[f"time/{phase}"] = seconds
        if phase in computed and seconds > 0:
            record[f"speed/{phase}"] = computed[phase] / seconds
    return record


def _responses(trainer: Trainer, collected: Collected) -> Record:
    samples = collected.samples
    rewards, lengths, truncated = torch.tensor(collected.sampled, dtype=torch.float64).unbind(-1)
    groups = rewards.reshape(-1, trainer.config.rollout.samples)
    kept = torch.tensor([v for s in samples for v in s.kept_mass], dtype=torch.float64)
    shown: list[dict[str, Any]] = [
        {"serial": s.serial, "item": s.item, "reward": r, "text": t[:500]}
        for s, r, t in list(zip(samples, collected.rewards, collected.texts, strict=True))[
            : trainer.config.metrics.samples
        ]
    ]
    return {
        "reward/mean": mean(rewards),
        "reward/std": float(rewards.std()),
        "reward/pass_rate": mean((rewards >= 1).double()),
        "reward/zero_spread": mean(degenerate(groups).double()),
        "response/length": mean(lengths),
        "response/length_max": float(lengths.max()),
        "response/truncated": mean(truncated),
        "sampling/kept_mass": mean(kept) if len(kept) else 1.0,
        "samples": shown,
    }


def measure_held_out(trainer: Trainer, task: Task) -> Record:
    """What an evaluation on ``task`` finds. TaskError if the context has room for none of its prompts."""
    table, collector, limit = trainer.config.eval, trainer.collector, trainer.config.rollout.max_tokens
    asked = [(i, encode(trainer.tokenizer, i, trainer.config.task)) for i in itertools.islice(task.items, table.items)]
    prompts = [(item, ids) for item, ids in asked if fits(ids, limit, collector.context)]
    if not prompts:
        raise TaskError(
            f"no held-out prompt leaves room for rollout.max_tokens = {limit} in the model's context of "
            f"{collector.context} tokens",
            path=task.name, remedy="shorten the prompts, or lower rollout.max_tokens",
        )  # fmt: skip
    trainer.rollout.wake()
    groups = sample_groups(trainer.rollout, prompts, table.samples, collector.params(table.temperature), (table.seed,))
    trainer.rollout.sleep()
    texts = [(item, collector.text(c.token_ids)) for (item, _), g in zip(prompts, groups, strict=True) for c in g]
    rewards = [task.score(item, text) for item, text in texts]
    lengths = [len(c.token_ids) for g in groups for c in g]
    return {
        "eval/pass_rate": sum(r >= 1 for r in rewards) / len(rewards),
        "eval/reward": sum(rewards) / len(rewards),
        "eval/length": sum(lengths) / len(lengths),
        "eval/too_long": len(asked) - len(prompts),
    }


def log_tokens(trainer: Trainer, collected: Collected, result: Result, version: int) -> None:
    """Write the step's samples, a line each, as ``precgraph audit`` reads them: a file of its own, which a step that
    is made again replaces. TrainerError if that fails."""
    table, tokens = trainer.config.rollout, result.tokens
    sampling = {"temperature": table.temperature, "top_p": table.top_p, "top_k": table.top_k}
    known = {
        "rollout_logprobs": tokens.rollout, "trainer_logprobs": tokens.trainer, "entropy": tokens.entropy,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"id": s.serial, "token_ids": s.tokens, "kept_mass": s.kept_mass, "version": s.version,
         "trainer_version": version, **sampling}
        for s in collected.samples
    ]  # fmt: skip
    for name, values in known.items():
        parts = values.split([len(s.tokens) for s in collected.samples])
        for row, part in zip(rows, parts, strict=True):
            row[name] = [None if math.isnan(v) else v for v in part.tolist()]
    path = trainer.config.directory / "rollout" / f"{trainer.step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def line_of(record: Record) -> str:
    """A step in one line of the terminal."""
    off, compared = record["mismatch/max"], record["mismatch/tokens"]
    entropy = f"{record['entropy/mean']:.3f}" if "entropy/mean" in record else "–"
    return (
        f"step {record['step']:>4}  reward {record['reward/mean']:.3f}  pass {record['reward/pass_rate']:.2f}  len "
        f"{record['response/length']:.0f}  cut {record['response/truncated']:.2f}  ent {entropy}  "
        f"max|Δ| {f'{off:.1e}' if off else '0.0' if compared else 'not measured'}  {record['time/step']:.1f} s"
    )


def line_of_evaluation(record: Record) -> str:
    """An evaluation, in the columns of its step."""
    return (
        f"step {record['step']:>4}  reward {record['eval/reward']:.3f}  pass {record['eval/pass_rate']:.2f}  len "
        f"{record['eval/length']:.0f}  of held-out items"
        + (f", {left} too long" if (left := record["eval/too_long"]) else "")
    )


def _memory(device: torch.device) -> float:
    """GB that the process held at most: of the device, or of the machine where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
