"""Where vLLM's V1 runner samples: precgraph's draws in place of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.outputs import SamplerOutput

from precgraph.errors import InputError
from precgraph.runtime.vllm.draws import Draws


class ExactSampler(nn.Module):
    """Stands where vLLM's own sampler stood; ``inner`` goes on to measure memory and to warm up, until ``serving``."""

    def __init__(self, inner: nn.Module, runner: Any, draws: Draws) -> None:
        super().__init__()
        self.inner, self.draws, self.serving = inner, draws, False
        self.logprobs_mode = inner.logprobs_mode
        self._runner = [runner]  # not a submodule

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Draw one token for each row of ``logits [N, V]``, the rows being the runner's requests in order."""
        if not self.serving:
            return self.inner(logits, sampling_metadata, *args, **kwargs)
        _require_plain(sampling_metadata)
        (runner,) = self._runner
        names = list(runner.input_batch.req_ids)
        requests = [runner.requests[name] for name in names]
        # With asynchronous scheduling the tokens are not known yet, but counted.
        indices = [len(request.output_token_ids) for request in requests]
        ids, logprobs = self.draws.draw(logits, names, requests, indices, runner.requests)
        # Only reached through a request's own seed; the runner would rewind these, which CPU generators cannot do: so
        # requests with a seed get through chunked prefill.
        sampling_metadata.generators.clear()
        return SamplerOutput(sampled_token_ids=ids.to(torch.int32)[:, None], logprobs_tensors=logprobs)


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
