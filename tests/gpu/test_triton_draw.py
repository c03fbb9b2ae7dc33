"""Draws on the GPU: the quantile's token by an oracle in float64, alone and in a batch, and never a wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from precgraph.runtime.logprobs import logprobs_from_logits
from precgraph.runtime.sampling import Rows, SamplingParams, ranks, sample
from tests.gpu.device import DEVICE, KERNELS, gpu_only, sizes

pytestmark = KERNELS
ON_A_GPU = gpu_only("precgraph.runtime takes these kernels for tensors on a GPU alone")
VOCABULARIES = sizes((997, 4096, 9001, 151936), (997, 4096, 9001))


def batch(width: int, rows: int = sizes(67, 19)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(width)
    logits = 2 * torch.randn(rows, width + 8, device=DEVICE, generator=generator)[:, :width]
    logits[3, : width // 2] = -torch.inf
    logits[5, -1] = 40.0
    temperature = 0.3 + 1.5 * torch.rand(rows, device=DEVICE, generator=generator)
    quantiles = torch.rand(rows, device=DEVICE, dtype=torch.float64, generator=generator)
    quantiles[0], quantiles[1] = 0.0, 1 - 2.0**-53
    return logits, temperature, quantiles


def drawn(logits: Tensor, temperature: Tensor, quantiles: Tensor) -> Tensor:
    from precgraph.lowering.triton.draw import draw
    from precgraph.lowering.triton.logprobs import block_sums

    return draw(logits, temperature, quantiles, block_sums(logits, temperature))


@pytest.mark.parametrize("width", VOCABULARIES)
def test_the_quantiles_token(width: int) -> None:
    logits, temperature, quantiles = batch(width)
    ids = drawn(logits, temperature, quantiles)
    sums = torch.softmax((logits / temperature[:, None]).double(), -1).cumsum(-1)
    at = sums.gather(1, ids[:, None])[:, 0]
    before = torch.where(ids > 0, sums.gather(1, (ids - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    assert bool(((before <= quantiles + 1e-6) & (quantiles <= at + 1e-6)).all())
    assert bool(logits.gather(1, ids[:, None]).isfinite().all())


@pytest.mark.parametrize("width", VOCABULARIES)
def test_a_row_draws_alone_what_it_draws_in_a_batch(width: int) -> None:
    logits, temperature, quantiles = batch(width)
    whole = drawn(logits, temperature, quantiles)
    for row in range(0, logits.shape[0], 9):
        part = slice(row, row + 1)
        assert torch.equal(drawn(logits[part].contiguous(), temperature[part], quantiles[part]), whole[part])


def ranks_by_the_kernel(logits: Tensor, ids: Tensor) -> Tensor:
    from precgraph.lowering.triton.draw import ranks

    return ranks(logits, ids)


@pytest.mark.parametrize("width", VOCABULARIES)
@pytest.mark.parametrize("counted", [ranks_by_the_kernel, pytest.param(ranks, marks=ON_A_GPU)])
def test_ranks(counted: Callable[[Tensor, Tensor], Tensor], width: int) -> None:
    logits = batch(width)[0]
    logits[7, ::2] = logits[7, 1]  # many that are equal
    logits[9, 4] = torch.nan
    ids = torch.arange(logits.shape[0], device=DEVICE) * 5 % width
    ids[3], ids[5], ids[9] = 0, width - 1, 4  # minus infinity, the largest, NaN
    assert torch.equal(counted(logits, ids), (logits >= logits.gather(1, ids[:, None])).sum(1))


@ON_A_GPU
def test_bf16_logits_are_read_as_fp32() -> None:
    logits, temperature, quantiles = batch(9001)
    params = [SamplingParams(temperature=t) for t in temperature.tolist()]
    half = logits.bfloat16()
    one, other = sample(half, params, quantiles.tolist()), sample(half.float(), params, quantiles.tolist())
    assert torch.equal(one.ids, other.ids) and torch.equal(one.logprobs, other.logprobs)


@ON_A_GPU
def test_shares_of_draws_are_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    draws = 10_000
    logits = probabilities.log().cuda().expand(draws, -1).contiguous()
    found = sample(logits, [SamplingParams()] * draws, [(i + 0.5) / draws for i in range(draws)])
    torch.testing.assert_close(found.ids.bincount(minlength=4).cpu() / draws, probabilities, rtol=0, atol=2e-4)


GREEDY, WHOLE, CUT = SamplingParams(temperature=0), SamplingParams(temperature=0.7), SamplingParams(top_p=0.9, top_k=40)


@ON_A_GPU
@pytest.mark.parametrize("kinds", [[GREEDY, WHOLE, CUT] * 2, [WHOLE] * 6], ids=["of all kinds", "of whole rows"])
def test_a_batch_does_not_wait(kinds: list[SamplingParams]) -> None:
    """torch raises where the host would wait for the device. A row gets what it gets in any other batch."""
    logits, _, quantiles = batch(9001, 6)
    uniforms = quantiles.tolist()
    sample(logits, kinds, uniforms)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sample(logits, Rows.of(kinds, logits.device), uniforms)
        ranks(logits, found.ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    temperature = torch.tensor([p.temperature or 1.0 for p in kinds], device=DEVICE)
    assert torch.equal(found.logprobs, logprobs_from_logits(logits, found.ids, temperature))
    for i, kind in enumerate(kinds):
        alone = sample(logits[i : i + 1], [kind], uniforms[i : i + 1])
        assert found.ids[i] == alone.ids[0] and found.kept_mass[i] == alone.kept_mass[0]
        assert bool(found.kept_mass[i] < 1) == kind.truncated
        assert not kind.greedy or found.ids[i] == logits[i].argmax()


@ON_A_GPU
def test_nan_is_seen_in_the_log_probability_and_gives_a_token_of_the_vocabulary() -> None:
    logits = batch(9001)[0][:3]
    logits[1, 17] = torch.nan
    found = sample(logits, [SamplingParams()] * 3, [0.3] * 3)
    assert bool(((found.ids >= 0) & (found.ids < 9001)).all())
    assert found.logprobs.isnan().tolist() == [False, True, False]


@ON_A_GPU
def test_log_probabilities_and_entropies_differentiate_as_torchs() -> None:
    logits, temperature, _ = batch(9001, 16)
    mine = logits.clone().requires_grad_()
    oracle = logits.double().requires_grad_()
    ids = torch.arange(16, device=DEVICE) * 7 + 5000
    for entropy in (False, True):
        found = logprobs_from_logits(mine, ids, temperature, entropy=True)
        logp = torch.log_softmax(oracle / temperature.double()[:, None], -1)
        wanted = logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp.masked_fill(logp.isinf(), 0.0)).sum(-1)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(pair[entropy].sum(), x)[0] for pair, x in ((found, mine), (wanted, oracle))]
        keep = logits.isfinite()
        torch.testing.assert_close(grads[0].double()[keep], grads[1][keep], rtol=1e-2, atol=1e-4)  # bf16 gradients
    assert torch.equal(logprobs_from_logits(mine, ids, temperature), found[0])
