"""What an engine in the trainer's process leaves as it was."""

from __future__ import annotations

import gc
import weakref

from precgraph.runtime.vllm.preserve import frozen_heap


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def test_what_was_there_is_frozen_and_what_comes_is_collected() -> None:
    gc.unfreeze()
    before = weakref.ref(Cycle())
    with frozen_heap():
        assert gc.get_freeze_count() > 0
        during = weakref.ref(Cycle())
        gc.collect()
        assert before() is not None and during() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_a_heap_that_is_frozen_stays_so() -> None:
    gc.freeze()
    try:
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
