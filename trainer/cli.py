"""The command `precgraph-train`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Say that the trainer does not exist yet; exit 2, the code for "could not run"."""
    print(
        "precgraph-train: the RL trainer is not built yet; until then, call precgraph.compile "
        "and precgraph.token_logprobs from a training loop of your own.",
        file=sys.stderr,
    )
    raise SystemExit(2)
