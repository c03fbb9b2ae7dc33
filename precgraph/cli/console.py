"""What the commands share: errors as one line, progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

from precgraph.errors import InputError, PrecGraphError, RoundingWarning

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
D = TypeVar("D")
_NO_MEMORY = "can't allocate memory"  # torch's words on a CPU, in a plain RuntimeError
_VERBOSITY = "TRANSFORMERS_VERBOSITY"
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")]
_GONE = 141  # 128 + SIGPIPE
_CHECKPOINT = ("*config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "*.gguf")  # of its directory
PIPED_WIDTH = 160  # columns of a table that goes to a file or a pipe
_BESIDE = 10  # columns of a spinner and a clock, with a space each


@dataclass
class Settings:
    """Options that come before the command."""

    debug: bool = False


settings = Settings()


class Group(TyperGroup):
    """The commands of a program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``--debug`` is accepted after the command too. What is no text (bytes of another encoding) is refused: it
        could be named in no report."""
        for word in args:
            if any("\ud800" <= c <= "\udfff" for c in word):
                raise typer.BadParameter(f"a name that is not UTF-8: {word!a}")
        if "--debug" in args:
            args = ["--debug", *(a for a in args if a != "--debug")]
        return super().parse_args(ctx, args)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Errors become one red line on stderr and exit code 2; with ``--debug`` the traceback comes first.

    Libraries' warnings and log messages are kept off the screen (never their errors) unless ``--debug`` is given; a
    RoundingWarning is a line on stderr.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _quiet():
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except PrecGraphError as error:
            _fail(str(error))
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except Exception as error:
            if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or _NO_MEMORY in str(error):
                _fail("out of memory; take fewer tokens, a smaller model or a larger machine")
            # 1 would say "inconsistent", and a bug says nothing about that.
            _fail(f"internal error, {type(error).__name__}: {error}; please report it with the output of --debug")

    return run


def _fail(message: str) -> None:
    from rich.markup import escape

    if settings.debug:
        traceback.print_exc()
    line = " ".join(message.split())
    console(stderr=True).print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


@contextmanager
def _quiet() -> Iterator[None]:
    # At its level info, transformers shows its bars (precgraph.loading.quietly).
    names = ("transformers",) if settings.debug else ("torch", "transformers", "huggingface_hub")
    verbosity = "info" if settings.debug else "error"
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(verbosity.upper())
    wanted = os.environ.get(_VERBOSITY)
    os.environ.setdefault(_VERBOSITY, verbosity)  # transformers sets its own level when it is first imported
    try:
        with warnings.catch_warnings():
            if not settings.debug:
                warnings.simplefilter("ignore")
            with noting():
                yield
    finally:
        if wanted is None:
            os.environ.pop(_VERBOSITY, None)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def noting() -> Iterator[None]:
    """Inside, a RoundingWarning, precgraph's own, is one line on stderr, ``note: ...``, once for each text whatever the
    filters are. Other warnings are shown as before; the filters are as they were when it ends."""
    said: set[str] = set()

    def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, RoundingWarning):
            show(message, category, *where, **more)
        elif (line := " ".join(str(message).split())) not in said:
            said.add(line)
            typer.echo(f"note: {line}", err=True)

    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.simplefilter("always", RoundingWarning)
        warnings.showwarning = shown
        yield


@contextmanager
def ending_with_its_reader() -> Iterator[None]:
    """Around a whole program: one whose output nobody reads any more (``| head -1``) ends as SIGPIPE would end it,
    silently and with exit code 141. Any other would be taken for a verdict."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        if not came_of(end, BrokenPipeError):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())  # what is left in the buffers
        raise SystemExit(_GONE) from None


def came_of(error: BaseException | None, cause: type[BaseException]) -> bool:
    """Whether ``cause`` is behind an exit: rich and typer make exit code 1 of a broken pipe, typer 130 of Ctrl-C."""
    return error is not None and (isinstance(error, cause) or came_of(error.__context__, cause))


# ------------------------------------------------------------------------------------------ output


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; tables that are not on a terminal get room."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH)


@contextmanager
def progress(out: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A spinner and a clock on ``out`` (stderr), if that is a terminal; call the result with what is being done now."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
    out = out or console(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("", total=None)
        # A text that is wider than the line would push spinner and clock off it: what takes minutes would stand still.
        yield lambda text: bar.update(task, description=_shortened(text, out.width - _BESIDE))


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def write_json(data: Any, path: Path | None = None) -> None:
    """Write JSON to a file, or to stdout."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        write_file(path, text)


def write_result(data: D, as_json: bool, output: Path | None, show: Callable[[D], None]) -> None:
    """Write a result as JSON to ``output`` if that is named; print it as JSON, or as ``show`` does."""
    if output is not None:
        write_json(data, output)
    if as_json:
        write_json(data)
    else:
        show(data)


def require_place(*paths: Path | None, reads: Iterable[str | Path | None] = ()) -> None:
    """InputError for a file that cannot be written anyway, or that is among what the command ``reads`` (files,
    checkpoints' directories, STACK:CONFIG): said before the work, not after it."""
    specs = [part for spec in map(str, filter(None, reads)) for part in (spec, spec.partition(":")[2]) if part]
    read = {os.path.realpath(part) for part in specs}
    for path in paths:
        if path is not None and _is_read(os.path.realpath(path), read):
            raise InputError("is read, and would be written over", path=str(path), remedy="name another file")
        if path is not None and str(path) == "-":
            raise InputError("- is no file", remedy="--json prints JSON to stdout")
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError("cannot be written", path=str(path), remedy="name a file in a folder that exists")


def _is_read(path: str, read: set[str]) -> bool:
    """Whether a file is one of ``read``, or one of those that make up a checkpoint in a directory of ``read``."""
    folder, name = os.path.split(path)
    return path in read or (folder in read and any(fnmatch(name, pattern) for pattern in _CHECKPOINT))


def write_file(path: Path, text: str) -> None:
    """Write a text file; InputError where that is impossible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", path=str(path), remedy="name a file in a folder that exists"
        ) from None


def choose(option: str, value: str, allowed: tuple[str, ...]) -> str:
    """``value`` if it is allowed; InputError with the nearest one if not."""
    if value not in allowed:
        import difflib

        close = difflib.get_close_matches(value, allowed, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise InputError(f"{option} {value!r} is not one of {', '.join(allowed)}{hint}")
    return value
