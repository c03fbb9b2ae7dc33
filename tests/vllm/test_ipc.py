"""CUDA IPC: another process sees the trainer's bytes, through memory that it maps once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from precgraph.errors import InputError
from precgraph.runtime.vllm import ipc
from precgraph.runtime.vllm.ipc import Handles, Opened
from precgraph.runtime.vllm.sync import fingerprint

CHILD = """
import json, sys
from precgraph.runtime.vllm.ipc import Opened
from precgraph.runtime.vllm.sync import fingerprint
opened = Opened()
for line in sys.stdin:
    tensors = opened.of(json.loads(line)).items()
    found = {n: [str(t.dtype), list(t.shape), fingerprint(t), t.data_ptr()] for n, t in tensors}
    del tensors
    print(json.dumps(found), flush=True)
"""
Found = dict[str, list[Any]]


class Reader:
    """Another process, which opens the handles that it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self, handles: dict[str, list[Any]]) -> tuple[Found, dict[str, int]]:
        """Dtype, shape and fingerprint of each tensor there, and its address."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(handles), file=self.process.stdin, flush=True)
        found = json.loads(next(line for line in self.process.stdout if line.startswith("{")))
        return {n: f[:3] for n, f in found.items()}, {n: f[3] for n, f in found.items()}


@contextmanager
def reader() -> Iterator[Reader]:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Reader(process)


def described(tensors: dict[str, Tensor]) -> Found:
    return {n: [str(t.dtype), list(t.shape), fingerprint(t)] for n, t in tensors.items()}


def policy() -> dict[str, Tensor]:
    big = torch.randn(300, 257, device="cuda")
    codes = big.to(torch.float8_e4m3fn)
    return {
        "x": big.bfloat16(), "codes": codes, "columns": codes[:, :200], "view": big[7:9], "scalar": big[0, 0],
        "none": big[:0],
    }  # fmt: skip


@pytest.mark.gpu
def test_another_process_maps_once_and_sees_what_changes() -> None:
    tensors, handles = policy(), Handles()
    with reader() as other:
        first = handles.of(tensors)
        found, places = other.read(first)
        assert found == described(tensors)
        for t in tensors.values():
            t.copy_((t.float() + 1).to(t.dtype))
        assert handles.of(tensors) == first, "the same tensors have the same handles"
        changed, again = other.read(handles.of(tensors))
        assert changed == described(tensors) != found and again == places


@pytest.mark.gpu
def test_other_tensors_of_the_same_names() -> None:
    """A new actor's, and some that are copied for each update: what is read is the new, wherever it lies."""
    handles = Handles()
    with reader() as other:
        for seed in range(4):
            torch.manual_seed(seed)
            tensors = policy()
            assert other.read(handles.of(tensors))[0] == described(tensors)
        del tensors["x"]
        assert other.read(handles.of(tensors))[0] == described(tensors)


@pytest.mark.gpu
def test_two_readers() -> None:
    tensors = policy()
    with reader() as one, reader() as two:
        mine, theirs = Handles(), Handles()
        for _ in range(3):
            assert one.read(mine.of(tensors))[0] == two.read(theirs.of(tensors))[0] == described(tensors)


@pytest.mark.gpu
def test_memory_does_not_grow() -> None:
    """With tensors that stay, of which torch makes no second event, and one of 8 MiB that is another at each update."""
    kept, handles = policy(), Handles()
    first, held = handles.of(kept), []
    with reader() as other:
        for i in range(20):
            fresh = torch.full((1 << 21,), float(i), device="cuda")
            told = handles.of({**kept, "fresh": fresh})
            assert {name: told[name] for name in kept} == first
            other.read(told)
            del fresh
            torch.cuda.ipc_collect()
            held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 19


@pytest.mark.gpu
def test_memory_comes_back_when_a_reader_has_died() -> None:
    torch.cuda.ipc_collect()  # what other tests have left
    handles, before = Handles(), torch.cuda.memory_allocated()
    tensors = {"x": torch.ones(1 << 22, device="cuda")}
    with reader() as other:
        other.read(handles.of(tensors))
        other.process.kill()
    del tensors
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() > before, "it was kept for the reader"
    handles.release()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before


# ------------------------------------------------------------------------------- without a GPU


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that handles are made of; a handle is a number and nothing."""
    names: list[str] = []

    def handle(name: str, tensor: Tensor) -> list[Any]:
        names.append(name)
        return [len(names), *[None] * 14]

    monkeypatch.setattr(ipc, "_handle", handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return names


def test_a_handle_is_made_anew_when_its_tensor_is_another(made: list[str]) -> None:
    handles, x, y = Handles(), torch.zeros(4, 4), torch.zeros(4)
    first = handles.of({"x": x, "y": y})
    x += 1
    assert handles.of({"x": x.detach(), "y": y[:]}) == first and made == ["x", "y"]
    for other in (x[1:], x.t(), x.view(torch.int32), x.clone()):
        made.clear()
        handles.of({"x": other, "y": y})
        assert made == ["x"]
    made.clear()
    assert handles.of({"y": y}).keys() == {"y"} and not made
    handles.of({"x": x, "y": y})
    assert made == ["x"], "it was dropped there, so it is told anew"


def test_a_storage_at_the_address_of_a_dead_one_is_another(made: list[str]) -> None:
    """As a copy is that is made for each update."""
    handles, memory = Handles(), bytearray(32)
    for count in range(1, 4):
        x = torch.frombuffer(memory, dtype=torch.float32)
        handles.of({"x": x})
        assert len(made) == count
        del x


def test_release_takes_back_every_count_that_the_receiver_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, released = iter(range(9)), []
    monkeypatch.setattr(ipc, "_handle", lambda name, tensor: [*[None] * 11, "file", next(counts), None, None])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", lambda file, count: released.append(count))
    handles = Handles()
    handles.of({"x": torch.zeros(1), "y": torch.zeros(1)})
    handles.taken()
    handles.of({"x": torch.zeros(1)})
    handles.taken()  # the receiver has dropped the first two itself
    handles.of({"x": torch.zeros(1)})
    handles.release()  # it died before it opened the last: it still holds the one before
    assert sorted(released) == [2, 3]


def test_what_is_mapped_stays_until_it_is_no_longer_named(monkeypatch: pytest.MonkeyPatch) -> None:
    opening: list[str] = []

    def opened(name: str, handle: list[Any]) -> Tensor:
        opening.append(name)
        return torch.tensor(handle)

    monkeypatch.setattr(ipc, "_open", opened)
    found = Opened()
    first = found.of({"a": [1], "b": [2]})
    again = found.of({"a": [1], "b": [3], "c": [4]})
    assert again["a"] is first["a"] and again["b"].item() == 3 and opening == ["a", "b", "b", "c"]
    assert found.of({"a": [1]}).keys() == {"a"}
    found.of({"a": [1], "b": [3]})
    assert opening == ["a", "b", "b", "c", "b"]


def test_a_tensor_on_no_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="^x: the tensor is on cpu"):
        Handles().of({"x": torch.zeros(1)})


@pytest.mark.parametrize("answer", ["taken", "refused", "no answer"])
def test_counts_that_the_worker_has_taken_back_itself_are_forgotten(
    answer: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops what it is not told before it looks at the rest; if it dies, nobody knows, and all are given back."""
    from precgraph.errors import SyncError
    from precgraph.vllm import LLM

    llm = LLM.__new__(LLM)
    llm._handles, llm._broken = Handles(), None
    monkeypatch.setattr(LLM, "_call", lambda self, *args: None)
    llm._send_handles({"x": torch.zeros(1)})

    def call(self: Any, method: str, told: Any) -> None:
        assert method == "precgraph_update_ipc" and told == {"x": [2, *[None] * 14]}
        if answer == "no answer":
            self._broken = "the engine has died"
        if answer != "taken":
            raise SyncError("the tensor is not the one that the manifest names")

    monkeypatch.setattr(LLM, "_call", call)
    if answer == "taken":
        llm._send_handles({"x": torch.zeros(1)})
    else:
        with pytest.raises(SyncError):
            llm._send_handles({"x": torch.zeros(1)})
    assert llm._handles._replaced == ([[1, *[None] * 14]] if answer == "no answer" else [])
