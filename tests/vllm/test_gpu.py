"""Real vLLM on a GPU: CUDA graphs, FlashAttention-3 over pages, asynchronous scheduling; the trainer's bits.

``benchmarks/gpu/rollout_exact.py`` shows the same at the size of a real model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import precgraph
from precgraph.errors import UnsupportedModelError
from precgraph.runtime.sampling import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
VOCABULARY = 4001
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_batched_tokens": 512, "max_num_seqs": 16,
    "enable_prefix_caching": True, "enable_chunked_prefill": True, "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.3,
}  # fmt: skip


def model_of(width: int, heads: int = 4, **more: Any) -> Any:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=768, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=width, max_position_embeddings=2048, tie_word_embeddings=False,
        **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)


def largest_difference(actor: Any, samples: Any, params: Any) -> float:
    worst = 0.0
    for sample, p in zip(samples, params, strict=True):
        ids = torch.tensor([sample.prompt_token_ids + sample.token_ids], device="cuda")
        with torch.no_grad():
            scores = precgraph.token_logprobs(actor, ids, temperature=p.temperature or 1.0)
        own = scores[0, len(sample.prompt_token_ids) - 1 :].cpu()
        worst = max(worst, float((own - torch.tensor(sample.logprobs)).abs().max()))
    return worst


@pytest.fixture(
    params=[(128, None), (64, None), (96, None), (128, 64), (64, 64), (80, 64)], ids=lambda p: f"{p[0]}-{p[1] or 'all'}"
)
def pair(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """By the width of heads, and the largest step that is captured; above it prompts attend to their own keys."""
    width, captured = request.param
    yield from engine(model_of(width), tmp_path, compilation_config={"max_cudagraph_capture_size": captured})


@pytest.fixture(params=[128, 64, 96])
def short(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """Steps are captured that are longer than any request."""
    yield from engine(model_of(request.param), tmp_path, max_model_len=256, max_num_batched_tokens=2048)


def engine(model: Any, folder: Any, **more: Any) -> Iterator[tuple[Any, Any]]:
    from precgraph.vllm import LLM

    model.save_pretrained(folder)
    actor = precgraph.compile(model.cuda(), "train")
    llm = LLM(str(folder), actor=actor, **ENGINE | more)
    yield actor, llm
    llm.shutdown()


def test_every_token_equals_the_trainers(pair: tuple[Any, Any]) -> None:
    """Also with prefixes from the cache, and after an update that the graphs were captured before."""
    actor, llm = pair
    rng = random.Random(1)
    lengths = (1, 7, 63, 128, 129, 200, 333, 700, 511, 512, 513, 2)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
    kinds = [
        SamplingParams(40, 0.7, seed=3),
        SamplingParams(40),
        SamplingParams(40, 0.0),
        SamplingParams(40, 1.2, 0.8, 50),
    ]
    params = [kinds[i % 4] for i in range(len(prompts))]
    assert llm.engine.llm_engine.vllm_config.compilation_config.cudagraph_mode.name == "FULL"
    first = llm.generate(prompts, params)
    second = llm.generate(prompts, params)
    assert largest_difference(actor, first, params) == 0.0
    assert largest_difference(actor, second, params) == 0.0
    assert sum(s.cached_tokens for s in second) > 0
    assert [s.token_ids for s in second][::4] == [s.token_ids for s in first][::4]  # those with a seed
    assert all((m < 1) == (i % 4 == 3) for i, s in enumerate(first) for m in s.kept_mass[:1])
    with torch.no_grad():
        for p in actor.parameters():
            p.mul_(1.1)
    actor.sync()
    with torch.cuda.stream(torch.cuda.Stream()):  # not the one on which the engine began
        third = llm.generate(prompts, params)
    assert largest_difference(actor, third, params) == 0.0
    assert [s.logprobs for s in third] != [s.logprobs for s in first]
    held = torch.cuda.memory_reserved()
    llm.shutdown()
    assert held - torch.cuda.memory_reserved() > 0.9 * ENGINE["kv_cache_memory_bytes"]


def test_prompts_join_while_others_decode(short: tuple[Any, Any]) -> None:
    """More requests than the engine runs at a time, of many lengths: a step holds prompts and decoding requests."""
    actor, llm = short
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.choice((3, 40, 129, 200)))] for _ in range(80)]
    params = [SamplingParams(rng.randint(1, 50), rng.choice((0.7, 1.0)), seed=i) for i in range(len(prompts))]
    first, second = (llm.generate(prompts, params) for _ in range(2))  # the second from cached prefixes
    assert sum(s.cached_tokens for s in second) > 0
    assert largest_difference(actor, first, params) == largest_difference(actor, second, params) == 0.0
    assert [s.token_ids for s in first] == [s.token_ids for s in second]


@pytest.mark.parametrize(
    ("width", "window", "page", "words"),
    [(96, None, 144, "pages of 144 tokens"), (128, 64, 16, "a window of 64 keys")],
    ids=["pages", "window"],
)
def test_attention_whose_pages_have_other_tiles_is_refused(
    width: int, window: int | None, page: int, words: str, tmp_path: Any
) -> None:
    from precgraph.vllm import LLM

    model = model_of(width, sliding_window=window, use_sliding_window=window is not None, max_window_layers=1)
    model.save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModelError, RuntimeError), match=words):
        LLM(str(tmp_path), actor=precgraph.compile(model.cuda(), "train"), block_size=page, **ENGINE)
