"""The optimiser: small rates move bf16 weights, states survive, sums are fp32."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config import OptimizerTable
from trainer.errors import TrainerError, UpdateError
from trainer.optim import MasterOptimizer

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao (pip install 'precgraph[torchao]')"
)
KINDS = [("fp32", "fp32"), ("bf16", "fp32"), *(pytest.param(m, "8bit", marks=needs_torchao) for m in ("fp32", "bf16"))]


def weights(seed: int = 0, shape: tuple[int, ...] = (64, 128)) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16())


def build(parameter: nn.Parameter, **table: Any) -> MasterOptimizer:
    return MasterOptimizer(
        [("w", parameter), ("norm", nn.Parameter(torch.ones(8, dtype=torch.bfloat16)))], OptimizerTable(**table)
    )


def push(optimizer: MasterOptimizer, parameter: Tensor, factor: float = 1.0) -> dict[str, float]:
    (parameter.float() * factor).sum().backward()
    return optimizer.step()


@pytest.mark.parametrize(("masters", "states"), KINDS)
def test_a_rate_of_1e_6_moves_bf16_weights(masters: str, states: str) -> None:
    """Plain bf16 AdamW moves none of them: half a step of a weight of 1 is 2e-3. Here the mean moves as it should."""
    w = weights()
    before, optimizer = w.detach().clone(), build(w, lr=1e-6, masters=masters, states=states)
    torch.manual_seed(0)
    for _ in range(100):
        push(optimizer, w)
    moved = (w.detach() != before).float().mean().item()
    assert moved > 0.02
    master = optimizer.masters["w"].detach().float()
    assert (master - before.float()).mean().item() == pytest.approx(-1e-4, rel=0.35)


def test_plain_bf16_would_not_move() -> None:
    w = weights()
    w.data = w.data.sign() * w.data.abs().clamp(min=0.01)
    before, optimizer = w.detach().clone(), torch.optim.AdamW([w], lr=1e-6, weight_decay=0)
    for _ in range(20):
        w.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(w.detach(), before)


def test_fp32_masters_are_torchs_adamw_and_weights_their_rounding() -> None:
    w, twin = weights(), nn.Parameter(weights().detach().float())
    optimizer = build(w, lr=1e-3, clip=0.0, weight_decay=0.1)
    oracle = torch.optim.AdamW([twin], lr=1e-3, weight_decay=0.1)
    for i in range(5):
        factor = torch.randn(w.shape, generator=torch.Generator().manual_seed(i)).bfloat16().float()
        (w.float() * factor).sum().backward()
        optimizer.step()
        twin.grad = factor
        oracle.step()
    assert torch.equal(optimizer.masters["w"].detach(), twin.detach())
    assert w.dtype == torch.bfloat16 and torch.equal(w.detach(), twin.detach().bfloat16())


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    """1 + 2^-9 + 2^-9 in bf16 steps of 2^-8 would stay 1 (ties to even); in fp32 it is 1 + 2^-8."""
    w = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = build(w, lr=0.0)
    for factor in (1.0, 2**-9, 2**-9):
        (w * factor).sum().backward()
        assert w.grad is None
    assert optimizer.gradient_norm() == 1 + 2**-8
    optimizer.discard()
    assert optimizer.gradient_norm() == 0.0


@pytest.mark.parametrize(("masters", "states"), KINDS)
def test_main_grad_is_a_gradient_in_fp32(masters: str, states: str) -> None:
    """The same update as through .grad, clipped by the norm of both; what bf16 would have lost is kept; taken once."""
    grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    mine, theirs = weights(), weights()
    a, b = (build(w, lr=1e-2, clip=0.5, masters=masters, states=states) for w in (mine, theirs))
    for scale in (1.0, 2.0):
        mine.main_grad = grad.float() * scale
        torch.manual_seed(0)
        left = a.step()
        torch.manual_seed(0)
        right = (theirs * (grad * scale)).sum().backward() or b.step()
        assert left == right and left["grad_norm"] == pytest.approx(scale * grad.double().norm().item(), rel=1e-5)
        assert mine.main_grad is None and torch.equal(mine.detach(), theirs.detach())


def test_main_grad_adds_to_grad() -> None:
    """A weight with two readers, of which one sums in fp32: 256 + 2^-8, where bf16 would keep 256."""
    w = weights()
    optimizer = build(w)
    w.main_grad = torch.full(w.shape, 2.0**-8)
    (w.float() * 256).sum().backward()
    assert torch.equal(optimizer.gradients()["w"], torch.full(w.shape, 256 + 2.0**-8)) and w.main_grad is None
    w.main_grad = torch.ones(w.shape)
    assert optimizer.gradients()["w"][0, 0] == 257 + 2.0**-8
    optimizer.discard()
    assert optimizer.gradient_norm() == 0.0
    w.main_grad = torch.ones(w.shape, dtype=torch.bfloat16)
    with pytest.raises(TrainerError, match=r"w: main_grad must be float32 \[64, 128\]"):
        optimizer.step()


def test_clipping_by_hand() -> None:
    """A gradient of 3 and 4 has norm 5; clipped to 1 it is 0.6 and 0.8 (but for 1e-6 in the denominator)."""
    a, b = (nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterOptimizer([("a", a), ("b", b)], OptimizerTable(lr=1.0, clip=1.0, beta1=0.0))
    (3 * a + 4 * b).sum().backward()
    assert optimizer.step()["grad_norm"] == 5.0
    assert [float(optimizer.optimizer.state[m]["exp_avg"]) for m in optimizer.masters.values()] == pytest.approx(
        [0.6, 0.8]
    )


def test_warm_up_by_hand() -> None:
    w = weights()
    optimizer = build(w, lr=4e-4, warmup=4)
    assert [push(optimizer, w)["lr"] for _ in range(6)] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])


def test_norm_weights_are_not_decayed() -> None:
    optimizer = build(weights(), lr=1e-2, weight_decay=0.5)
    decays = {tuple(p.shape): g["weight_decay"] for g in optimizer.optimizer.param_groups for p in g["params"]}
    assert decays == {(64, 128): 0.5, (8,): 0.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    w = weights()
    before, optimizer = w.detach().clone(), build(w)
    with pytest.raises(UpdateError, match="norm"):
        push(optimizer, w, value)
    assert torch.equal(w.detach(), before) and optimizer.steps == 0
    push(optimizer, w)
    assert optimizer.steps == 1


@pytest.mark.parametrize(("masters", "states"), KINDS)
def test_states_survive_bit_for_bit(masters: str, states: str) -> None:
    w = weights()
    optimizer = build(w, lr=1e-3, warmup=10, masters=masters, states=states)
    for i in range(3):
        push(optimizer, w, 1.0 + i)
    saved = {k: v.clone() for k, v in optimizer.state_dict().items()}
    assert all(type(v) is Tensor for v in saved.values())
    other = nn.Parameter(w.detach().clone())
    restored = build(other, lr=1e-3, warmup=10, masters=masters, states=states)
    restored.load_state_dict(saved, optimizer.steps)
    for each, parameter in ((optimizer, w), (restored, other)):
        torch.manual_seed(5)
        for i in range(3):
            push(each, parameter, 0.5 - i)
    assert torch.equal(w, other)
    mine, theirs = optimizer.state_dict(), restored.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused update is for GPUs")
def test_the_fused_update_goes_on_from_saved_states() -> None:
    w = nn.Parameter(weights().detach().cuda())
    optimizer = build(w, lr=1e-3)
    push(optimizer, w, 1.0)
    other = nn.Parameter(w.detach().clone())
    restored = build(other, lr=1e-3)
    restored.load_state_dict({k: v.cpu() for k, v in optimizer.state_dict().items()}, optimizer.steps)
    for each, parameter in ((optimizer, w), (restored, other)):
        push(each, parameter, 0.5)
    assert torch.equal(w, other)


def test_states_of_another_kind_are_refused() -> None:
    w = weights()
    optimizer = build(w)
    push(optimizer, w)
    saved = optimizer.state_dict()
    with pytest.raises(TrainerError, match="no place for"):
        build(weights(), masters="bf16").load_state_dict(saved, 1)
    moment = saved["state.exp_avg.w"]
    with pytest.raises(TrainerError, match="holds 'state.exp_avg.w' as .1., not .*optimizer table"):
        build(weights()).load_state_dict({**saved, "state.exp_avg.w": moment.flatten()[:1]}, 1)
    del saved["state.exp_avg.w"]
    with pytest.raises(TrainerError, match="lacks 'state.exp_avg.w'"):
        build(weights()).load_state_dict(saved, 1)
