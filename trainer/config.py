"""The configuration of a run: typed tables, read from TOML, every key overridable as ``a.b=c``.

:func:`load` reads a file, :func:`override` applies ``--set`` options, :meth:`Config.save` writes every key out. A key
that does not exist is a :class:`ConfigError` that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tomlkit

from precgraph.strict_json import sound
from trainer.errors import ConfigError, nearest
from trainer.files import replace_text
from trainer.validation import validate


@dataclass(frozen=True, slots=True)
class RunTable:
    """``dir`` is the run directory (empty: ``runs/NAME``). ``save_every`` and ``eval_every`` count steps, 0 is never
    (a run always saves at its end); ``keep`` is how many checkpoints stay, 0 all."""

    name: str = "run"
    dir: str = ""
    seed: int = 0
    steps: int = 100
    save_every: int = 25
    keep: int = 2
    eval_every: int = 0


@dataclass(frozen=True, slots=True)
class ModelTable:
    """``path`` is a directory, a ``.gguf`` or a hub id; ``layers`` keeps only the first layers (0: all). ``memory`` is
    the share of a GPU's memory that the run may take, for runs that share one. ``origin`` says how to get the model,
    and is the remedy when it is not there."""

    path: str = ""
    origin: str = ""
    layers: int = 0
    device: str = "auto"
    memory: float = 1.0
    checkpointing: bool = False


@dataclass(frozen=True, slots=True)
class TaskTable:
    """``data``: ``reasoning_gym:FAMILY``, ``jsonl:PATH`` or ``python:MODULE:FUNCTION``; ``params`` go to the family or
    the function. ``size``: so many items, the first of a file; 0: all of it, and 1000 of what a family or a function
    makes. ``reward``: empty for the data's own verifier, or ``MODULE:FUNCTION``. ``answer`` says where a
    response's answer is: ``whole``, ``last_number``, ``last_line``, ``tag`` (``<answer>``) or ``boxed``. ``prompt``
    holds ``{question}``; with ``chat`` it goes through the tokenizer's chat template. ``origin`` says how to get the
    data, and is the remedy when a file is not there."""

    data: str = "reasoning_gym:chain_sum"
    origin: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    seed: int = 0
    reward: str = ""
    answer: str = "last_number"
    prompt: str = "{question}"
    system: str = ""
    chat: bool = True
    question_key: str = "question"
    answer_key: str = "answer"


@dataclass(frozen=True, slots=True)
class EvalTable:
    """Held-out items (``data`` empty: the task's own, drawn with another seed, and left out of the training items),
    sampled at ``temperature`` (0: greedy)."""

    data: str = ""
    items: int = 64
    samples: int = 1
    temperature: float = 0.0
    seed: int = 1_000_003


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """``engine``: ``embedded`` (precgraph's own) or ``vllm`` (in the trainer's process; its own model where the arm is
    not ``exact``). ``groups`` prompts of ``samples`` responses each a step. With ``dynamic``, groups whose rewards are
    all alike are replaced by new prompts, for at most ``max_rounds`` rounds of sampling. ``max_sequences``,
    ``max_batch_tokens`` and ``cache_blocks`` (0: automatic) go to the engine."""

    engine: str = "embedded"
    groups: int = 8
    samples: int = 8
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    dynamic: bool = False
    max_rounds: int = 4
    max_sequences: int = 64
    max_batch_tokens: int = 512
    cache_blocks: int = 0


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """GRPO and its variants.

    ``advantages``: ``group_norm`` ((r − mean) / (std + 1e-4), GRPO) or ``centred`` (r − mean, Dr. GRPO).
    ``aggregation``: ``token`` (mean over all tokens, DAPO), ``sequence`` (mean of sequence means, GRPO) or ``constant``
    (sum over sequence count × max_tokens, Dr. GRPO). ``clip_low``, ``clip_high``: the ratio stays in 1 − low .. 1 +
    high. ``epochs`` passes over a rollout, each in ``batches`` optimiser steps. ``kl``: coefficient of the k3 estimate
    against the model as it was at the start, 0 for none. ``zero_spread``: ``keep`` groups of equal rewards (they still
    feel the KL term) or ``drop`` them. ``overlong``: truncated responses are kept (``keep``), left out of the loss
    (``mask``) or lose up to ``overlong_penalty`` of reward over the last ``overlong_buffer`` tokens (``penalty``,
    DAPO). ``correction`` of the difference between rollout and trainer: ``none``, ``token_truncated`` (min(ratio, cap))
    or ``sequence_masked`` (the whole sequence's ratio, 0 above the cap). ``old_logprobs``, when a rollout serves more
    than one optimiser step: scored anew by the ``trainer``, or taken from the ``rollout``."""

    advantages: str = "group_norm"
    aggregation: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    epochs: int = 1
    batches: int = 1
    kl: float = 0.0
    zero_spread: str = "keep"
    overlong: str = "keep"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    correction: str = "none"
    correction_cap: float = 2.0
    old_logprobs: str = "trainer"


@dataclass(frozen=True, slots=True)
class PrecisionTable:
    """``arm`` decides what trains and what rolls out; ``recipe`` (a preset or a file) is the FP8 recipe of the arms
    that use one. ``allow_mismatch`` lets a pair run that the check refuses; ``mixed``, ``unified`` and ``bf16`` are
    such pairs by intent and set it. ``rollout_backend`` is the backend of ``unified``'s rollout."""

    arm: str = "exact"
    recipe: str = "jet_rl"
    backend: str = "auto"
    rollout_backend: str = "auto"
    allow_mismatch: bool = False
    checked: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerTable:
    """AdamW. ``masters``: ``fp32`` (an fp32 copy is updated; its bf16 rounding is what both sides quantise) or ``bf16``
    (stochastic rounding, no copy). ``states``: ``fp32`` or ``8bit``. ``clip`` is the gradient's largest norm (0: none),
    ``warmup`` the steps over which the rate rises to ``lr``."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: int = 0
    masters: str = "fp32"
    states: str = "fp32"


@dataclass(frozen=True, slots=True)
class TrainTable:
    """Packing. Sequences fill cells of at most ``cell_tokens`` (0: as the longest sequence needs, at least 1024),
    padded to a multiple of 128; a micro-batch is as many cells as fit ``micro_batch_tokens``. The cells alone decide
    the numerics, so the micro-batch size changes nothing but the order of fp32 sums."""

    micro_batch_tokens: int = 4096
    cell_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MetricsTable:
    """``asserts`` such as ``mismatch/max == 0`` stop the run when broken; ``names`` adds the mismatch figures under the
    names of trl, verl, nemo or prime. ``threshold`` is the difference from which a token counts as off.
    ``masked_alarm`` is the share of sequences that a correction may mask, step after step, before it is an alarm.
    ``log_tokens`` writes every token and its log-probabilities to ``rollout/STEP.jsonl``, a log for ``precgraph
    audit``."""

    asserts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    threshold: float = 1e-2
    masked_alarm: float = 0.25
    tensorboard: bool = True
    wandb: bool = False
    samples: int = 4
    log_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run. Construct it through :func:`load` or :meth:`from_dict`, which validate."""

    run: RunTable = field(default_factory=RunTable)
    model: ModelTable = field(default_factory=ModelTable)
    task: TaskTable = field(default_factory=TaskTable)
    eval: EvalTable = field(default_factory=EvalTable)
    rollout: RolloutTable = field(default_factory=RolloutTable)
    algorithm: AlgorithmTable = field(default_factory=AlgorithmTable)
    precision: PrecisionTable = field(default_factory=PrecisionTable)
    optimizer: OptimizerTable = field(default_factory=OptimizerTable)
    train: TrainTable = field(default_factory=TrainTable)
    metrics: MetricsTable = field(default_factory=MetricsTable)

    def __post_init__(self) -> None:
        validate(self)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run.dir or Path("runs") / self.run.name)

    @property
    def updates(self) -> int:
        """Optimiser steps that one rollout serves."""
        return self.algorithm.epochs * self.algorithm.batches

    @property
    def scores_first(self) -> bool:
        """Whether a rollout's samples are scored apart from the updates, before the first of several."""
        return self.updates > 1 and self.algorithm.old_logprobs == "trainer"

    @property
    def allow_mismatch(self) -> bool:
        """Whether an inconsistent pair may run: by the key, or because the arm is one on purpose."""
        return self.precision.allow_mismatch or self.precision.arm != "exact"

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data, every key spelled out."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """The same by ``table.key``, as ``--set`` and tables of differences name them."""
        return {f"{name}.{key}": value for name, table in self.to_dict().items() for key, value in table.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`; keys that are absent have their defaults. ConfigError names a wrong key."""
        tables = {f.name: typing.get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
        values = {}
        for name, table in data.items():
            if name not in tables:
                raise ConfigError(
                    f"unknown table [{name}]{nearest(name, tables)}", remedy=f"tables: {', '.join(tables)}"
                )
            if not isinstance(table, Mapping):
                raise ConfigError(f"{name} must be a table", remedy=f"write [{name}] and its keys below")
            values[name] = _table(tables[name], name, table)
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write every key as TOML. TrainerError if that fails; then the file is as it was."""
        document = tomlkit.document()
        document.add(tomlkit.comment("precgraph-train: every key, as the latest steps of the run have it"))
        document.update(self.to_dict())
        replace_text(Path(path), tomlkit.dumps(document))


def load(path: str | Path, settings: Iterable[str] = ()) -> Config:
    """Read a TOML file and apply ``a.b=c`` settings in order; errors name the file."""
    try:
        data = sound(tomllib.loads, Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", remedy="name a TOML file") from None
    except ValueError as error:  # of TOML, of UTF-8, of an integer of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return Config.from_dict(override(data, settings))


def load_run(directory: Path, settings: Iterable[str] = ()) -> Config:
    """The configuration of a run, from its directory; ConfigError if that is none."""
    path = directory / "config.toml"
    if not path.is_file():
        what = "no such directory" if not directory.exists() else "is no run directory: it holds no config.toml"
        raise ConfigError(what, path=str(directory), remedy="name a run directory")
    return load(path, settings)


def override(data: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """``data`` with ``a.b=c`` settings. ``c`` is a TOML value; what is not one is taken as a string."""
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in data.items()}
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = [k.strip() for k in path.split(".")]
        if not equals or len(keys) < 2 or not all(keys):
            raise ConfigError(f"--set {setting!r} is not of the form table.key=value")
        table = result
        for key in keys[:-1]:
            inner = table.get(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {setting!r}: {key} is not a table")
            table[key] = dict(inner)
            table = table[key]
        table[keys[-1]] = _toml_value(text.strip())
    for name, key in (("model", "path"), ("task", "data")):
        before, after = data.get(name), result.get(name)
        if not isinstance(before, Mapping) or not isinstance(after, dict):
            continue
        if before.get(key) != after.get(key) and before.get("origin") == after.get("origin"):
            after.pop("origin", None)  # it says how to get what the file names, and another is meant
    return result


def _toml_value(text: str) -> Any:
    try:
        return sound(tomllib.loads, f"value = {text}")["value"]
    except ValueError:
        return text


def _table(kind: Any, name: str, data: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise ConfigError(
                f"unknown key {name}.{key}{nearest(key, hints)}", remedy=f"keys of [{name}]: {', '.join(hints)}"
            )
        values[key] = _typed(f"{name}.{key}", hints[key], value)
    return kind(**values)


def _typed(path: str, kind: Any, value: Any) -> Any:
    """``value`` as ``kind``; integers widen to float, nothing else converts."""
    wanted = typing.get_origin(kind) or kind
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise ConfigError(f"{path} must be a number of fp32, and is larger than any") from None
    fits = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
    if fits and isinstance(kind, types.GenericAlias) and wanted is list:
        fits = all(isinstance(v, str) for v in value)
    if not fits:
        what = {
            "dict": "a table", "list": "a list of strings", "str": "a string", "bool": "true or false",
            "int": "a whole number", "float": "a number",
        }  # fmt: skip
        raise ConfigError(f"{path} must be {what[wanted.__name__]}, not {value!r}")
    return value
