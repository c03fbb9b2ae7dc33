"""What values a configuration may have; the first that is wrong is a :class:`ConfigError` that names its key."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from precgraph.runtime.limits import MAX_TEMPERATURE, MIN_TEMPERATURE
from trainer.errors import ConfigError, nearest

if TYPE_CHECKING:
    from trainer.config import Config

BLOCK = 128  # the group of tokens that shares a scale in WGrad; micro-batches are cut at its multiples
FP32 = 2.0**-126, 2.0**128  # tensors take every number in fp32: its smallest normal one, and what is beyond it
ARMS = ("exact", "unified", "mixed", "bf16")


def validate(c: Config) -> None:
    """ConfigError for a value that no run can have."""
    _sizes(c)
    _choice("precision.arm", c.precision.arm, ARMS)
    _choice("rollout.engine", c.rollout.engine, ("embedded", "vllm"))
    _choice("algorithm.advantages", c.algorithm.advantages, ("group_norm", "centred"))
    _choice("algorithm.aggregation", c.algorithm.aggregation, ("token", "sequence", "constant"))
    _choice("algorithm.zero_spread", c.algorithm.zero_spread, ("keep", "drop"))
    _choice("algorithm.overlong", c.algorithm.overlong, ("keep", "mask", "penalty"))
    _choice("algorithm.correction", c.algorithm.correction, ("none", "token_truncated", "sequence_masked"))
    _choice("algorithm.old_logprobs", c.algorithm.old_logprobs, ("trainer", "rollout"))
    _choice("optimizer.masters", c.optimizer.masters, ("fp32", "bf16"))
    _choice("optimizer.states", c.optimizer.states, ("fp32", "8bit"))
    _choice("task.answer", c.task.answer, ("whole", "last_number", "last_line", "tag", "boxed"))
    for name in c.metrics.names:
        _choice("metrics.names", name, ("trl", "verl", "nemo", "prime"))
    for path in (
        "run.steps", "rollout.groups", "rollout.max_tokens", "rollout.max_rounds", "rollout.max_sequences",
        "rollout.max_batch_tokens", "algorithm.epochs", "algorithm.batches", "eval.items", "eval.samples",
    ):  # fmt: skip
        _at_least(c, path, 1)
    _at_least(c, "rollout.samples", 2, "a group of one has no spread, and so no advantage")
    for path in (
        "run.seed", "task.size", "run.save_every", "run.keep", "run.eval_every", "model.layers", "rollout.top_k",
        "rollout.cache_blocks", "algorithm.kl", "algorithm.clip_low", "algorithm.clip_high", "optimizer.lr",
        "algorithm.overlong_buffer", "algorithm.overlong_penalty", "optimizer.weight_decay", "optimizer.clip",
        "optimizer.warmup", "eval.temperature", "metrics.threshold", "metrics.samples", "train.cell_tokens",
    ):  # fmt: skip
        _at_least(c, path, 0)
    _temperature("rollout.temperature", c.rollout.temperature, "greedy samples do not differ: nothing can be learned")
    if c.eval.temperature:
        _temperature("eval.temperature", c.eval.temperature, "0 is greedy")
    _require(0 < c.model.memory <= 1, "model.memory", "must be above 0 and at most 1")
    _require(0 < c.rollout.top_p <= 1, "rollout.top_p", "must be above 0 and at most 1")
    _require(c.algorithm.clip_low <= 1, "algorithm.clip_low", "must be at most 1")
    _require(c.algorithm.correction_cap >= 1, "algorithm.correction_cap", "must be at least 1")
    _require(0 <= c.optimizer.beta1 < 1 and 0 <= c.optimizer.beta2 < 1, "optimizer.beta1, beta2", "must be in 0 .. 1")
    _require(
        FP32[0] <= c.optimizer.eps < FP32[1], "optimizer.eps", f"must be at least {FP32[0]:.2g}, and finite",
        "fp32 would round a smaller one to 0",
    )  # fmt: skip
    o = c.optimizer
    _require(
        max(o.lr / (1 - o.beta1), o.lr * o.weight_decay) < FP32[1], "optimizer.lr", "is too large",
        "fp32 holds neither its first step, lr / (1 - beta1), nor what it decays by",
    )  # fmt: skip
    _require("\0" not in c.run.name + c.run.dir, "run.name, run.dir", "must hold no NUL: they name a directory")
    _require("{question}" in c.task.prompt, "task.prompt", "must hold {question}")
    _require(
        c.task.chat or not c.task.system, "task.system", "is read with task.chat = true only",
        'set it to "", or write it into task.prompt',
    )  # fmt: skip
    for path, value in (("micro_batch_tokens", c.train.micro_batch_tokens), ("cell_tokens", c.train.cell_tokens)):
        _require(
            value % BLOCK == 0 and value >= 0, f"train.{path}", f"must be a multiple of {BLOCK}",
            "WGrad quantises tokens in groups of that size",
        )  # fmt: skip
    _require(c.train.micro_batch_tokens >= BLOCK, "train.micro_batch_tokens", f"must be at least {BLOCK}")
    if c.algorithm.overlong == "penalty":
        buffer = c.algorithm.overlong_buffer
        _require(0 < buffer <= c.rollout.max_tokens, "algorithm.overlong_buffer", "must be in 1 .. rollout.max_tokens")
    _require(
        c.updates == 1 or c.algorithm.old_logprobs == "trainer" or c.algorithm.correction == "none",
        "algorithm.correction", "must be none with algorithm.old_logprobs = 'rollout'",
        "it weighs the trainer's log-probabilities against the rollout's: set algorithm.old_logprobs = 'trainer'",
    )  # fmt: skip
    _require(
        c.precision.arm != "exact" or c.precision.rollout_backend == "auto",
        "precision.rollout_backend", "must be auto with precision.arm = 'exact'",
        "its rollout runs the trainer's kernels: set precision.backend",
    )  # fmt: skip
    groups_each = c.rollout.groups * c.rollout.samples
    _require(
        c.algorithm.batches <= groups_each, "algorithm.batches", f"must be at most groups × samples = {groups_each}"
    )


def _sizes(c: Config) -> None:
    """ConfigError for a number that a tensor cannot take, and for NaN, which no comparison refuses."""
    for table in dataclasses.fields(c):
        for key, value in dataclasses.asdict(getattr(c, table.name)).items():
            path = f"{table.name}.{key}"
            if isinstance(value, int):
                _require(-(2**63) <= value < 2**63, path, "must be a number of 64 bits")
            elif isinstance(value, float):
                held = abs(value) < FP32[1] or math.isinf(value)
                _require(held, path, f"must be a number of fp32, not {value}")


def _temperature(path: str, value: float, why: str) -> None:
    within = MIN_TEMPERATURE <= value <= MAX_TEMPERATURE
    _require(within, path, f"must be at least {MIN_TEMPERATURE} and at most {MAX_TEMPERATURE}, not {value}", why)


def _value(c: Config, path: str) -> Any:
    table, key = path.split(".")
    return getattr(getattr(c, table), key)


def _at_least(c: Config, path: str, least: int, why: str = "") -> None:
    value = _value(c, path)
    _require(math.isfinite(value) and value >= least, path, f"must be at least {least}, not {value}", why)


def _choice(path: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, path, f"= {value!r} is not one of {', '.join(allowed)}{nearest(value, allowed)}")


def _require(holds: bool, path: str, rule: str, why: str = "") -> None:
    if not holds:
        raise ConfigError(f"{path} {rule}", remedy=why or None)
