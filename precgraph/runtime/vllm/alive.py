"""Engines in processes of their own may die at any moment, and vLLM would wait for their answers for ever; an engine
answers one caller at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, Concatenate, ParamSpec, TypeVar

from precgraph.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
SECONDS = 1.0  # between two looks at the processes


def in_this_process(core: Any) -> bool:
    """Whether the engine of ``core``, vLLM's client of it, has no processes of its own."""
    return not hasattr(core, "ensure_alive")


def answered(core: Any, call: Callable[[], Any]) -> Any:
    """``call()``, unless the processes of the engine die: then the error of that."""
    if in_this_process(core):
        return call()
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()  # a daemon: after a death it never ends
    while not wait([answer], timeout=SECONDS).done:
        core.ensure_alive()
    return answer.result()


@contextmanager
def deaths_end_steps(core: Any) -> Iterator[None]:
    """Inside, a step that is waited for ends with an error when the engine's processes die.

    Not by another thread that steps, as above: after Ctrl-C it would go on stepping.
    """
    if in_this_process(core):
        yield
        return
    over = Event()

    def look() -> None:
        while not over.wait(SECONDS):
            try:
                core.ensure_alive()
            except Exception as error:
                core.outputs_queue.put_nowait(error)  # from where the client raises it
                return

    Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def one_at_a_time(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method that other threads may not enter meanwhile, nor another such method: InputError for them."""

    @functools.wraps(call)
    def alone(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._turn.acquire(blocking=False):
            raise InputError(
                f"{call.__name__}() while another thread is in generate() or sync()", remedy="call one after the other"
            )
        try:
            return call(self, *args, **kwargs)
        finally:
            self._turn.release()

    return alone
