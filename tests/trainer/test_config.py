"""Configuration: types, unknown keys with the nearest name, overrides of every key, TOML in and out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Config, load, override
from trainer.errors import ConfigError, TrainerError
from trainer.models import device_of, load_tokenizer
from trainer.tasks import load_task

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


def test_defaults_round_trip_through_toml(tmp_path: Path) -> None:
    config = Config.from_dict({"task": {"params": {"min_terms": 2}}, "metrics": {"asserts": ["mismatch/max == 0"]}})
    config.save(tmp_path / "c.toml")
    assert load(tmp_path / "c.toml") == config


@pytest.mark.parametrize(
    ("data", "wrong", "right"),
    [
        ({"rollout": {"max_token": 3}}, "rollout.max_token", "max_tokens"),
        ({"optimizer": {"learning_rate": 1.0}}, "optimizer.learning_rate", "did you mean 'lr'?"),
        ({"optimiser": {"lr": 1.0}}, "[optimiser]", "optimizer"),
        ({"precision": {"arm": "exakt"}}, "precision.arm", "exact"),
        ({"algorithm": {"aggregation": "tokens"}}, "algorithm.aggregation", "token"),
    ],
)
def test_wrong_names_are_errors_that_name_the_nearest(data: dict[str, Any], wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_dict(data)
    assert wrong in str(error.value) and right in str(error.value)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"run": {"steps": "ten"}}, "run.steps must be a whole number, not 'ten'"),
        ({"run": {"steps": True}}, "run.steps"),
        ({"run": {"steps": 1.5}}, "run.steps"),
        ({"rollout": {"dynamic": 1}}, "rollout.dynamic"),
        ({"metrics": {"asserts": "mismatch/max == 0"}}, "metrics.asserts"),
        ({"metrics": {"asserts": [1]}}, "metrics.asserts"),
        ({"task": {"params": 3}}, "task.params"),
        ({"run": 3}, "run"),
        ({"rollout": {"samples": 1}}, "rollout.samples"),  # a group of one has no spread
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature"),
        ({"rollout": {"top_p": 0.0}}, "rollout.top_p"),
        ({"train": {"micro_batch_tokens": 1000}}, "train.micro_batch_tokens"),
        ({"train": {"micro_batch_tokens": 0}}, "train.micro_batch_tokens"),
        ({"algorithm": {"overlong": "penalty"}}, "algorithm.overlong_buffer"),
        ({"algorithm": {"correction_cap": 0.5}}, "algorithm.correction_cap"),
        # A correction would compare the rollout's log-probabilities with themselves.
        ({"algorithm": {"epochs": 2, "old_logprobs": "rollout", "correction": "token_truncated"}},
         "algorithm.correction must be none with algorithm.old_logprobs"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr"),
        ({"task": {"prompt": "no place for it"}}, "task.prompt"),
        ({"metrics": {"names": ["openrlhf"]}}, "metrics.names"),
        # Tensors take them in fp32, in the middle of an update.
        ({"optimizer": {"lr": 1e300}}, "optimizer.lr must be a number of fp32"),
        ({"optimizer": {"lr": 1e38}}, "optimizer.lr is too large"),
        ({"optimizer": {"lr": 1e20, "weight_decay": 1e20}}, "optimizer.lr is too large"),
        ({"run": {"dir": "a\0"}}, "run.name, run.dir must hold no NUL"),
        ({"optimizer": {"lr": 10**400}}, "optimizer.lr must be a number of fp32"),
        ({"optimizer": {"eps": 1e-40}}, "optimizer.eps must be at least 1.2e-38"),
        ({"optimizer": {"eps": float("inf")}}, "optimizer.eps"),  # no weight would move
        ({"algorithm": {"clip_high": 2.0**128}}, "algorithm.clip_high must be a number of fp32"),
        ({"rollout": {"top_k": 2**63}}, "rollout.top_k must be a number of 64 bits"),
        ({"eval": {"seed": -(2**63) - 1}}, "eval.seed must be a number of 64 bits"),
        ({"metrics": {"masked_alarm": float("nan")}}, "metrics.masked_alarm"),  # no share is above NaN
        # A rollout would refuse them, an evaluation after hours.
        ({"rollout": {"temperature": 1e-6}}, "rollout.temperature must be at least 1e-05"),
        ({"eval": {"temperature": 1e19}}, "eval.temperature must be at least 1e-05 and at most"),
        ({"precision": {"rollout_backend": "triton"}}, "precision.rollout_backend must be auto"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_or_range(data: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        Config.from_dict(data)


def test_every_key_can_be_overridden() -> None:
    plain = Config().to_dict()
    for table, keys in plain.items():
        for key, value in keys.items():
            text = {dict: "{ a = 1 }", list: "[]", bool: "true", str: "text"}.get(type(value), "128")
            data = override({}, [f"{table}.{key}={text}"])
            wanted: Any = {dict: {"a": 1}, list: [], bool: True, str: "text"}.get(type(value), 128)
            assert data == {table: {key: wanted}}
            if not isinstance(value, str) and key not in ("memory", "top_p", "clip_low", "beta1", "beta2", "batches"):
                assert dataclasses.asdict(Config.from_dict(data))[table][key] == wanted


def test_settings_apply_in_order_and_keep_the_rest() -> None:
    data = override(
        {"run": {"steps": 3, "seed": 1}}, ["run.steps=5", "run.steps = 7", "run.name=a b", "task.params.digits=2"]
    )
    assert data == {"run": {"steps": 7, "seed": 1, "name": "a b"}, "task": {"params": {"digits": 2}}}


def test_an_origin_is_of_what_the_file_names() -> None:
    data = {"model": {"path": "a", "origin": "made by a"}, "task": {"data": "jsonl:a", "origin": "found at a"}}
    assert override(data, ["model.path=a", "run.steps=2"]) == {**data, "run": {"steps": 2}}
    assert override(data, ["model.path=b"]) == {"model": {"path": "b"}, "task": data["task"]}
    assert override(data, ["task.data=jsonl:b"]) == {"model": data["model"], "task": {"data": "jsonl:b"}}
    given = override(data, ["model.path=b", "model.origin=made by b"])
    assert given["model"] == {"path": "b", "origin": "made by b"} and data["model"]["origin"] == "made by a"


def test_values_at_the_ends_of_their_range() -> None:
    Config.from_dict({
        "algorithm": {"correction_cap": float("inf")}, "optimizer": {"eps": 2.0**-126},
        "rollout": {"temperature": 1e-5}, "eval": {"temperature": 0.0, "seed": -(2**63)},
        "precision": {"arm": "unified", "rollout_backend": "triton"},
    })  # fmt: skip


@pytest.mark.parametrize("setting", ["steps=3", "run.steps", "=3", "run.=3"])
def test_malformed_settings(setting: str) -> None:
    with pytest.raises(ConfigError, match="table.key=value"):
        override({}, [setting])


@pytest.mark.parametrize("name", ["mps", "meta", "gpu", "cuda:-1", "cuda:99"])
def test_devices_that_no_run_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match=f"model.device = '{name}'.*write .*auto"):
        device_of(name)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml")
    for text in ("[run\n", f"[run]\nseed = {'9' * 5000}\n", f"a = {'[' * 9999}{']' * 9999}\n"):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(ConfigError, match="not valid TOML"):
            load(tmp_path / "bad.toml")


def test_example_configurations_are_valid() -> None:
    paths = sorted(EXAMPLES.glob("*.toml"))
    assert paths
    for path in paths:
        load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo", "runs/demo-policy: no such file or directory.*; `make train-demo`"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct: no such file or directory.*--set model.path=FILE"),
        ("gsm8k", 'gsm8k/train.jsonl: No such file.*grade-school-math.*lines of {"question"'),
    ],
)
def test_what_an_example_needs_is_in_the_message(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("precgraph.loading._hub_reachable", lambda: False)
    config = load(EXAMPLES / f"{name}.toml")
    with pytest.raises(TrainerError, match=message) as error:
        load_task(config.task) if name == "gsm8k" else load_tokenizer(config.model)
    assert "\n" not in str(error.value)
