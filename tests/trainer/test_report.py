"""The page on an experiment's runs, from run directories that are written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trainer import tiny
from trainer.errors import TrainerError
from trainer.report import Said, busy, write_report


def written(directory: Path, arm: str, seed: int, delta: float, without: Sequence[str] = ()) -> None:
    """Twelve steps whose pass rate climbs from 0.1 by 0.05 a step, of a run with a share of the card of its own."""
    run = directory / f"{arm}-{seed}"
    run.mkdir(parents=True)
    named = {"name": run.name, "seed": seed}
    tiny.settings(run, run=named, precision={"arm": arm}, model={"memory": 1 / (seed + 1)}).save(run / "config.toml")
    records = [
        {
            "step": i, "graph/digest": "d" * 64, "rollout/digest": "e" * 64,
            "reward/mean": 0.1 + 0.05 * i, "reward/pass_rate": 0.1 + 0.05 * i,
            "mismatch/mean": delta, "mismatch/max": delta * (i + 1), "mismatch/k3": 0.0, "time/step": 2.0,
            "mismatch/tokens": 8, "mismatch/tokens_different": 2 * (delta > 0), "mismatch/position/8-16": delta,
            "mismatch/position/16-32": 0.0, "speed/rollout": 1000.0,
            **({"eval/pass_rate": 0.2 + 0.1 * i} if i in (0, 11) else {}),
        }
        for i in range(12)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({key: value for key, value in record.items() if key not in without}) + "\n" for record in records
        )
    )


def tables(text: str) -> dict[str, dict[str, str]]:
    """The cells of each arm of all tables of a page, by their titles."""
    out: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in text.replace("\\|", "¦").splitlines():
        row = [cell.strip().replace("¦", "|") for cell in line.strip("|").split("|")]
        if line.startswith("| arm |"):
            head = row
        elif row[0] in ("exact", "bf16"):
            out.setdefault(row[0], {}).update(zip(head, row, strict=True))
    return out


def test_a_page_by_hand(tmp_path: Path) -> None:
    for seed in (0, 1):
        written(tmp_path / "runs", "exact", seed, 0.0)
        written(tmp_path / "runs", "bf16", seed, 0.01 * (seed + 1))
    written(tmp_path / "runs" / "smoke", "exact", 9, 0.0)  # not of the experiment
    (tmp_path / "runs" / "gpu.csv").write_text("40, 1000\n80, 1000\n[N/A], 5\n")
    said = Said("Sums in two arms", {"GPU": "none"}, ["What to see: nothing."], ["first", "second"])
    png, page, text = write_report(tmp_path / "runs", tmp_path / "out" / "arms", said)
    assert png.stat().st_size > 10_000 and "<img" in page.read_text()
    made = text.read_text()
    exact, bf16 = (tables(made)[arm] for arm in ("exact", "bf16"))
    assert exact["seeds"] == "2" and exact["mean |Δ|"] == exact["max |Δ|"] == "0.0"
    assert exact["sampled pass rate, first 5 steps"] == "0.200 ± 0.000" and exact["last 10 steps"] == "0.425 ± 0.000"
    assert exact["greedy pass rate after 1 steps"] == "0.200 ± 0.000"
    assert exact["greedy pass rate after 12 steps"] == "1.30 ± 0.00"
    assert bf16["mean |Δ|"] == "0.0150 ± 0.0071" and bf16["max |Δ|"] == "0.180 ± 0.085"
    assert bf16["8-16"] == "0.0150 ± 0.0071", "mismatch by position"
    assert exact["share of tokens that differ"] == "0.0" and bf16["share of tokens that differ"] == "0.250 ± 0.000"
    assert exact["s / step"] == "2.00 ± 0.00" and exact["rollout, tokens/s"] == "1000 ± 0"
    assert made.startswith("# Sums in two arms\n\n| | |\n|---|---|\n| GPU | none |\n| task | `reasoning_gym:chain_sum`")
    assert "\nWhat to see: nothing.\n" in made and made.endswith("## Commands\n\n```sh\nfirst\nsecond\n```\n")
    assert "some kernel ran 60% of the time" in made and str(tmp_path) not in made
    assert f"| bf16-1 | 12 | `{'d' * 16}` | `{'e' * 16}` |" in made
    assert "k3 is the mean of exp(Δ) − 1 − Δ" in made and "at temperature 1. Greedy (temperature 0):" in made


def test_a_page_of_what_was_recorded(tmp_path: Path) -> None:
    """Evaluations that only one run has, one bucket of positions, no digest of a rollout: left out."""
    for seed in (0, 1):
        without = ["rollout/digest", "mismatch/position/16-32", *["eval/pass_rate"] * seed]
        written(tmp_path, "exact", seed, 0.0, without)
    made = write_report(tmp_path, tmp_path / "page")[2].read_text()
    assert "# GRPO on reasoning_gym:chain_sum\n" in made and "greedy pass rate" not in made
    assert "by position" not in made and f"`{'d' * 16}` | – |" in made


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="holds no run"):
        write_report(tmp_path, tmp_path / "x")
    assert busy(tmp_path / "gpu.csv") is None
