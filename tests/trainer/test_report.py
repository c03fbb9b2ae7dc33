"""The page on an experiment's runs, from run directories that are written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer import tiny
from trainer.errors import TrainerError
from trainer.report import busy, write_report


def written(directory: Path, arm: str, seed: int, delta: float) -> None:
    """Twelve steps whose pass rate climbs from 0.1 by 0.05 a step, of a run with a share of the card of its own."""
    run = directory / f"{arm}-{seed}"
    run.mkdir(parents=True)
    named = {"name": run.name, "seed": seed}
    tiny.settings(run, run=named, precision={"arm": arm}, model={"memory": 1 / (seed + 1)}).save(run / "config.toml")
    records = [
        {
            "step": i, "graph/digest": "d" * 64, "reward/mean": 0.1 + 0.05 * i, "reward/pass_rate": 0.1 + 0.05 * i,
            "mismatch/mean": delta, "mismatch/max": delta * (i + 1), "mismatch/k3": 0.0, "time/step": 2.0,
            "mismatch/position/8-16": delta, "speed/rollout": 1000.0,
            **({"eval/pass_rate": 0.2 + 0.1 * i} if i in (0, 11) else {}),
        }
        for i in range(12)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_a_page_by_hand(tmp_path: Path) -> None:
    for seed in (0, 1):
        written(tmp_path / "runs", "exact", seed, 0.0)
        written(tmp_path / "runs", "bf16", seed, 0.01 * (seed + 1))
    written(tmp_path / "runs" / "smoke", "exact", 9, 0.0)  # not of the experiment
    (tmp_path / "runs" / "gpu.csv").write_text("40, 1000\n80, 1000\n[N/A], 5\n")
    png, page, text = write_report(tmp_path / "runs", tmp_path / "out" / "arms")
    assert png.stat().st_size > 10_000 and "<img" in page.read_text()
    lines = text.read_text().splitlines()
    (head,) = [x for x in lines if x.startswith("| arm | steps")]
    exact, bf16 = (
        dict(zip([c.strip() for c in head.split("|")], [c.strip() for c in line.split("|")], strict=True))
        for line in (next(x for x in lines if x.startswith(f"| {arm} |")) for arm in ("exact", "bf16"))
    )
    assert exact["mean abs Δ"] == exact["max abs Δ"] == "0.0 ± 0.0" and exact["steps"] == "12 ± 0.0"
    assert exact["pass, first"].startswith("0.2 ") and exact["pass, last"].startswith("0.425 ")
    assert exact["drawn anew, first"].startswith("0.2 ") and exact["drawn anew, last"].startswith("1.3 ")
    assert bf16["mean abs Δ"] == "0.015 ± 7.1e-03" and bf16["max abs Δ"].startswith("0.18 ")
    assert any(x.startswith("| bf16 | 0.015 ") for x in lines), "mismatch by position"
    assert "busy 60% of the time" in text.read_text() and f"`{'d' * 16}`" in text.read_text()


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="holds no run"):
        write_report(tmp_path, tmp_path / "x")
    assert busy(tmp_path / "gpu.csv") is None
