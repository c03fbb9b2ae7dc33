"""The process in which responses meet a library's verifier: a script that :mod:`trainer.rewards` starts.

What a response says may take sympy for ever, or all memory (``9^{9^{9^9}}``), and no exception gets through to one
power of integers. Here the kernel ends the process instead; whoever started it sees it end, and starts another.

Values come in on stdin from that process alone, pickled: tuples and the like in a source's entry stay what they are. A
line of JSON goes out for each: first (name, arguments), answered by null, then the verifier's arguments, answered by
its score. A string says what it raised.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MEMORY = 4 << 30  # bytes of addresses; the libraries take an eighth of it


def math_verify() -> Callable[[str, str], bool]:
    """Whether math-verify finds two texts equal. Its own timeouts are exceptions, which come when the power is done."""
    from math_verify import parse, verify

    def equal(gold: str, given: str) -> bool:
        found = (parse(text, parsing_timeout=None) for text in (gold, given))
        return bool(verify(*found, timeout_seconds=None))

    equal("$1$", "$1$")  # what is loaded on first use is not the first response's to pay for
    return equal


def reasoning_gym(family: str, seed: int, size: int, params: dict[str, Any]) -> Callable[[str, dict[str, Any]], float]:
    """The score that a family gives an answer to one of its entries."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(family, seed=seed, size=size, **params)
    return lambda answer, entry: float(dataset.score_answer(answer=answer, entry=entry))


def main(seconds: float) -> None:
    """Serve until stdin ends; a request that takes more than ``seconds`` of the CPU is the last."""
    replies, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not answer
    with suppress(ValueError, OSError):  # a tighter limit holds already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def answer(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = reply = function(*arguments)
        except Exception as error:
            result, reply = None, " ".join(f"raised {type(error).__name__}: {error}".split())
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(None if callable(reply) else reply), file=replies, flush=True)
        return result

    def request() -> Any:
        return pickle.load(sys.stdin.buffer)

    name, arguments = request()
    makers: dict[str, Callable[..., Any]] = {"math_verify": math_verify, "reasoning_gym": reasoning_gym}
    verifier = answer(lambda: makers[name](**arguments))
    with suppress(EOFError):
        while True:
            arguments = request()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer(verifier, *arguments)


if __name__ == "__main__":
    main(float(sys.argv[1]))
