"""A GRPO loop of one's own, with nothing but precgraph and torch: compile, generate, token_logprobs, sync.

By default a tiny random model learns to answer with even digits, in half a minute on a CPU; pass a model directory and
a reward of your own to :func:`train` for something useful. The rollout's log-probabilities equal the trainer's bit for
bit, which the loop asserts, so there is nothing to correct for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import precgraph
from precgraph.runtime.engine import Completion, Engine
from precgraph.runtime.sampling import SamplingParams

Reward = Callable[[Sequence[int], Sequence[int]], float]  # of a prompt's and a response's token ids


def advantages(rewards: Tensor) -> Tensor:
    """``rewards [groups, samples]``, normalised within each group; equal rewards give 0."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def padded(samples: Sequence[Completion]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and response mask, all ``[B, S]``: from lengths, never from the values of ids."""
    width = max(len(s.prompt_token_ids) + len(s.token_ids) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    attention, response = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for i, s in enumerate(samples):
        start, stop = len(s.prompt_token_ids), len(s.prompt_token_ids) + len(s.token_ids)
        ids[i, :stop] = torch.tensor([*s.prompt_token_ids, *s.token_ids])
        attention[i, :stop] = 1
        response[i, start:stop] = True
    return ids, attention, response


def train(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], reward: Reward, *, steps: int, samples: int = 8,
    lr: float = 1e-6, max_tokens: int = 16, stop_token_ids: Sequence[int] = (), temperature: float = 1.0,
    clip: float = 1.0, seed: int = 0,
) -> list[tuple[float, float]]:  # fmt: skip
    """Train ``model`` in place by GRPO; returns (mean reward, max |Δ log-prob|) of each step."""
    actor = precgraph.compile(model, mode="train")
    rollout = precgraph.compile(actor, mode="infer")
    report = precgraph.check(actor, rollout)
    assert report.ok, str(report)
    engine = Engine(rollout)
    # An lr of 1e-6 would round to nothing in bf16: update fp32 copies, and hand their rounding to both programs.
    parameters = [p for p in actor.parameters() if p.requires_grad]
    masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=lr, weight_decay=0.0)
    params = SamplingParams(n=samples, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids)
    torch.manual_seed(seed)
    history = []
    for step in range(steps):
        batch = engine.generate(prompts, params)
        rewards = torch.tensor([reward(s.prompt_token_ids, s.token_ids) for s in batch])
        credit = advantages(rewards.reshape(len(prompts), samples))

        ids, attention, response = padded(batch)
        logprobs = precgraph.token_logprobs(actor, ids, attention, temperature=temperature)
        mine = logprobs[response[:, 1:]]  # entry t of a row scores token t + 1
        sampled = torch.tensor([v for s in batch for v in s.logprobs])
        mismatch = (mine.detach() - sampled).abs().max().item()
        assert mismatch == 0.0, f"step {step}: rollout and trainer differ by {mismatch}"

        lengths = response.sum(1)
        ratio = (mine - sampled).exp()  # exactly 1: one update a rollout; its gradient is that of the log-probability
        loss = -(ratio * credit.repeat_interleave(lengths)).sum() / lengths.sum()
        loss.backward()

        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        actor.sync()  # the engine serves the new weights from here on
        history.append((rewards.mean().item(), mismatch))
    return history


def tiny_model(vocabulary: int = 32, seed: int = 0) -> LlamaForCausalLM:
    """A random two-layer Llama in bf16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def even_tokens(prompt: Sequence[int], response: Sequence[int]) -> float:
    """The share of even ids."""
    return sum(t % 2 == 0 for t in response) / len(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    prompts = [[1, 5, 9], [2, 6], [3, 7, 11, 15], [4]]
    history = train(tiny_model(), prompts, even_tokens, steps=options.steps, lr=1e-3, stop_token_ids=[0])
    for step, (reward, mismatch) in enumerate(history):
        print(f"step {step:3}  reward {reward:.3f}  max |Δ log-prob| {mismatch}")


if __name__ == "__main__":
    main()
