"""Tasks: where questions come from, how a prompt is made of one, and what a response is worth.

Three sources: families of reasoning-gym by name, a JSONL file of questions and answers (checked with math-verify), and
any Python callable. Text exists only on the way in and for the reward; ids are never made from decoded text. What
answers are worth is in :mod:`trainer.rewards`.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number, Real
from pathlib import Path
from typing import Any

from precgraph.strict_json import lines, sound
from trainer.config import Config, TaskTable
from trainer.errors import ConfigError, RewardError, TaskError, nearest
from trainer.rewards import Scorer, exact_scorer, family_scorer, math_scorer

GENERATED = 1000  # items of a source that makes them, unless task.size says how many
LARGEST = 1e6  # reward: with much larger ones, sums of squares overflow far from the function that gave them


@dataclass(frozen=True, slots=True)
class Item:
    """One question. ``id`` names it in messages; ``entry`` is the source's own record, for its verifier."""

    id: str
    question: str
    answer: str
    entry: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """Items and a scorer. ``score(item, response)`` is called with the response's text; ``note`` is what a run says of
    the items when it starts; ``reward`` names a function of the user's own; ``left_out`` is the share of the items that
    held-out ones took."""

    name: str
    items: Sequence[Item]
    scorer: Scorer
    note: str = ""
    reward: str = ""
    left_out: float = 0.0

    def score(self, item: Item, response: str) -> float:
        """The reward; RewardError, naming the scorer and the item, if it raises or returns no number within
        ±``LARGEST``."""
        judge = f"task.reward = {self.reward!r}" if self.reward else "the scorer"
        try:
            value = self.scorer(item, response)
        except (Exception, SystemExit) as error:  # an exit would end the run as if it were done
            raise RewardError(
                f"{judge} raised {_words(error)}, for an item of {self.name}",
                path=item.id, remedy=f"correct it; the response began {response[:80]!r}",
            ) from error  # fmt: skip
        if isinstance(value, Real) and -LARGEST <= value <= LARGEST:
            return float(value)
        raise RewardError(
            f"{judge} gave {_short(value)}, not a finite number within ±{LARGEST:.0e}, for an item of {self.name}",
            path=item.id, remedy=f"return a float; the response began {response[:80]!r}",
        )  # fmt: skip


def load_task(
    table: TaskTable, *, data: str = "", seed: int | None = None, size: int | None = None, drawn: bool = False
) -> Task:
    """The task of a configuration, or, for evaluation, of other ``data``, ``seed`` or ``size``. Of a source with more
    items than ``size`` the first are taken, or, if ``drawn``, those that the seed draws."""
    name, key = data or table.data, "eval.data" if data else "task.data"
    kind, _, rest = name.partition(":")
    seed, size = table.seed if seed is None else seed, table.size if size is None else size
    own = _own_reward(table)
    items: Sequence[Item]
    if kind == "reasoning_gym" and rest:
        arguments: dict[str, Any] = {"family": rest, "seed": seed, "size": size or GENERATED, "params": table.params}
        items, scorer = _family(**arguments), own or family_scorer(table.answer, **arguments)
    elif kind == "jsonl" and rest:
        origin = "" if data else table.origin  # of task.data
        items, scorer = _jsonl(Path(rest), table, origin or f"check {key}"), own or math_scorer(table.answer)
    elif kind == "python" and ":" in rest:
        items, scorer = _python(rest, key, table, seed, size or GENERATED), own or exact_scorer(table.answer)
    else:
        raise ConfigError(
            f"{key} = {name!r} names no source",
            remedy="write reasoning_gym:FAMILY, jsonl:PATH or python:MODULE:FUNCTION",
        )
    if not items:
        raise TaskError(f"{name} has no items", remedy="check what it reads or makes")
    if not own and kind != "reasoning_gym" and (bare := next((item for item in items if not item.answer), None)):
        raise TaskError(
            "has no answer, which every response without one would equal", path=bare.id,
            remedy="leave such items out, or set task.reward",
        )  # fmt: skip
    note = f"{len(items)} items"
    if size and len(items) > size:
        note = f"{size} of {len(items)} items"
        places = random.Random(seed).sample(range(len(items)), size) if drawn else range(size)
        items = _Part(items, sorted(places))
    return Task(name, items, scorer, note, table.reward)


def held_out(config: Config) -> Task:
    """The items that a run is evaluated on: of a source that has them as they are, as many as the seed draws."""
    table = config.eval
    return load_task(config.task, data=table.data, seed=table.seed, size=table.items, drawn=True)


def training(config: Config, held: Task) -> Task:
    """The items that a run learns from: those of ``[task]`` but for the questions, by their text, that
    ``held`` asks. TaskError if fewer are left than a step has groups."""
    task = load_task(config.task)
    asked = {item.question for item in held.items}
    kept = [i for i, item in enumerate(task.items) if item.question not in asked]
    if not (lost := len(task.items) - len(kept)):
        return task
    share = lost / len(task.items)
    note = f"{task.note}; {lost} of them ({share:.0%}) ask what held-out items ask, and are left out"
    if len(kept) < config.rollout.groups:
        whole = task.name.startswith("jsonl:") and not isinstance(task.items, _Part)  # of a file there is no more
        more = "" if whole else "raise task.size, "
        raise TaskError(
            f"{note}; {len(kept)} stay, and a step needs rollout.groups = {config.rollout.groups}",
            path=task.name, remedy=f"{more}lower eval.items, or name other items with eval.data",
        )  # fmt: skip
    return replace(task, items=_Part(task.items, kept), note=note, left_out=share)


@dataclass(frozen=True)
class _Part(Sequence[Item]):
    """Some of the items, by their places: what is made on demand stays so."""

    items: Sequence[Item]
    places: Sequence[int]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        return self.items[self.places[index]]


def resolve(path: str, key: str) -> Callable[..., Any]:
    """The callable ``MODULE:FUNCTION``; the working directory counts as a place for modules."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{key} = {path!r} is not of the form module:function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}: cannot import {module!r}: {error}", remedy="run from the folder that holds it"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}: importing {module!r} raised {_words(error)}", remedy="correct it; --debug shows where"
        ) from error
    function = getattr(found, name, None)
    if not callable(function):
        functions = [word for word, value in vars(found).items() if callable(value)]
        raise ConfigError(f"{key}: {module} has no function {name!r}{nearest(name, functions)}")
    result: Callable[..., Any] = function
    return result


def _own_reward(table: TaskTable) -> Scorer | None:
    if not table.reward:
        return None
    function = resolve(table.reward, "task.reward")
    return lambda item, response: function(item.question, item.answer, response)


def _words(error: BaseException) -> str:
    """An error of somebody's own code, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _short(value: object) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no integer of thousands of digits
        return f"a huge {type(value).__name__}"


# ----------------------------------------------------------------------------------------- sources


def _family(family: str, seed: int, size: int, params: dict[str, Any]) -> Sequence[Item]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError("reasoning-gym is not installed", remedy="pip install 'precgraph[trainer]'") from error
    if family not in DATASETS:
        raise ConfigError(f"reasoning-gym has no family {family!r}{nearest(family, DATASETS)}")
    try:
        dataset = reasoning_gym.create_dataset(family, seed=seed, size=size, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.params do not fit {family}: {error}") from error
    return _Lazy(dataset, family)


class _Lazy(Sequence[Item]):
    """Items of a procedural family, made when they are asked for."""

    def __init__(self, dataset: Any, family: str) -> None:
        self._dataset, self._family = dataset, family

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        return Item(f"{self._family}/{index}", str(entry["question"]), str(entry["answer"]), entry)

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))


def _jsonl(path: Path, table: TaskTable, remedy: str) -> list[Item]:
    items = []
    try:
        rows = lines(path)
    except OSError as error:
        raise TaskError(f"{error.strerror or error}", path=str(path), remedy=remedy) from None
    for number, line in rows:
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            entry = sound(json.loads, line.decode())
        except ValueError as error:
            raise TaskError(f"is not valid JSON: {error}", path=place) from None
        if not isinstance(entry, dict):
            raise TaskError("holds no table", path=place)
        for key in (table.question_key, table.answer_key):
            if key not in entry:
                raise TaskError(
                    f"has no {key!r}{nearest(key, entry)}",
                    path=place,
                    remedy="set task.question_key and task.answer_key",
                )
        question, answer = (_text(entry[key], key, place) for key in (table.question_key, table.answer_key))
        items.append(Item(place, question, _final(answer), entry))
    return items


def _text(value: object, key: str, place: str) -> str:
    """A question or an answer: text, or a number, as its text; NaN is what libraries of tables write for none."""
    number = isinstance(value, Number) and not isinstance(value, bool) and str(value) != "nan"
    if isinstance(value, str) or number:
        return str(value)
    raise TaskError(f"{key!r} is {_short(value)}, neither text nor a number", path=place)


def _final(answer: str) -> str:
    """GSM8K writes the worked answer, then ``#### 42``."""
    return answer.rsplit("####", 1)[-1].strip()


def _python(path: str, key: str, table: TaskTable, seed: int, size: int) -> list[Item]:
    function = resolve(path, key)
    words = ", ".join(("size", "seed", *table.params))
    try:
        rows = list(function(size=size, seed=seed, **table.params))
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"{key} = 'python:{path}' raised {_words(error)}",
            remedy=f"it was called with {words} by name; --debug shows where it raised",
        ) from error
    items = []
    for index, row in enumerate(rows):
        place = f"{path}/{index}"
        if isinstance(row, Mapping) and {"question", "answer"} <= row.keys():
            entry, question, answer = row, row["question"], row["answer"]
        elif isinstance(row, tuple) and len(row) == 2:
            entry, (question, answer) = {}, row
        else:
            raise TaskError(
                f"item {index} of {path} is {row!r:.80}",
                remedy="yield (question, answer) pairs, or tables with both keys",
            )
        items.append(Item(place, _text(question, "question", place), _text(answer, "answer", place), entry))
    return items


# ----------------------------------------------------------------------------------------- prompts


def encode(tokenizer: Any, item: Item, table: TaskTable) -> list[int]:
    """Token ids of an item's prompt. A chat template brings its own start token; plain text gets the tokenizer's."""
    text = table.prompt.replace("{question}", item.question)
    if not table.chat:
        return [int(i) for i in tokenizer(text)["input_ids"]]
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("task.chat = true, but the tokenizer has no chat template", remedy="set task.chat = false")
    messages = [{"role": "user", "content": text}]
    if table.system:
        messages.insert(0, {"role": "system", "content": table.system})
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # a template is code: jinja's errors, and what its expressions raise
        raise ConfigError(
            f"the tokenizer's chat template raised {_words(error)}",
            remedy='set task.system = "" or task.chat = false' if table.system else "set task.chat = false",
        ) from error
    return [int(i) for i in ids]


def stop_ids(model_config: Any, generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: of the generation config, the model's config and the tokenizer, 0 included."""
    found: set[int] = set()
    for source in (generation_config, model_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else [ids])
    return tuple(sorted(int(i) for i in found))


class Stream:
    """An endless order over a task's items: shuffled anew each epoch, by the seed alone. ``position`` is its state."""

    def __init__(self, count: int, seed: int, position: int = 0) -> None:
        self.count, self.seed, self.position = count, seed, position
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> int:
        """The index of the next item."""
        epoch, place = divmod(self.position, self.count)
        if epoch != self._epoch:
            self._order = list(range(self.count))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        self.position += 1
        return self._order[place]
