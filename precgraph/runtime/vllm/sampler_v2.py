"""Where vLLM's V2 runner samples: precgraph's draws in place of vLLM's. Importing it needs Triton.

V2 asks a model for its ``ModelState``, and that for a sampler. Rows of a step are the requests in the order of
``input_batch``; the runner keeps them by a slot each, until they end or are preempted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from precgraph.runtime.vllm.draws import Draws
from precgraph.runtime.vllm.params import require_exact


class ExactModelState(DefaultModelState):  # type: ignore[misc]
    """vLLM's own, with our sampler."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        return ExactSamplerV2(sampler, self.model.draws(self.vllm_config)), None


class ExactSamplerV2(Sampler):  # type: ignore[misc]
    """Takes the place of ``inner``, whose draws go on until ``serving``: to measure memory, and to warm up by requests
    that ask for everything.

    A request that was preempted comes back as a new one: without a seed, the rest of it draws with another.
    """

    def __init__(self, inner: Any, draws: Draws) -> None:
        self.__dict__.update(vars(inner))  # the runner reads its states, and vLLM's own draw does
        self.draws = draws
        self.serving = False
        self._requests: dict[int, Any] = {}  # by the runner's slot

    def add_request(self, index: int, *arguments: Any) -> None:
        """``arguments`` end with vLLM's parameters of the request; up to 0.30 its prompt's length comes before.

        InputError for parameters that cannot be served: the front end refuses them, and a request that came past it
        must not be served as if it had asked for nothing.
        """
        if not self.serving:
            super().add_request(index, *arguments)
            return
        # Our draws read nothing of vLLM's states, which would take a seed from numpy's global generator.
        require_exact(arguments[-1])
        self._requests[index] = SimpleNamespace(sampling_params=arguments[-1])

    def apply_staged_writes(self) -> None:
        if not self.serving:
            super().apply_staged_writes()

    def __call__(self, logits: Tensor, input_batch: Any) -> SamplerOutput:
        """Draw one token for each row of ``logits [N, V]``."""
        if not self.serving:
            return super().__call__(logits, input_batch)
        requests = [self._requests[slot] for slot in input_batch.idx_mapping_np.tolist()]
        indices = self._indices(input_batch).tolist()
        running = self.req_states.req_id_to_index
        ids, logprobs = self.draws.draw(logits, input_batch.req_ids, requests, indices, running)
        # One token a row, and none where a prompt goes on in the next step.
        ones = input_batch.seq_lens.new_ones(input_batch.num_reqs)
        sampled, rejected = get_num_sampled_and_rejected(
            ones, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )  # fmt: skip
        return SamplerOutput(
            sampled_token_ids=ids[:, None], logprobs_tensors=logprobs, num_nans=None,
            num_sampled=sampled, num_rejected=rejected,
        )  # fmt: skip

    def _indices(self, batch: Any) -> Any:
        """Which token of its request each row draws. Of a prefill that goes on, preempted requests' output included,
        that which its last step draws: what is drawn before it does not count.
        """
        computed = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        return np.maximum(computed, batch.prefill_len_np) - self.req_states.prompt_len.np[batch.idx_mapping_np]
