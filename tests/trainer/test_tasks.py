"""Tasks: sources, answers, rewards that misbehave, prompts and end tokens."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.trainer import tiny
from trainer import rewards
from trainer.config import Config, TaskTable, load
from trainer.errors import ConfigError, RewardError, TaskError, TrainerError
from trainer.loop import Trainer
from trainer.rewards import extract, math_scorer
from trainer.tasks import Item, Stream, Task, encode, held_out, load_task, stop_ids, training

DEMO = Path(__file__).parents[2] / "examples" / "configs" / "demo.toml"


@pytest.mark.parametrize(
    ("text", "where", "answer"),
    [
        (" 7 ", "whole", "7"),
        ("First 3, then 4: 3 + 4 = 7.", "last_number", "7"),
        ("It is -12", "last_number", "-12"),
        ("about 1,234.5 of them", "last_number", "1234.5"),
        ("1/2 of it", "last_number", "1/2"),
        ("none", "last_number", ""),
        ("2-3", "last_number", "3"),
        ("x-3 and (2)-3", "last_number", "3"),
        ("=-3", "last_number", "-3"),
        ("\u22123", "last_number", "-3"),
        ("2\u22123", "last_number", "3"),
        (".5", "last_number", "0.5"),
        ("-.5", "last_number", "-0.5"),
        ("...5", "last_number", "5"),
        ("7.", "last_number", "7"),
        ("5,6", "last_number", "6"),
        ("1,234,567", "last_number", "1234567"),
        ("1,2345", "last_number", "2345"),
        ("1234,567", "last_number", "567"),
        ("0,123", "last_number", "123"),
        ("1/2.5", "last_number", "2.5"),
        ("so\nthe answer\n\n", "last_line", "the answer"),
        ("<answer>a</answer> no, <answer> b\n</answer>", "tag", "b"),
        ("<answer>a", "tag", ""),
        (r"so \boxed{\frac{1}{2}} it is", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "boxed", ""),
        ("nothing", "boxed", ""),
    ],
)
def test_extract(text: str, where: str, answer: str) -> None:
    assert extract(text, where) == answer


def test_reasoning_gym_by_name() -> None:
    pytest.importorskip("reasoning_gym")
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load_task(TaskTable(data="reasoning_gym:chain_sum", params=params, size=20, seed=4))
    item = task.items[3]
    assert len(task.items) == 20 and item.id == "chain_sum/3"
    left, sign, right = item.entry["metadata"]["expression"].split()
    wanted = int(left) + int(right) * (1 if sign == "+" else -1)
    assert item.answer == str(wanted)
    assert task.score(item, f"{left} {sign} {right} is {wanted}") == 1.0
    assert task.score(item, f"{wanted + 1}") < 1.0 and task.score(item, "") < 1.0
    other = load_task(TaskTable(data="reasoning_gym:chain_sum", params=params, size=20), seed=5)
    assert [i.question for i in other.items] != [i.question for i in task.items]


def test_reasoning_gym_errors_name_the_nearest() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="chain_sum"):
        load_task(TaskTable(data="reasoning_gym:chain_sums"))
    with pytest.raises(ConfigError, match="task.params do not fit"):
        load_task(TaskTable(data="reasoning_gym:chain_sum", params={"terms": 2}))


def test_jsonl_with_math_verify(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    rows = [
        {"question": "half?", "answer": "It is 1/2.\n#### 1/2"},  # GSM8K's form
        {"question": "more?", "answer": "\\frac{3}{4}"},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    task = load_task(TaskTable(data=f"jsonl:{path}", answer="last_number"))
    assert [i.answer for i in task.items] == ["1/2", "\\frac{3}{4}"]
    assert task.score(task.items[0], "that makes 0.5") == 1.0
    assert task.score(task.items[0], "that makes 0.4") == 0.0 and task.score(task.items[0], "no idea") == 0.0
    boxed = load_task(TaskTable(data=f"jsonl:{path}", answer="boxed"))
    assert boxed.score(boxed.items[1], r"so \boxed{0.75}") == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no items"),
        ("{", "not valid JSON"),
        ("[1]", "holds no table"),
        ('{"question": "a", "answr": "b"}', "answr"),
        ("[" * 100_000, "nested too deeply"),
        ("\xff", "not valid JSON"),
        ('{"question": "a", "answer": null}', "jsonl:1: 'answer' is None, neither text nor a number"),
        ('{"question": "a", "answer": ["b"]}', "'answer' is .'b'., neither"),
        ('\n{"question": {"a": "b"}, "answer": "b"}', "jsonl:2: 'question' is .'a': 'b'., neither"),
        ('{"question": "a", "answer": true}', "'answer' is True, neither"),
        ('{"question": "a", "answer": NaN}', "'answer' is nan, neither"),
        ('{"question": "a", "answer": "so #### "}', "jsonl:1: has no answer, which every response without one"),
    ],
)
def test_jsonl_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "d.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(TaskError, match=message):
        load_task(TaskTable(data=f"jsonl:{path}"))
    with pytest.raises(TaskError, match="No such file"):
        load_task(TaskTable(data=f"jsonl:{tmp_path / 'none'}"))


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_line_ends_of_unicode_are_text_in_jsonl(tmp_path: Path, end: str) -> None:
    """JSON lets them stand in a string as they are, and ``ensure_ascii=False`` writes them so."""
    pytest.importorskip("math_verify")
    path = tmp_path / "d.jsonl"
    rows = [{"question": f"a{end}b", "answer": "1"}, {"question": "c", "answer": "2"}]
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    task = load_task(TaskTable(data=f"jsonl:{path}"))
    assert [i.question for i in task.items] == [f"a{end}b", "c"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("made_up_task")
    monkeypatch.setitem(sys.modules, "made_up_task", made)
    return made


def test_any_python_callable(module: Any) -> None:
    module.items = lambda size, seed, digits: [(f"{i}?", "7") for i in range(digits)]
    module.reward = lambda question, answer, response: 0.5 if response == question + answer else 0.0
    table = TaskTable(data="python:made_up_task:items", params={"digits": 5}, size=3, answer="last_number")
    task = load_task(table)
    assert (
        len(task.items) == 3 and task.score(task.items[0], "it is 7") == 1.0 and task.score(task.items[0], "8") == 0.0
    )
    own = load_task(TaskTable(data=table.data, params=table.params, reward="made_up_task:reward"))
    assert own.score(own.items[1], "1?7") == 0.5


@pytest.mark.parametrize(
    ("path", "message"),
    [("made_up_task:itms", "items"), ("no_such_module_at_all:f", "cannot import"), ("made_up_task", "module:function")],
)
def test_callables_that_are_not_there(module: Any, path: str, message: str) -> None:
    module.items = lambda size, seed: []
    with pytest.raises(ConfigError, match=message):
        load_task(TaskTable(data="python:made_up_task:items", reward=path))
    module.itemz = 3  # which nobody can mean
    with pytest.raises(ConfigError, match="no function 'itemz'; did you mean 'items'"):
        load_task(TaskTable(data="python:made_up_task:itemz"))
    with pytest.raises(TaskError, match="no items"):
        load_task(TaskTable(data="python:made_up_task:items"))


@pytest.mark.parametrize("row", [(None, None), {"question": "1?", "answer": None}, ("1?", ["1"])])
def test_items_are_texts_or_numbers(module: Any, row: Any) -> None:
    rows: list[Any] = [("1?", 1), ("2?", 0.5)]
    module.items = lambda size, seed: rows
    task = load_task(TaskTable(data="python:made_up_task:items"))
    assert [item.answer for item in task.items] == ["1", "0.5"]
    rows.append(row)
    with pytest.raises(TaskError, match="made_up_task:items/2: .*neither text nor a number"):
        load_task(TaskTable(data="python:made_up_task:items"))


def test_an_answer_of_nothing_needs_a_reward_of_ones_own(module: Any) -> None:
    module.items = lambda size, seed: [("1?", "1"), ("2?", "")]
    module.reward = lambda question, answer, response: float(not answer)
    with pytest.raises(TaskError, match="made_up_task:items/1: has no answer.*set task.reward"):
        load_task(TaskTable(data="python:made_up_task:items"))
    task = load_task(TaskTable(data="python:made_up_task:items", reward="made_up_task:reward"))
    assert [task.score(item, "") for item in task.items] == [0.0, 1.0]


def test_a_source_of_held_out_items_has_its_own_key(module: Any, tmp_path: Path) -> None:
    module.items = lambda size, seed: [("1?", "1")]
    table = TaskTable(data="python:made_up_task:items", origin="made by made_up_task")
    for data, message in {
        "nothing": "eval.data = 'nothing' names no source", "python:made_up_task:other": "eval.data: .* 'other'",
        f"jsonl:{tmp_path / 'none'}": "No such file or directory; check eval.data",
    }.items():  # fmt: skip
        with pytest.raises(TrainerError, match=message):
            load_task(table, data=data)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_source_that_raises_names_task_data(module: Any, error: type[BaseException]) -> None:
    def lazy(size: int, seed: int) -> Any:
        yield "1?", "1"
        raise error("first\nsecond")

    module.lazy = lazy
    with pytest.raises(TaskError, match=f"'python:made_up_task:lazy' raised {error.__name__}: first second") as caught:
        load_task(TaskTable(data="python:made_up_task:lazy"))
    assert isinstance(caught.value.__cause__, error)


def test_params_are_arguments_by_name(module: Any) -> None:
    """Each key is one; a function that takes a table named params is told so."""
    module.items = lambda size, seed, params: []
    with pytest.raises(TaskError, match="task.data = .*TypeError.*'digits'.*called with size, seed, digits by name"):
        load_task(TaskTable(data="python:made_up_task:items", params={"digits": 2}))
    with pytest.raises(TaskError, match="task.data = .*multiple values.*'size'"):
        load_task(TaskTable(data="python:made_up_task:items", params={"size": 2}))


def test_a_module_that_raises_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_task_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="task.data: importing 'broken_task_module' raised ZeroDivisionError"):
        load_task(TaskTable(data="python:broken_task_module:items"))


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -1e308, 1.1e6, 10**400, 10**5000, None, "1", [1.0]],
    ids=lambda value: type(value).__name__,  # the largest cannot be written
)
def test_a_reward_that_is_no_number_names_the_item(value: Any) -> None:
    """Nor is one whose square no sum holds: the gradient would be NaN, and nothing say why."""
    task = tiny.task(lambda item, text: value)
    with pytest.raises(RewardError, match="sum/2.*not a finite number within.*began 'xyz'"):
        task.score(task.items[2], "xyz")
    assert tiny.task(lambda item, text: -1e6).score(task.items[2], "xyz") == -1e6


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_reward_that_raises_names_the_item(error: type[BaseException]) -> None:
    def scorer(item: Any, text: str) -> float:
        raise error(0)

    task = tiny.task(scorer)
    with pytest.raises(RewardError, match=f"sum/2.*{error.__name__}"):
        task.score(task.items[2], "xyz")


def test_a_reward_of_the_users_own_is_named_and_its_data_apart(module: Any) -> None:
    module.items = lambda size, seed: [("1?", "1")]
    module.boom = lambda question, answer, response: {}[response]
    table = TaskTable(data="python:made_up_task:items", reward="made_up_task:boom")
    task = load_task(table)
    said = "made_up_task:items/0: task.reward = 'made_up_task:boom' raised KeyError: 'x', for an item of "
    with pytest.raises(RewardError) as raised:
        task.score(task.items[0], "x")
    assert str(raised.value).startswith(f"{said}python:made_up_task:items; correct it;")
    module.boom = lambda question, answer, response: None
    task = load_task(table)
    with pytest.raises(RewardError, match="task.reward = 'made_up_task:boom' gave None, not a finite number"):
        task.score(task.items[0], "x")
    assert load_task(replace(table, reward="")).reward == ""


# -------------------------------------------------------------------------------------- verifiers


def test_no_answer_holds_up_math_verify(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Some of these end in no lifetime, some ask for all memory, and no exception interrupts a power."""
    pytest.importorskip("math_verify")
    monkeypatch.setattr(rewards, "SECONDS", 0.5)
    score, item = math_scorer("boxed"), Item("x/1", "q", "42")
    begin = time.process_time()
    for text in ("9^{9^{9^9}}", "10^{10^{10}}", "99999999!", r"\binom{10000000}{5000000}", r"\sum_{i=1}^{10^8} i^i"):
        assert score(item, rf"\boxed{{{text}}}") == 0.0
        assert score(item, r"\boxed{\frac{84}{2}}") == 1.0  # the next response has a verifier again
    assert time.process_time() - begin < 0.5  # this process waits
    assert [r.getMessage() for r in caplog.records] == [
        "x/1: a response scores 0, for math_verify took more than 0.5 s; further ones are not mentioned"
    ]


def test_an_interrupted_answer_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    score, item = math_scorer("whole"), Item("x", "q", "42")
    assert score(item, "42") == 1.0
    ask = rewards._ask

    def interrupted(process: Any, value: Any) -> Any:
        process.stdin.write(rewards.pickle.dumps(value))
        process.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(rewards, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score(item, "42")
    monkeypatch.setattr(rewards, "_ask", ask)
    assert score(item, "41") == 0.0


@pytest.mark.parametrize(
    ("family", "answer"), [("prime_factorization", "abc"), ("game_of_life", "{}"), ("coin_flip", "1e999")]
)
def test_what_a_family_cannot_read_scores_0(family: str, answer: str, caplog: pytest.LogCaptureFixture) -> None:
    gym = pytest.importorskip("reasoning_gym")
    task = load_task(TaskTable(data=f"reasoning_gym:{family}", size=2, answer="whole"))
    item = task.items[1]
    with pytest.raises((ValueError, LookupError, OverflowError)):
        gym.create_dataset(family, seed=0, size=2).score_answer(answer=answer, entry=dict(item.entry))
    assert [task.score(item, text) for text in (answer, item.answer, answer)] == [0.0, 1.0, 0.0]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert caplog.records[0].getMessage().startswith(f"{family}/1: a response scores 0, for reasoning_gym raised ")


def test_a_verifier_that_does_not_start_is_an_error() -> None:
    verifier = rewards.Verifier("reasoning_gym", family="no_such_family", seed=0, size=1, params={})
    with pytest.raises(TaskError, match="does not start: it raised .*no_such_family"):
        verifier.score(Item("x", "q", "1"), "1", {})


# --------------------------------------------------------------------------------------- held out


def questions(task: Any) -> list[str]:
    return [item.question for item in task.items]


def learned(config: Config) -> Task:
    return training(config, held_out(config))


def test_no_question_is_both_learned_and_held_out() -> None:
    """A family of 200 questions: most of the held-out ones are drawn for training, too."""
    pytest.importorskip("reasoning_gym")
    config = load(DEMO)
    drawn, kept, held = load_task(config.task), learned(config), held_out(config)
    asked = set(questions(held))
    assert len(held.items) == 100 and asked < set(questions(drawn))
    assert questions(kept) == [q for q in questions(drawn) if q not in asked]
    left_out = 1000 - len(kept.items)
    said = f"{left_out} of them ({left_out / 10:.0f}%) ask what held-out items ask, and are left out"
    assert kept.note == f"1000 items; {said}"
    assert questions(learned(config)) == questions(kept)  # as a resumed run draws them
    item = kept.items[0]
    assert kept.score(item, item.answer) == 1.0


@pytest.mark.parametrize(("held", "left"), [("made_up_task:others", 8), ("made_up_task:some", 6), ("", 4)])
def test_held_out_items_of_any_source_are_left_out(module: Any, held: str, left: int) -> None:
    """Without data of its own the evaluation takes the task's, and a function need not mind the seed."""
    module.items = lambda size, seed: [(f"{i}?", "7") for i in range(size)]
    module.some = lambda size, seed: [("2?", "another answer"), ("5?", "7"), ("x?", "7")]
    module.others = lambda size, seed: [("x?", "7")]
    task = {"data": "python:made_up_task:items", "size": 8}
    table = {"task": task, "eval": {"data": held and f"python:{held}", "items": 4}, "rollout": {"groups": 4}}
    config = Config.from_dict(table)
    kept = learned(config)
    assert len(kept.items) == left and not set(questions(kept)) & set(questions(held_out(config)))
    note = f"; {8 - left} of them ({(8 - left) * 25 // 2}%) ask what held-out items ask, and are left out"
    assert kept.note == "8 items" + (note if left < 8 else "") and kept.left_out == (8 - left) / 8
    if left < 8:
        with pytest.raises(TaskError, match=rf"{left} stay, and a step needs rollout.groups = 7.*lower eval.items"):
            learned(Config.from_dict(table | {"rollout": {"groups": 7}}))


@pytest.mark.parametrize(("size", "more"), [(0, ""), (3, "raise task.size, ")])
def test_a_file_that_is_taken_whole_has_no_more_items(size: int, more: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": i}) + "\n" for i in range(4)))
    config = Config.from_dict({"task": {"data": f"jsonl:{path}", "size": size}, "eval": {"items": 4}})
    with pytest.raises(TaskError, match=f"rollout.groups = 8; {more}lower eval.items"):
        learned(config)


@pytest.mark.parametrize("source", ["jsonl", "python"])
def test_rows_without_a_seed_are_split_by_one(module: Any, tmp_path: Path, source: str) -> None:
    """All rows are taken, and of a sorted file the held-out ones are not its beginning."""
    rows = [{"question": f"{i}?", "answer": i} for i in range(1500)]
    module.items = lambda size, seed: rows
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = {"data": f"jsonl:{path}" if source == "jsonl" else "python:made_up_task:items", "reward": "math:hypot"}
    config = Config.from_dict({"task": task})
    kept, held = learned(config), held_out(config)
    assert len(held.items) == 64 and len(kept.items) == 1500 - 64
    assert set(questions(kept)) | set(questions(held)) == {f"{i}?" for i in range(1500)}
    assert kept.note == "1500 items; 64 of them (4%) ask what held-out items ask, and are left out"
    places = [int(item.answer) for item in held.items]
    assert places == sorted(places) and places[0] < 300 and places[-1] > 1200
    assert questions(held_out(config)) == questions(held)
    other = Config.from_dict({"task": task, "eval": {"seed": 1}})
    assert questions(held_out(other)) != questions(held)
    assert set(questions(learned(other))).isdisjoint(questions(held_out(other)))
    cut = load_task(Config.from_dict({"task": {**task, "size": 1000}}).task)
    assert questions(cut) == [f"{i}?" for i in range(1000)] and cut.note == "1000 of 1500 items"


def test_a_run_learns_from_what_is_left_and_says_so(module: Any, tmp_path: Path) -> None:
    module.items = lambda size, seed: [(f"{i}+{i}=", str(2 * i)) for i in range(size)]
    config = tiny.settings(tmp_path, task={"data": "python:made_up_task:items", "size": 8})
    console = Console(file=io.StringIO(), width=200)
    made = Trainer(config, model=tiny.model(layers=1), tokenizer=tiny.tokenizer(), console=console)
    made.run(until=0.0)
    assert "8 items; 4 of them (50%) ask what held-out items ask, and are left out\n" in console.file.getvalue()
    made.evaluate()
    assert questions(made.task) == ["4+4=", "5+5=", "6+6=", "7+7="] and made.stream.count == 4
    assert questions(made._held_out) == ["0+0=", "1+1=", "2+2=", "3+3="]


# ---------------------------------------------------------------------------------------- prompts

TEMPLATE = (
    "{{ 'B' }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}.{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


def test_prompts_by_template_and_plain() -> None:
    tokenizer, item = tiny.tokenizer(), Item("i", "1+1=", "2")
    plain = encode(tokenizer, item, TaskTable(chat=False, prompt="Q: {question}"))
    assert tokenizer.decode(plain) == "Q: 1+1="
    with pytest.raises(ConfigError, match="no chat template"):
        encode(tokenizer, item, TaskTable())
    tokenizer.chat_template = TEMPLATE
    got = tokenizer.decode(encode(tokenizer, item, TaskTable(system="be brief")))
    assert got == "Bsystem:be brief.user:1+1=.A"  # the template's own start token, once


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('System role not supported') if messages[0]['role'] == 'system' }}",
        "{% if messages[0]['role'] == 'system' %}{{ 1 + 'a' }}{% endif %}",
        "{% if messages[0]['role'] == 'system' %}{{ none_such.role }}{% endif %}",
    ],
)
def test_a_template_that_raises_is_named_with_the_remedy(template: str) -> None:
    tokenizer, item = tiny.tokenizer(), Item("i", "1+1=", "2")
    tokenizer.chat_template = TEMPLATE + template
    assert encode(tokenizer, item, TaskTable())
    with pytest.raises(ConfigError, match='chat template raised .*task.system = "" or task.chat = false') as caught:
        encode(tokenizer, item, TaskTable(system="be brief"))
    assert "\n" not in str(caught.value)


def test_a_template_that_is_none_is_named() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for"
    with pytest.raises(ConfigError, match=r"chat template raised TemplateSyntaxError.*; set task.chat = false$"):
        encode(tokenizer, Item("i", "1+1=", "2"), TaskTable())


def test_a_system_prompt_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.system is read with task.chat = true only"):
        Config.from_dict({"task": {"system": "be brief", "chat": False}})


def test_every_end_token_counts_and_zero_is_one() -> None:
    def having(ids: Any) -> SimpleNamespace:
        return SimpleNamespace(eos_token_id=ids)

    assert stop_ids(having(2), having([2, 7]), having(0)) == (0, 2, 7)
    assert stop_ids(having(0), having(None), having(None)) == (0,)
    assert stop_ids(having(None), None, having(None)) == ()


def test_the_stream_visits_every_item_once_an_epoch_and_resumes() -> None:
    stream = Stream(5, seed=1)
    order = [stream.next() for _ in range(15)]
    epochs = [order[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(e) == [0, 1, 2, 3, 4] for e in epochs) and len({tuple(e) for e in epochs}) > 1
    again = Stream(5, seed=1, position=7)
    assert [again.next() for _ in range(8)] == order[7:]
