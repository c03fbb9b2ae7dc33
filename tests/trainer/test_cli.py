"""The command: run, resume, fork, eval, export, plot, compare, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import torch

from tests.trainer import tiny
from trainer import checkpoint, cli, loop, rollout_vllm
from trainer.changes import FILE
from trainer.cli import UNFINISHED, app, guarded
from trainer.config import load_run
from trainer.errors import InterruptedRunError
from trainer.loop import Trainer
from trainer.metrics import read_records
from trainer.plot import read_runs, rows


def call(*arguments: object) -> int:
    """The exit code, as of the console script."""
    try:
        return guarded(lambda: app([str(a) for a in arguments]))
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


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


def test_a_run_in_parts(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part ends before a step that might take too long; the next one goes on."""
    run = tmp_path / "run"
    assert call("run", config, "--max-seconds", 0) == UNFINISHED
    assert "no step was made: --max-seconds was over once the model was loaded.".replace(" ", "") in _flat(capsys)
    assert checkpoint.steps(run) == [0] and read_records(run) == []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda self, until: setattr(self, "step", 1))
        assert call("resume", run, "--max-seconds", 600) == UNFINISHED == 3
    assert f"1 of 2 steps; go on with: precgraph-train resume {run}".replace(" ", "") in _flat(capsys)
    assert call("resume", run, "--max-seconds", 600) == 0 and checkpoint.steps(run) == [0, 1, 2]
    assert "done" in _flat(capsys)
    assert call("resume", run, "--max-seconds", 0) == 0  # which nothing had to be left for
    assert f"all 2 steps are made; for more: precgraph-train resume {run} --set".replace(" ", "") in _flat(capsys)


def _flat(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_rounded_masters_are_one_note(
    debug: tuple[str, ...], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cli.options, "debug", False)
    described = tmp_path / "policy" / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"dtype": "float16"}))
    assert call(*debug, "run", config, "--dry-run") == 0
    said = capsys.readouterr().err
    (line,) = (line for line in said.splitlines() if "the config says float16" in line)
    assert line.startswith(f"note: {described}: ") and "RoundingWarning" not in said


@pytest.mark.parametrize(("size", "share"), [(10, "40%"), (14, None)])
def test_much_that_is_held_out_is_a_warning(
    size: int, share: str | None, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four items are held out: 40 % or 29 %."""
    assert call("run", config, "--dry-run", "--set", f"task.size={size}") == 0
    said = capsys.readouterr().err
    assert f"{size} items; 4 of them ({400 / size:.0f}%) ask what held-out items ask" in " ".join(said.split())
    warnings = [line for line in said.splitlines() if line.startswith("held-out items take")]
    rest = f"{share} of the items from training: lower eval.items, or name others with eval.data"
    assert warnings == ([f"held-out items take {rest}"] if share else [])


def test_a_life_of_a_run(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert call("run", config, "--dry-run", "--set", "optimizer.lr=2e-3") == 0
    printed = capsys.readouterr()
    assert "lr = 0.002" in printed.out and "consistent" in printed.err and not run.exists()

    names = "--metric-names", "nemo,trl", "--metric-names", "prime"
    assert call("run", config, "--assert", "mismatch/max == 0", *names) == 0
    assert load_run(run).metrics.names == ["nemo", "trl", "prime"]
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
        (["--metric-names", "trl,verll"], "did you mean 'verl'?"),
        (["--set", "model.device=cuda:77"], "cuda"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_2(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert call("run", config, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "precision.arm=mixed", "--assert", "mismatch/max == 0"],
         "which arm 'mixed' does not promise; leave out that --assert, or the file's: --set 'metrics.asserts=[]'"),
        (["--set", "precision.arm=bf16", "--assert", "mismatch_kl/mean <= 0", "--metric-names", "prime"],
         "which arm 'bf16' does not promise"),
        (["--set", "rollout.max_tokens=300"], "exceed the model's context of 256 tokens, this one with 4 tokens and "
                                              "rollout.max_tokens = 300; --set rollout.max_tokens=252 fits"),
        (["--set", "rollout.engine=vllm"], "vLLM is not installed; pip install 'precgraph[vllm]'"),
        (["--set", "rollout.engine=vllm", "--set", "precision.arm=unified"], "vLLM's own block FP8 needs a GPU"),
        (["--set", "rollout.engine=vllm", "--set", "precision.arm=bf16", "--set", "rollout.top_k=5"], "truncated"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_said_before_the_model_is_loaded(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    """And leaves no directory, whose name would be taken."""
    monkeypatch.setattr(loop, "load_policy", lambda table: pytest.fail("the model was loaded"))
    absent = "not installed" in message
    monkeypatch.setattr(rollout_vllm.importlib.util, "find_spec", lambda name: None if absent else name)
    assert call("run", config, *arguments) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_directory_that_is_taken_is_said_before_the_model_is_loaded(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert call("run", config, "--max-seconds", 0) == UNFINISHED
    (run / "metrics.jsonl").write_text('{"step": 0}\n')  # of steps whose checkpoints somebody has removed
    monkeypatch.setattr(loop, "load_policy", lambda table: pytest.fail("the model was loaded"))
    assert call("run", config) == 2
    assert f"{run}: already holds a run; precgraph-train resume {run}" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_run_without_a_step_may_be_started_again(config: Path, tmp_path: Path) -> None:
    """From its own weights, not from those that the first start has saved."""
    assert call("run", config, "--max-seconds", 0) == UNFINISHED
    first = checkpoint.load(tmp_path / "run").weights
    tiny.model(seed=1, layers=1).save_pretrained(tmp_path / "policy")
    assert call("run", config, "--max-seconds", 0) == UNFINISHED
    second = checkpoint.load(tmp_path / "run").weights
    assert not any(torch.equal(second[n], w) for n, w in first.items() if "proj" in n)


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    """Help, and what is wrong with a configuration, in a process that could not import torch."""
    tiny.settings(tmp_path / "run").save(tmp_path / "c.toml")
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom trainer.cli import app, guarded\n"
        "sys.exit(guarded(lambda: app(sys.argv[1:])))\n"
    )
    for arguments, code in (
        (["--help"], 0), (["run", "--help"], 0), (["run", str(tmp_path / "c.toml"), "--set", "run.step=3"], 2),
        (["resume", str(tmp_path / "nope")], 2), (["eval", str(tmp_path / "nope.toml")], 2),
        (["export", str(tmp_path / "nope"), str(tmp_path / "out")], 2),
    ):  # fmt: skip
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_a_broken_assertion_says_how_to_go_on(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume alone would meet it again."""
    run = tmp_path / "run"
    assert call("run", config, "--assert", "response/length > 99") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"saved after 1 steps; go on with: precgraph-train resume {run} --set 'metrics.asserts=[]'" in said
    assert call("resume", run, "--set", "metrics.asserts=[]") == 0 and len(read_records(run)) == 2


@pytest.mark.parametrize("key", ["precision.arm=bf16", "precision.recipe=deepseek", "run.seed=9", "task.size=4"])
def test_a_resumed_run_stays_the_run_that_it_was(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert call("run", config, "--max-seconds", 0) == UNFINISHED
    before = (tmp_path / "run" / "config.toml").read_bytes()
    assert call("resume", tmp_path / "run", "--set", key) == 2
    said = capsys.readouterr().err
    assert f"{key.partition('=')[0]} would change in the middle of the run; fork it: --into NEW_DIRECTORY" in said
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


def test_changed_keys_are_said_and_kept(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config.toml alone would say that all steps were made as the last ones."""
    run, fork = tmp_path / "run", tmp_path / "fork"
    assert call("run", config, "--set", "run.steps=1") == 0 and not (run / FILE).exists()
    capsys.readouterr()
    assert call("resume", run, "--set", "run.steps=2", "--set", "optimizer.lr=2e-3") == 0
    said = capsys.readouterr().err
    assert "from step 1 on: run.steps = 2, before 1\nfrom step 1 on: optimizer.lr = 0.002, before 0.001\n" in said
    first = {"step": 1, "changes": {"run.steps": [1, 2], "optimizer.lr": [0.001, 0.002]}}
    assert [json.loads(line) for line in (run / FILE).read_text().splitlines()] == [first]
    assert load_run(run).optimizer.lr == 2e-3
    assert call("resume", run, "--set", "run.steps=3") == 0
    second = {"step": 2, "changes": {"run.steps": [2, 3]}}
    assert [json.loads(line) for line in (run / FILE).read_text().splitlines()] == [first, second]

    # A fork is compared with the steps that it keeps, and may be of another seed.
    assert call("resume", run, "--step", 1, "--into", fork, "--set", "run.seed=9", "--max-seconds", 0) == UNFINISHED
    changed = {"run.seed": [3, 9], "run.steps": [1, 3], "optimizer.lr": [0.001, 0.002]}
    assert [json.loads(line) for line in (fork / FILE).read_text().splitlines()] == [{"step": 1, "changes": changed}]
    (fork / "metrics.jsonl").unlink()  # its checkpoint alone is one of other steps, it may be
    assert call("resume", run, "--step", 1, "--into", fork) == 2 and "already holds a run" in capsys.readouterr().err
    (fork / FILE).write_text('{"step": 1}\n')
    assert call("resume", fork) == 2 and "is no list of changes" in capsys.readouterr().err


def test_directories_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plot", "compare", "export", "resume"):
        for directory, message in ((tmp_path, "holds no config.toml"), (tmp_path / "none", "no such directory")):
            assert call(command, directory, *([tmp_path / "model"] if command == "export" else [])) == 2
            error = capsys.readouterr().err
            assert f"{directory}: " in error and error.endswith(f"{message}; name a run directory\n")
    assert call("eval", tmp_path) == 2 and "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_assertions_on_what_is_measured_are_taken(config: Path) -> None:
    more = ["--assert", "eval/pass_rate >= 0", "--assert", "gen_kl_error == 0", "--metric-names", "nemo"]
    assert call("run", config, "--dry-run", *more, "--set", "run.eval_every=2") == 0


def test_an_export_replaces_nothing(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers only logs an error for a file, and mixes its files with those that a directory has."""
    assert call("run", config, "--max-seconds", 0) == UNFINISHED
    for taken in (config, config.parent):
        assert call("export", tmp_path / "run", taken) == 2 and "exists already" in capsys.readouterr().err


def test_two_processes_do_not_train_in_one_directory(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is the process's: it is gone when that is killed."""
    run, fork = tmp_path / "run", tmp_path / "fork"
    assert call("run", config, "--max-seconds", 0) == UNFINISHED
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
    for command in (["plot", "--force", "-o", tmp_path / "curves"], ["compare"]):
        assert call(*command, tmp_path, tmp_path / ".." / tmp_path.name) == 2


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_a_plot_replaces_nothing_unless_it_is_told_to(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    tiny.settings(tmp_path / "run").save(tmp_path / "run" / "config.toml")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 1}\n')
    monkeypatch.chdir(tmp_path)
    taken = Path(f"curves.{suffix}")
    taken.write_text("mine")
    for output in ([], ["-o", "curves"], ["-o", "curves.png"]):
        assert call("plot", "run", *output) == 2
        assert f"{taken}: exists already; name another by -o, or add --force" in capsys.readouterr().err
    assert taken.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == [taken.name, "run"]
    assert call("plot", "run", "-o", "others") == 0 and taken.read_text() == "mine"
    assert call("plot", "run", "--force") == 0 and taken.read_bytes()[:4] in (b"\x89PNG", b"<!do")


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


def test_ctrl_c_before_a_run_can_save_is_said(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.loop.load_policy", interrupted)
    assert call("run", config) == 130 and not checkpoint.steps(tmp_path / "run")
    assert capsys.readouterr().err == "precgraph-train: stopped at once; what was saved is whole\n"


def test_a_log_has_whole_lines(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no terminal has no columns to wrap at."""
    assert call("run", config, "--dry-run") == 0
    assert "run.eval_every = 0: nothing is evaluated in the run; precgraph-train eval does it after\n" in (
        capsys.readouterr().err
    )


def test_a_terminal_that_is_gone_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise InterruptedRunError("interrupted")

    master, slave = os.openpty()
    os.close(master)
    with os.fdopen(slave, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        assert guarded(end) == 130
