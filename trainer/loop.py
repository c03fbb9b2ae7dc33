"""The loop: rollout, reward, update, sync, record, save.

State changes only in the update and between steps. Whatever happens before the update (a reward that raises, an engine
that dies, Ctrl-C) leaves the state of the step's start, which is then saved: the run can be resumed from there. During
an update and a save, the first Ctrl-C waits. An evaluation begins when its step is saved and recorded.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from precgraph.checkpoint import whole
from precgraph.gguf_files import parsed_once
from trainer import changes, checkpoint, loss
from trainer.alarms import Alarms
from trainer.config import Config
from trainer.errors import ConfigError, InconsistentError, InterruptedRunError, MetricAssertionError, TrainerError
from trainer.lock import locked
from trainer.metrics import (
    Assertion,
    Record,
    Recorder,
    read_records,
    require_attainable,
    require_measured,
    require_seen,
)  # fmt: skip
from trainer.models import device_of, limit_memory, load_description, load_policy, load_tokenizer
from trainer.optim import MasterOptimizer
from trainer.precision import build_pair
from trainer.record import line_of, line_of_evaluation, log_tokens, measure, measure_held_out
from trainer.rollout import Collected, Collector, Rollout, build_rollout, draw, require_engine
from trainer.tasks import Stream, Task, held_out, stop_ids, training
from trainer.update import Result, Updater


class Trainer:
    """A run. ``model`` (a Hugging Face causal language model, bf16), ``tokenizer``, ``task`` and ``rollout`` are what
    the configuration names unless they are given; a ``rollout`` must serve the weights of ``model``.

    Construction loads, compiles and checks everything (InconsistentError, ConfigError, TaskError) and writes nothing.
    """

    def __init__(
        self, config: Config, *, model: Any = None, tokenizer: Any = None, task: Task | None = None,
        rollout: Rollout | None = None, console: Console | None = None,
    ) -> None:  # fmt: skip
        self.config, self.console = config, console or Console(stderr=True)
        self.assertions = [Assertion.parse(text) for text in config.metrics.asserts]
        require_measured(self.assertions, config)
        require_attainable(self.assertions, config)
        self.device = device_of(config.model.device)
        if rollout is None:
            require_engine(config, self.device)
        checkpoint.seed(config.run.seed)
        self.task = task or training(config, self._held_out)
        limit_memory(self.device, config.model.memory)
        with parsed_once():
            self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.model)
            described = load_description(config.model) if model is None else model.config
            context = getattr(described, "max_position_embeddings", None)
            draw(config, self.task, self.tokenizer, Stream(len(self.task.items), config.run.seed), context)
            model = model if model is not None else load_policy(config.model)
        self.pair = build_pair(model.to(self.device), config)
        self.actor = self.pair.actor
        if config.model.checkpointing:
            self.actor.gradient_checkpointing_enable()
        self.rollout = rollout or build_rollout(self.pair, config)
        self._require_one_program()
        self.stops = stop_ids(self.actor.config, getattr(self.actor, "generation_config", None), self.tokenizer)
        self.optimizer = MasterOptimizer(self.actor.named_parameters(), config.optimizer)
        self.updater = Updater(self.pair, self.optimizer, config, self.device)
        self.alarms = Alarms(config.metrics, exact=self.pair.exact)
        self.stream = Stream(len(self.task.items), config.run.seed)
        self.collector = Collector(config, self.rollout, self.task, self.tokenizer, self.stops, self.stream, context)
        self.step = 0
        self._restored = False
        self._interruptible = False
        self._interrupted = False

    # ----------------------------------------------------------------------------------------- run
    def run(self, until: float | None = None) -> None:
        """Train up to ``run.steps``, or as far as whole steps fit before ``until`` on ``time.monotonic``'s clock; saved
        either way. Raises what went wrong, after saving; the message says where to resume. ConfigError if another
        process trains in the run's directory."""
        with locked(self.config.directory):
            self._run(until)

    def _run(self, until: float | None) -> None:
        config, directory = self.config, self.config.directory
        self._prepare()
        recorder = Recorder(directory, config.metrics, self.step, config.to_dict())
        try:
            with self._signals(), self._progress() as show:
                if self.task.note:
                    self.console.print(self.task.note)
                self.save()  # of a run that starts, or forks
                if until is None or time.monotonic() < until:
                    self._evaluate(recorder, show)  # what broke off
                longest = 0.0
                while self.step < config.run.steps and (until is None or time.monotonic() + longest < until):
                    start = time.monotonic()
                    record = self._guarded_step(show)
                    recorder.write(record)
                    self._after(record, show)
                    self._evaluate(recorder, show)
                    longest = max(longest, time.monotonic() - start)
            self.save()
            if self.step >= config.run.steps:
                require_seen(self.assertions, read_records(directory))
        finally:
            recorder.close()
            self.optimizer.close()

    def _prepare(self) -> None:
        """Write the configuration into the run directory, and what of it is new to a run that goes on; a run that
        starts refuses a directory in which another has made a step."""
        config, directory = self.config, self.config.directory
        if self.step == 0 and not self._restored:
            checkpoint.require_free(directory)
            if (stale := checkpoint.path_of(directory, 0)).exists():
                shutil.rmtree(stale)  # of other weights, it may be
            (directory / changes.FILE).unlink(missing_ok=True)
        elif (directory / "config.toml").exists():
            changes.record(directory, self.step, changes.since(directory, self.step, config))
        config.save(directory / "config.toml")

    def _guarded_step(self, show: Any) -> Record:
        """One step; whatever stops it before its update leaves the state of its start, saved."""
        step, position, random, updates = (
            self.step, self.stream.position, checkpoint.random_state(), self.optimizer.steps,
        )  # fmt: skip
        try:
            self._interruptible = True
            if self._interrupted:
                raise KeyboardInterrupt
            return self.train_step(show)
        except BaseException as error:
            self._interruptible = False
            self.optimizer.discard()
            self.stream.position = position
            if self.optimizer.steps != updates:  # in an update, or between two
                self.console.print(
                    "[yellow]this step had begun its update and is not saved; go on from the last checkpoint with: "
                    f"precgraph-train resume {self.config.directory}[/yellow]", soft_wrap=True,
                )  # fmt: skip
                raise
            self.step = step  # it may be past an update that was skipped
            checkpoint.set_random_state(random)
            self.save()
            self._leave(error)

    def _leave(self, error: BaseException) -> NoReturn:
        """Raise what stopped the run in a state that is saved, and say where to go on."""
        if isinstance(error, KeyboardInterrupt):
            raise InterruptedRunError(f"interrupted; {self._resumable()}") from None
        if isinstance(error, TrainerError | RuntimeError):
            self.console.print(f"[yellow]{self._resumable()}[/yellow]")
        raise error

    def _after(self, record: Record, show: Any) -> None:
        """Alarms, assertions and the periodic checkpoint."""
        every = self.config.run.save_every
        for alarm in record["alarms"]:
            self.console.print(f"[yellow]step {record['step']}: {alarm}[/yellow]")
        self._require(record)
        if every and self.step % every == 0:
            show("saving")
            self.save()

    def _require(self, record: Record) -> None:
        """MetricAssertionError, with the state saved, if the record breaks an assertion."""
        try:
            for assertion in self.assertions:
                assertion.check(record)
        except MetricAssertionError as error:
            self.save()
            error.remedy = f"{self._resumable()} --set 'metrics.asserts=[]', or with what it should assert"
            raise

    def _evaluate(self, recorder: Recorder, show: Any) -> None:
        """The evaluation that is due after the last step, if its record lacks it. Whatever happens in it, the step is
        saved; a run that is resumed begins with it."""
        every, last = self.config.run.eval_every, recorder.last
        if not every or self.step % every or last.get("step") != self.step - 1 or "eval/pass_rate" in last:
            return
        show("eval")
        self.save()
        try:
            self._interruptible = True
            if self._interrupted:
                raise KeyboardInterrupt
            record = {"step": last["step"], **self.evaluate()}
            self._interruptible = False
        except BaseException as error:
            self._interruptible = False
            self._leave(error)
        recorder.write(record)
        show(None, line=line_of_evaluation(record))
        self._require(record)

    def _resumable(self) -> str:
        return f"saved after {self.step} steps; go on with: precgraph-train resume {self.config.directory}"

    # ---------------------------------------------------------------------------------------- step
    def train_step(self, show: Any = lambda *_, **__: None) -> Record:
        """One whole step: collect, score, update, sync; returns its record. ``step`` advances."""
        begin = time.perf_counter()
        version = int(self.actor.precgraph.store.version)
        self._require_one_program()
        self.rollout.wake()
        collected = self.collector.collect(self.step, version, note=show)
        rolled = time.perf_counter() - begin
        self.rollout.sleep()
        advantages, kept = self._credit(collected)
        result = Result.empty(self.device)
        if collected.samples:
            result = self.updater.prepare(collected.samples, show)
            self._interruptible = False
            self.updater.update(collected.samples, advantages, kept, result, show)
        self._interruptible = False
        result.seconds |= {"rollout": rolled, "step": time.perf_counter() - begin}
        record = measure(self, collected, result, version)
        if self.config.metrics.log_tokens:
            log_tokens(self, collected, result, version)
        self.step += 1
        record["alarms"] = self.alarms.check(record)
        show(None, line=line_of(record))
        return record

    def _require_one_program(self) -> None:
        """InconsistentError if the engine of an exact run serves another program than the trainer's."""
        if self.pair.exact and self.rollout.digest != self.pair.digest and not self.config.precision.allow_mismatch:
            raise InconsistentError(
                f"the engine runs the program {self.rollout.digest[:16]}, the trainer {self.pair.digest[:16]}",
                remedy="build both from one model, recipe and backend, or set precision.allow_mismatch = true",
            )

    def _credit(self, collected: Collected) -> tuple[torch.Tensor, list[bool]]:
        """The advantage of each sample, and whether its tokens count in the loss."""
        table, count = self.config.algorithm, self.config.rollout.samples
        rewards = torch.tensor(collected.rewards, dtype=torch.float64).reshape(-1, count)
        flat = torch.zeros_like(rewards)
        if table.overlong == "penalty":
            lengths = torch.tensor([len(s.tokens) for s in collected.samples]).reshape(-1, count)
            flat = loss.overlong_penalty(
                lengths, self.config.rollout.max_tokens, table.overlong_buffer, table.overlong_penalty
            )
        values = loss.advantages(rewards - flat, table.advantages).flatten().float()
        alike = loss.degenerate(rewards - flat).repeat_interleave(count).tolist()
        kept = [
            not (table.overlong == "mask" and s.truncated) and not (table.zero_spread == "drop" and a)
            for s, a in zip(collected.samples, alike, strict=True)
        ]
        return values.to(self.device), kept

    # ------------------------------------------------------------------------------------ evaluate
    @torch.no_grad()
    def evaluate(self) -> Record:
        """Held-out items: ``eval/pass_rate``, ``eval/reward``, ``eval/length``, and ``eval/too_long``, how many were
        left out because the model's context has no room for their prompt and response; TaskError if all were.

        What is drawn follows from ``eval.seed``: the run's own streams stay as they are."""
        task = self._held_out
        with self._seeded():
            return measure_held_out(self, task)

    @cached_property
    def _held_out(self) -> Task:
        """Made once: what is left out of the training items and what is asked are the same, whatever draws them."""
        with self._seeded():
            return held_out(self.config)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Every generator as ``eval.seed`` makes it; afterwards as it was."""
        state = checkpoint.random_state()
        checkpoint.seed(self.config.eval.seed)
        try:
            yield
        finally:
            checkpoint.set_random_state(state)

    # --------------------------------------------------------------------------------------- state
    def save(self) -> Path:
        """Write the checkpoint of the steps that are done, unless it is there."""
        interruptible, self._interruptible = self._interruptible, False
        state = checkpoint.State(
            step=self.step, position=self.stream.position, weights_version=int(self.actor.precgraph.store.version),
            optimizer_steps=self.optimizer.steps, digest=self.pair.digest, trends=self.alarms.state(),
            weights={n: p.detach() for n, p in self.actor.named_parameters()}, optimizer=self.optimizer.state_dict(),
            random=checkpoint.random_state(),
        )  # fmt: skip
        path = checkpoint.save(self.config.directory, state, keep=self.config.run.keep)
        self._interruptible = interruptible
        return path

    @torch.no_grad()
    def restore(self, directory: Path, step: int | None = None) -> None:
        """Take over the state of a checkpoint. ConfigError if it is of another model."""
        state = checkpoint.load(directory, step)
        parameters = dict(self.actor.named_parameters())
        shapes = {n: tuple(p.shape) for n, p in parameters.items()}
        if shapes != {n: tuple(t.shape) for n, t in state.weights.items()}:
            raise ConfigError(
                "the checkpoint is of another model", path=str(directory), remedy="keep model.path and model.layers"
            )
        if state.digest != self.pair.digest:
            self.console.print(
                "[yellow]the program is not the one that was saved: other recipe, kernels or versions[/yellow]"
            )
        for name, parameter in parameters.items():
            parameter.copy_(state.weights[name])
        self.optimizer.load_state_dict(state.optimizer, state.optimizer_steps)
        self.actor.sync()
        self.actor.precgraph.store.version = state.weights_version
        self.step, self.stream.position = state.step, state.position
        self._restored = True
        self.alarms.load(state.trends)
        checkpoint.set_random_state(state.random)

    def export(self, directory: Path) -> None:
        """Write the weights, config and tokenizer as a Hugging Face model directory, whole or not at all. InputError if
        it holds something already, or cannot be written."""
        with whole(directory) as folder:
            self.actor.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    # ------------------------------------------------------------------------------------- outside
    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C, SIGTERM or SIGHUP stops the run where its state is whole; a second one stops it at once,
        but for SIGHUP, which a closed terminal sends more than once. Under nohup that stops nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]

        def stop(number: int, frame: Any) -> None:
            if number == signal.SIGHUP:
                self.console.quiet = True  # the terminal is gone: writing to it would be an error
                if self._interrupted:
                    return
            if self._interrupted or self._interruptible:
                self._interrupted = True
                raise KeyboardInterrupt
            self._interrupted = True  # the bar says so: what is interrupted here may hold the console's lock

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[phase]}", table_column=Column()),  # a long one wraps
        )  # fmt: skip
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(self.config.run.name, total=self.config.run.steps, completed=self.step, phase="")

            def show(phase: str | None, line: str | None = None) -> None:
                if self._interrupted:
                    phase = "stopping once the update is whole; Ctrl-C again stops at once"
                try:
                    bar.update(task, completed=self.step, phase=phase or "")
                    if line is not None:
                        bar.console.print(line, soft_wrap=True, highlight=False)
                except OSError:
                    if not self.console.quiet:  # else the terminal has gone while this was written
                        raise

            yield show
