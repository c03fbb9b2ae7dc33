"""The command ``precgraph-train``: run, resume, eval, export, plot, compare. Nothing here imports torch before a
command has checked what it can without, so that help and errors of a configuration are instant.

Exit codes: 0 done, 1 an assertion on a metric was broken, 2 could not run, 3 ``--max-seconds`` ended a run or resume
before its last step, 130 interrupted by Ctrl-C, SIGTERM or SIGHUP (both with the state saved).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from precgraph.cli.console import Debug, Group, came_of, ending_with_its_reader, noting, progress
from precgraph.cli.console import console as console_on
from precgraph.cli.console import settings as options
from precgraph.errors import PrecGraphError
from trainer.changes import FILE, Changes, require_same_run, since
from trainer.config import Config, load, load_run
from trainer.errors import ConfigError, InputError, InterruptedRunError, MetricAssertionError

LEFT_OUT = 0.3  # of the items: above that, what is held out is told as a warning
UNFINISHED = 3  # so that a loop of a shell knows a run that goes on from one that is done, or failed

app = typer.Typer(
    cls=Group, name="precgraph-train", help="Train a language model by GRPO, with the rollout's numbers in the update.",
    epilog="Exit codes: 0 done, 1 an assertion was broken, 2 could not run, 3 --max-seconds ended it before its last "
    "step, 130 interrupted.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set a key of the configuration.")]
Asserts = Annotated[
    list[str] | None,
    typer.Option(
        "--assert",
        metavar="EXPR",
        help="Stop with exit code 1 when broken: 'mismatch/max == 0'. In place of the file's.",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--metric-names", metavar="NAME,...",
        help="Log the mismatch under these names too: trl, verl, nemo, prime. In place of the file's.",
    ),
]  # fmt: skip
Seconds = Annotated[
    float | None,
    typer.Option(
        "--max-seconds", min=0.0,
        help="Stop, saved, before the first step that might end later than this; exit code 3 if steps are left.",
    ),
]  # fmt: skip


@app.callback()
def _options(debug: Debug = False) -> None:
    options.debug = debug


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    settings: Settings = None,
    asserts: Asserts = None,
    metric_names: Names = None,
    max_seconds: Seconds = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Resolve, load, check both programs, print, stop.")
    ] = False,
) -> None:
    """Start a run."""
    until = _until(max_seconds)
    resolved = load(config, [*(settings or []), *_more(asserts, metric_names)])
    console = console_on(stderr=True)
    with _showing(console, "starting torch"):
        from trainer import checkpoint
        from trainer.lock import locked
        from trainer.loop import Trainer

    with _screen(), nullcontext() if dry_run else locked(resolved.directory):
        if not dry_run:
            checkpoint.require_free(resolved.directory)
        with _showing(console, f"loading and compiling {resolved.model.path}"):
            trainer = Trainer(resolved, console=console)
        _explain(console, trainer)
        if dry_run:
            typer.echo(_toml(resolved))
            console.print(f"{trainer.task.note}\na dry run: nothing was started, and nothing written")
        else:
            _train(console, trainer, until)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="Go back to the checkpoint of this step; needs --into.")] = None,
    into: Annotated[Path | None, typer.Option(help="Fork: go on in this new run directory.")] = None,
    settings: Settings = None,
    asserts: Asserts = None,
    metric_names: Names = None,
    max_seconds: Seconds = None,
) -> None:
    """Go on with a run from its last checkpoint, or fork it from an earlier one."""
    until, target = _until(max_seconds), into or directory
    changed = [*(settings or []), *_more(asserts, metric_names), f"run.dir={json.dumps(str(target))}"]
    resolved, console = load_run(directory, changed), console_on(stderr=True)
    with _showing(console, "starting torch"):
        from trainer import checkpoint
        from trainer.lock import locked
        from trainer.loop import Trainer

    checkpoint.find(directory, step)  # before a directory is made
    with _screen(), locked(target):
        last = checkpoint.load(directory, step).step
        if step is not None and step != checkpoint.steps(directory)[-1] and into is None:
            raise ConfigError(
                f"step {step} is not the last checkpoint, and going on from it would overwrite what follows",
                path=str(directory), remedy="fork it: --into NEW_DIRECTORY",
            )  # fmt: skip
        if into is not None and ((into / "metrics.jsonl").exists() or checkpoint.steps(into)):
            raise ConfigError("already holds a run", path=str(into), remedy="name a new directory for the fork")
        changes = since(directory, last, resolved)
        if into is None:
            require_same_run(changes, directory)
        _tell_changes(console, changes, last)
        with _showing(console, f"loading and compiling {resolved.model.path}"):
            trainer = Trainer(resolved, console=console)
            trainer.restore(directory, last)
        if into is not None:
            _fork_records(directory, into, last)
        _explain(console, trainer)
        console.print(f"resuming after {trainer.step} steps")
        _train(console, trainer, until)


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(help="A run directory, or a TOML file to evaluate its model as it is.")],
    step: Annotated[int | None, typer.Option(help="Evaluate the checkpoint of this step instead of the last.")] = None,
    settings: Settings = None,
) -> None:
    """Pass rate on held-out items, as JSON on stdout."""
    is_run = target.is_dir()
    resolved = load_run(target, settings or []) if is_run else load(target, settings or [])
    console = console_on(stderr=True)
    with _showing(console, "starting torch"):
        from trainer.loop import Trainer

    with _screen():
        with _showing(console, f"loading and compiling {resolved.model.path}"):
            trainer = Trainer(resolved, console=console)
            if is_run:
                trainer.restore(target, step)
        with _showing(console, "sampling"):
            typer.echo(json.dumps({"step": trainer.step, **trainer.evaluate()}))


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    output: Annotated[Path, typer.Argument(help="Where the Hugging Face model goes.")],
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step instead of the last.")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face directory: weights, config and tokenizer."""
    resolved, console = load_run(directory), console_on(stderr=True)
    with _showing(console, "starting torch"):
        from precgraph.checkpoint.whole import require_new
        from trainer.loop import Trainer

    require_new(output)
    with _screen(), _showing(console, f"loading and compiling {resolved.model.path}"):
        trainer = Trainer(resolved)
        trainer.restore(directory, step)
        trainer.export(output)
    typer.echo(f"step {trainer.step}: {output}")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Both .png and .html are written.")] = Path("curves"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files.")] = False,
) -> None:
    """Reward, length, entropy and mismatch of runs on one page, as PNG and self-contained HTML."""
    from trainer.plot import plot_runs, targets

    taken = next((path for path in targets(output) if path.exists()), None)
    if taken and not force:
        raise InputError("exists already", path=str(taken), remedy="name another by -o, or add --force")
    for path in plot_runs(runs, output):
        typer.echo(str(path))


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(help="Run directories.")]) -> None:
    """Final values of runs, seeds of one configuration together with their spread."""
    from precgraph.cli.console import console
    from trainer.plot import summary

    out = console()
    out.print(summary(runs, out.width))


# ------------------------------------------------------------------------------------------ helpers


def _more(asserts: list[str] | None, names: list[str] | None) -> list[str]:
    out = []
    if asserts:
        out.append(f"metrics.asserts={json.dumps(asserts)}")
    if names:
        split = [name.strip() for each in names for name in each.split(",")]
        out.append(f"metrics.names={json.dumps(split)}")
    return out


def _until(seconds: float | None) -> float | None:
    """The moment at which a command that starts now has run for so long."""
    return None if seconds is None else time.monotonic() + seconds


@contextmanager
def _showing(console: Console, what: str) -> Iterator[None]:
    """A clock beside what takes a while."""
    with progress(console) as show:
        show(what)
        yield


@contextmanager
def _screen() -> Iterator[None]:
    """Libraries' bars kept off the screen, on which those of saving would run through the trainer's own; with
    ``--debug``, what they say on it. precgraph's warnings are notes of one line."""
    from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_info

    from precgraph.loading import quietly

    if not options.debug:
        with quietly(), noting():
            yield
        return
    before = get_verbosity()
    set_verbosity_info()  # type: ignore[no-untyped-call]
    try:
        with noting():
            yield
    finally:
        set_verbosity(before)


def _train(console: Console, trainer: Any, until: float | None) -> None:
    """Run it, and say what to do next; typer.Exit with ``UNFINISHED`` if steps are left."""
    before = trainer.step
    trainer.run(until)
    directory, wanted = trainer.config.directory, trainer.config.run.steps
    if before >= wanted:
        console.print(f"nothing left to do: all {wanted} steps are made; for more: "
                      f"precgraph-train resume {directory} --set run.steps=N", soft_wrap=True)  # fmt: skip
    elif trainer.step >= wanted:
        console.print(f"done: {directory}")
    elif trainer.step > before:
        console.print(f"{trainer.step} of {wanted} steps; go on with: precgraph-train resume {directory}")
    else:
        console.print(f"[yellow]no step was made: --max-seconds was over once the model was loaded. Give it more, or "
                      f"this goes on for ever[/yellow]; still {before} of {wanted} steps: precgraph-train resume "
                      f"{directory}")  # fmt: skip
    if trainer.step < wanted:
        raise typer.Exit(UNFINISHED)


def _tell_changes(console: Console, changes: Changes, step: int) -> None:
    for key, (before, after) in changes.items():
        text = f"from step {step} on: {key} = {after!r}, before {before!r}"
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _toml(config: Config) -> str:
    import tomlkit

    return tomlkit.dumps(config.to_dict())


def _explain(console: Console, trainer: Any) -> None:
    """What will run, and whether it is one policy."""
    pair, config = trainer.pair, trainer.config
    count = sum(p.numel() for p in trainer.actor.parameters())
    console.print(
        f"{type(trainer.actor).__name__}, {count / 1e6:.1f} M parameters on {trainer.device}; {trainer.task.name}"
    )
    console.print(f"arm [bold]{config.precision.arm}[/bold]: trains {pair.actor.precgraph.recipe.name}, "
                  f"rolls out {pair.program.precgraph.recipe.name}")  # fmt: skip
    console.print(verdict(pair, config), soft_wrap=True)
    if not config.run.eval_every:
        console.print(
            "run.eval_every = 0: nothing is evaluated in the run; precgraph-train eval does it after", highlight=False
        )
    if trainer.task.left_out > LEFT_OUT:
        console.print(f"[yellow]held-out items take {trainer.task.left_out:.0%} of the items from training: lower "
                      "eval.items, or name others with eval.data[/yellow]", soft_wrap=True)  # fmt: skip
    if not trainer.stops:
        console.print("[yellow]the model has no end token: every response runs to rollout.max_tokens[/yellow]")


def verdict(pair: Any, config: Config) -> str:
    """What the check says of both programs, and what that lets expect of their log-probabilities."""
    found = str(pair.report).splitlines()[0]
    if pair.exact:
        return f"{found}\none program, digest {pair.digest[:16]}: log-probabilities must be equal bit for bit"
    why = "precision.allow_mismatch" if config.precision.allow_mismatch else f"arm {config.precision.arm}"
    if pair.report.ok:  # what it compares is alike, and yet they are not exact
        same = pair.program.precgraph.digest == pair.digest
        found = "one program, but kernels whose bits depend on the batch" if same else "two programs of other digests"
    return f"{found}\n[yellow]allowed by {why}: log-probabilities may differ, watch them[/yellow]"


def _fork_records(source: Path, target: Path, step: int) -> None:
    from trainer.files import replace_text
    from trainer.metrics import read_records

    target.mkdir(parents=True, exist_ok=True)
    kept = [json.dumps(r) for r in read_records(source) if r["step"] < step]
    for name in (FILE, "config.toml"):  # what the fork's first step is compared with
        if (source / name).exists():
            replace_text(target / name, (source / name).read_text(encoding="utf-8"))
    replace_text(target / "metrics.jsonl", "".join(f"{line}\n" for line in kept))


def guarded(command: Callable[[], Any]) -> int:
    """Run a command; errors that have a name become one line and an exit code."""
    try:
        command()
    except (PrecGraphError, OSError) as error:  # a full disk, a folder that is none
        if options.debug:
            traceback.print_exc()
        _tell(error)
        return 130 if isinstance(error, InterruptedRunError) else 1 if isinstance(error, MetricAssertionError) else 2
    except Exception:  # 1 would say that an assertion was broken
        traceback.print_exc()
        return 2
    except (KeyboardInterrupt, SystemExit) as end:  # typer makes an exit of Ctrl-C, without a word
        if not came_of(end, KeyboardInterrupt):
            raise
        _tell("stopped at once; what was saved is whole")
        return 130
    return 0


def _tell(text: object) -> None:
    """A line on stderr. Where the terminal is gone nobody reads it, and the exit code stays what it is."""
    try:
        print(f"precgraph-train: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what is left in the buffer


def main() -> NoReturn:
    """The console script."""
    with ending_with_its_reader():
        raise SystemExit(guarded(lambda: app(standalone_mode=True)))


if __name__ == "__main__":
    main()
