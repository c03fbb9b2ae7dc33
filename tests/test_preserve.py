"""What an engine in the trainer's process leaves as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from precgraph.runtime.vllm.preserve import rare_full_collections


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@contextmanager
def full_collections() -> Iterator[list[str]]:
    """One entry for each that begins inside."""
    found: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(phase)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_full_collections_are_rare_inside() -> None:
    def made_by(replies: AbstractContextManager[None]) -> int:
        gc.collect()
        with full_collections() as found, replies:
            kept = [[i] for i in range(2 * len(gc.get_objects()) + 200_000)]
            assert kept
        return len(found)

    before = gc.get_threshold()
    gc.freeze()  # what other tests have left counts for nothing, and need not be outnumbered
    try:
        assert made_by(nullcontext()) > 0
        assert made_by(rare_full_collections()) == 0
    finally:
        gc.unfreeze()
    assert gc.get_threshold() == before


def test_what_is_dropped_between_calls_is_collected() -> None:
    dropped = []
    for _ in range(2000):  # the young generation is looked at every 700 objects
        dropped.append(weakref.ref(Cycle()))
        with rare_full_collections():
            pass
    assert dropped[0]() is None
