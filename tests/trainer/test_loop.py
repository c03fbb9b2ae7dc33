"""Whole runs of a tiny policy: exactness, resumption bit for bit, variants, faults."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

import precgraph
from precgraph.audit import audit
from precgraph.recipe import GradientRule
from tests.trainer import tiny
from tests.trainer.test_plot import ASIDE
from trainer import checkpoint, loop, loss, precision
from trainer.cli import verdict
from trainer.errors import (
    AlignmentError,
    CheckpointError,
    ConfigError,
    InconsistentError,
    InputError,
    InterruptedRunError,
    MetricAssertionError,
    RewardError,
    RolloutError,
    TaskError,
    TrainerError,
)
from trainer.loop import Trainer
from trainer.metrics import Record, read_records
from trainer.plot import points, read_runs

_PAIRS: dict[tuple[str, float], tuple[Any, dict[str, Tensor]]] = {}
_MADE: list[Trainer] = []


def trainer(directory: Path, *, task: Any = None, fresh: bool = False, **tables: Any) -> Trainer:
    """A trainer of the tiny policy at its initial weights. Unless ``fresh``, programs that an earlier test compiled are
    used again: a trainer made before stops being one."""
    config = tiny.settings(directory, **tables)
    tools = {"tokenizer": tiny.tokenizer(), "task": task or tiny.task()}
    key = config.precision.arm, config.algorithm.kl
    if fresh or config.precision.allow_mismatch:
        return Trainer(config, model=tiny.model(layers=1), **tools)
    if key not in _PAIRS:
        made = Trainer(config, model=tiny.model(layers=1), **tools)
        _PAIRS[key] = made.pair, weights(made)
    else:
        while _MADE:
            _MADE.pop().optimizer.close()
        pair, initial = _PAIRS[key]
        with torch.no_grad():
            for name, parameter in pair.actor.named_parameters():
                parameter.grad = None
                parameter.copy_(initial[name])
        pair.actor.sync()
        pair.actor.precgraph.store.version = 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "build_pair", lambda *_: pair)
            made = Trainer(config, model=pair.actor, **tools)
    _MADE.append(made)
    return made


def weights(made: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in made.actor.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def lasting(records: Sequence[Record]) -> list[Record]:
    """Records without what depends on the clock or the process."""
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "speed/", "memory/"))} for r in records]


class Wrapped:
    """A rollout that passes everything on, through ``change(call, completions)``."""

    def __init__(self, inner: Any, change: Callable[[int, list[Any]], list[Any]]) -> None:
        self.inner, self.change, self.calls, self.digest = inner, change, 0, inner.digest

    def generate(self, prompts: Any, params: Any) -> list[Any]:
        self.calls += 1
        return self.change(self.calls, list(self.inner.generate(prompts, params)))

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self) -> None:
        self.inner.wake()


def wrap(made: Trainer, change: Callable[[int, list[Any]], list[Any]]) -> None:
    made.rollout = made.collector.rollout = Wrapped(made.rollout, change)


# --------------------------------------------------------------------------------------- exactness


def test_an_exact_run_has_no_mismatch_and_measures_everything(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, algorithm={"kl": 0.01}, metrics={"asserts": ["mismatch/max == 0"], "names": ["trl", "verl"]}
    )
    made.run()
    assert made.pair.exact and made.pair.report.ok
    records = read_records(tmp_path)
    assert [r["step"] for r in records] == [0, 1]
    for step, record in enumerate(records):
        assert record["mismatch/max"] == 0.0 and record["mismatch/tokens_different"] == 0 and record["alarms"] == []
        assert record["mismatch/tokens"] == round(8 * record["response/length"]) and record["mismatch/missing"] == 0
        assert record["graph/digest"] == record["rollout/digest"]
        assert record["weights/version"] == 1 + step and record["weights/of_samples"] == [1 + step]
        assert 0 < record["update/codes_changed"] < 1 and record["update/grad_norm"] > 0
        assert record["rollout_corr/k3_kl"] == record["sampling/sampling_logp_difference/max"] == 0.0
        for key in ("rollout", "reference", "update", "sync", "step"):
            assert record[f"time/{key}"] > 0
        assert 0 < record["entropy/mean"] < 5 and record["clip/share"] == 0.0
    assert records[0]["kl/reference"] == 0.0 < records[1]["kl/reference"]
    assert (tmp_path / "config.toml").exists() and checkpoint.steps(tmp_path) == [0, 1, 2]


def test_keys_that_compare_leaves_aside_change_no_number(tmp_path: Path) -> None:
    """All of them at once, but for the seed, which is meant to, what messages alone read, and what is not installed. A
    metric by another trainer's name is one more."""
    tables = {name: dict(table) for name, table in ASIDE.items() if name != "task"}
    del tables["run"]["seed"], tables["metrics"]["wandb"]
    records = []
    for place, changes in ((tmp_path / "a", {}), (tmp_path / "b", tables)):
        trainer(place, **{**changes, "run": {"steps": 3, **changes.get("run", {})}}).run()
        records.append([{k: v for k, v in r.items() if k != "samples"} for r in lasting(read_records(place))])
    assert len(records[0]) == 3 and records[0] == [{k: r[k] for k in records[0][0]} for r in records[1]]


def test_truncated_sampling_is_compared_on_the_full_vocabulary(tmp_path: Path) -> None:
    """top-p and top-k renormalise what is drawn from; ratios must not be biased by the kept mass."""
    made = trainer(
        tmp_path, rollout={"top_p": 0.9, "top_k": 40, "temperature": 0.7}, algorithm={"correction": "token_truncated"}
    )
    record = made.train_step()
    assert record["mismatch/max"] == 0.0 and record["mismatch/ratio_mean"] == 1.0
    assert record["sampling/kept_mass"] < 0.95 and record["correction/weight_mean"] == 1.0


@pytest.mark.parametrize(("arm", "codes"), [("exact", {"AU100"}), ("mixed", {"AU110"})])
def test_a_log_of_tokens_is_one_that_the_audit_reads(tmp_path: Path, arm: str, codes: set[str]) -> None:
    """And it says the same of the step as the step's own record."""
    made = trainer(tmp_path, precision={"arm": arm}, rollout={"top_p": 0.9}, metrics={"log_tokens": True})
    record = made.train_step()
    found = audit(tmp_path / "rollout" / "000000.jsonl")
    assert {v.code[:5] for v in found.verdicts} - {"AU109"} == codes
    m = found.measures
    assert (m["sequences"], m["tokens"], m["different"], m["missing"]) == (
        8, record["mismatch/tokens"], record["mismatch/tokens_different"], 0,
    )  # fmt: skip
    assert m["max"] == record["mismatch/max"] and m["mean"] == pytest.approx(record["mismatch/mean"])
    row = json.loads((tmp_path / "rollout" / "000000.jsonl").read_text().splitlines()[-1])
    assert (row["id"], row["version"], row["trainer_version"]) == ("0.1.3", 1, 1)
    assert (row["temperature"], row["top_p"], row["top_k"]) == (1.0, 0.9, 0)
    assert min(row["entropy"]) > 0 and min(row["kept_mass"]) < 1


def test_first_update_has_ratio_exactly_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios: list[Tensor] = []
    real = loss.policy_loss
    monkeypatch.setattr(loss, "policy_loss", lambda *a: [ratios.append((t := real(*a)).ratio), t][1])
    trainer(tmp_path).train_step()
    assert ratios and all(torch.equal(r, torch.ones_like(r)) for r in ratios)


def test_scoring_does_not_depend_on_padding() -> None:
    actor = precgraph.compile(tiny.model(layers=1), "train")
    row = torch.tensor([[5, 9, 30, 0, 0, 17]])
    padded, mask = torch.zeros(1, 11, dtype=torch.int64), torch.zeros(1, 11, dtype=torch.int64)
    padded[0, 5:], mask[0, 5:] = row[0], 1
    with torch.no_grad():
        assert torch.equal(precgraph.token_logprobs(actor, padded, mask)[:, 5:], precgraph.token_logprobs(actor, row))


@pytest.mark.parametrize("arm", ["mixed", "unified", "bf16"])
def test_the_other_arms_run_and_say_what_they_are(tmp_path: Path, arm: str) -> None:
    made = trainer(
        tmp_path, precision={"arm": arm}, algorithm={"correction": "sequence_masked"}, metrics={"masked_alarm": 1.0}
    )
    assert not made.pair.exact
    record = made.train_step()
    assert record["mismatch/tokens"] > 0
    assert (record["graph/digest"] == record["rollout/digest"]) == (arm == "bf16")
    said = verdict(made.pair, made.config)
    assert f"allowed by arm {arm}: log-probabilities may differ" in said
    assert said.startswith(
        "one program, but kernels whose bits depend on the batch" if arm == "bf16" else "inconsistent:"
    )
    if arm != "bf16":
        assert not made.pair.report.ok and 0 < record["mismatch/max"] < 0.5 and record["mismatch/first_position"] == 0
        assert record["correction/weight_mean"] != 1.0


def test_an_inconsistent_pair_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = precision.stock_rules(precgraph.Recipe.jet_rl())
    monkeypatch.setattr(precision, "_rollout_program", lambda *_: (stock, "auto"))
    with pytest.raises(InconsistentError, match="PG103"):
        trainer(tmp_path, fresh=True)
    assert not trainer(tmp_path, precision={"allow_mismatch": True}).pair.exact


# ------------------------------------------------------------------------------------------ resume


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, masters: str) -> None:
    tables = {"optimizer": {"lr": 1e-3, "masters": masters, "warmup": 4}, "algorithm": {"kl": 0.01}}
    whole = trainer(tmp_path / "whole", fresh=True, run={"steps": 3}, **tables)
    whole.run()
    first = trainer(tmp_path / "parts", fresh=True, run={"steps": 1}, **tables)
    first.run()
    torch.manual_seed(999)  # another process would have other random numbers
    second = trainer(tmp_path / "parts", fresh=True, run={"steps": 3}, **tables)
    second.restore(tmp_path / "parts")
    second.run()
    assert equal(weights(whole), weights(second)) and not equal(weights(whole), weights(first))
    a, b = (checkpoint.load(tmp_path / name) for name in ("whole", "parts"))
    assert a.step == 3 and equal(a.optimizer, b.optimizer) and equal(a.random, b.random) and a.position == b.position
    assert lasting(read_records(tmp_path / "whole")) == lasting(read_records(tmp_path / "parts"))


def test_a_part_has_room_for_its_longest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 seconds by the clock, 25 to spend: two fit, a third would end at 30."""
    made, clock = trainer(tmp_path, run={"steps": 5, "save_every": 0}), [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    wrap(made, lambda call, c: [clock.__setitem__(0, clock[0] + 10), c][1])
    made.run(until=125.0)
    assert made.step == 2 and checkpoint.steps(tmp_path) == [0, 2]


def test_a_directory_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    trainer(tmp_path, run={"steps": 1}).run()
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer(tmp_path).run()
    with pytest.raises(ConfigError, match="another model"):
        Trainer(
            tiny.settings(tmp_path), model=tiny.model(layers=2), tokenizer=tiny.tokenizer(), task=tiny.task()
        ).restore(tmp_path)


def test_a_fork_has_its_checkpoint_before_its_first_step(tmp_path: Path) -> None:
    """A kill in that step would leave nothing else to go on from."""
    trainer(tmp_path / "run").run()
    fork = trainer(tmp_path / "fork", run={"save_every": 0})
    fork.restore(tmp_path / "run", 1)
    seen: list[list[int]] = []
    wrap(fork, lambda call, c: [seen.append(checkpoint.steps(tmp_path / "fork")), c][1])
    fork.run()
    assert seen == [[1]]


def test_export_is_a_hugging_face_directory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = trainer(tmp_path / "run")
    made.train_step()
    made.export(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert equal(weights(made), {n: p.detach() for n, p in again.named_parameters()})
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == tiny.EOS


# ---------------------------------------------------------------------------------------- variants


def test_several_updates_a_rollout(tmp_path: Path) -> None:
    """Old log-probabilities from the rollout or scored anew: the same bits, so the same weights."""
    tables = {"algorithm": {"epochs": 2, "batches": 2}}
    scored = trainer(tmp_path / "a", **tables)
    record = scored.train_step()
    assert record["update/steps"] == 4 and record["weights/version"] == 1 and record["mismatch/max"] == 0.0
    assert record["mismatch/missing"] == 0 and scored.actor.precgraph.store.version == 5
    wanted = weights(scored)
    taken = trainer(tmp_path / "b", algorithm={**tables["algorithm"], "old_logprobs": "rollout"})
    taken.train_step()
    assert equal(wanted, weights(taken))


def test_old_logprobs_of_the_rollout_are_compared_as_far_as_the_update_scores(tmp_path: Path) -> None:
    """With one optimiser step an epoch, everything, groups of equal rewards too; else the first step's samples."""
    good, items = tiny.task(), list[str]()
    half = tiny.task(lambda i, text: 1.0 if (items.append(i.id) or i.id) == items[0] else good.scorer(i, text))
    whole = trainer(tmp_path / "a", task=half, algorithm={"epochs": 2, "old_logprobs": "rollout"}).train_step()
    assert whole["mismatch/missing"] == whole["mismatch/unscored"] == 0 < whole["mismatch/tokens"]
    assert whole["mismatch/max"] == 0.0 and whole["alarms"] == [] and whole["reward/zero_spread"] == 0.5
    part = trainer(tmp_path / "b", algorithm={"batches": 2, "old_logprobs": "rollout"}).train_step()
    assert part["mismatch/unscored"] == 4 and part["mismatch/missing"] > 0 < part["mismatch/tokens"]
    assert part["mismatch/max"] == 0.0 and "4 samples were not scored" in part["alarms"][0]
    flat = tiny.task(lambda item, text: 0.0)
    none = trainer(tmp_path / "c", task=flat, algorithm={"batches": 2, "old_logprobs": "rollout"}).train_step()
    assert none["mismatch/tokens"] == 0 and none["mismatch/unscored"] == 8 and none["alarms"]


def test_the_split_into_micro_batches_changes_only_roundings(tmp_path: Path) -> None:
    """The same cells in one micro-batch or in four: per-token values bit for bit, sums of gradients up to bf16
    rounding."""
    sums, values = [], []
    for size in (4096, 128):
        made = trainer(
            tmp_path, train={"micro_batch_tokens": size, "cell_tokens": 128}, rollout={"groups": 6, "max_tokens": 24}
        )
        step: list[dict[str, Tensor]] = []
        made.optimizer.step = lambda made=made, step=step: (
            step.append(dict(made.optimizer.gradients())) or {"grad_norm": 1.0, "lr": 0.0}
        )  # type: ignore[method-assign]
        collected = made.collector.collect(0, 1)
        result = made.updater.prepare(collected.samples)
        made.updater.update(collected.samples, *made._credit(collected), result)
        sums += step
        values.append(result.tokens)
    assert torch.equal(values[0].trainer, values[1].trainer) and torch.equal(values[0].entropy, values[1].entropy)
    for name, whole in sums[0].items():
        assert float((whole - sums[1][name]).norm() / whole.norm()) < 1e-2, name  # other groups of tokens: 2 to 4 %


def test_dynamic_sampling_replaces_groups_of_equal_rewards(tmp_path: Path) -> None:
    flat = {"sum/0", "sum/1", "sum/2", "sum/3"}
    calls: list[int] = []

    def score(item: Any, text: str) -> float:
        calls.append(1)
        return 0.0 if item.id in flat else float(len(calls) % 2)

    made = trainer(tmp_path, task=tiny.task(score), rollout={"groups": 3, "dynamic": True, "max_rounds": 8})
    record = made.train_step()
    dropped, all_groups = record["data/dropped_groups"], record["data/position"]
    assert dropped > 0 and record["data/rounds"] > 1 and all_groups == 3 + dropped
    # What was replaced is measured all the same: half of the rewards of three groups are 1, and all others 0.
    assert record["reward/zero_spread"] == pytest.approx(dropped / all_groups)
    assert record["reward/mean"] == record["reward/pass_rate"] == pytest.approx(1.5 / all_groups)


def test_a_policy_without_a_fault_is_not_said_to_have_failed(tmp_path: Path) -> None:
    """Dynamic sampling leaves it no group: rewards are those that were given, and no mismatch or entropy is drawn."""
    made = trainer(tmp_path, task=tiny.task(lambda item, text: 1.0), rollout={"dynamic": True, "max_rounds": 2})
    made.run()
    (run,) = read_runs([tmp_path])
    for record in run.records:
        assert record["reward/mean"] == record["reward/pass_rate"] == record["reward/zero_spread"] == 1.0
        assert 0 < record["response/length"] <= record["response/length_max"] <= 12 and record["alarms"] == []
        assert record["mismatch/tokens"] == 0 and record["data/dropped_groups"] == 4
        assert record["speed/rollout"] * record["time/rollout"] == pytest.approx(16 * record["response/length"])
    assert [points(run, key) for key in ("entropy/mean", "mismatch/max", "mismatch/mean")] == [[], [], []]


def test_when_nothing_teaches_nothing_changes(tmp_path: Path) -> None:
    """Equal rewards; only truncated responses; no group left: no optimiser step, and every metric is finite."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        (lambda item, text: 1.0, {}),
        (None, {"algorithm": {"overlong": "mask"}, "rollout": {"max_tokens": 1}}),
        (lambda item, text: 0.5, {"rollout": {"dynamic": True, "max_rounds": 2}}),
        (lambda item, text: 0.5, {"algorithm": {"kl": 0.1, "zero_spread": "drop"}}),
    ]
    for number, (scorer, tables) in enumerate(cases):
        made = trainer(tmp_path / str(number), task=tiny.task(scorer), **tables)
        if number == 1:
            made.collector.stops = ()
        before = weights(made)
        record = made.train_step()
        assert record["update/skipped"] == 1 and record["update/steps"] == 0 and equal(before, weights(made))
        numbers = [v for v in record.values() if isinstance(v, float)]
        assert all(math.isfinite(v) for v in numbers), record


def test_kl_still_pulls_where_rewards_are_equal(tmp_path: Path) -> None:
    """The default: a group without spread keeps its KL term, which is 0 only while the policy is the reference."""
    made = trainer(tmp_path, task=tiny.task(lambda item, text: 1.0), algorithm={"kl": 0.1})
    with torch.no_grad():
        for p in made.actor.parameters():
            p.mul_(1.05)
    made.actor.sync()
    record = made.train_step()
    assert record["update/steps"] == 1 and record["update/grad_norm"] > 0 and record["kl/reference"] > 0


def test_truncation_is_judged_by_the_engine_and_not_by_one_id(tmp_path: Path) -> None:
    """With half the vocabulary ending a response, few run to the limit."""
    made = trainer(tmp_path)
    made.collector.stops = tuple(range(40))
    record = made.train_step()
    assert record["response/truncated"] < 0.3 and record["response/length"] < 6


# ------------------------------------------------------------------------------------------ faults


def resumed(tmp_path: Path, task: Any = None, **tables: Any) -> Trainer:
    made = trainer(tmp_path, task=task, **tables)
    made.restore(tmp_path)
    made.run()
    return made


@pytest.mark.parametrize("fault", ["reward", "signal"])
def test_what_stops_an_evaluation_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The step is recorded and saved before; the run that is resumed begins with the evaluation, and is the one that
    was never stopped."""
    tables: dict[str, Any] = {"run": {"steps": 3, "save_every": 0, "eval_every": 2}}
    monkeypatch.setattr(loop, "held_out", lambda config: tiny.task(lambda i, text: float(fault_now())))
    stopping = True

    def fault_now() -> float:
        if stopping and fault == "reward":
            raise ValueError("no verdict")
        if stopping:
            os.kill(os.getpid(), signal.SIGINT)
        return random.random()

    made = trainer(tmp_path / "parts", **tables)
    with pytest.raises(RewardError if fault == "reward" else InterruptedRunError):
        made.run()
    (first, second) = read_records(tmp_path / "parts")
    assert checkpoint.steps(tmp_path / "parts") == [0, 2] and "eval/reward" not in first | second
    stopping = False
    again = weights(resumed(tmp_path / "parts", **tables))
    whole = trainer(tmp_path / "whole", **tables)
    whole.run()
    records = read_records(tmp_path / "parts")
    assert lasting(records) == lasting(read_records(tmp_path / "whole")) and equal(again, weights(whole))
    assert [("eval/reward" in r, r["step"]) for r in records] == [(False, 0), (True, 1), (False, 2)]


def test_what_is_left_out_of_training_is_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source, too, that draws from Python's own generator: its items are drawn once for both."""
    module = types.ModuleType("drawn_task")
    module.items = lambda size, seed: [(f"{random.randrange(40)}=", "") for _ in range(size)]  # type: ignore[attr-defined]
    module.reward = lambda question, answer, text: 0.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "drawn_task", module)
    task = {"data": "python:drawn_task:items", "reward": "drawn_task:reward", "size": 60, "chat": False}
    config = tiny.settings(tmp_path, task=task, eval={"items": 6})
    made = Trainer(config, model=tiny.model(), tokenizer=tiny.tokenizer())
    asked: list[str] = []
    monkeypatch.setattr("trainer.record.encode", lambda tokenizer, item, table: asked.append(item.question) or [2])
    made.evaluate()
    assert len(asked) == 6 and not set(asked) & {item.question for item in made.task.items}


def test_held_out_prompts_beyond_the_context_are_left_out_and_counted(tmp_path: Path) -> None:
    made, task = trainer(tmp_path), tiny.task(count=4)
    made._held_out = replace(task, items=[replace(task.items[0], question="9" * 300), *task.items[1:]])
    assert made.evaluate()["eval/too_long"] == 1
    made._held_out = replace(task, items=made._held_out.items[:1])
    with pytest.raises(TaskError, match=r"no held-out prompt leaves room.* = 12 .*context of 256 tokens"):
        made.evaluate()


def test_an_assertion_breaks_on_what_an_evaluation_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "held_out", lambda config: tiny.task(lambda i, text: 0.0))
    tables: dict[str, Any] = {"run": {"eval_every": 1}, "metrics": {"asserts": ["eval/reward > 0"]}}
    with pytest.raises(MetricAssertionError, match="step 0: eval/reward is 0"):
        trainer(tmp_path, **tables).run()
    assert read_records(tmp_path)[0]["eval/reward"] == 0.0 and checkpoint.steps(tmp_path)[-1] == 1


def test_an_assertion_that_no_step_could_break_fails_at_the_end(tmp_path: Path) -> None:
    """No response of this run is longer than 8 tokens, and might have been."""
    tables: dict[str, Any] = {"metrics": {"asserts": ["mismatch/position/8-16 == 0"]}, "rollout": {"max_tokens": 9}}
    made = trainer(tmp_path, **tables)
    wrap(made, lambda call, c: [short(x, 8) for x in c])
    with pytest.raises(MetricAssertionError, match="no step of the run has measured mismatch/position/8-16"):
        made.run()
    assert checkpoint.steps(tmp_path)[-1] == len(read_records(tmp_path)) == 2


def short(completion: Any, limit: int) -> Any:
    kept = {k: getattr(completion, k)[:limit] for k in ("token_ids", "logprobs", "kept_mass")}
    return replace(completion, **kept)


def test_rewards_that_draw_are_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    """From Python's generator and numpy's, which a run seeds as it does torch's."""
    task = tiny.task(lambda item, text: random.gauss(0, 1) + np.random.standard_normal())
    whole = trainer(tmp_path / "whole", task=task, run={"steps": 3})
    whole.run()
    trainer(tmp_path / "parts", task=task, run={"steps": 1}).run()
    random.seed(99)
    np.random.seed(99)
    made = trainer(tmp_path / "parts", task=task, run={"steps": 3})
    made.restore(tmp_path / "parts")
    made.run()
    records = read_records(tmp_path / "parts")
    assert lasting(records) == lasting(read_records(tmp_path / "whole"))
    assert len({r["reward/mean"] for r in records}) == 3
    other = trainer(tmp_path / "other", task=task, run={"steps": 1, "seed": 4})
    other.run()
    assert read_records(tmp_path / "other")[0]["reward/mean"] != records[0]["reward/mean"]


def test_a_run_directory_that_is_removed_stops_the_run(tmp_path: Path) -> None:
    """What would be written there from then on is no run: it lacks the configuration."""
    good, directory = tiny.task(), tmp_path / "run"

    def score(item: Any, text: str) -> float:
        shutil.rmtree(directory, ignore_errors=True)
        return good.scorer(item, text)

    with pytest.raises(TrainerError, match=r"run/metrics\.jsonl: was removed during the run; start the run again"):
        trainer(directory, task=tiny.task(score)).run()
    assert not directory.exists()


def test_a_reward_may_turn_gradients_off(tmp_path: Path) -> None:
    """For the whole process, as one with a model of its own may do when it is first called."""
    good = tiny.task()

    def score(item: Any, text: str) -> float:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return good.scorer(item, text)

    try:
        made = trainer(tmp_path / "off", task=tiny.task(score))
        made.run()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    found = weights(made)
    plain = trainer(tmp_path / "on", task=good)
    plain.run()
    assert equal(found, weights(plain))
    assert lasting(read_records(tmp_path / "off")) == lasting(read_records(tmp_path / "on"))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (lambda: 1 / 0, RewardError, "ZeroDivisionError"),
        (lambda: float("nan"), RewardError, "nan, not a finite number"),
        (None, RolloutError, "engine died: RuntimeError: out of blocks"),
    ],
)
def test_a_fault_before_the_update_keeps_the_state(tmp_path: Path, fault: Any, error: Any, message: str) -> None:
    """It strikes in the second step; the run that is resumed afterwards is the one that never met it."""
    good = tiny.task()
    seen = {"count": 0}

    def score(item: Any, text: str) -> float:
        seen["count"] += 1
        return fault() if fault and seen["count"] > 10 else good.scorer(item, text)

    made = trainer(tmp_path / "faulty", task=tiny.task(score), run={"save_every": 0})
    if fault is None:

        def die(call: int, completions: list[Any]) -> list[Any]:
            if call == 2:
                raise RuntimeError("out of blocks")
            return completions

        wrap(made, die)
    with pytest.raises(error, match=message):
        made.run()
    assert checkpoint.steps(tmp_path / "faulty") == [0, 1]
    again = weights(resumed(tmp_path / "faulty"))
    whole = trainer(tmp_path / "whole")
    whole.run()
    assert equal(again, weights(whole))
    assert lasting(read_records(tmp_path / "faulty")) == lasting(read_records(tmp_path / "whole"))


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP ends processes, as it does unless the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize(
    ("where", "number"),
    [(w, n) for w in ("rollout", "update") for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
)
def test_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: signal.Signals) -> None:
    """In a rollout it stops at once and the step is done again; in an update it waits until that is whole."""
    made = trainer(tmp_path, run={"steps": 3, "save_every": 0})
    if where == "rollout":
        wrap(made, lambda call, c: [call == 2 and os.kill(os.getpid(), number), c][1])
    else:
        real = made.optimizer.step
        monkeypatch.setattr(
            made.optimizer, "step", lambda: [made.step == 1 and os.kill(os.getpid(), number), real()][1]
        )
    before = signal.getsignal(number)
    with pytest.raises(InterruptedRunError, match="go on with: precgraph-train resume"):
        made.run()
    assert signal.getsignal(number) is before
    assert checkpoint.steps(tmp_path)[-1] == len(read_records(tmp_path)) == (1 if where == "rollout" else 2)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("where", ["rollout", "update"])
def test_a_terminal_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Whatever is written to it is then an error of its own; the state is saved all the same."""
    master, slave = os.openpty()
    made = trainer(tmp_path, run={"steps": 3, "save_every": 0})
    made.console = Console(file=os.fdopen(slave, "w", buffering=1, closefd=False), force_terminal=True)
    real_save = checkpoint.save_file

    def hang_up() -> None:
        os.close(master)
        os.kill(os.getpid(), signal.SIGHUP)

    def save_file(*args: Any) -> None:
        if made._interrupted:
            os.kill(os.getpid(), signal.SIGHUP)  # the shell's, and then the kernel's
        real_save(*args)

    monkeypatch.setattr(checkpoint, "save_file", save_file)

    if where == "rollout":
        wrap(made, lambda call, c: [call == 2 and hang_up(), c][1])
    else:
        real = made.optimizer.step
        monkeypatch.setattr(made.optimizer, "step", lambda: [made.step == 1 and hang_up(), real()][1])
    with pytest.raises(InterruptedRunError):
        made.run()
    with pytest.raises(OSError, match="Input/output error"):
        os.write(slave, b"x")
    os.close(slave)
    assert checkpoint.steps(tmp_path)[-1] == len(read_records(tmp_path)) == (1 if where == "rollout" else 2)


def test_a_signal_waits_for_no_lock_of_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refreshing thread may hold the one of two locks, and the interrupted print the other."""
    made = trainer(tmp_path, run={"steps": 3, "save_every": 0})
    made.console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    real, free = made.optimizer.step, threading.Event()

    def step() -> Any:
        if made.step == 1:
            holds = threading.Event()

            def refresh() -> None:
                with made.console._lock:
                    holds.set()
                    free.wait(20)

            other = threading.Thread(target=refresh)
            other.start()
            holds.wait()
            begin = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
            assert time.monotonic() - begin < 10
            free.set()
            other.join()
        return real()

    monkeypatch.setattr(made.optimizer, "step", step)
    with pytest.raises(InterruptedRunError):
        made.run()
    assert checkpoint.steps(tmp_path)[-1] == 2
    shown = made.console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r" 2/3 \d:\d\d:\d\d +\S+ +stopping once the update", shown), shown  # beside the whole count


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_half_an_update_is_never_saved(tmp_path: Path, masters: str, fault: type[BaseException]) -> None:
    """A second Ctrl-C, or a card without memory, when some of the weights have moved: the step is made again."""
    made = trainer(tmp_path / "parts", run={"steps": 3, "save_every": 0}, optimizer={"masters": masters})
    made.console = Console(file=io.StringIO(), width=200)
    real = made.optimizer.optimizer.step

    def step() -> None:
        real()
        if made.step == 1:
            raise fault("in the middle")

    made.optimizer.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(fault):
        made.run()
    assert "is not saved; go on from the last checkpoint" in made.console.file.getvalue()  # type: ignore[attr-defined]
    assert checkpoint.steps(tmp_path / "parts") == [0]
    again = weights(resumed(tmp_path / "parts", run={"steps": 3}, optimizer={"masters": masters}))
    whole = trainer(tmp_path / "whole", run={"steps": 3}, optimizer={"masters": masters})
    whole.run()
    assert equal(again, weights(whole))


def test_under_nohup_a_hangup_stops_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        made = trainer(tmp_path)
        wrap(made, lambda call, c: [os.kill(os.getpid(), signal.SIGHUP), c][1])
        made.run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.steps(tmp_path)[-1] == 2


def test_a_full_disk_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path)
    real, calls = checkpoint.save_file, {"count": 0}

    def full(tensors: Any, path: Path) -> None:
        calls["count"] += 1
        if calls["count"] > 3:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device.*step 0 is untouched"):
        made.run()
    monkeypatch.undo()
    after = weights(resumed(tmp_path))
    whole = trainer(tmp_path / "whole")
    whole.run()
    assert equal(after, weights(whole))


def test_an_export_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after the weights; then an export, and one in its place."""
    made = trainer(tmp_path / "run")

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(InputError, match="out: cannot be written: .*No space left"):
        patch.setattr(made.tokenizer, "save_pretrained", full)
        made.export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    made.export(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert equal(dict(again.named_parameters()), weights(made))
    with pytest.raises(InputError, match="exists already"):
        made.export(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_prompts_beyond_the_context_are_skipped_and_counted(tmp_path: Path) -> None:
    task = tiny.task()
    long = [replace(i, question="9" * 300) if n % 2 else i for n, i in enumerate(task.items)]
    record = trainer(tmp_path, task=replace(task, items=long), rollout={"groups": 4}).train_step()
    assert record["data/too_long"] > 0 and record["data/position"] == 4 + record["data/too_long"]
    with pytest.raises(TaskError, match="exceed the model's context of 256 tokens.*shorten the prompts"):
        trainer(tmp_path, task=replace(task, items=long[1::2])).train_step()


def test_a_broken_assertion_stops_the_run_and_saves(tmp_path: Path) -> None:
    made = trainer(tmp_path, metrics={"asserts": ["response/length < 1"]}, run={"save_every": 0})
    with pytest.raises(MetricAssertionError, match="step 0: response/length"):
        made.run()
    assert checkpoint.steps(tmp_path) == [0, 1]


def test_stale_or_shuffled_completions_are_noticed(tmp_path: Path) -> None:
    made = trainer(tmp_path, run={"save_every": 0})
    inner = made.rollout
    wrap(made, lambda call, c: [replace(x, weights_version=0) for x in c])
    with pytest.raises(AlignmentError, match="weights version 0, the trainer has 1"):
        made.train_step()
    made.rollout = made.collector.rollout = inner
    wrap(made, lambda call, c: c[-1:] + c[:-1])
    with pytest.raises(AlignmentError, match="another prompt"):
        made.train_step()
    made.rollout.digest = "of another program"
    with pytest.raises(InconsistentError, match="of another prog"):
        made.train_step()
    # Log-probabilities that belong to another response of the same prompt: lengths fit, ids fit, the values do not.
    made.rollout = made.collector.rollout = inner
    made.collector.stops = ()
    wrap(made, lambda call, c: [replace(x, logprobs=c[i - 1].logprobs) for i, x in enumerate(c)])
    (alarm,) = [a for a in made.train_step()["alarms"] if "programs of one digest" in a]
    assert "first at position 0" in alarm


def test_a_missing_log_probability_is_counted(tmp_path: Path) -> None:
    made = trainer(tmp_path, algorithm={"correction": "token_truncated"})
    wrap(made, lambda call, c: [replace(x, logprobs=[None, *x.logprobs[1:]]) for x in c])
    record = made.train_step()
    assert record["mismatch/missing"] == 8 and record["mismatch/max"] == 0.0 and record["correction/weight_mean"] == 1.0


def test_evaluation_leaves_the_run_alone(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made._held_out = made.task
    before = (checkpoint.random_state(), made.stream.position)
    got = made.evaluate()
    assert set(got) == {"eval/pass_rate", "eval/reward", "eval/length", "eval/too_long"} and got["eval/too_long"] == 0
    assert 0 < got["eval/length"] <= 12
    assert equal(before[0], checkpoint.random_state()) and made.stream.position == before[1]
    assert made.evaluate() == got


def test_main_gradients_in_fp32_are_trained_on(tmp_path: Path) -> None:
    """A recipe that keeps WGrad's fp32 sums: nothing differs from the rollout, and every linear's weight moves."""
    recipe = tmp_path / "recipe.toml"
    replace(precgraph.Recipe.jet_rl(), gradient=GradientRule(master="float32")).save(recipe)
    made = trainer(tmp_path / "run", fresh=True, precision={"recipe": str(recipe)})
    before = weights(made)
    made.run()
    moved = [n for n, w in weights(made).items() if not torch.equal(w, before[n])]
    assert {n for n in before if "_proj" in n} <= set(moved)
    assert all(getattr(p, "main_grad", None) is None for p in made.actor.parameters())
    assert all(r["mismatch/max"] == 0.0 for r in read_records(tmp_path / "run"))
