"""Engines in processes of their own may die at any moment; vLLM would wait for their answers for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

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
