"""The command: run, resume, fork, eval, export, plot, compare, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.trainer import tiny
from trainer import checkpoint
from trainer.cli import app, guarded
from trainer.errors import InterruptedRunError
from trainer.metrics import read_records
from trainer.plot import read_runs, rows


def call(*arguments: object) -> int:
    return guarded(lambda: app([str(a) for a in arguments], standalone_mode=False))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with a saved policy and a Python task."""
    made = ModuleType("cli_task")
    made.items = lambda size, seed: [(f"{i}+{i}=", "2") for i in range(size)]  # type: ignore[attr-defined]
    made.reward = lambda question, answer, text: float("1" in text or "2" in text)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cli_task", made)
    tiny.model(layers=1).save_pretrained(tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    settings = tiny.settings(
        tmp_path / "run", run={"steps": 2}, model={"path": str(tmp_path / "policy"), "device": "cpu"},
        task={"data": "python:cli_task:items", "reward": "cli_task:reward", "size": 8},
        rollout={"groups": 2, "max_tokens": 8},
    )  # fmt: skip
    settings.save(tmp_path / "c.toml")
    return tmp_path / "c.toml"


def test_a_run_in_parts(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part ends before a step that might take too long; the next one goes on."""
    run = tmp_path / "run"
    assert call("run", config, "--max-seconds", 0) == 0
    assert f"0 of 2 steps; go on with: precgraph-train resume {run}".replace(" ", "") in _flat(capsys)
    assert checkpoint.steps(run) == [0] and read_records(run) == []
    assert call("resume", run, "--max-seconds", 600) == 0 and checkpoint.steps(run) == [0, 1, 2]
    assert "done" in _flat(capsys)


def _flat(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr().err.split())


def test_a_life_of_a_run(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert call("run", config, "--dry-run", "--set", "optimizer.lr=2e-3") == 0
    printed = capsys.readouterr()
    assert "lr = 0.002" in printed.out and "consistent" in printed.err and not run.exists()

    assert call("run", config, "--assert", "mismatch/max == 0", "--metric-names", "nemo") == 0
    assert [r["gen_kl_error"] for r in read_records(run)] == [0.0, 0.0] and checkpoint.steps(run) == [0, 1, 2]
    assert call("run", config) == 2 and "already holds a run" in capsys.readouterr().err

    assert call("resume", run, "--set", "run.steps=3") == 0
    assert [r["step"] for r in read_records(run)] == [0, 1, 2]
    assert call("resume", run, "--step", 1) == 2 and "--into" in capsys.readouterr().err
    fork = tmp_path / "fork"
    assert call("resume", run, "--step", 1, "--into", fork, "--set", "run.steps=2") == 0
    mine, theirs = read_records(fork), read_records(run)[:2]
    assert [r["step"] for r in mine] == [0, 1] and mine[1]["reward/mean"] == theirs[1]["reward/mean"]
    assert mine[1]["update/grad_norm"] == theirs[1]["update/grad_norm"]
    capsys.readouterr()

    assert call("eval", run, "--step", 2) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["step"] == 2 and 0 <= evaluated["eval/pass_rate"] <= 1
    assert call("export", run, tmp_path / "exported") == 0 and (tmp_path / "exported" / "model.safetensors").exists()
    printed = capsys.readouterr()
    assert printed.out == f"step 3: {tmp_path / 'exported'}\n" and not printed.err  # no bar of loading or saving

    assert call("run", config, "--set", f"run.dir={tmp_path / 'other'}", "--assert", "response/length > 99") == 1
    capsys.readouterr()
    assert call("plot", run, fork, "-o", tmp_path / "curves") == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "curves.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page and "exact" in page
    assert call("compare", run, fork) == 0 and "exact" in capsys.readouterr().out
    table = rows(read_runs([run, fork]))
    assert len(table) == 3  # they differ in run.steps: two experiments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "rollout.max_token=3"], "did you mean 'max_tokens'?"),
        (["--set", "precision.arm=exakt"], "did you mean 'exact'?"),
        (["--set", "model.path=nowhere"], "nowhere"),
        (["--set", "task.data=python:cli_task:itms"], "did you mean 'items'?"),
        (["--assert", "mismatch == 0"], "did you mean 'mismatch/mean' or 'mismatch/max'?"),
        (["--assert", "mismatch/maximum == 0"], "did you mean 'mismatch/max'?"),
        (["--assert", "eval/pass_rate > 0"], "the run never evaluates"),
        (["--assert", "eval/pass_rate > 0", "--set", "run.eval_every=3"], "the run never evaluates"),
        (["--assert", "gen_kl_error < 1", "--metric-names", "trl"], "gen_kl_error is not logged; --metric-names nemo"),
        (["--set", "model.device=cuda:77"], "cuda"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_2(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert call("run", config, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_directories_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plot", "compare", "export"):
        for directory, message in ((tmp_path, "holds no config.toml"), (tmp_path / "none", "no such directory")):
            assert call(command, directory, *([tmp_path / "model"] if command == "export" else [])) == 2
            error = capsys.readouterr().err
            assert f"{directory}: " in error and error.endswith(f"{message}; name a run directory\n")
    for command in ("resume", "eval"):
        assert call(command, tmp_path) == 2 and "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_assertions_on_what_is_measured_are_taken(config: Path) -> None:
    more = ["--assert", "eval/pass_rate >= 0", "--assert", "gen_kl_error == 0", "--metric-names", "nemo"]
    assert call("run", config, "--dry-run", *more, "--set", "run.eval_every=2") == 0


def test_an_export_replaces_nothing(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers only logs an error for a file, and mixes its files with those that a directory has."""
    assert call("run", config, "--max-seconds", 0) == 0
    for taken in (config, config.parent):
        assert call("export", tmp_path / "run", taken) == 2 and "exists already" in capsys.readouterr().err


def test_two_processes_do_not_train_in_one_directory(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is the process's: it is gone when that is killed."""
    run, fork = tmp_path / "run", tmp_path / "fork"
    assert call("run", config, "--max-seconds", 0) == 0
    script = (
        "import sys, time\nfrom contextlib import ExitStack\nfrom pathlib import Path\n"
        "from trainer.lock import locked\nstack = ExitStack()\n"
        "[stack.enter_context(locked(Path(p))) for p in sys.argv[1:]]\n"
        "print('held', flush=True)\ntime.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(run), str(fork)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
        for arguments, directory in (
            (["run", config], run), (["resume", run], run), (["resume", run, "--step", 0, "--into", fork], fork),
        ):  # fmt: skip
            capsys.readouterr()
            assert call(*arguments) == 2
            (line,) = [part for part in capsys.readouterr().err.splitlines() if part.startswith("precgraph-train")]
            assert line.startswith(f"precgraph-train: {directory}: another process trains here")
        assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    finally:
        other.kill()
        other.wait()
    assert call("resume", run) == 0 and len(read_records(run)) == 2


def test_a_run_that_is_named_twice_is_no_second_seed(tmp_path: Path) -> None:
    tiny.settings(tmp_path).save(tmp_path / "config.toml")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "mismatch/max": Infinity}\n')
    assert call("plot", tmp_path, "-o", tmp_path / "curves") == 0
    for command in ("plot", "compare"):
        assert call(command, tmp_path, tmp_path / ".." / tmp_path.name) == 2


def test_debug_shows_where_the_users_own_code_raised(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules["cli_task"].items = lambda size, seed: 1 / 0  # type: ignore[attr-defined]
    for arguments, shown in (([config], False), ([config, "--debug"], True), ([config], False)):
        assert call("run", *arguments) == 2
        error = capsys.readouterr().err
        assert "task.data = 'python:cli_task:items' raised ZeroDivisionError" in error.splitlines()[-1]
        assert ("lambda size, seed: 1 / 0" in error) is shown and ("Traceback" in error) is shown


def test_what_is_no_broken_assertion_does_not_exit_1(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert call("run", config) == 0
    assert call("resume", tmp_path / "run", "--into", tmp_path / "file") == 2  # an OSError
    sys.modules["cli_task"].items = lambda size, seed: 1 / 0  # type: ignore[attr-defined]
    assert call("eval", config) == 2  # an error of the task's own code


def test_a_terminal_that_is_gone_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise InterruptedRunError("interrupted")

    master, slave = os.openpty()
    os.close(master)
    with os.fdopen(slave, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        assert guarded(end) == 130
