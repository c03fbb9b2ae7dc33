"""Supervised runs of a 100M-class model in FP8 and in BF16: the same data, seeds and optimiser; losses and gradients.

``python -m benchmarks.gpu.convergence [--steps 500] [--seeds 3]``. The text is Python's own library, as bytes. BF16 is
Hugging Face's model with SDPA. A seed draws the first weights and the order of the data. Gradients are compared at the
weights that the BF16 run ends with, on one batch: the relative error of FP8's against BF16's, and as a yardstick that
of BF16's own, both against gradients in fp32.
"""

from __future__ import annotations

import argparse
import math
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import precgraph
from benchmarks.common.options import need_gpu, positive
from benchmarks.common.results import Result, append

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=12, max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip
ROWS, LENGTH, WARM_UP, RATE = 16, 1024, 50, 6e-4
LAST = 20  # steps whose mean is a run's final loss


def text() -> Tensor:
    """The sources of Python's library, one after the other, as bytes on the card."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8, device="cuda")


def batch(data: Tensor, step: int, seed: int = 0) -> Tensor:
    """Rows ``[ROWS, LENGTH]`` from places that the seed and the step's number draw."""
    generator = torch.Generator().manual_seed(seed * 1_000_000 + step)
    starts = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=generator).cuda()
    return data[starts + torch.arange(LENGTH, device="cuda")].long()


def new_model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return LlamaForCausalLM._from_config(CONFIG, dtype=dtype).train()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in fp32, one way for all models."""
    logits = model(ids).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(model: Any, data: Tensor, steps: int, seed: int) -> list[float]:
    """Losses of AdamW with fp32 masters, whose bf16 rounding is what the model runs on."""
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        done = max(0.0, (step - WARM_UP) / max(1, steps - WARM_UP))
        optimizer.param_groups[0]["lr"] = (
            RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * done))
        )
        loss = loss_of(model, batch(data, step, seed))
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(model, ids).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in right.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--seeds", type=positive, default=3)
    options = parser.parse_args()
    need_gpu()
    data, final = text(), defaultdict(list)
    bf16 = new_model()  # stays as seed 0 leaves it: the gradients are compared there
    shape = (
        f"Llama {sum(p.numel() for p in bf16.parameters()) / 1e6:.0f}M, {options.steps} steps of {ROWS}x{LENGTH} bytes"
    )
    for seed in range(options.seeds):
        models = {
            "BF16": new_model(seed=seed) if seed else bf16,
            "FP8": precgraph.compile(new_model(seed=seed), "train"),
        }
        for name, model in models.items():
            losses = train(model, data, options.steps, seed)
            final[name].append(fmean(losses[-LAST:]))
            append("convergence", [Result(shape, f"final loss, {name}, seed {seed}", final[name][-1], "nats")])
            bad = sum(not math.isfinite(x) for x in losses)
            curve = " ".join(f"{losses[i]:.3f}" for i in range(0, options.steps, max(1, options.steps // 10)))
            print(f"{name:5s} {seed} {curve}  final {final[name][-1]:.4f}, {bad} not finite", flush=True)
    over = fmean(final["FP8"]) / fmean(final["BF16"]) - 1
    print(f"FP8's mean over BF16's: {over:+.4f}")
    rows = [Result(shape, *row) for row in compare_gradients(bf16, batch(data, options.steps))]
    append("convergence", [Result(shape, "FP8's final loss over BF16's", over, "1"), *rows])


def compare_gradients(trained: LlamaForCausalLM, ids: Tensor) -> list[tuple[str, float, str]]:
    """Relative errors of each layer's weights; printed by kind of weight, least and largest over the layers."""

    def same(make: Callable[[LlamaForCausalLM], Any], dtype: torch.dtype) -> dict[str, Tensor]:
        model = new_model(dtype)
        model.load_state_dict(trained.state_dict())
        return gradients(make(model), ids)

    right = same(lambda m: m, torch.float32)
    plain, fp8 = same(lambda m: m, torch.bfloat16), same(lambda m: precgraph.compile(m, "train"), torch.bfloat16)
    tables = {"FP8 against BF16": errors(fp8, plain), "FP8 against fp32": errors(fp8, right),
              "BF16 against fp32": errors(plain, right)}  # fmt: skip
    rows = []
    for title, table in tables.items():
        kinds: dict[str, list[float]] = defaultdict(list)
        for name, value in table.items():
            kinds[re.sub(r"layers\.\d+\.", "", name)].append(value)
            rows.append((f"gradient error, {title}, {name}", value, "1"))
        print(f"gradient error, {title}: least and largest over layers")
        for kind, values in kinds.items():
            print(f"  {kind:42s} {min(values):.4f} {max(values):.4f}")
    return rows


if __name__ == "__main__":
    main()
