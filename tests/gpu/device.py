"""Where the kernels' tests run: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter, on small CPU tensors."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
KERNELS = [] if INTERPRETED else [pytest.mark.gpu]
"""The marks of a file of tests that run in the interpreter too."""


def sizes(gpu: T, interpreted: T) -> T:
    """What a test takes on a GPU; what it takes in the interpreter, where a program needs milliseconds."""
    return interpreted if INTERPRETED else gpu


def gpu_only(reason: str) -> pytest.MarkDecorator:
    """Of a test, or a parameter of one, in such a file."""
    return pytest.mark.skipif(INTERPRETED, reason=f"not in Triton's interpreter: {reason}")
