"""What vLLM changes in its own process and a trainer there needs as it was."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # no process of the engine's own
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RARELY = 1000  # collections of the middle generation before a full one; Python's own number is 10


@contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Variables that vLLM reads while an engine starts; what they were comes back."""
    with _restored(wanted):
        os.environ.update(wanted)
        yield


@contextmanager
def _restored(names: Iterable[str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def preserved_state() -> Iterator[None]:
    """Random generators, torch's threads and defaults, the process's CPUs, what torchrun told it, the hook for errors
    and the garbage collector's heap come back as they were.

    vLLM seeds every global generator, its CPU worker replaces ``torch.set_num_threads`` by a function that does
    nothing and may bind the process to cores, and its CPU platform sets ``LOCAL_WORLD_SIZE``. The hook is that of its
    process group, which names its rank. A heap that it has frozen would keep what the trainer drops later.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    grad, cores = torch.is_grad_enabled(), os.sched_getaffinity(0)
    hook, frozen = sys.excepthook, gc.get_freeze_count()
    try:
        with _restored(_OF_TORCHRUN):
            yield
    finally:
        sys.excepthook = hook
        if not frozen:  # or the trainer's own frozen objects would thaw too
            gc.unfreeze()
        os.sched_setaffinity(0, cores)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.set_grad_enabled(grad)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def default_stream() -> Iterator[None]:
    """On CUDA's default stream, where an engine of this process begins: the V2 runner waits for the stream on which it
    has begun, whatever stream its steps are on."""
    if not torch.cuda.is_initialized():
        yield
        return
    before, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    default.wait_stream(before)
    with torch.cuda.stream(default):
        yield
    before.wait_stream(default)


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Python's collector looks at young objects, and hardly ever at all of them.

    Replies of hundreds of requests a step are so many objects that it walks all of torch's and vLLM's over and over:
    at 512 requests that took more than half of this process's time a step. A heap that is frozen for each call would
    keep what the trainer has dropped in between: every ``gc.freeze()`` begins the count to a full collection anew.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, _RARELY))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
