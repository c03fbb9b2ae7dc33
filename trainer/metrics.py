"""What a step measures, under which names, and what is asserted of it.

Every mean is guarded: with nothing to average it is 0, and the count that says so is a metric too. What is asserted of
a mismatch is broken where that count says that not every token was compared.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precgraph.mismatch import ENTROPIES, LARGEST, POSITIONS, bucket_names
from precgraph.strict_json import lines, sound
from trainer.config import Config, MetricsTable
from trainer.errors import ConfigError, MetricAssertionError, TrainerError, nearest
from trainer.files import replace_text

Record = dict[str, Any]
WANDB_ID = "wandb-id"  # what makes a resumed run go on in its own curves

# The same figures as other trainers log them. verl and NeMo-RL count Δ as trainer − rollout, as we do.
FOREIGN: dict[str, dict[str, str]] = {
    "trl": {
        "sampling/sampling_logp_difference/mean": "mismatch/mean",
        "sampling/sampling_logp_difference/max": "mismatch/max",
        "sampling/importance_sampling_ratio/mean": "mismatch/ratio_mean",
        "sampling/importance_sampling_ratio/min": "mismatch/ratio_min",
        "sampling/importance_sampling_ratio/max": "mismatch/ratio_max",
    },
    "verl": {
        "rollout_corr/kl": "mismatch/kl",
        "rollout_corr/k3_kl": "mismatch/k3",
        "training/rollout_probs_diff_mean": "mismatch/prob_diff_mean",
        "training/rollout_probs_diff_max": "mismatch/prob_diff_max",
        "training/rollout_probs_diff_std": "mismatch/prob_diff_std",
        "training/rollout_actor_probs_pearson_corr": "mismatch/prob_correlation",
    },
    "nemo": {"token_mult_prob_error": "mismatch/mult_prob_error", "gen_kl_error": "mismatch/k3"},
    "prime": {"mismatch_kl/mean": "mismatch/k3"},
}


def mean(values: Tensor, where: Tensor | None = None) -> float:
    """Mean over ``where``; 0 if there is nothing."""
    kept = values if where is None else values[where]
    return float(kept.double().mean()) if kept.numel() else 0.0


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's coefficient; of equal values 1, and else 0 where one side has no spread."""
    if torch.equal(a, b):
        return 1.0
    x, y = a - a.mean(), b - b.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale else 0.0


def mismatch(
    rollout: Tensor,
    trainer: Tensor,
    entropy: Tensor,
    place: Tensor,
    sequence: Tensor,
    serials: Sequence[str],
    threshold: float,
) -> Record:
    """The difference Δ = trainer − rollout of log-probabilities ``[n]`` over response tokens.

    ``place`` is a token's position in its response, ``sequence`` its index into ``serials``. Tokens without a value on
    one side (NaN), or with -inf on both, are counted in ``mismatch/missing`` and in nothing else; ``mismatch/unscored``
    is how many samples have tokens without a value on the trainer's side.
    """
    delta = trainer.double() - rollout.double()
    known = ~delta.isnan()
    delta = delta[known]
    size, bounded = delta.abs(), delta.clamp(max=LARGEST)
    off, where = size > 0, place[known]
    ours, theirs = trainer.double().exp()[known], rollout.double().exp()[known]
    probabilities = (ours - theirs).abs()
    ratio = bounded.exp()
    worst = int(size.argmax()) if size.numel() else -1
    out: Record = {
        "mismatch/mean": mean(size),
        "mismatch/max": float(size.max()) if size.numel() else 0.0,
        "mismatch/k3": mean(bounded.expm1() - bounded),
        "mismatch/kl": mean(-delta),
        "mismatch/ratio_mean": mean(ratio) if size.numel() else 1.0,
        "mismatch/ratio_min": float(ratio.min()) if size.numel() else 1.0,
        "mismatch/ratio_max": float(ratio.max()) if size.numel() else 1.0,
        "mismatch/mult_prob_error": mean(size.clamp(max=LARGEST).exp()) if size.numel() else 1.0,
        "mismatch/prob_diff_mean": mean(probabilities),
        "mismatch/prob_diff_max": float(probabilities.max()) if size.numel() else 0.0,
        "mismatch/prob_diff_std": float(probabilities.std()) if size.numel() > 1 else 0.0,
        "mismatch/prob_correlation": correlation(ours, theirs),
        "mismatch/above_threshold": mean((size > threshold).double()),
        "mismatch/tokens": int(known.sum()),
        "mismatch/tokens_different": int(off.sum()),
        "mismatch/first_position": int(where[off].min()) if bool(off.any()) else None,
        "mismatch/worst_sequence": serials[int(sequence[known][worst])] if bool(off.any()) else None,
        "mismatch/missing": int((~known).sum()),
        "mismatch/unscored": sequence[trainer.isnan()].unique().numel(),
    }
    for name, borders, values in (
        ("position", POSITIONS, where.double()),
        ("entropy", ENTROPIES, entropy[known].double()),
    ):
        edges = torch.tensor(borders[1:], dtype=torch.float64, device=values.device)
        index = torch.bucketize(values, edges, right=True)
        for i, bucket in enumerate(bucket_names(borders)):
            if bool((index == i).any()):
                out[f"mismatch/{name}/{bucket}"] = mean(size, index == i)
    return out


_COUNTED_BY = {"mismatch": "mismatch/tokens", "correction": "update/steps", "kl": "update/steps"}


def averaged(record: Mapping[str, Any], name: str) -> bool:
    """Whether there was anything that a step's mean is of: a response with a token, an update."""
    return record.get(_COUNTED_BY.get(name.partition("/")[0], "")) != 0


def foreign(record: Mapping[str, Any], names: Iterable[str]) -> Record:
    """The mismatch figures of ``record`` once more, under the names of other trainers."""
    return {theirs: record[ours] for name in names for theirs, ours in FOREIGN[name].items() if ours in record}


# ------------------------------------------------------------------------------------- assertions

KNOWN = (
    "reward/mean", "reward/std", "reward/pass_rate", "reward/zero_spread", "response/length", "response/length_max",
    "response/truncated", "entropy/mean", "clip/share", "kl/reference", "loss", "correction/weight_mean",
    "correction/masked", "mismatch/mean", "mismatch/max", "mismatch/k3", "mismatch/kl", "mismatch/ratio_mean",
    "mismatch/ratio_min", "mismatch/ratio_max", "mismatch/prob_correlation",
    "mismatch/mult_prob_error", "mismatch/prob_diff_mean", "mismatch/prob_diff_max", "mismatch/prob_diff_std",
    "mismatch/above_threshold", "mismatch/tokens", "mismatch/tokens_different", "mismatch/first_position",
    "mismatch/missing", "mismatch/unscored", "update/grad_norm", "update/lr", "update/steps", "update/skipped",
    "update/codes_changed", "weights/version", "sampling/kept_mass", "data/position", "data/dropped_groups",
    "data/too_long", "data/rounds", "time/rollout", "time/reference", "time/score", "time/update", "time/sync",
    "time/step", "speed/rollout", "speed/reference", "speed/score", "speed/update", "memory/peak_gb",
    "eval/pass_rate", "eval/reward", "eval/length", "eval/too_long",
    *(f"mismatch/position/{b}" for b in bucket_names(POSITIONS)),
    *(f"mismatch/entropy/{b}" for b in bucket_names(ENTROPIES)),
    *(name for table in FOREIGN.values() for name in table),
)  # fmt: skip

# Of these, 0 says that rollout and trainer agree bit for bit.
NO_MISMATCH = tuple(
    f"mismatch/{name}" for name in ("mean", "max", "k3", "kl", "prob_diff_mean", "prob_diff_max", "tokens_different")
)
COUNTS = ("mismatch/tokens", "mismatch/missing", "mismatch/unscored")

_OPERATORS = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_ASSERTION = re.compile(r"\s*([\w/.+-]+)\s*(==|!=|<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Assertion:
    """``name operator number``, such as ``mismatch/max == 0``. NaN fulfils none."""

    text: str
    name: str
    compare: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Assertion:
        """ConfigError if malformed, or if no metric has that name."""
        found = _ASSERTION.fullmatch(text)
        try:
            bound = float(found[3]) if found else math.nan
        except ValueError:
            bound = math.nan
        if found is None or math.isnan(bound):
            raise ConfigError(
                f"assertion {text!r} is not of the form 'metric < number'", remedy="e.g. 'mismatch/max == 0'"
            )
        if found[1] not in KNOWN:
            raise ConfigError(f"assertion {text!r}: no metric is called {found[1]!r}{nearest(found[1], KNOWN)}")
        return cls(text, found[1], found[2], bound)

    @property
    def of_all_tokens(self) -> bool:
        """Whether it is about a mismatch, so that no token may be without a value; a count of tokens says itself."""
        return _ours(self.name).startswith("mismatch/") and self.name not in COUNTS

    def measured(self, record: Mapping[str, Any]) -> bool:
        """Whether the record has the metric; without a token that was compared, no mismatch was measured."""
        return self.name in record and not (self.of_all_tokens and record.get("mismatch/tokens") == 0)

    def check(self, record: Mapping[str, Any]) -> None:
        """MetricAssertionError if the record has the metric and breaks the assertion, or if the assertion is about a
        mismatch and not all tokens were compared."""
        if self.of_all_tokens and record.get("mismatch/missing"):
            raise MetricAssertionError(f"step {record['step']}: {self.text!r} was asserted, and {incomplete(record)}")
        value = record.get(self.name)
        if value is None or not self.measured(record):
            return
        if math.isnan(value) or not _OPERATORS[self.compare](value, self.bound):
            raise MetricAssertionError(
                f"step {record.get('step')}: {self.name} is {value:g}, and {self.text!r} was asserted",
                remedy="the state is saved; see metrics.jsonl",
            )


def _ours(name: str) -> str:
    """Our name of a metric that may have another trainer's."""
    return next((table[name] for table in FOREIGN.values() if name in table), name)


def incomplete(record: Mapping[str, Any]) -> str:
    """How many tokens of a step could not be compared, and why."""
    missing, unscored = record["mismatch/missing"], record["mismatch/unscored"]
    why = f": {unscored} samples were not scored by the weights that sampled them" if unscored else ""
    return f"{missing} of {missing + record['mismatch/tokens']} tokens cannot be compared{why}"


def require_attainable(assertions: Iterable[Assertion], config: Config) -> None:
    """ConfigError for an assertion of no mismatch in an arm that is not made for it: the first step would break it."""
    for a in assertions:
        of_none = _ours(a.name) in NO_MISMATCH and a.compare in ("==", "<=") and a.bound == 0
        if of_none and config.precision.arm != "exact":
            raise ConfigError(
                f"metrics.asserts has {a.text!r}, which arm {config.precision.arm!r} does not promise",
                remedy="leave out that --assert, or the file's: --set 'metrics.asserts=[]'",
            )


def require_measured(assertions: Iterable[Assertion], config: Config) -> None:
    """ConfigError for an assertion on what no step of a run measures: it would hold without having been checked."""
    for a in assertions:
        for never, why, remedy in _never_measured(a, config):
            if never:
                raise ConfigError(f"assertion {a.text!r}: {why}", remedy=remedy)


def _never_measured(a: Assertion, config: Config) -> Iterator[tuple[bool, str, str]]:
    """Reasons for which a run of that configuration never measures what is asserted: whether one holds, what it is,
    and the remedy."""
    table, phase = config.algorithm, a.name.removeprefix("time/").removeprefix("speed/")
    owner = next((name for name, names in FOREIGN.items() if a.name in names), None)
    evaluates = 0 < config.run.eval_every <= config.run.steps
    yield a.name.startswith("eval/") and not evaluates, "the run never evaluates", "set run.eval_every"
    yield owner not in (None, *config.metrics.names), f"{a.name} is not logged", f"--metric-names {owner}"
    yield phase == "reference" and table.kl == 0, "the run has no reference", "set algorithm.kl"
    yield phase == "score" and not config.scores_first, "no sample is scored before the update", "leave it out"
    if a.name.startswith("mismatch/position/"):
        first = int(re.split("[-+]", a.name.rpartition("/")[2])[0])
        limit = config.rollout.max_tokens
        yield first >= limit, "no response is that long", f"rollout.max_tokens is {limit}"
    later = table.batches > 1 and not config.scores_first
    why = "samples of all optimiser steps but the first are not scored by the weights that sampled them"
    yield a.of_all_tokens and later, why, "set algorithm.old_logprobs = 'trainer'"


def require_seen(assertions: Iterable[Assertion], records: Sequence[Record]) -> None:
    """MetricAssertionError for an assertion on what no step of a whole run has measured."""
    for a in assertions:
        if not any(a.measured(record) for record in records):
            raise MetricAssertionError(f"{a.text!r} was asserted, and no step of the run has measured {a.name}")


# ---------------------------------------------------------------------------------------- recorder


def read_records(directory: Path) -> list[Record]:
    """The records of a run, in order; an evaluation's line is a part of its step's. A last line that was cut off by a
    crash is left out. TrainerError for any other line that is no record: what stands below it must not be lost."""
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise TrainerError("holds no metrics.jsonl", path=str(directory), remedy="name a run directory")
    records: list[Record] = []
    rows = lines(path)
    for number, line in rows:
        try:
            record = sound(json.loads, line.decode())
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError("no table with a step")
        except ValueError as error:  # of JSON, of UTF-8
            if number == len(rows):
                break
            raise TrainerError(
                f"is no record of a step: {error}", path=f"{path}:{number}", remedy="restore or remove the line"
            ) from None
        if records and records[-1]["step"] == record["step"]:
            records[-1] |= record
        else:
            records.append(record)
    return records


class Recorder:
    """``metrics.jsonl`` of a run, and TensorBoard and W&B beside it. ``step`` is the first step that is to come:
    records from there on, of a run that went further than its checkpoint, are dropped. ``last`` is the record of the
    last step, if there is one."""

    def __init__(self, directory: Path, table: MetricsTable, step: int, config: Mapping[str, Any]) -> None:
        self.path = directory / "metrics.jsonl"
        self.last: Record = {}
        if self.path.exists():
            kept = [r for r in read_records(directory) if r["step"] < step]
            replace_text(self.path, "".join(f"{json.dumps(r)}\n" for r in kept))
            self.last = kept[-1] if kept else {}
        else:
            self.path.touch()
        self._board = _tensorboard(directory, step) if table.tensorboard else None
        self._wandb = _wandb(directory, config) if table.wandb else None

    def write(self, record: Record) -> None:
        """Append a step's record, or what has come to the last one; in the file when this returns. TrainerError if that
        fails, on a full disk for one, or if the file is gone: no run could be resumed from a new one."""
        if not self.path.exists():
            raise TrainerError("was removed during the run", path=str(self.path), remedy="start the run again")
        self.last = self.last | record if self.last.get("step") == record["step"] else record
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            if self._board is not None:
                for name, value in numbers.items():
                    self._board.add_scalar(name, value, record["step"])
                self._board.flush()
        except OSError as error:
            raise TrainerError(
                f"step {record['step']} cannot be recorded: {error.strerror or error}", path=str(self.path.parent),
                remedy=f"make room, and go on from the last checkpoint: precgraph-train resume {self.path.parent}",
            ) from error  # fmt: skip
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])

    def close(self) -> None:
        if self._board is not None:
            with suppress(OSError):  # write() has flushed it, or has said why it could not
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tensorboard(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "metrics.tensorboard needs tensorboard", remedy="pip install 'precgraph[trainer]', or set it to false"
        ) from error
    return SummaryWriter(str(directory / "tensorboard"), purge_step=step)


def _wandb(directory: Path, config: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "metrics.wandb needs wandb", remedy="pip install wandb, or set metrics.wandb = false"
        ) from error
    place = directory / WANDB_ID
    known = place.read_text(encoding="utf-8") if place.exists() else None
    run = wandb.init(
        project="precgraph", name=directory.name, dir=str(directory), config=dict(config), id=known, resume="allow"
    )
    replace_text(place, run.id)
    return run
