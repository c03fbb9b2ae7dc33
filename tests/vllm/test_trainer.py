"""The trainer with vLLM as its rollout engine, in one process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import tiny
from trainer.errors import ConfigError
from trainer.loop import Trainer
from trainer.metrics import read_records
from trainer.rollout_vllm import require_vllm

pytestmark = pytest.mark.vllm
ENGINE = {"engine": "vllm", "max_sequences": 8, "max_batch_tokens": 64}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Trainers of the tiny policy; their engines are shut down after the test."""
    made: list[Trainer] = []

    def start(name: str, rollout: dict[str, Any] = ENGINE, **tables: dict[str, Any]) -> Trainer:
        config = tiny.settings(tmp_path / name, rollout=dict(rollout), **tables)
        made.append(Trainer(config, model=tiny.model(), tokenizer=tiny.tokenizer(), task=tiny.task()))
        return made[-1]

    yield start
    for trainer in made:
        if hasattr(trainer.rollout, "close"):
            trainer.rollout.close()


def test_exact(make: Any, tmp_path: Path) -> None:
    """Three steps without a mismatch, and the same run, bit for bit, as with the embedded engine."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"steps": 3, "save_every": 0, "eval_every": 2}, "metrics": {"asserts": ["mismatch/max == 0"]},
    }  # fmt: skip
    runs = {}
    for name, rollout in (("vllm", ENGINE), ("embedded", {})):
        trainer = make(name, rollout, **tables)
        trainer._held_out = trainer.task
        trainer.run()
        runs[name] = read_records(tmp_path / name), {n: p.detach() for n, p in trainer.actor.named_parameters()}
    for record in runs["vllm"][0]:
        assert record["mismatch/max"] == 0.0 and record["mismatch/tokens_different"] == 0 and not record["alarms"]
        assert record["graph/digest"] == record["rollout/digest"]
        assert record["weights/of_samples"] == [record["weights/version"]] == [record["step"] + 1]
        assert record["update/codes_changed"] > 0
    for mine, theirs in zip(runs["vllm"][0], runs["embedded"][0], strict=True):
        for key in ("samples", "reward/mean", "entropy/mean", "loss", "update/grad_norm"):
            assert mine[key] == theirs[key], key
    assert "eval/pass_rate" in runs["vllm"][0][1]
    assert all(torch.equal(runs["embedded"][1][n], p) for n, p in runs["vllm"][1].items())


def test_bf16_is_vllms_own_model(make: Any, tmp_path: Path) -> None:
    """It is given each step's weights: the mismatch stays that of two sets of kernels, far below that of old ones."""
    tables: dict[str, dict[str, Any]] = {"run": {"steps": 3, "save_every": 0}, "optimizer": {"lr": 3e-3, "clip": 0.0}}
    trainer = make("bf16", precision={"arm": "bf16"}, **tables)
    model = trainer.rollout._engine.apply_model(lambda m: type(m).__name__)[0]
    assert model == "LlamaForCausalLM" and trainer.rollout.digest.startswith("vllm ")
    trainer.run()
    means = [r["mismatch/mean"] for r in read_records(tmp_path / "bf16")]
    assert len(means) == 3 and 0 < max(means) < 2e-2
    with torch.no_grad():
        for p in trainer.actor.parameters():
            p.mul_(1.2)
    trainer.actor.sync()
    trainer.rollout._served = trainer.actor.precgraph.store.version  # as if it had been given these
    assert trainer.train_step()["mismatch/mean"] > 4 * max(means)


@pytest.mark.parametrize("arm", ["mixed", "unified"])
def test_what_vllm_cannot_run_on_a_cpu(make: Any, arm: str) -> None:
    with pytest.raises(ConfigError, match="needs a GPU.*embedded"):
        make(arm, precision={"arm": arm})


def test_truncated_sampling_needs_the_kept_mass(make: Any) -> None:
    with pytest.raises(ConfigError, match="truncated distribution"):
        make("cut", {**ENGINE, "top_p": 0.9}, precision={"arm": "bf16"})


def test_vllms_fp8_on_somebody_elses_deep_gemm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is loaded; precgraph's own program takes either."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.1.5" if n == "sgl-deep-gemm" else version(n))
    for arm in ("unified", "mixed"):
        config = tiny.settings(tmp_path, rollout=dict(ENGINE), precision={"arm": arm, "allow_mismatch": True})
        with pytest.raises(ConfigError, match="sgl-deep-gemm 0.1.5.*; pip uninstall sgl-deep-gemm"):
            require_vllm(config, torch.device("cuda"))
    require_vllm(tiny.settings(tmp_path, rollout=dict(ENGINE)), torch.device("cuda"))
