"""What the vLLM tests share: tiny checkpoints, engines in this process, and the rescoring that must give 0."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import precgraph
from tests.families import VOCABULARY, causal_lm

# Read by vLLM when it starts: engines in this process, and no more memory or output than needed.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TINY_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_model_len": 640, "max_num_batched_tokens": 128, "max_num_seqs": 8,
    "enable_prefix_caching": True, "enable_chunked_prefill": True, "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, str]]:
    """A tiny model of a family and the directory that it was saved to."""

    def save(family: str, seed: int = 0, **changes: Any) -> tuple[Any, str]:
        model = causal_lm(family, seed, **changes)
        path = tmp_path_factory.mktemp(family)
        model.save_pretrained(path)
        return model, str(path)

    return save


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """Start a ``precgraph.vllm.LLM``; all are shut down after the module."""
    started: list[Any] = []

    def make(model: str | Path, **arguments: Any) -> Any:
        from precgraph.vllm import LLM

        started.append(LLM(model, **{**TINY_ENGINE, **arguments}))
        return started[-1]

    yield make
    for llm in started:
        llm.shutdown()
    started.clear()
    gc.collect()


@pytest.fixture
def prompts() -> list[list[int]]:
    """Mixed lengths: one token, around a key tile, longer than a step's budget, and two that share prefixes."""
    rng = random.Random(3)
    made = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (1, 7, 63, 128, 129, 200, 333)]
    return [*made, [*made[5][:150], 5, 6, 7], [*made[6][:300], 9]]


def with_tokenizer(saved: tuple[Any, str]) -> tuple[Any, str]:
    """A checkpoint with a tokenizer whose token i is the word ``t{i}``."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(saved[1])
    return saved


def largest_difference(actor: Any, samples: Sequence[Any], temperatures: Sequence[float] | float) -> float:
    """max |Δ log-prob| between the engine and the training program over every sampled token."""
    each = [temperatures] * len(samples) if isinstance(temperatures, float) else temperatures
    worst = 0.0
    for sample, temperature in zip(samples, each, strict=True):
        assert sample.token_ids and len(sample.token_ids) == len(sample.logprobs) == len(sample.kept_mass)
        ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
        with torch.no_grad():
            scores = precgraph.token_logprobs(actor, ids, temperature=temperature or 1.0)
        assert isinstance(scores, torch.Tensor)
        own = scores[0, len(sample.prompt_token_ids) - 1 :]
        worst = max(worst, float((own - torch.tensor(sample.logprobs)).abs().max()))
    return worst


def train_step(actor: Any, seed: int, lr: float = 1e-2) -> None:
    """One optimiser step that changes the weights visibly, and no sync."""
    ids = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(actor.parameters(), lr=lr)
    actor(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
