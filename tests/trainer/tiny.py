"""A tiny policy for the trainer's tests: characters as tokens, two layers, a second to compile."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.families import config
from trainer.config import Config
from trainer.tasks import Item, Task

CHARACTERS = "0123456789+-*/=?.,:() abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
EOS, UNKNOWN = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; id 0 ends a text and pads it."""
    vocabulary = {"<eos>": EOS, "<unk>": UNKNOWN, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex("."), "isolated")
    core.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def model(seed: int = 0, layers: int = 2, **changes: Any) -> LlamaForCausalLM:
    """A random bf16 Llama of the tokenizer's vocabulary, tied embeddings, 128 wide."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": layers, "vocab_size": len(CHARACTERS) + 2, "eos_token_id": EOS, "bos_token_id": None,
        "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(seed)
    made: LlamaForCausalLM = LlamaForCausalLM._from_config(
        config("llama", **{**sizes, **changes}), dtype=torch.bfloat16
    )
    return made.eval()


def task(scorer: Any = None, count: int = 8) -> Task:
    """Sums of two digits; a response is worth the share of its characters that are even digits."""
    items = [Item(f"sum/{i}", f"{i}+{i}=", str(2 * i)) for i in range(count)]
    return Task("sums", items, scorer or (lambda item, text: sum(c in "02468" for c in text) / max(len(text), 1)))


def settings(directory: Any, **tables: dict[str, Any]) -> Config:
    """A quick configuration in ``directory``; ``tables`` override it."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory), "steps": 2, "save_every": 1, "keep": 0, "seed": 3},
        "task": {"chat": False},
        "rollout": {"groups": 2, "samples": 4, "max_tokens": 12},
        "optimizer": {"lr": 1e-3},
        "metrics": {"tensorboard": False},
        "eval": {"items": 4},
    }
    for name, table in tables.items():
        base.setdefault(name, {}).update(table)
    return Config.from_dict(base)
