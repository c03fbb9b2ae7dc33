"""Engines in processes of their own, found there by the entry point; one that dies; the server, with a real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import precgraph
from precgraph.errors import DigestError, StaleWeightsError, SyncError
from precgraph.runtime.sampling import SamplingParams
from tests.vllm.conftest import largest_difference, train_step
from tests.vllm.test_shutdown import refuses_everything
from tests.vllm.test_sync import addresses, require_served_anew

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PARAMS = SamplingParams(max_tokens=10, temperature=0.7, top_p=0.9)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


@pytest.mark.runner
def test_an_engine_of_its_own_process(
    processes: None, checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Generate, update by a file, refuse a broken one with its typed error, generate; then it is killed in a sync."""
    from precgraph.vllm import save_weights

    model, path = checkpoint("llama")
    actor = precgraph.compile(model, "train")
    before = _children()
    llm = start(path, digest=actor.precgraph.graph.digest())
    engine = _children() - before
    assert engine, "the engine runs in this process"
    samples = llm.generate(prompts, PARAMS)
    assert largest_difference(actor, samples, 0.7) == 0.0 and samples[0].kept_mass[0] < 1.0
    places = addresses(llm)
    train_step(actor, 1)
    actor.sync()
    assert llm.sync(actor) == 2
    require_served_anew(actor, llm, prompts, 2)
    assert addresses(llm) == places
    weights = tmp_path / "w.safetensors"
    save_weights(actor, weights)
    whole = weights.read_bytes()
    data = bytearray(whole)
    data[-9] ^= 1
    weights.write_bytes(bytes(data))
    state = llm.state()
    with pytest.raises(SyncError, match="is not the one that the manifest names"):
        llm.sync(weights)
    assert llm.state() == state and largest_difference(actor, llm.generate(prompts[:2], PARAMS), 0.7) == 0.0
    weights.write_bytes(whole)
    call = llm._call

    def killed(method: str, *args: Any) -> Any:
        if method == "precgraph_finish":  # all parts have arrived, and it is about to install them
            for pid in engine:
                os.kill(pid, signal.SIGKILL)
        return call(method, *args)

    monkeypatch.setattr(llm, "_call", killed)
    with pytest.raises(SyncError, match=r"the engine failed in precgraph_finish: .*; start a new engine"):
        llm.sync(weights)
    for use in (lambda: llm.generate(prompts[:1], PARAMS), lambda: llm.sync(weights), llm.state):
        with pytest.raises(StaleWeightsError, match="the engine failed in precgraph_finish.*; start a new engine"):
            use()
    assert weights.read_bytes() == whole


def test_an_interrupted_generate_a_relative_path_and_the_end(
    processes: None, checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from precgraph.vllm import save_weights

    model, path = checkpoint("llama")
    actor, llm = precgraph.compile(model, "train"), start(path)
    params = SamplingParams(max_tokens=10, temperature=0.7, top_p=0.9, seed=3)
    wanted = llm.generate(prompts, params)
    with _interrupted(llm, monkeypatch, at=3), pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params)
    found = llm.generate(prompts, params)
    assert [(s.token_ids, s.kept_mass) for s in found] == [(s.token_ids, s.kept_mass) for s in wanted]
    assert largest_difference(actor, found, 0.7) == 0.0
    train_step(actor, 1)
    actor.sync()
    save_weights(actor, tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    assert llm.sync("w.safetensors") == llm.state()["version"] == 2
    llm.shutdown()
    refuses_everything(llm, actor, tmp_path / "w.safetensors", "the engine was shut down")


def test_an_engine_that_is_interrupted_too(
    processes: None, checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at a terminal reaches the engine's process as well, which ends."""
    before = _children()
    llm = start(checkpoint("llama")[1])
    with _interrupted(llm, monkeypatch, at=2, engine=_children() - before), pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], PARAMS)
    with pytest.raises(
        StaleWeightsError, match=r"^generate\(\) broke off with KeyboardInterrupt, .*start a new engine$"
    ):
        llm.generate([[1, 2, 3]], PARAMS)


def test_an_engine_that_dies_in_a_step(
    processes: None, checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed for memory, for one: what waits for the step's tokens ends too."""
    before = _children()
    llm = start(checkpoint("llama")[1])
    engine, front = _children() - before, llm.engine.llm_engine
    step = front.step

    def killed() -> Any:
        for pid in engine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return step()

    monkeypatch.setattr(front, "step", killed)
    with pytest.raises(Exception, match="EngineCore"):
        llm.generate([[1, 2, 3]], PARAMS)
    with pytest.raises(StaleWeightsError, match=r"^generate\(\) broke off with EngineDeadError.*start a new engine$"):
        llm.generate([[1, 2, 3]], PARAMS)


@contextmanager
def _interrupted(llm: Any, monkeypatch: pytest.MonkeyPatch, at: int, engine: Iterable[int] = ()) -> Iterator[None]:
    """Ctrl-C before a step, here and in the processes ``engine``."""
    front, count = llm.engine.llm_engine, [0]
    step = front.step

    def interrupted() -> Any:
        count[0] += 1
        if count[0] == at:
            for pid in engine:
                os.kill(pid, signal.SIGINT)
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(front, "step", interrupted)
        yield
    assert count[0] >= at


def _children() -> set[int]:
    """Engines in processes of their own. One that an earlier test killed may still be a zombie, without a command
    line, or be gone before it is asked."""
    import psutil

    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "EngineCore" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def test_another_digest_is_refused_across_processes(
    processes: None, checkpoint: Callable[..., Any], start: Callable[..., Any]
) -> None:
    with pytest.raises(DigestError, match="the engine runs program"):
        start(checkpoint("qwen2")[1], digest="0" * 64)


def test_the_server_example() -> None:
    """``vllm serve`` with ``--hf-overrides`` and the middleware; rescored from what came over HTTP."""
    example = Path(__file__).parents[2] / "examples" / "vllm_serve.py"
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(
        [sys.executable, str(example), "--tokens", "12"], capture_output=True, text=True, timeout=300, env=environment,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "max |Δ log-prob| over 48 tokens = 0.0" in done.stdout
    assert "max |Δ kept mass| = 0.0, at least 0.9" in done.stdout
