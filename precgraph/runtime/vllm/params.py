"""Sampling parameters of vLLM: what an exact rollout refuses, and what it takes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmParams

from precgraph.errors import InputError
from precgraph.runtime.engine import prompt_ids
from precgraph.runtime.limits import MIN_TEMPERATURE
from precgraph.runtime.sampling import MAX_N, MAX_SEED, SamplingParams, seeds_of
from precgraph.runtime.vllm import RECORD, SEED
from precgraph.runtime.vllm.replies import kept_masses
from precgraph.runtime.vllm.temperature import require_served
from precgraph.runtime.vllm.versions import logits_processors

# What changes the distribution that a token is drawn from without changing the log-probability that is reported, or
# asks for numbers that the program does not make; each with the value that asks for nothing.
_REFUSED: dict[str, tuple[Any, str]] = {
    "presence_penalty": (0.0, "penalties change the distribution"),
    "frequency_penalty": (0.0, "penalties change the distribution"),
    "repetition_penalty": (1.0, "penalties change the distribution"),
    "min_p": (0.0, "min_p changes the distribution; top_p and top_k are served, with the mass that they keep"),
    "min_tokens": (0, "it hides stop tokens; use ignore_eos and max_tokens"),
    "logit_bias": (None, "it changes the distribution"),
    "bad_words": (None, "it changes the distribution"),
    "allowed_token_ids": (None, "it changes the distribution"),
    "structured_outputs": (None, "it changes the distribution"),
    "thinking_token_budget": (None, "it forces tokens"),
    "prompt_logprobs": (None, "score prompts with precgraph.token_logprobs"),
    "prompt_logprob_token_ids": (None, "score prompts with precgraph.token_logprobs"),
    "logprob_token_ids": (None, "ask for logprobs=k, or score with precgraph.token_logprobs"),
    "trace_decode_token_ids": (None, "it forces tokens"),
}


def require_exact(params: Any) -> None:
    """InputError, naming the parameter, for what an exact rollout cannot serve."""
    for name, (nothing, why) in _REFUSED.items():
        value = getattr(params, name, nothing)
        empty = value is None or value == nothing or (nothing is None and value in ([], {}))
        if not empty:
            raise InputError(f"{name} = {value!r} is refused in exact mode: {why}")
    require_served(params.temperature)  # one that was set after vLLM's constructor, which replaces it
    if params.logprobs == -1:
        raise InputError("logprobs = -1 is refused in exact mode: ask for the k likeliest, logprobs = k")
    asked = params.seed  # Python's generators take -4 for 4; torch's, which vLLM makes too, end the engine for True
    if asked is not None and not (type(asked) is int and 0 <= asked <= MAX_SEED):
        raise InputError(f"seed = {asked!r} must be an integer from 0 to 2**63 - 1")
    seed, record = own_args(params)
    if params.n > 1 and (seed, record) != (None, None):
        raise InputError(f"n = {params.n} would share one {SEED} or {RECORD}", remedy="send the prompt n times")
    if seed is not None and not (isinstance(seed, int) and 0 <= seed <= MAX_SEED):
        raise InputError(f"{SEED} = {seed!r} must be an integer from 0 to 2**63 - 1")
    if record is not None and not isinstance(record, str):
        raise InputError(f"{RECORD} = {record!r} must be a string")
    of_vllm(params)  # a value that only the draw refuses, top_k = 2**63 for one, would end the engine there


def of_vllm(params: Any) -> SamplingParams:
    """What :func:`precgraph.runtime.sampling.sample` needs of vLLM's parameters."""
    return SamplingParams(
        temperature=0.0 if params.temperature < MIN_TEMPERATURE else params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
    )


def to_vllm(params: SamplingParams) -> Any:
    """vLLM's parameters for ours; stop tokens end a request as ours do, and nothing else does.

    InputError for a temperature in whose place vLLM would take another, and for several samples: each is a request of
    its own (:func:`samples_of`).
    """
    require_served(params.temperature)
    if params.n != 1:
        raise InputError(f"n = {params.n} in one request", remedy="make a request of each sample")
    return VllmParams(
        max_tokens=params.max_tokens, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k,
        stop_token_ids=list(params.stop_token_ids), ignore_eos=True, seed=params.seed, logprobs=0, detokenize=False,
    )  # fmt: skip


def completion_fields(
    output: Any, version: int, prompt_index: int, kept_mass: Mapping[Any, float] = {}
) -> dict[str, Any]:
    """vLLM's output for a request as the fields of a :class:`precgraph.runtime.engine.Completion`.

    ``kept_mass`` is that of each token by its index; without it, any token could be drawn.
    """
    (answer,) = output.outputs
    tokens = list(answer.token_ids)
    return {
        "prompt_token_ids": list(output.prompt_token_ids), "token_ids": tokens,
        "logprobs": [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)],
        "kept_mass": kept_masses(kept_mass, len(tokens)),
        "finish_reason": str(answer.finish_reason), "weights_version": version,
        "cached_tokens": output.num_cached_tokens or 0, "prompt_index": prompt_index,
    }  # fmt: skip


def own_args(params: Any) -> tuple[Any, Any]:
    """The seed and the record's name among the ``extra_args`` of a request; None where it has none."""
    args = params.extra_args or {}
    return args.get(SEED), args.get(RECORD)


class ExactGate(*logits_processors()):  # type: ignore[misc]
    """Processes nothing: vLLM asks it, when a request arrives, whether its parameters can be served."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        require_exact(sampling_params)

    def __init__(self, *args: Any) -> None:
        pass

    def apply(self, logits: Tensor, *context: Any) -> Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass


def requests_of(
    prompts: Sequence[Sequence[int]], params: Any, vocabulary: int, served: Any
) -> list[tuple[int, list[int], Any]]:
    """A call's requests, prompt after prompt: its index, its token ids, and parameters of one sample, of the class of
    ``params``.

    ``params`` are one for all or one a prompt, ``served`` is vLLM's ``ModelConfig``. InputError for what cannot be
    served: no lists of token ids, no room for a token, stop strings that vLLM, without a tokenizer, would not look for.
    """
    if not isinstance(prompts, Sized):
        kind = type(prompts).__name__
        raise InputError(f"prompt_token_ids is a {kind}", remedy="pass a list of lists of integers")
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
    ids = [prompt_ids(f"prompt {i}", prompts[i], vocabulary) for i in range(len(prompts))]
    room = served.max_model_len
    for i, prompt in enumerate(ids):
        if len(prompt) >= room:
            raise InputError(
                f"prompt {i} has {len(prompt)} tokens, and max_model_len = {room} leaves none to sample",
                remedy="cut it, or pass a larger max_model_len",
            )
    if served.skip_tokenizer_init and any(getattr(p, "stop", None) for p in each):
        raise InputError(
            "stop strings need a tokenizer, and this engine was started without one",
            remedy="end requests at stop_token_ids, or leave out skip_tokenizer_init",
        )
    return [(i, prompt, one) for i, (prompt, p) in enumerate(zip(ids, each, strict=True)) for one in samples_of(p)]


def samples_of(params: Any) -> list[Any]:
    """The parameters of each of a prompt's ``n`` samples, of the class of ``params``, ours or vLLM's.

    A request of its own for each: vLLM's own children of a request would share one seed of ours and one record.
    """
    if isinstance(params, SamplingParams):
        return list(params.each())
    if not isinstance(params, VllmParams):
        raise InputError(f"params are a {type(params).__name__}", remedy="pass SamplingParams, precgraph's or vLLM's")
    require_exact(params)
    if not isinstance(params.n, int) or not 1 <= params.n <= MAX_N or (params.n > 1 and of_vllm(params).greedy):
        raise InputError(f"n = {params.n!r}", remedy=f"an integer from 1 to {MAX_N}, and 1 for greedy requests")
    if params.n == 1:
        return [params]
    samples = []
    for seed in seeds_of(params.seed, params.n):
        samples.append(params.clone())
        samples[-1].n, samples[-1].seed = 1, seed
    return samples


def request_of(params: Any) -> Any:
    """vLLM's parameters for one sample, with a seed, and a name for its record if some tokens cannot be drawn."""
    if isinstance(params, SamplingParams):
        params = to_vllm(params)
    require_exact(params)
    asked, own = params.clone(), of_vllm(params)
    seed = asked.seed
    if seed is None and not own.greedy:
        seed = int(torch.randint(MAX_SEED, ()))
    asked.logprobs, asked.seed = asked.logprobs or 0, None
    asked.extra_args = {**(asked.extra_args or {}), SEED: seed or 0}
    if own.truncated:
        asked.extra_args[RECORD] = secrets.token_hex(8)
    return asked
