"""What a response is worth by the verifiers that come with the trainer: equal text, math-verify, reasoning-gym's own.

Scorers get an item and a response's text. No response stops a run: one that a verifier cannot read, or is too slow for,
scores 0, and the log says so once.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import TaskError

if TYPE_CHECKING:
    from trainer.tasks import Item

Scorer = Callable[["Item", str], float]
SECONDS = 5.0  # of the CPU, for one response: the load of the machine does not decide a reward

_log = logging.getLogger(__name__)
_LATEX_BOX = "\\boxed{"
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?"  # after a digit, a letter or a bracket it is a minus between two things
    r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+(?!\.?[0-9]))?"
    r"|(?<![\w.])\.[0-9]+)"
)


def extract(response: str, where: str) -> str:
    """The answer in a response; empty if absent.

    ``whole`` and ``last_line`` are stripped; ``tag`` is the last ``<answer>...</answer>``, ``boxed`` the last
    ``\\boxed{...}``. ``last_number`` is a whole number, a decimal (``.5`` is 0.5) or a fraction (``1/2``), without its
    thousands separators: commas before groups of three digits, so that ``5,6`` are two numbers. A hyphen or U+2212
    right before it is its sign, unless a letter, a digit or a closing bracket comes before that: ``2-3`` ends with 3.
    """
    if where == "whole":
        return response.strip()
    if where == "last_line":
        return next((line.strip() for line in reversed(response.splitlines()) if line.strip()), "")
    if where == "tag":
        found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        return str(found[-1]).strip() if found else ""
    if where == "boxed":
        return _boxed(response)
    numbers = _NUMBER.findall(response)
    return _plain(numbers[-1]) if numbers else ""


def _plain(number: str) -> str:
    number = number.replace(",", "").replace("\u2212", "-")
    return re.sub(r"^(-?)\.", r"\g<1>0.", number)


def _boxed(text: str) -> str:
    start = text.rfind(_LATEX_BOX)
    if start < 0:
        return ""
    depth, begin = 1, start + len(_LATEX_BOX)
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return ""


# ----------------------------------------------------------------------------------------- scorers


def exact_scorer(where: str) -> Scorer:
    """1 if the answer is the reference, as text."""
    return lambda item, response: float(extract(response, where) == item.answer.strip())


def math_scorer(where: str) -> Scorer:
    """1 if math-verify finds the answer equal to the reference. TaskError if it is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise TaskError("math-verify is not installed", remedy="pip install 'precgraph[trainer]'")
    verifier = Verifier("math_verify")

    def score(item: Item, response: str) -> float:
        answer = extract(response, where)
        if not answer:
            return 0.0
        return verifier.score(item, f"${item.answer}$", answer if where == "whole" else f"${answer}$")

    return score


def family_scorer(where: str, **arguments: Any) -> Scorer:
    """What a family of reasoning-gym gives; ``arguments`` make the dataset: family, seed, size and params."""
    verifier = Verifier("reasoning_gym", **arguments)
    return lambda item, response: verifier.score(item, extract(response, where), dict(item.entry))


class Verifier:
    """A verifier of ``trainer/verifier.py`` in a process of its own, started for the first response and again after one
    that has ended it."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self._name, self._arguments = name, arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()
        self._told = False

    def score(self, item: Item, *request: Any) -> float:
        """The verifier's score; 0 for what it raises at or takes too long for. TaskError if it cannot be started."""
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process = self._start()
                reply = _ask(self._process, request)
            except BaseException:
                self._end()  # what it would answer now is not the next one's answer
                raise
        if not isinstance(reply, str):
            return float(reply)
        if not self._told:
            _log.warning(
                "%s: a response scores 0, for %s %s; further ones are not mentioned", item.id, self._name, reply
            )
            self._told = True
        return 0.0

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("verifier.py")), str(SECONDS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | settings,
            start_new_session=True,  # Ctrl-C is for the run alone
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, process)
        reply = _ask(process, (self._name, self._arguments))
        if reply is not None:
            raise TaskError(f"the verifier {self._name} does not start: it {reply}", remedy="set task.reward")
        return process


def _ask(process: subprocess.Popen[bytes], value: Any) -> Any:
    """What a verifier's process answers, or, if that is a string, why it does not."""
    assert process.stdin and process.stdout
    process.stdin.write(pickle.dumps(value))
    process.stdin.flush()
    if line := process.stdout.readline():
        return json.loads(line)
    code = process.wait()
    return f"took more than {SECONDS:g} s" if code == -signal.SIGPROF else f"ended with code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
