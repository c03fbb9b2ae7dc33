"""What command lines of benchmarks share: values that are refused before any work, and the need of a card."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import torch


def need_gpu() -> None:
    """End the process where there is no card: what follows would fail late, or measure something else."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA GPU")


def positive(text: str) -> int:
    """A count, as an argparse type."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0, as an argparse type."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def rows_by_length(text: str) -> str:
    """A batch such as ``4x2048``, as an argparse type; the text, which results name it by."""
    if not re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} has not the form ROWSxLENGTH, such as 4x2048")
    return text


def writable(text: str) -> Path:
    """A file that rows can be appended to, as an argparse type; none is left where there was none."""
    file = Path(text)
    new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from error
    if new:
        file.unlink()
    return file
