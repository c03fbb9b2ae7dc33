"""The optimiser for loops of one's own: torch's AdamW in fp32, rounded stochastically; states in fp32, saved or not."""

from __future__ import annotations

import copy
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precgraph
from precgraph.errors import InputError
from precgraph.optim import StochasticAdamW, stochastic_bf16


def draw(seed: int) -> Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


def push(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, seed: int) -> None:
    parameter.grad = draw(seed).to(parameter.dtype)
    torch.manual_seed(seed)
    optimizer.step()


def test_stochastic_rounding_is_unbiased_and_keeps_what_bf16_can_hold() -> None:
    torch.manual_seed(0)
    for value in (1.001, -0.3333, 3e-30):
        x = torch.full((200_000,), value)
        rounded = stochastic_bf16(x).float()
        assert len(rounded.unique()) == 2
        assert rounded.double().mean().item() == pytest.approx(x[0].item(), rel=2e-5)
    exact = torch.tensor([0.0, 1.0, -2.5, 448.0, float("inf")])
    assert torch.equal(stochastic_bf16(exact).float(), exact)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000])
def test_whatever_its_bits_nan_stays_nan(bits: int) -> None:
    """PTX makes 0x7FFFFFFF: a carry of the noise would turn it into -0.0, a weight like any other."""
    assert stochastic_bf16(torch.full((64,), bits, dtype=torch.int32).view(torch.float32)).isnan().all()


def test_arguments_and_defaults_are_those_of_torchs_adamw() -> None:
    mine, torchs = (inspect.signature(kind).parameters for kind in (StochasticAdamW, torch.optim.AdamW))
    assert list(mine) == list(torchs)[: len(mine)] and len(mine) == 5
    assert {n: p.default for n, p in mine.items()} == {n: torchs[n].default for n in mine}


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_is_torchs_adamw_rounded_to_a_neighbour(decay: float) -> None:
    w, twin = nn.Parameter(draw(0)), nn.Parameter(draw(0).float())
    optimizer = StochasticAdamW([w], lr=1e-2, weight_decay=decay)
    oracle = torch.optim.AdamW([twin], lr=1e-2, weight_decay=decay, foreach=False)
    for seed in (1, 2, 3):
        twin.data.copy_(w.detach())
        push(optimizer, w, seed)
        push(oracle, twin, seed)
        torch.manual_seed(seed)
        assert torch.equal(w.detach(), stochastic_bf16(twin.detach()))


def test_a_closure_gives_the_loss_and_the_gradients() -> None:
    w = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def loss() -> Tensor:
        total = (3 * w).sum()
        total.backward()
        return total

    assert StochasticAdamW([w], lr=0.5, weight_decay=0.0).step(loss) == 12
    assert w.tolist() == [0.5] * 4  # Adam's first step is the rate


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    """torch's own loading would round the moments to the parameters' bf16, and the next step would refuse them."""
    w, idle = nn.Parameter(draw(0)), nn.Parameter(draw(9))
    optimizer = StochasticAdamW([{"params": [idle]}, {"params": [w], "lr": 1e-2}])
    push(optimizer, w, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    other = nn.Parameter(w.detach().clone())
    restored = StochasticAdamW([{"params": [nn.Parameter(draw(9))]}, {"params": [other]}])
    restored.load_state_dict(saved)
    for seed in (2, 3):
        push(optimizer, w, seed)
        push(restored, other, seed)
    assert torch.equal(w, other) and restored.state[other]["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1e-3), ("lr", math.nan), ("eps", -1.0), ("weight_decay", math.inf), ("betas", (0.9, 1.0)),
     ("betas", (-0.1, 0.9))],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(name: str, value: Any) -> None:
    """As torch's AdamW refuses them: a rate below 0 would climb, a beta of 1 divide by 0."""
    w = nn.Parameter(draw(0))
    with pytest.raises(InputError, match=rf"StochasticAdamW's {'beta[12]' if name == 'betas' else name} = .*from 0"):
        StochasticAdamW([w], **{name: value})
    with pytest.raises(InputError, match="from 0, and below"):
        StochasticAdamW([{"params": [w], name: value}])


def test_another_dtype_is_refused() -> None:
    with pytest.raises(InputError, match=r"one of shape \[3\] is torch.float32; give that one to torch.optim.AdamW"):
        StochasticAdamW([nn.Parameter(draw(0)), nn.Parameter(torch.ones(3))])


def test_nothing_of_precgraph_imports_the_trainer() -> None:
    """A module of the user's own may be called trainer, and then hides ours."""
    sources = list(Path(precgraph.__file__).parent.rglob("*.py"))
    found = [p for p in sources if re.search(r"^\s*(from|import) trainer\b", p.read_text(), re.MULTILINE)]
    assert len(sources) > 50 and not found
