"""Metrics by hand, assertions, alarms, and the record file."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer import tiny
from trainer.alarms import Alarms, Trend
from trainer.config import MetricsTable
from trainer.errors import ConfigError, MetricAssertionError, TrainerError
from trainer.metrics import (
    KNOWN,
    Assertion,
    Recorder,
    bucket_names,
    foreign,
    mean,
    mismatch,
    read_records,
    require_measured,
    require_seen,
)

NAN = math.nan


def measured(rollout: list[float], trainer: list[float], **more: Any) -> dict[str, Any]:
    n = len(rollout)
    place = more.get("place", list(range(n)))
    sequence = more.get("sequence", [0] * n)
    entropy = more.get("entropy", [1.0] * n)
    tensors: list[Tensor] = [torch.tensor(v, dtype=torch.float64) for v in (rollout, trainer, entropy)]
    return mismatch(
        *tensors, torch.tensor(place, dtype=torch.int64), torch.tensor(sequence, dtype=torch.int64), ["a", "b"], 1e-2
    )


def test_mismatch_by_hand() -> None:
    """Δ = 0, −0.1 and 0.2."""
    got = measured([-1.0, -2.0, -3.0], [-1.0, -2.1, -2.8], sequence=[0, 0, 1])
    assert got["mismatch/mean"] == pytest.approx(0.1) and got["mismatch/max"] == pytest.approx(0.2)
    k3 = [0, math.exp(-0.1) - 1 + 0.1, math.exp(0.2) - 1 - 0.2]
    assert got["mismatch/k3"] == pytest.approx(sum(k3) / 3)
    assert got["mismatch/kl"] == pytest.approx(-0.1 / 3)
    assert got["mismatch/ratio_mean"] == pytest.approx((1 + math.exp(-0.1) + math.exp(0.2)) / 3)
    assert got["mismatch/above_threshold"] == pytest.approx(2 / 3)
    assert got["mismatch/tokens_different"] == 2 and got["mismatch/first_position"] == 1
    assert got["mismatch/worst_sequence"] == "b" and got["mismatch/missing"] == 0
    difference = [0, math.exp(-2) - math.exp(-2.1), math.exp(-2.8) - math.exp(-3)]
    assert got["mismatch/prob_diff_mean"] == pytest.approx(sum(difference) / 3)
    assert got["mismatch/prob_diff_max"] == pytest.approx(max(difference))
    assert got["mismatch/ratio_min"] == pytest.approx(math.exp(-0.1))
    assert got["mismatch/ratio_max"] == pytest.approx(math.exp(0.2))
    pair = np.exp([[-1.0, -2.0, -3.0], [-1.0, -2.1, -2.8]])
    assert got["mismatch/prob_correlation"] == pytest.approx(np.corrcoef(pair)[0, 1]) != 1.0


@pytest.mark.parametrize(
    ("rollout", "trainer", "right"),
    [([], [], 1.0), ([-1.0], [-1.0], 1.0), ([-1.0], [-2.0], 0.0), ([-1.0, -1.0], [-1.0, -2.0], 0.0),
     ([-0.1, -7.3, -0.3], [-0.1, -7.3, -0.3], 1.0), ([0.0, -math.inf], [-math.inf, 0.0], -1.0)],
)  # fmt: skip
def test_correlation_without_spread(rollout: list[float], trainer: list[float], right: float) -> None:
    assert measured(rollout, trainer)["mismatch/prob_correlation"] == pytest.approx(right, abs=1e-15)


def test_multiplicative_error_by_hand() -> None:
    """Masked tokens are not there at all: (1 + e^0.1) / 2 = 1.0526, above the limit of 1.05."""
    got = measured([-1.0, -2.1], [-1.0, -2.0])
    assert got["mismatch/mult_prob_error"] == pytest.approx((1 + math.exp(0.1)) / 2)


def test_equal_is_exactly_zero() -> None:
    got = measured([-0.1, -7.0], [-0.1, -7.0])
    assert got["mismatch/max"] == 0.0 and got["mismatch/k3"] == 0.0 and got["mismatch/ratio_mean"] == 1.0
    assert got["mismatch/first_position"] is None and got["mismatch/worst_sequence"] is None


def test_missing_values_are_counted_and_left_out() -> None:
    got = measured([-0.1, NAN, -0.2], [-0.1, -5.0, -0.2])
    assert got["mismatch/missing"] == 1 and got["mismatch/tokens"] == 2 and got["mismatch/max"] == 0.0


def test_infinite_differences() -> None:
    """Δ = +inf is bounded where its exponential is, at 1e30; -inf on both sides is no difference of which one knows."""
    got = measured([-math.inf, -math.inf, -1.0], [-1.0, -math.inf, -1.0])
    assert got["mismatch/missing"] == 1 and got["mismatch/tokens"] == 2 and got["mismatch/tokens_different"] == 1
    assert got["mismatch/max"] == math.inf and got["mismatch/k3"] == pytest.approx(1e30 / 2)
    assert got["mismatch/unscored"] == 0
    got = measured([-1.0], [-math.inf])
    assert got["mismatch/k3"] == got["mismatch/max"] == math.inf and got["mismatch/ratio_mean"] == 0.0


def test_samples_that_were_not_scored_are_counted() -> None:
    got = measured([-1.0, -2.0, NAN, -3.0], [-1.0, NAN, -1.0, NAN], sequence=[0, 1, 0, 1])
    assert got["mismatch/unscored"] == 1 and got["mismatch/missing"] == 3
    (alarm,) = Alarms(MetricsTable(), exact=False).check(got)
    assert alarm == "3 of 4 tokens cannot be compared: 1 samples were not scored by the weights that sampled them"
    (alarm,) = Alarms(MetricsTable(), exact=False).check(measured([NAN, -1.0], [-1.0, -1.0]))
    assert alarm == "1 of 2 tokens cannot be compared"


@pytest.mark.parametrize("values", [([], []), ([NAN], [-1.0])])
def test_nothing_to_measure_is_finite(values: tuple[list[float], list[float]]) -> None:
    got = measured(*values)
    assert all(v is None or math.isfinite(v) for v in got.values())
    assert got["mismatch/tokens"] == 0 and mean(torch.zeros(0)) == 0.0


def test_buckets() -> None:
    got = measured([0.0] * 4, [0.1, 0.3, 0.5, 0.7], place=[0, 15, 16, 300], entropy=[0.0, 0.1, 3.0, 0.05])
    positions = {k.rsplit("/")[-1]: v for k, v in got.items() if k.startswith("mismatch/position/")}
    assert positions == pytest.approx({"0-1": 0.1, "8-16": 0.3, "16-64": 0.5, "256-1024": 0.7})
    entropies = {k.rsplit("/")[-1]: v for k, v in got.items() if k.startswith("mismatch/entropy/")}
    assert entropies == pytest.approx({"0-0.1": 0.4, "0.1-0.5": 0.3, "2+": 0.5})
    assert bucket_names((0, 1.5, 2)) == ["0-1.5", "1.5-2", "2+"]


def test_names_of_other_trainers() -> None:
    record = measured([-1.0], [-1.5])
    got = foreign(record, ["trl", "verl", "nemo", "prime"])
    assert got["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5)
    for name in ("mean", "min", "max"):
        assert got[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(math.exp(-0.5))
    assert got["training/rollout_actor_probs_pearson_corr"] == 0.0
    assert got["rollout_corr/kl"] == pytest.approx(0.5)
    assert (
        got["rollout_corr/k3_kl"]
        == got["gen_kl_error"]
        == got["mismatch_kl/mean"]
        == pytest.approx(math.exp(-0.5) - 0.5)
    )
    assert got["token_mult_prob_error"] == pytest.approx(math.exp(0.5))
    assert set(got) <= set(KNOWN) and foreign(record, []) == {}


# ------------------------------------------------------------------------------------- assertions


def test_assertions_hold_and_break() -> None:
    Assertion.parse("mismatch/max == 0").check({"step": 1, "mismatch/max": 0.0})
    Assertion.parse("reward/mean>=0.5").check({"step": 1, "reward/mean": 0.5})
    Assertion.parse("eval/reward > 0").check({"step": 1})  # not measured at this step
    for value in (1e-9, NAN):
        with pytest.raises(MetricAssertionError, match="step 7: mismatch/max"):
            Assertion.parse("mismatch/max == 0").check({"step": 7, "mismatch/max": value})


@pytest.mark.parametrize("text", ["mismatch/max == 0", "mismatch/position/4-8 < 1", "rollout_corr/kl < 1"])
def test_an_assertion_of_a_mismatch_does_not_hold_where_tokens_were_not_compared(text: str) -> None:
    assertion = Assertion.parse(text)
    for rollout in ([NAN, -1.0], [NAN, NAN]):
        record = {"step": 7, **measured(rollout, [-1.0, -1.0])}
        with pytest.raises(MetricAssertionError, match=r"step 7: .* was asserted, and [12] of 2 tokens cannot be comp"):
            assertion.check(record)
        Assertion.parse("mismatch/missing <= 2").check(record)  # a count of them says itself
        with pytest.raises(MetricAssertionError, match="mismatch/missing is"):
            Assertion.parse("mismatch/missing == 0").check(record)


def test_what_no_step_has_measured_was_not_asserted() -> None:
    records = [{"step": 0, **measured([-1.0], [-1.0])}, {"step": 1, **measured([], [])}]
    seen = [Assertion.parse(text) for text in ("mismatch/max == 0", "mismatch/first_position > 3")]
    require_seen(seen, records)
    for text in ("mismatch/position/4-8 < 0", "time/score < 0"):
        with pytest.raises(MetricAssertionError, match=f"no step of the run has measured {text[:-4]}"):
            require_seen([*seen, Assertion.parse(text)], records)
    with pytest.raises(MetricAssertionError, match="no step of the run has measured mismatch/max"):
        require_seen(seen, records[1:])  # a step without a sample


@pytest.mark.parametrize(
    ("text", "tables", "message"),
    [
        ("time/score < 1", {}, "no sample is scored before the update"),
        ("speed/score > 1", {"algorithm": {"epochs": 2, "old_logprobs": "rollout"}}, "no sample is scored before"),
        ("time/reference < 1", {}, "set algorithm.kl"),
        ("mismatch/position/16-64 < 1", {"rollout": {"max_tokens": 16}}, "no response is that long"),
        ("mismatch/max == 0", {"algorithm": {"batches": 2, "old_logprobs": "rollout"}}, "old_logprobs = 'trainer'"),
    ],
)
def test_what_a_configuration_never_measures_is_refused(
    tmp_path: Path, text: str, tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_measured([Assertion.parse(text)], tiny.settings(tmp_path, **tables))


def test_what_a_configuration_measures_is_not_refused(tmp_path: Path) -> None:
    config = tiny.settings(tmp_path, algorithm={"batches": 2, "kl": 0.1}, rollout={"max_tokens": 17})
    texts = ("time/score < 9", "time/reference < 9", "mismatch/position/16-64 < 1", "mismatch/max == 0", "loss < 9")
    require_measured(map(Assertion.parse, texts), config)
    config = tiny.settings(tmp_path, algorithm={"epochs": 2, "old_logprobs": "rollout"})
    require_measured([Assertion.parse("mismatch/max == 0")], config)


@pytest.mark.parametrize("text", ["mismatch/max", "mismatch/max = 0", "mismatch/max == zero", "0 == mismatch/max", ""])
def test_malformed_assertions(text: str) -> None:
    with pytest.raises(ConfigError):
        Assertion.parse(text)


def test_assertion_on_an_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="mismatch/max"):
        Assertion.parse("mismatch/maximum == 0")


# ------------------------------------------------------------------------------------------ alarms


def test_steady_growth_raises_the_alarm() -> None:
    trend, noise = Trend(), random.Random(0)
    raised = [trend.add(1e-3 * 1.2**i * math.exp(noise.gauss(0, 0.1))) for i in range(20)]
    assert raised.index(True) <= 13


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5])
def test_noise_around_a_constant_does_not(spread: float) -> None:
    for seed in range(20):
        trend, noise = Trend(), random.Random(seed)
        assert sum(trend.add(1e-3 * math.exp(noise.gauss(0, spread))) for _ in range(100)) <= 1


def test_one_outlier_and_zeros_do_not() -> None:
    trend = Trend()
    assert not any(trend.add(v) for v in [*[1e-3] * 12, 1.0, *[1e-3] * 12])
    assert not any(trend.add(0.0) for _ in range(30))


def test_any_difference_alarms_an_exact_run() -> None:
    record = measured([-1.0, -2.0], [-1.0, -2.0 - 1e-12])
    assert Alarms(MetricsTable(), exact=False).check(record) == []
    (alarm,) = Alarms(MetricsTable(), exact=True).check(record)
    assert "1 tokens differ" in alarm and "first at position 1" in alarm


@pytest.mark.parametrize(
    ("name", "calm", "loud", "text"),
    [
        ("correction/masked", 0.125, 0.625, "the correction masks 62.5% of the sequences in the median of 5 steps"),
        ("mismatch/mult_prob_error", 1.01, 1.0526, "mean exp|Δ| is 1.053 in the median of 5 steps, above 1.05"),
        ("reward/zero_spread", 0.9, 1.0, "the rewards within each group are equal in the median of 5 steps"),
    ],
)
def test_what_is_too_much_alarms_when_it_lasts(name: str, calm: float, loud: float, text: str) -> None:
    """Three steps of five, of those with a token and an update. A single step, however loud, does not."""
    alarms = Alarms(MetricsTable(masked_alarm=0.25), exact=False)
    for value in (calm, calm, 1e9, calm, loud):
        assert alarms.check({name: value}) == []
    assert alarms.check({"mismatch/tokens": 0, "update/steps": 0}) == []
    (alarm,) = alarms.check({name: loud})
    assert alarm.startswith(text)
    assert alarms.check({name: calm}) != [] == alarms.check({name: calm})


def test_alarms_remember_across_a_checkpoint() -> None:
    first, second = (Alarms(MetricsTable(), exact=False) for _ in range(2))
    for i in range(11):
        assert first.check({"mismatch/mean": 1e-3 * 1.2**i}) == []
    second.load(json.loads(json.dumps(first.state())))
    assert any("grows" in text for text in second.check({"mismatch/mean": 1e-3 * 1.2**11}))


# ---------------------------------------------------------------------------------------- recorder


def test_records_from_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    table = MetricsTable(tensorboard=False)
    recorder = Recorder(tmp_path, table, 0, {})
    for step in range(4):
        recorder.write({"step": step, "reward/mean": step / 2})
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # cut off by a crash
    assert [r["step"] for r in read_records(tmp_path)] == [0, 1, 2, 3]
    recorder = Recorder(tmp_path, table, 2, {})
    recorder.write({"step": 2, "reward/mean": 9.0})
    recorder.close()
    assert [(r["step"], r["reward/mean"]) for r in read_records(tmp_path)] == [(0, 0.0), (1, 0.5), (2, 9.0)]


def test_an_evaluation_belongs_to_its_step(tmp_path: Path) -> None:
    """It comes after the step's record, and what reads the file sees one."""
    table = MetricsTable(tensorboard=False)
    recorder = Recorder(tmp_path, table, 0, {})
    recorder.write({"step": 0, "loss": 1.0})
    recorder.write({"step": 1, "loss": 2.0})
    recorder.write({"step": 1, "eval/reward": 3.0})
    recorder.close()
    wanted = {"step": 1, "loss": 2.0, "eval/reward": 3.0}
    assert read_records(tmp_path) == [{"step": 0, "loss": 1.0}, wanted] and recorder.last == wanted
    assert Recorder(tmp_path, table, 2, {}).last == wanted
    assert read_records(tmp_path) == [{"step": 0, "loss": 1.0}, wanted]
    assert Recorder(tmp_path, table, 0, {}).last == {}


def test_a_full_disk_leaves_the_files_of_a_run_as_they_were(tmp_path: Path, full_disk: Any) -> None:
    config, path = tiny.settings(tmp_path), tmp_path / "metrics.jsonl"
    config.save(tmp_path / "config.toml")
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(99)))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with full_disk(64):
        with pytest.raises(TrainerError, match=r"metrics\.jsonl: cannot be written: File too large"):
            Recorder(tmp_path, MetricsTable(tensorboard=False), 98, {})
        with pytest.raises(TrainerError, match=r"config\.toml: cannot be written: File too large"):
            config.save(tmp_path / "config.toml")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("board", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the board's writer has one
def test_a_record_that_does_not_fit_on_the_disk(tmp_path: Path, full_disk: Any, board: bool) -> None:
    """It is one message, which closing does not replace; what was cut off is dropped when the run goes on."""
    table = MetricsTable(tensorboard=board)
    recorder = Recorder(tmp_path, table, 0, {})
    recorder.write({"step": 0, "reward/mean": 0.5})
    with (
        full_disk(100),
        pytest.raises(TrainerError, match=r"step 1 cannot be recorded: File too large; make room, .* resume"),
    ):
        for number in range(9):  # the board's thread may be a record behind
            recorder.write({"step": 1, f"reward/{number}": 1.0, "samples": [] if board else ["x" * 99]})
    recorder.close()
    assert [r["step"] for r in read_records(tmp_path)][:1] == [0]
    again = Recorder(tmp_path, table, 1, {})
    again.write({"step": 1, "reward/mean": 1.0})
    again.close()
    assert read_records(tmp_path) == [{"step": 0, "reward/mean": 0.5}, {"step": 1, "reward/mean": 1.0}]


def test_a_resumed_run_goes_on_in_its_own_curves_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id, which wandb makes, is kept in the run directory; another directory, such as a fork's, is another run."""
    begun: list[dict[str, Any]] = []
    logged: list[tuple[str, dict[str, Any], int]] = []

    def init(**options: Any) -> SimpleNamespace:
        begun.append(options)
        name = options["id"] or f"made-{len(begun)}"
        return SimpleNamespace(
            id=name, log=lambda numbers, step: logged.append((name, numbers, step)), finish=lambda: None
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    table = MetricsTable(tensorboard=False, wandb=True)
    for step, name in ((0, "run"), (1, "run"), (1, "fork")):
        (tmp_path / name).mkdir(exist_ok=True)
        recorder = Recorder(tmp_path / name, table, step, {"run": {"seed": 3}})
        recorder.write({"step": step, "reward/mean": 0.5, "graph/digest": "x", "alarms": []})
        recorder.close()
    numbers = {"reward/mean": 0.5}
    assert logged == [("made-1", numbers, 0), ("made-1", numbers, 1), ("made-3", numbers, 1)]
    assert begun[1]["id"] == "made-1" and begun[1]["resume"] == "allow" and begun[1]["config"] == {"run": {"seed": 3}}


@pytest.mark.parametrize("line", [b"xx", b"[]", b"\xff", b'{"step": "0"}'])
def test_a_damaged_line_does_not_drop_what_stands_below_it(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 1}\n')
    before = path.read_bytes()
    with pytest.raises(TrainerError, match=r"metrics\.jsonl:2: is no record"):
        Recorder(tmp_path, MetricsTable(tensorboard=False), 2, {})
    assert path.read_bytes() == before


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder(tmp_path, MetricsTable(), 0, {})
    recorder.write({"step": 3, "reward/mean": 0.25, "samples": [], "graph/digest": "x"})
    recorder.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(3, 0.25)]
