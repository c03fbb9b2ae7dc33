"""Real vLLM generates with the rollout program; the training program rescores every token to the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import precgraph
from precgraph.errors import InputError
from precgraph.runtime.engine import Engine
from precgraph.runtime.sampling import SamplingParams
from precgraph.runtime.vllm import SEED
from precgraph.runtime.vllm.temperature import LEAST
from tests.rollouts import outputs
from tests.vllm.conftest import largest_difference, with_tokenizer

pytestmark = pytest.mark.vllm
MAIN = ("mistral", "qwen3", "llama")
# What is no family's: requests, their refusals and interruptions, the generator.
ANY_FAMILY = pytest.mark.parametrize("pair", MAIN[:1], indirect=True)


@pytest.fixture(scope="module", params=[pytest.param(MAIN[0], marks=pytest.mark.runner), *MAIN[1:]])
def pair(request: pytest.FixtureRequest, checkpoint: Callable[..., Any], start: Callable[..., Any]) -> tuple[Any, Any]:
    """A trainer and an engine that read the same checkpoint each on its own."""
    model, path = checkpoint(request.param)
    return precgraph.compile(model, "train"), start(path)


def test_every_token_equals_the_trainers(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """Nine concurrent requests, prefills in chunks of 128, prefixes reused in the second round."""
    actor, llm = pair
    params = [
        SamplingParams(max_tokens=40, temperature=0.7, top_p=1.0 if i % 2 else 0.9, top_k=i % 3 * 20) for i in range(9)
    ]
    first, second = llm.generate(prompts, params), llm.generate(prompts, params)
    for samples in (first, second):
        assert [len(s.token_ids) for s in samples] == [40] * 9
        assert largest_difference(actor, samples, 0.7) == 0.0
    assert [s.prompt_token_ids for s in first] == prompts
    assert sum(s.cached_tokens for s in second) > sum(s.cached_tokens for s in first)
    assert all(0 < mass <= 1 for s in first for mass in s.kept_mass)
    assert all(mass == 1.0 for mass in first[3].kept_mass) and any(mass < 1.0 for mass in first[0].kept_mass)
    assert {s.digest for s in first} == {actor.precgraph.graph.digest()} and {s.weights_version for s in first} == {1}


@pytest.mark.runner
def test_preempted_requests_go_on_where_they_were(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages run out: some requests give theirs back; what they have written is read again, as a prompt in chunks."""
    model, path = checkpoint("qwen3")
    actor = precgraph.compile(model, "train")
    llm = start(path, block_size=16, num_gpu_blocks_override=64, max_num_batched_tokens=48, enable_prefix_caching=False)
    scheduler, written = llm.engine.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def preempted(request: Any, *args: Any, **named: Any) -> None:
        written.append(request.num_output_tokens)
        preempt(request, *args, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", preempted)
    params = [SamplingParams(max_tokens=120, temperature=0.7, top_p=0.8, seed=i) for i in range(9)]
    samples = llm.generate(prompts, params)
    assert max(written) > 48  # more than one step reads
    assert largest_difference(actor, samples, 0.7) == 0.0
    theirs = Engine(precgraph.compile(actor, "infer")).generate(prompts, params)
    assert [(s.token_ids, s.kept_mass) for s in samples] == [(s.token_ids, s.kept_mass) for s in theirs]


@ANY_FAMILY
def test_no_step_asks_for_the_tokens_of_the_step_before(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """Or vLLM would wait for the device before each draw: it does so for any processor of logits, and has our gate.

    The V2 runner gives a sampler no tokens.
    """
    _, llm = pair
    runner = llm.engine.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.vllm_config.model_config.logits_processors
    seen: list[Any] = []
    hook = runner.sampler.register_forward_pre_hook(
        lambda _, args, named: seen.append(named["sampling_metadata"].output_token_ids), with_kwargs=True
    )
    llm.generate(prompts, SamplingParams(max_tokens=4))
    hook.remove()
    assert len(seen) > 3 and not any(seen)


def test_greedy_is_scored_at_temperature_one(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    actor, llm = pair
    temperatures = [0.0, 1.3, 0.0, 0.5, 0.0, 1.0, 0.0, 2.0, 0.0]
    samples = llm.generate(prompts, [SamplingParams(max_tokens=9, temperature=t) for t in temperatures])
    assert largest_difference(actor, samples, temperatures) == 0.0
    for sample, temperature in zip(samples, temperatures, strict=True):
        if temperature == 0.0:
            ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
            with torch.no_grad():
                wanted = actor(input_ids=ids).logits[0, len(sample.prompt_token_ids) - 1 : -1].argmax(-1)
            assert wanted.tolist() == sample.token_ids


def test_same_seeds_give_the_embedded_engines_tokens(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """Two engines with schedulers of their own agree on every token, log-probability and kept mass."""
    actor, llm = pair
    stops = range(0, 997, 31)
    params = [SamplingParams(max_tokens=24, temperature=0.9, top_p=0.8, seed=i, stop_token_ids=stops) for i in range(9)]
    mine = llm.generate(prompts, params)
    theirs = Engine(precgraph.compile(actor, "infer")).generate(prompts, params)
    for a, b in zip(mine, theirs, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        assert a.logprobs == b.logprobs and a.kept_mass == b.kept_mass
    assert {s.finish_reason for s in mine} == {"stop", "length"}


@pytest.mark.runner
@ANY_FAMILY
def test_seeded_requests_through_chunked_prefill(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """vLLM's own CPU sampler stops the engine here: its runner rewinds a generator that cannot be rewound."""
    from vllm import SamplingParams as VllmParams

    llm = pair[1]
    asked = [VllmParams(max_tokens=6, temperature=1.0, seed=i, ignore_eos=True) for i in range(9)]
    outputs = [
        llm.engine.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False) for _ in range(2)
    ]  # fmt: skip
    tokens = [[o.outputs[0].token_ids for o in each] for each in outputs]
    assert tokens[0] == tokens[1]
    mine = llm.generate(prompts, [VllmParams(max_tokens=6, temperature=1.0, seed=i, ignore_eos=True) for i in range(9)])
    assert [s.token_ids for s in mine] == [list(t) for t in tokens[0]]


@pytest.mark.runner
@ANY_FAMILY
def test_n_samples_of_a_prompt(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """By ours and by vLLM's parameters: those that the embedded engine draws for a list of seeds, prompt by prompt."""
    from vllm import SamplingParams as VllmParams

    actor, llm = pair
    ours = SamplingParams(max_tokens=6, temperature=0.7, top_k=20, seed=3, n=3)
    flat = [p for p in prompts[1:3] for _ in range(3)]
    wanted = Engine(precgraph.compile(actor, "infer")).generate(flat, ours.each() * 2)
    theirs = VllmParams(max_tokens=6, temperature=0.7, top_k=20, seed=3, n=3, ignore_eos=True)
    for params in (ours, theirs):
        done = llm.generate(prompts[1:3], params)
        assert outputs(done) == outputs(wanted)
        assert largest_difference(actor, done, 0.7) == 0.0
        assert [s.prompt_index for s in done] == [0, 0, 0, 1, 1, 1]
    assert theirs.n == 3 and theirs.seed == 3
    with pytest.raises(InputError, match="n = 2 would share one"):
        llm.generate([[1]], VllmParams(n=2, extra_args={SEED: 1}))
    for n, temperature in ((0, 1.0), (2.5, 1.0), (16385, 1.0), (2, 0.0)):
        theirs.n, theirs.temperature = n, temperature  # which vLLM checks in the constructor alone
        with pytest.raises(InputError, match=f"n = {n}; an integer from 1 to 16384, and 1 for greedy requests"):
            llm.generate([[1]], theirs)
    with pytest.raises(InputError, match="stop strings need a tokenizer, and this engine was started without one"):
        llm.generate([[1]], VllmParams(stop=["a"]))


@pytest.mark.runner
def test_stop_strings_of_vllm_cut_a_sample_and_change_no_bit(
    checkpoint: Callable[..., Any], start: Callable[..., Any], prompts: list[list[int]]
) -> None:
    from vllm import SamplingParams as VllmParams

    llm = start(with_tokenizer(checkpoint("llama"))[1], skip_tokenizer_init=False)
    (whole,) = llm.generate([prompts[1]], VllmParams(max_tokens=12, seed=5, ignore_eos=True))
    stop = f"t{whole.token_ids[6]}"
    (cut,) = llm.generate([prompts[1]], VllmParams(max_tokens=12, seed=5, ignore_eos=True, stop=[stop]))
    end = 1 + next(i for i, t in enumerate(whole.token_ids) if f"t{t}".startswith(stop))
    assert cut.finish_reason == "stop"
    assert (cut.token_ids, cut.logprobs) == (whole.token_ids[:end], whole.logprobs[:end])


@ANY_FAMILY
def test_equal_samples_are_warned_of_once_a_call(pair: tuple[Any, Any]) -> None:
    from vllm import SamplingParams as VllmParams

    llm = pair[1]
    for kind in (SamplingParams, VllmParams):
        with pytest.warns(UserWarning, match="samples 0 and 1 share the seed 1, .* they are equal") as seen:
            done = llm.generate([[1, 2, 3]] * 3, kind(max_tokens=6, seed=1))
        assert [w.filename for w in seen if w.category is UserWarning] == [__file__]
        assert len({tuple(s.token_ids) for s in done}) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            llm.generate([[1, 2, 3]] * 2, [kind(max_tokens=2, seed=s) for s in (1, 2)])
            llm.generate([[1, 2, 3]] * 2, kind(max_tokens=2, temperature=0.0, seed=1))


@pytest.mark.runner
@ANY_FAMILY
def test_unseeded_requests_follow_the_global_generator(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    llm, params = pair[1], SamplingParams(max_tokens=8)
    torch.manual_seed(11)
    first = llm.generate(prompts[:3], params)
    after = torch.get_rng_state()
    second = llm.generate(prompts[:3], params)
    torch.manual_seed(11)
    third = llm.generate(prompts[:3], params)
    assert torch.equal(torch.get_rng_state(), after)
    assert [s.token_ids for s in first] == [s.token_ids for s in third] != [s.token_ids for s in second]


@pytest.mark.runner
@ANY_FAMILY
def test_alternatives_are_full_vocabulary_log_probabilities(pair: tuple[Any, Any], prompts: list[list[int]]) -> None:
    """What the server's ``logprobs=k`` shows: after temperature, whatever top-p left out."""
    from vllm import SamplingParams as VllmParams

    actor, llm = pair
    asked = VllmParams(max_tokens=5, temperature=0.6, top_p=0.5, logprobs=4, ignore_eos=True)
    (output,) = llm.engine.generate([{"prompt_token_ids": prompts[2]}], asked, use_tqdm=False)
    answer = output.outputs[0]
    ids = torch.tensor([prompts[2] + list(answer.token_ids)])
    with torch.no_grad():
        logits = actor(input_ids=ids).logits[0, len(prompts[2]) - 1 : -1]
    wanted = torch.log_softmax(logits / torch.tensor(0.6), -1)
    for row, step in zip(wanted, answer.logprobs, strict=True):
        assert len(step) in (4, 5)
        assert {t: l.logprob for t, l in step.items()} == {t: float(row[t]) for t in step}
        assert all(l.rank == int((row > row[t]).sum()) + 1 for t, l in step.items())


REFUSED: dict[str, Any] = {
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.1, "min_tokens": 3,
    "logit_bias": {5: 1.0}, "allowed_token_ids": [1, 2, 3], "prompt_logprobs": 1, "logprobs": -1, "bad_words": ["a"],
}  # fmt: skip
# What a request may ask for besides: how it is drawn and ends, what of it is told, and what the engine makes of itself.
SERVED = {
    "n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs",
    "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "extra_args", "prompt_logprob_start",
    "skip_reading_prefix_cache", "repetition_detection", "routed_experts_prompt_start", "truncate_prompt_tokens",
    "watermarking",  # by the engine's own configuration of it, which is refused
}  # fmt: skip


def test_every_parameter_of_vllm_is_known() -> None:
    """Served or refused; one that a later vLLM adds is missing here, and might change the distribution unseen."""
    from vllm import SamplingParams as VllmParams

    from precgraph.runtime.vllm.params import _REFUSED

    asked = {name for name in VllmParams.__struct_fields__ if not name.startswith("_")}
    assert not SERVED & _REFUSED.keys() and asked - SERVED - _REFUSED.keys() == set()


@pytest.mark.runner
@ANY_FAMILY
@pytest.mark.parametrize("name", [*REFUSED, "structured_outputs"])
def test_what_changes_the_distribution_is_refused(pair: tuple[Any, Any], name: str) -> None:
    """By our LLM with a typed error, and, where the engine is used directly, by the engine's front end."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = pair[1]
    values = {**REFUSED, "structured_outputs": StructuredOutputsParams(regex="a+")}
    params = VllmParams(max_tokens=4, **{name: values[name]})
    with pytest.raises(InputError, match=f"^{name} = "):
        llm.generate([[1, 2, 3]], params)
    if name not in ("logprobs", "structured_outputs", "bad_words"):  # refused by vLLM's own checks before ours
        with pytest.raises(Exception, match=f"{name} = "):  # of a class that depends on the version
            llm.engine.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids


@ANY_FAMILY
def test_wrong_prompts_are_refused_before_anything_runs(pair: tuple[Any, Any]) -> None:
    from vllm import SamplingParams as VllmParams

    llm = pair[1]
    with pytest.raises(InputError, match="prompt 1 is empty"):
        llm.generate([[1], []], SamplingParams())
    with pytest.raises(InputError, match="prompt 0 holds 997, outside the vocabulary"):
        llm.generate([[997]], SamplingParams())
    for text in ("12", [1.7]):
        with pytest.raises(InputError, match="prompt 0 is not a sequence of token ids"):
            llm.generate([text], SamplingParams())
    with pytest.raises(InputError, match="prompt 0 has 640 tokens, and max_model_len = 640 leaves none to sample"):
        llm.generate([[1] * 640], SamplingParams())
    assert len(llm.generate([[1] * 639], SamplingParams(max_tokens=4))[0].token_ids) == 1
    for params in (None, "x", [None], 1):
        with pytest.raises(InputError, match="^params are a (NoneType|str|int); pass SamplingParams"):
            llm.generate([[1]], params)
    with pytest.raises(InputError, match="prompt_token_ids is a NoneType"):
        llm.generate(None, SamplingParams())
    late = VllmParams()
    late.temperature = 0.001
    for params in (SamplingParams(temperature=0.001), late):
        with pytest.raises(InputError, match="^temperature: vLLM takes 0.01 in place of 0.001"):
            llm.generate([[1]], params)
    assert [VllmParams(temperature=t).temperature for t in (0.0, 0.00999, LEAST)] == [0.0, LEAST, LEAST]
    with pytest.raises(InputError, match="2 prompts but 1 sampling"):
        llm.generate([[1], [2]], [SamplingParams()])


@pytest.mark.runner
@ANY_FAMILY
@pytest.mark.parametrize("place", ["before", "within", "after"])
@pytest.mark.parametrize("step", [1, 4])
def test_an_interrupted_generate_leaves_nothing_behind(
    pair: tuple[Any, Any], prompts: list[list[int]], place: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before a step, in the midst of its model, or before its tokens have arrived."""
    actor, llm = pair
    llm.sync(actor)
    model, front = llm.engine.apply_model(lambda m: m)[0], llm.engine.llm_engine
    owner, name = {
        "before": (front, "step"),
        "within": (model, "compute_logits"),
        "after": (front.output_processor, "process_outputs"),
    }[place]
    call, count = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == step:
            raise KeyboardInterrupt
        return call(*args, **kwargs)

    params = SamplingParams(max_tokens=10, temperature=0.7, top_p=0.9, seed=3)
    wanted = llm.generate(prompts, params)
    llm.sync(actor)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
    assert count[0] > step, "nothing ran after the interruption"
    found = llm.generate(prompts, params)
    for a, b in zip(found, wanted, strict=True):
        assert (a.token_ids, a.logprobs, a.kept_mass) == (b.token_ids, b.logprobs, b.kept_mass)
        assert a.cached_tokens == b.cached_tokens
    assert largest_difference(actor, found, 0.7) == 0.0
    assert llm.sync(actor) == actor.precgraph.store.version
