"""GRPO on a CPU in minutes: make a tiny policy, teach it the form for half a minute, improve it by RL in exact FP8.

The policy is a Llama of two layers, trained from scratch by supervised learning on reasoning-gym's ``chain_sum``, from
a careless teacher who is off by one or two half of the time: it knows the form, and is as often wrong. Then
``precgraph-train`` takes over with the arm ``exact``: FP8 in training and rollout, log-probabilities equal bit for bit,
which is asserted at every step. Run it with ``make train-demo``; another time, it makes another run beside the first.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import reasoning_gym
import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from precgraph.loading import quietly
from trainer.cli import guarded
from trainer.config import Config, load
from trainer.errors import ConfigError
from trainer.loop import Trainer
from trainer.metrics import read_records
from trainer.plot import plot_runs, summary

CONFIG = Path(__file__).parent / "configs" / "demo.toml"
NAME = "train-demo"  # not that of CONFIG, whose runs are yours
PIECES = r"[A-Za-z ]+:|."  # the instruction is one token, every other character too


def free_place(config: Config) -> Config:
    """The configuration with a run directory that nothing is in yet: nothing is replaced. ConfigError for one that was
    named, and for a model that the policy would replace."""
    directory, policy = config.directory, config.model.path
    if policy != load(CONFIG).model.path and Path(policy).exists():
        raise ConfigError("exists already", path=policy, remedy="name a model.path that does not exist")
    if config.run.dir:
        if is_taken(directory):
            raise ConfigError("exists already", path=str(directory), remedy="name another directory: --set run.dir=DIR")
        return config
    place, number = directory, 1
    while is_taken(place):
        number += 1
        place = directory.with_name(f"{directory.name}-{number}")
    return replace(config, run=replace(config.run, dir=str(place)))


def is_taken(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def lessons(params: dict[str, int], count: int, seed: int, careless: float = 0.5) -> list[tuple[str, str]]:
    """Questions of the task, of another seed than the run's, with a teacher's answers."""
    data = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **params)
    draw = random.Random(seed)
    slips = [draw.choice((-2, -1, 1, 2)) if draw.random() < careless else 0 for _ in range(count)]
    return [(entry["question"], str(int(entry["answer"]) + slip)) for entry, slip in zip(data, slips, strict=True)]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Pieces of the texts as tokens; id 0 ends a text."""
    split = Split(Regex(PIECES), "isolated")
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)} | set("0123456789")
    core = Tokenizer(WordLevel({p: i for i, p in enumerate(["<eos>", "<unk>", *sorted(pieces)])}, unk_token="<unk>"))
    core.pre_tokenizer = split
    core.decoder = Fuse()  # no spaces between tokens
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>")


def make_policy(
    data: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, steps: int, seed: int
) -> LlamaForCausalLM:
    """A two-layer Llama after ``steps`` supervised steps in fp32, rounded to bf16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 20))
    draw = random.Random(seed)
    for _ in range(steps):
        ids, labels = batch(draw.sample(data, 64), tokenizer)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
    return model.to(torch.bfloat16).eval()


def batch(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids and labels; only the answer and the end token are learned."""
    rows = [(tokenizer(q)["input_ids"], [*tokenizer(a)["input_ids"], tokenizer.eos_token_id]) for q, a in pairs]
    width = max(len(q) + len(a) for q, a in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, (q, a) in enumerate(rows):
        ids[i, : len(q) + len(a)] = torch.tensor([*q, *a])
        labels[i, len(q) : len(q) + len(a)] = torch.tensor(a)
    return ids, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--supervised-steps", type=int, default=500)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="set a key of the configuration")
    options = parser.parse_args()
    started, console = time.perf_counter(), Console(stderr=True)
    config = load(CONFIG, [f"run.name={NAME}", *options.set])
    wanted, config = config.directory, free_place(config)
    if config.directory != wanted:
        console.print(f"{wanted} is taken and stays as it is; this run goes to {config.directory}", soft_wrap=True)

    data = lessons(config.task.params, 4000, seed=12345)
    tokenizer = make_tokenizer([q for q, _ in data] + [a for _, a in data])
    with console.status(f"teaching the form: {options.supervised_steps} supervised steps from scratch"):
        policy = make_policy(data, tokenizer, options.supervised_steps, config.run.seed)
    with quietly():
        policy.save_pretrained(config.model.path)
    tokenizer.save_pretrained(config.model.path)
    console.print(f"policy of {sum(p.numel() for p in policy.parameters()):,} parameters in {config.model.path}, "
                  f"{time.perf_counter() - started:.0f} s")  # fmt: skip

    with console.status("compiling the FP8 training and rollout programs"):
        trainer = Trainer(config, console=console)
    console.print(str(trainer.pair.report))
    before = trainer.evaluate()["eval/pass_rate"]
    trainer.run()
    after = trainer.evaluate()["eval/pass_rate"]

    console.print(summary([config.directory], console.width))
    for path in plot_runs([config.directory], config.directory / "curves"):
        console.print(f"wrote {path}")
    worst = max(record["mismatch/max"] for record in read_records(config.directory))
    console.print(f"pass rate on {config.eval.items} held-out sums, at temperature {config.eval.temperature:g}: "
                  f"{before:.0%} before, {after:.0%} after; mismatch at most {worst} in {config.run.steps} steps; "
                  f"{time.perf_counter() - started:.0f} s", soft_wrap=True)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(guarded(main))
