"""Log-probabilities against their rule in torch on the same device, and against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from precgraph.lowering.reference.reductions import ordered_sum
from precgraph.lowering.triton import logprobs as lp
from tests.gpu.device import DEVICE, KERNELS, sizes
from tests.gpu.same import same_bits

pytestmark = KERNELS

VOCABULARIES = sizes((151936, 50257, 100), (9001, 100))
ODD = sizes(50257, 9001)  # a vocabulary whose last block is not whole


def rule(logits: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rule blocks4096, written with torch: (chosen, entropy, maximum, log of the sum)."""
    z = logits / temperature[:, None]
    blocks = F.pad(z, (0, -z.shape[1] % 4096), value=float("-inf")).unflatten(1, (-1, 4096))
    maxima = blocks.amax(-1)
    shift = torch.where(maxima == float("-inf"), 0.0, maxima)
    moved = blocks - shift[..., None]
    e = moved.exp()
    sums = ordered_sum(e)[..., 0]
    weighted = ordered_sum(torch.where(e == 0, 0.0, e * moved))[..., 0]
    maximum = maxima.amax(-1)
    factor = (maxima - maximum[:, None]).exp()
    total = ordered_sum(sums * factor)[:, 0]
    offset = torch.where(sums == 0, 0.0, sums * (maxima - maximum[:, None]))
    mean = ordered_sum(factor * (weighted + offset))[:, 0] / total
    chosen = z.gather(1, ids[:, None])[:, 0] - maximum - total.log()
    return chosen, total.log() - mean, maximum, total.log()


def inputs(count: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = 4 * torch.randn(count, vocabulary, device=DEVICE)
    logits[0, : vocabulary // 2] = float("-inf")
    ids = torch.randint(vocabulary // 2, vocabulary, (count,), device=DEVICE)
    return logits, ids, 0.5 + torch.rand(count, device=DEVICE)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("tempered", [False, True])
def test_forward_and_backward(vocabulary: int, tempered: bool) -> None:
    for count in sizes((1, 7, 129), (1, 7)):
        logits, ids, divisor = inputs(count, vocabulary)
        temperature = divisor if tempered else torch.ones_like(divisor)
        chosen, entropy, maximum, log_total = rule(logits, ids, temperature)
        mine = lp.logprobs(logits, ids, temperature, entropy=True)
        assert mine.entropy is not None
        assert same_bits(mine.normalizer, torch.stack((maximum, log_total)))
        assert same_bits(mine.chosen, chosen) and same_bits(mine.entropy, entropy)
        assert same_bits(lp.logprobs(logits, ids, temperature).chosen, chosen)

        z = logits / temperature[:, None]
        p = (z - maximum[:, None] - log_total[:, None]).exp()
        logp = z - maximum[:, None] - log_total[:, None]
        grad, entropy_grad = torch.randn(2, count, device=DEVICE)
        one_hot = F.one_hot(ids, vocabulary).float()
        right = grad[:, None] * (one_hot - p)
        both = right - entropy_grad[:, None] * torch.where(p == 0, 0.0, p * (logp + entropy[:, None]))
        right, both = right / temperature[:, None], both / temperature[:, None]
        assert same_bits(lp.logprobs_backward(grad, logits, ids, mine.normalizer, temperature), right.bfloat16())
        made = lp.logprobs_backward(
            grad, logits, ids, mine.normalizer, temperature, entropy=mine.entropy, entropy_grad=entropy_grad
        )
        assert same_bits(made, both.bfloat16())


def test_temperatures_and_logits_at_their_limits() -> None:
    logits, ids, _ = inputs(5, ODD)
    logits[1, 1000:] = -0.0
    logits[2] *= 1e20
    logits[3] = 0.0
    for value in (1e-5, 0.7, 3.0, 1e6, 1e18):
        temperature = torch.full((5,), value, device=DEVICE)
        chosen, entropy, maximum, log_total = rule(logits, ids, temperature)
        mine = lp.logprobs(logits, ids, temperature, entropy=True)
        assert mine.entropy is not None
        assert same_bits(mine.normalizer, torch.stack((maximum, log_total)))
        assert same_bits(mine.chosen, chosen) and same_bits(mine.entropy, entropy)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_close_to_float64_and_independent_of_the_other_rows(vocabulary: int) -> None:
    count = sizes(129, 17)
    logits, ids, divisor = inputs(count, vocabulary)
    mine = lp.logprobs(logits, ids, divisor, entropy=True)
    exact = torch.log_softmax(logits.double() / divisor.double()[:, None], -1)
    assert (mine.chosen - exact.gather(1, ids[:, None])[:, 0]).abs().max() < 1e-5
    right = -torch.where(exact == float("-inf"), 0.0, exact.exp() * exact).sum(-1)
    assert mine.entropy is not None and (mine.entropy - right).abs().max() < 1e-4
    some = torch.tensor([0, 5, count - 1], device=DEVICE)
    assert same_bits(lp.logprobs(logits[some], ids[some], divisor[some]).chosen, mine.chosen[some])


def test_gradient_equals_autograd_of_float64() -> None:
    logits, ids, _ = inputs(8, ODD)
    wide = logits[1:].double().requires_grad_()
    ids = ids[1:].contiguous()
    logp = torch.log_softmax(wide / 0.7, -1)
    chosen, entropy = logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    grad, entropy_grad = torch.randn(2, 7, device=DEVICE)
    (chosen * grad + entropy * entropy_grad).sum().backward()
    temperature = torch.full((7,), 0.7, device=DEVICE)
    mine = lp.logprobs(logits[1:], ids, temperature, entropy=True)
    made = lp.logprobs_backward(
        grad, logits[1:], ids, mine.normalizer, temperature, entropy=mine.entropy, entropy_grad=entropy_grad
    )
    assert wide.grad is not None
    assert (made.double() - wide.grad).norm() < 3e-3 * wide.grad.norm()


def test_nan_logits_and_ids_outside_the_vocabulary_give_nan() -> None:
    logits, ids, _ = inputs(3, ODD)
    logits[1, 77] = float("nan")
    ids[2] = ODD
    assert lp.logprobs(logits, ids, torch.ones(3, device=DEVICE)).chosen.isnan().tolist() == [False, True, True]
