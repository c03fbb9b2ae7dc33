"""Where vLLM's V2 runner samples: precgraph's draws in place of vLLM's. Importing it needs Triton.

V2 asks a model for its ``ModelState``, and that for a sampler. Rows of a step are the requests in the order of
``input_batch``; the runner keeps them by a slot each, until they end or are preempted.
"""

from __future__ import annotations

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
    """Takes the place of ``inner`` and its states, which the runner reads; vLLM's own draw serves what is no request
    (measuring memory).

    A request that was preempted comes back as a new one: without a seed, the rest of it draws with another.
    """

    def __init__(self, inner: Any, draws: Draws) -> None:
        self.__dict__.update(vars(inner))
        self.draws = draws
        self.serving = False  # vLLM warms up with requests that ask for everything
        self._params: dict[int, Any] = {}

    def add_request(self, index: int, *arguments: Any) -> None:
        """``arguments`` end with vLLM's parameters of the request; until 0.26 its prompt's length comes before."""
        super().add_request(index, *arguments)
        self._params[index] = arguments[-1]
        if self.serving:
            # The front end refuses such requests; one that came past it must not be served as if it had asked for
            # nothing.
            require_exact(arguments[-1])

    def __call__(self, logits: Tensor, input_batch: Any) -> SamplerOutput:
        """Draw one token for each row of ``logits [N, V]``."""
        slots, names = self.req_states.req_id_to_index, input_batch.req_ids
        if names[0] not in slots:
            return super().__call__(logits, input_batch)
        ids, logprobs = self.draws.draw(
            logits, names, self._indices(input_batch).tolist(), lambda name: self._params[slots[name]], slots
        )
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
