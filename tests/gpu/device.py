"""Where the kernels' tests run: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter, on small CPU tensors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
KERNELS = [] if INTERPRETED else [pytest.mark.gpu]
"""The marks of a file of tests that run in the interpreter too."""


PINS = Path(__file__).parents[2] / "constraints" / "vllm-cpu.txt"


def require_pinned_triton() -> None:
    """RuntimeError unless the interpreter is that of the Triton whose private names ``interpreter.py`` replaces."""
    import triton

    (pinned,) = re.findall(r"^triton==(\S+)$", PINS.read_text(), re.MULTILINE)
    if triton.__version__ != pinned:
        raise RuntimeError(
            f"tests/gpu/interpreter.py fits the interpreter of triton {pinned}, not of {triton.__version__}: run "
            f"`make test-kernels`, which installs {PINS.parent.name}/{PINS.name}, or fit it to the other and pin that"
        )


def sizes(gpu: T, interpreted: T) -> T:
    """What a test takes on a GPU; what it takes in the interpreter, where a program needs milliseconds."""
    return interpreted if INTERPRETED else gpu


def gpu_only(reason: str) -> pytest.MarkDecorator:
    """Of a test, or a parameter of one, in such a file."""
    return pytest.mark.skipif(INTERPRETED, reason=f"not in Triton's interpreter: {reason}")
