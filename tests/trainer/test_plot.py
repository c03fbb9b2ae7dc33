"""Curves and tables of runs, from run directories that are written by hand."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.trainer import tiny
from trainer import plot
from trainer.errors import TrainerError
from trainer.plot import FINAL, WINDOWS, differing, groups, moving_mean, plot_runs, read_runs, rows, spread, summary


def written(directory: Path, records: Sequence[dict[str, Any]], **tables: dict[str, Any]) -> Path:
    """A run directory with a record a step."""
    directory.mkdir(parents=True)
    tiny.settings(directory, **tables).save(directory / "config.toml")
    lines = [json.dumps({"step": i, **record}) for i, record in enumerate(records)]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return directory


def cells(paths: Sequence[Path]) -> dict[str, str]:
    """The only row of the table, by its titles."""
    header, row = rows(read_runs(paths))
    return dict(zip(header, row, strict=True))


@pytest.mark.parametrize(
    ("arms", "seeds", "width", "lines"),
    [
        (4, 1, 160, 5 + 4),  # what it is a mean of, borders and heading; a row an arm
        (4, 1, 80, 6 + 10),  # two lines of what it is a mean of; a column an arm
        (3, 2, 80, 6 + 10),
        (4, 2, 80, 2 + 4 * (4 + 10)),  # a table an arm
        (1, 2, 40, 7 + 10),
    ],
)
def test_the_summary_fits_the_terminal(arms: int, seeds: int, width: int, lines: int, tmp_path: Path) -> None:
    paths = []
    for arm in ("exact", "unified", "mixed", "bf16")[:arms]:
        for seed in range(seeds):
            record = {column.key: 0.00123 * (seed + 1) for column in FINAL}
            named = {"run": {"seed": seed}, "precision": {"arm": arm}}
            paths.append(written(tmp_path / f"{arm}{seed}", [record], **named))
    screen = Console(width=width, file=io.StringIO())
    screen.print(summary(paths, width))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") == lines and max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).startswith(WINDOWS)
    cell = "0.00123" if seeds == 1 else "0.00184 ± 0.00087"
    assert text.count(cell) == arms * len(FINAL)  # whole: no cell is folded


def test_what_each_value_is_of(tmp_path: Path) -> None:
    """Rewards of the last ten steps, the mismatch and times of all."""
    assert moving_mean([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]
    paths = [
        written(
            tmp_path / str(seed),
            [
                {
                    "reward/mean": 0.0 if i < 5 else value,
                    "mismatch/max": value * i,
                    "mismatch/mean": 0.0,
                    "time/step": i,
                }
                for i in range(15)
            ],
            run={"seed": seed, "name": f"s{seed}"},
        )
        for seed, value in ((0, 1.0), (1, 3.0))
    ]
    row = cells(paths)
    assert row["seeds"] == "2" and row["steps"] == "15" and row["pass"] == "–"
    assert row["reward"] == "2.00 ± 1.41" and row["max |Δ|"] == "28.0 ± 19.8"
    assert row["mean |Δ|"] == "0.0" and row["s / step"] == "7.00 ± 0.00"


def test_a_fork_is_no_seed_of_its_own(tmp_path: Path) -> None:
    """It counts with its origin: with it, the seed's value is the mean of both."""
    for name, seed, value in (("origin", 0, 1.0), ("fork", 0, 2.0), ("other", 1, 3.5)):
        written(tmp_path / name, [{"reward/mean": value}], run={"seed": seed, "name": "run"})
    row = cells([tmp_path / "origin", tmp_path / "fork"])
    assert row["seeds"] == "1 (2 runs)" and row["reward"] == "1.50"
    row = cells([tmp_path / "origin", tmp_path / "fork", tmp_path / "other"])
    assert row["seeds"] == "2 (3 runs)" and row["reward"] == "2.50 ± 1.41"


def test_experiments_of_one_arm_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    """A fork with another rate has its origin's ``run.name``."""
    for name, lr in (("origin", 1e-3), ("fork", 2e-3)):
        written(tmp_path / name, [{"reward/mean": 1.0}], run={"name": "run"}, optimizer={"lr": lr})
    labels = [label for label, _ in groups(read_runs([tmp_path / "origin", tmp_path / "fork"]))]
    assert labels == ["exact (origin)", "exact (fork)"]


ASIDE: dict[str, dict[str, Any]] = {  # every key that changes no number, at another value
    "run": {"seed": 8, "name": "another", "save_every": 2, "keep": 1},
    "model": {"memory": 0.5, "origin": "ask for it"},
    "task": {"origin": "ask for it"},
    "precision": {"allow_mismatch": True},
    "metrics": {
        "asserts": ["loss < 99"], "names": ["trl", "nemo"], "masked_alarm": 0.5, "tensorboard": True, "wandb": True,
        "samples": 1, "log_tokens": True,
    },
}  # fmt: skip


def test_keys_that_change_no_number_tell_no_experiments_apart(tmp_path: Path) -> None:
    """What they are is measured: ``test_loop.py`` makes a run with each of them."""
    assert {f"{name}.{key}" for name, table in ASIDE.items() for key in table} | {"run.dir"} == plot._NO_PART.keys()
    record = {"reward/mean": 1.0}
    paths = [written(tmp_path / "a", [record]), written(tmp_path / "b", [record], **ASIDE)]
    assert cells(paths)["seeds"] == "2"
    for name, table in (
        ("run", {"steps": 5}), ("run", {"eval_every": 1}), ("metrics", {"threshold": 1.0}),
        ("precision", {"checked": True}), ("rollout", {"max_sequences": 8}), ("train", {"micro_batch_tokens": 256}),
    ):  # fmt: skip
        (key,) = table
        other = written(tmp_path / f"{name}.{key}", [record], **{name: table})
        keys = differing(groups(read_runs([paths[0], other])))
        assert [row[0] for row in keys[1:]] == [f"{name}.{key}"]


def test_what_experiments_differ_in_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By table, page and legend, and nothing else: seeds and names are no difference, the arm is in the label."""
    record = {"reward/mean": 1.0}
    paths = [
        written(tmp_path / "a0", [record], optimizer={"lr": 1e-3}),
        written(tmp_path / "a1", [record], optimizer={"lr": 1e-3}, run={"seed": 1, "name": "other"}),
        written(tmp_path / "b", [record], optimizer={"lr": 2e-3}, algorithm={"kl": 0.1}),
        written(tmp_path / "c", [record], optimizer={"lr": 1e-3}, precision={"arm": "bf16"}),
    ]
    keys = differing(groups(read_runs(paths)))
    assert keys[0] == ["differs in", "exact (a0)", "exact (b)", "bf16"]
    assert sorted(keys[1:]) == [["algorithm.kl", "0.0", "0.1", "0.0"], ["optimizer.lr", "0.001", "0.002", "0.001"]]
    for width in (160, 30):
        screen = Console(width=width, file=io.StringIO())
        screen.print(summary(paths, width))
        text = screen.file.getvalue()  # type: ignore[attr-defined]
        assert "differs in" in text and text.count("optimizer.lr") == 1 and "rollout.samples" not in text
    (figure,) = {axis.figure for axis in drawn(paths, tmp_path / "page", monkeypatch).values()}
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(labels[1].split("\n")) == {"exact (b)", "algorithm.kl 0.1", "optimizer.lr 0.002"}
    page = (tmp_path / "page.html").read_text()
    assert "<td>optimizer.lr</td><td>0.001</td><td>0.002</td><td>0.001</td>" in page

    alike = differing(groups(read_runs(paths[:2])))
    assert len(alike) == 1 and "differ in" not in plot_runs(paths[:2], tmp_path / "alike")[1].read_text()
    monkeypatch.setattr(plot, "NAMED", 1)
    assert all(label.endswith("\nand 1 more") for label in plot._legend(groups(read_runs(paths))))


def test_what_was_changed_half_way_is_another_experiment(tmp_path: Path) -> None:
    records = [{"reward/mean": 1.0}] * 8
    changed = written(tmp_path / "changed", records, optimizer={"lr": 1e-2})
    changes = [
        {"step": 4, "changes": {"optimizer.lr": [1e-3, 5e-3]}},
        {"step": 6, "changes": {"optimizer.lr": [5e-3, 1e-2]}},
    ]
    (changed / "changes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in changes))
    whole = written(tmp_path / "whole", records, optimizer={"lr": 1e-2}, run={"seed": 4})
    assert differing(groups(read_runs([changed, whole])))[1:] == [
        ["optimizer.lr", "0.001, 0.005 from step 4, 0.01 from step 6", "0.01"]
    ]


def test_programs_and_kinds_of_values_tell_experiments_apart(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / str(i), [{"reward/mean": 1.0, "graph/digest": digest * 32}], task={"params": {"k": k}})
        for i, (digest, k) in enumerate((("ab", 1), ("cd", 1), ("ab", True), ("ab", 1.0)))
    ]
    runs = read_runs(paths)
    assert differing(groups(runs[:2]))[1:] == [["graph/digest", "ab" * 8, "cd" * 8]]
    assert differing(groups([runs[0], *runs[2:]]))[1:] == [["task.params", '{"k": 1}', '{"k": true}', '{"k": 1.0}']]


def test_seeds_of_different_lengths_say_so(tmp_path: Path) -> None:
    paths = [written(tmp_path / str(n), [{"reward/mean": 1.0}] * n, run={"seed": n}) for n in (3, 100, 7)]
    assert cells(paths)["steps"] == "3–100"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "–"),
        ([160.0], "160"),
        ([4005.0, 4126.4], "4066 ± 86"),
        ([7.836, 8.164], "8.00 ± 0.23"),
        ([0.124, 0.114], "0.119 ± 0.007"),
        ([1.9e-6, 0.3e-6], "1.1e-06 ± 1.1e-06"),
        ([0.0, 0.0], "0.0"),
        ([-1.0, 1.0], "0.00 ± 1.41"),
        ([math.inf, 1.0], "inf"),
    ],
)
def test_numbers_are_readable(values: list[float], text: str, tmp_path: Path) -> None:
    for seed, value in enumerate(values):
        written(tmp_path / str(seed), [{"loss": value}], run={"seed": seed})
    runs = read_runs([tmp_path / str(seed) for seed in range(len(values))])
    assert spread(runs, lambda run: run.records[0]["loss"]) == text


def drawn(paths: Sequence[Path], output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figure's axes by title."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot_runs(paths, output)
    return {axis.get_title(): axis for axis in figures[-1].axes}


def test_panels_with_nothing_in_them_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a run without a KL term have a KL of 0; a single evaluation is a point."""
    records = [{"reward/mean": 0.5, "kl/reference": 0.0, "mismatch/max": 0.0} for _ in range(30)]
    one = written(tmp_path / "one", records)
    assert set(drawn([one], tmp_path / "a", monkeypatch)) == {"reward", "max |Δ| (nats)"}
    records[7]["eval/pass_rate"] = 0.25
    two = written(tmp_path / "two", records, algorithm={"kl": 0.1})
    axes = drawn([one, two], tmp_path / "b", monkeypatch)
    assert set(axes) == {"reward", "max |Δ| (nats)", "KL to reference", "pass rate in evaluations"}
    (line,) = axes["pass rate in evaluations"].lines
    assert line.get_xydata().tolist() == [[7, 0.25]] and line.get_marker() == "o"
    assert [line.get_marker() for line in axes["KL to reference"].lines] == [""]
    with pytest.raises(TrainerError, match="holds nothing to draw"):
        plot_runs([written(tmp_path / "three", [{}])], tmp_path / "c")


def test_a_page_names_runs_and_no_paths(tmp_path: Path) -> None:
    _, page = plot_runs([written(tmp_path / "private" / "mine", [{"reward/mean": 1.0}])], tmp_path / "page")
    text = page.read_text()
    assert "<code>mine</code>" in text and "private" not in text
    assert plot.WINDOWS in text and "over seeds" in text and plot.DEFINITIONS in text


@pytest.mark.parametrize("name", ["page", "page.png", "page.html"])
def test_a_suffix_is_not_doubled(name: str, tmp_path: Path) -> None:
    run = written(tmp_path / "mine", [{"reward/mean": 1.0}])
    assert plot_runs([run], tmp_path / name) == [tmp_path / "page.png", tmp_path / "page.html"]
