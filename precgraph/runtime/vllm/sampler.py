"""The sampler inside vLLM's V1 runner: precgraph's draw and precgraph's log-probabilities.

Neither of vLLM's log-probability modes is what a trainer needs (``processed_logprobs`` is normalised again after top-p
and top-k, ``raw_logprobs`` is taken before the temperature), and its draws depend on the batch. Here both come from
:func:`precgraph.runtime.sampling.sample`: a request's i-th token depends on its logits, its parameters and the i-th
number of its own seed, as in :class:`precgraph.runtime.engine.Engine`. A generator of torch is never touched, which
also is what lets requests with a seed through chunked prefill on the CPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from precgraph.errors import InputError
from precgraph.runtime.logprobs import logprobs_from_logits
from precgraph.runtime.sampling import MAX_SEED, Sampled, SamplingParams, sample
from precgraph.runtime.vllm.params import of_vllm, own_args


@dataclass(slots=True)
class _Request:
    """The state of one request's draws; ``uniforms`` are its random numbers so far, by the token's index."""

    params: SamplingParams
    generator: random.Random
    record: str | None
    uniforms: list[float] = field(default_factory=list)

    def uniform(self, index: int) -> float:
        while len(self.uniforms) <= index:
            self.uniforms.append(self.generator.random())
        return self.uniforms[index]


class ExactSampler(nn.Module):
    """Stands where vLLM's own sampler stood; ``inner`` keeps serving what is no request (measuring memory)."""

    def __init__(self, inner: nn.Module, runner: Any, seed: int) -> None:
        super().__init__()
        self.inner = inner
        self.logprobs_mode = inner.logprobs_mode
        self._runner = [runner]  # not a submodule
        self._seeds = random.Random(seed)
        self._requests: dict[str, _Request] = {}
        self._kept_mass: dict[str, dict[int, float]] = {}

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Draw one token for each row of ``logits [N, V]``, the rows being the runner's requests in order."""
        (runner,) = self._runner
        names = list(runner.input_batch.req_ids)
        if not names:
            return self.inner(logits, sampling_metadata, *args, **kwargs)
        _require_plain(sampling_metadata)
        if len(names) != logits.shape[0]:
            raise InputError(f"{logits.shape[0]} rows of logits for {len(names)} requests: is speculative decoding on?")
        states = [self._state(name, runner) for name in names]
        indices = [len(runner.requests[name].output_token_ids) for name in names]
        uniforms = [state.uniform(i) for state, i in zip(states, indices, strict=True)]
        params = [state.params for state in states]
        drawn = sample(logits.float(), params, uniforms)
        self._record(states, indices, drawn)
        # Only reached through a request's own seed; the runner would rewind these, which CPU generators cannot do.
        sampling_metadata.generators.clear()
        count = sampling_metadata.max_num_logprobs
        return SamplerOutput(
            sampled_token_ids=drawn.ids.to(torch.int32)[:, None],
            logprobs_tensors=None if count is None else _logprobs(logits, drawn, params, count),
        )

    def take_kept_mass(self, records: list[str]) -> dict[str, dict[int, float]]:
        """The kept mass of finished requests that had asked to be recorded, by the token's index; and forget it."""
        return {name: self._kept_mass.pop(name, {}) for name in records}

    def _state(self, name: str, runner: Any) -> _Request:
        state = self._requests.get(name)
        if state is None:
            params = runner.requests[name].sampling_params
            own = own_args(params)
            seed = own.get("seed", params.seed)
            generator = random.Random(self._seeds.randint(0, MAX_SEED) if seed is None else seed)
            state = self._requests[name] = _Request(of_vllm(params), generator, own.get("record"))
            for gone in [n for n in self._requests if n not in runner.requests]:
                del self._requests[gone]
        return state

    def _record(self, states: list[_Request], indices: list[int], drawn: Sampled) -> None:
        rows = [i for i, s in enumerate(states) if s.record is not None and s.params.truncated]
        if rows:
            kept = drawn.kept_mass.tolist()
            for row in rows:  # a prefill that is not finished draws too; the token that counts comes last
                self._kept_mass.setdefault(str(states[row].record), {})[indices[row]] = kept[row]


def _logprobs(logits: Tensor, drawn: Sampled, params: list[SamplingParams], count: int) -> LogprobsTensors:
    """The drawn token's log-probability, then those of the ``count`` likeliest, and the drawn one's rank from 1."""
    temperature = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=logits.device)
    likeliest = logits.topk(count, dim=-1).indices
    others = [logprobs_from_logits(logits, ids, temperature) for ids in likeliest.unbind(1)]
    ranks = (logits >= logits.gather(1, drawn.ids[:, None])).sum(1)
    return LogprobsTensors(
        logprob_token_ids=torch.cat((drawn.ids[:, None], likeliest), 1).to(torch.int32),
        logprobs=torch.stack((drawn.logprobs, *others), 1),
        selected_token_ranks=ranks,
    )


def _require_plain(metadata: Any) -> None:
    """The front end refuses such requests; one that came past it must not be served as if it had asked for nothing."""
    asked = {
        "penalties": not metadata.no_penalties,
        "allowed_token_ids": metadata.allowed_token_ids_mask is not None,
        "bad_words": bool(metadata.bad_words_token_ids),
    }
    for name, given in asked.items():
        if given:
            raise InputError(f"{name} reached the sampler of an exact rollout, which cannot apply them")
