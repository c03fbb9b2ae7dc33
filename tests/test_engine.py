"""The embedded engine: a rollout's tokens and log-probabilities against the trainer's, bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

import precgraph
from precgraph.errors import InputError, NonFiniteError, NumericsStateError
from precgraph.runtime import engine as engine_module
from precgraph.runtime import sizes
from precgraph.runtime.compiled import Compiled
from precgraph.runtime.engine import Completion, Engine, require_row_invariance
from precgraph.runtime.sampling import SamplingParams
from tests.families import CAUSAL_LMS, VOCABULARY, causal_lm, config
from tests.rollouts import mixed_params, outputs, pair, prompts_of, worst_difference

LENGTHS = (1, 7, 127, 128, 129, 300)


# ------------------------------------------------------------------------------- equal to the trainer


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_logprobs_equal_the_trainers(name: str) -> None:
    actor, rollout = pair(name)
    prompts = prompts_of(LENGTHS)
    prompts += [prompts[5], prompts[3], prompts[5][:200]]  # these find their beginnings in the cache
    params = mixed_params(len(prompts))
    first: list[Completion] | None = None
    for budget in (16, 64, 1000):
        completions = Engine(rollout, max_batch_tokens=budget).generate(prompts, params)
        first = first or completions
        assert outputs(completions) == outputs(first)
        assert [c.cached_tokens for c in completions] == [0] * 6 + [288, 112, 192]
    assert first is not None
    for layout in ("left", "right", "packed"):
        assert worst_difference(actor, first, params, layout) == 0.0
    assert all(k == 1.0 for c, p in zip(first, params, strict=True) for k in c.kept_mass if not p.truncated)
    assert all(0 < k < 1 for c, p in zip(first, params, strict=True) for k in c.kept_mass if p.truncated)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_calls_that_are_filled_up_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: few sizes of a call, the same tokens and log-probabilities, and the trainer's."""
    actor, rollout = pair(name)
    prompts = prompts_of(LENGTHS)
    prompts += [prompts[5], prompts[5][:200]]
    params = mixed_params(len(prompts))
    plain = Engine(rollout, max_batch_tokens=100).generate(prompts, params)
    monkeypatch.setattr(sizes, "FILLED", {"cpu"})
    seen: set[int] = set()
    run, logits = engine_module.run_paged, Compiled.logits
    monkeypatch.setattr(engine_module, "run_paged", lambda *a: [hidden := run(*a), seen.add(hidden.shape[1])][0])
    monkeypatch.setattr(Compiled, "logits", lambda self, h: [seen.add(h.shape[1]), logits(self, h)][1])
    filled = Engine(rollout, max_batch_tokens=100).generate(prompts, params)
    assert outputs(filled) == outputs(plain)
    assert seen <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128} and len(seen) > 3
    assert worst_difference(actor, filled, params, "packed") == 0.0


def test_sizes_by_hand() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [sizes.filled(n, cuda) for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 49, 97, 385, 8192)] == [
        0, 1, 2, 3, 4, 6, 6, 8, 12, 16, 64, 128, 512, 8192,
    ]  # fmt: skip
    assert sizes.filled(49, cpu) == 49


def test_two_threads_change_nothing() -> None:
    _, rollout = pair("llama")
    prompts, params = prompts_of((1, 40, 129)), mixed_params(3)
    one = Engine(rollout).generate(prompts, params)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = Engine(rollout).generate(prompts, params)
    finally:
        torch.set_num_threads(threads)
    assert outputs(one) == outputs(two)


def test_kept_mass_is_the_mass_of_the_support() -> None:
    actor, rollout = pair("qwen3")
    prompt = prompts_of((20,))[0]
    params = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.6, seed=1)
    done = Engine(rollout).generate([prompt], params)[0]
    ids = torch.tensor([prompt + done.token_ids])
    with torch.no_grad():
        probabilities = (actor(ids).logits[0].double() / 0.7).softmax(-1)
    for i, (token, kept) in enumerate(zip(done.token_ids, done.kept_mass, strict=True)):
        row = probabilities[len(prompt) + i - 1]
        values, order = row.sort(descending=True)
        count = int((values.cumsum(0) < 0.6).sum()) + 1
        assert token in order[:count].tolist()
        assert kept == pytest.approx(float(values[:count].sum()), abs=1e-5)


# ---------------------------------------------------------------------------- independent of the rest


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_results_do_not_depend_on_how_they_are_run(name: str) -> None:
    _, rollout = pair(name)
    prompts = prompts_of((1, 7, 33, 64, 129, 129, 3))
    prompts[5] = prompts[4]
    params = mixed_params(len(prompts), max_tokens=9)
    expected = outputs(Engine(rollout).generate(prompts, params))
    for options in (
        {"block_size": 1}, {"block_size": 7, "max_batch_tokens": 5}, {"block_size": 64},
        {"prefix_caching": False}, {"max_sequences": 2, "max_batch_tokens": 50}, {"max_sequences": 1},
    ):  # fmt: skip
        engine = Engine(rollout, self_check=False, **options)
        assert outputs(engine.generate(prompts, params)) == expected, options
    alone = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    assert outputs(alone) == expected
    backwards = engine.generate(prompts[::-1], params[::-1])
    assert outputs(backwards[::-1]) == expected


def test_repeats_of_a_large_batch_give_one_result() -> None:
    _, rollout = pair("qwen2")
    prompts = prompts_of([1 + 7 * i % 40 for i in range(44)])
    params = mixed_params(len(prompts), max_tokens=4)
    engine = Engine(rollout, max_batch_tokens=100)
    first = outputs(engine.generate(prompts, params))
    for _ in range(3):
        assert outputs(engine.generate(prompts, params)) == first


# ---------------------------------------------------------------------------------- stops and seeds


def test_a_stop_token_is_the_last_one() -> None:
    _, rollout = pair("qwen2")
    engine = Engine(rollout)
    prompt = prompts_of((12,))
    whole = engine.generate(prompt, SamplingParams(max_tokens=10, seed=3))[0]
    assert whole.finish_reason == "length" and len(whole.token_ids) == 10
    stop = whole.token_ids[4]
    cut = engine.generate(prompt, SamplingParams(max_tokens=10, seed=3, stop_token_ids=[stop]))[0]
    end = whole.token_ids.index(stop) + 1
    assert cut.finish_reason == "stop"
    assert (cut.token_ids, cut.logprobs) == (whole.token_ids[:end], whole.logprobs[:end])


def test_seeds() -> None:
    _, rollout = pair("qwen2")
    engine = Engine(rollout)
    prompt = prompts_of((12,))[0]
    state = torch.get_rng_state()
    params = [SamplingParams(max_tokens=n, seed=s) for n, s in ((6, 5), (12, 5), (6, 6))]
    with pytest.warns(UserWarning, match="samples 0 and 1 share the seed 5, .* they are equal"):
        seeded = engine.generate([prompt] * 3, params)
    engine.generate([prompt], SamplingParams(temperature=0))
    assert torch.equal(torch.get_rng_state(), state)
    assert seeded[1].token_ids[:6] == seeded[0].token_ids != seeded[2].token_ids

    torch.manual_seed(11)
    free = engine.generate([prompt] * 3, SamplingParams(max_tokens=6))
    after = torch.rand(1)
    torch.manual_seed(11)
    assert outputs(engine.generate([prompt] * 3, SamplingParams(max_tokens=6))) == outputs(free)
    assert torch.equal(torch.rand(1), after)
    assert len({tuple(c.token_ids) for c in free}) == 3
    torch.manual_seed(11)
    drawn = [int(torch.randint(2**63 - 1, ())) for _ in range(3)]  # one number a request, in order
    assert torch.equal(torch.rand(1), after)
    again = engine.generate([prompt] * 3, [SamplingParams(max_tokens=6, seed=s) for s in drawn])
    assert outputs(again) == outputs(free)


def test_n_samples_of_a_prompt_are_n_requests() -> None:
    """Prompt after prompt, each with the numbers of its own seed and the trainer's log-probabilities."""
    actor, rollout = pair("qwen2")
    engine = Engine(rollout)
    prompts = prompts_of((12, 5))
    params = [SamplingParams(max_tokens=6, seed=s, n=n, temperature=0.7, top_k=20) for s, n in ((7, 3), (8, 1))]
    ones = [one for p in params for one in p.each()]
    done = engine.generate(prompts, params)
    assert outputs(done) == outputs(engine.generate([prompts[0]] * 3 + [prompts[1]], ones))
    assert len({tuple(c.token_ids) for c in done[:3]}) == 3
    assert [c.prompt_index for c in done] == [0, 0, 0, 1]
    assert worst_difference(actor, done, ones, "left") == 0.0
    done[0].prompt_token_ids.clear()
    assert done[1].prompt_token_ids == prompts[0]

    torch.manual_seed(11)
    free = engine.generate(prompts, SamplingParams(max_tokens=6, n=2))
    torch.manual_seed(11)
    repeated = engine.generate([p for p in prompts for _ in range(2)], SamplingParams(max_tokens=6))
    assert outputs(free) == outputs(repeated)
    with pytest.warns(UserWarning, match="samples 0 and 2 share the seed 7, .* they are correlated"):
        engine.generate(prompts, [SamplingParams(max_tokens=2, seed=7, n=n) for n in (2, 1)])


def test_equal_samples_are_warned_of_once_a_call() -> None:
    _, rollout = pair("qwen2")
    engine = Engine(rollout)
    with pytest.warns(UserWarning) as seen:
        done = engine.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=6, seed=1))
    assert len({tuple(c.token_ids) for c in done}) == 1
    (warning,) = seen
    assert "leave the seed out" in str(warning.message) and "a list of params with a seed each" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=2, temperature=0, seed=1),  # nothing is drawn
        [SamplingParams(max_tokens=2, seed=s) for s in (1, 2)],
        [SamplingParams(max_tokens=2, seed=1, temperature=t) for t in (0.7, 1.0)],  # compared with the same draws
    ],
)
def test_samples_that_differ_or_are_meant_to_be_equal_warn_of_nothing(params: Any) -> None:
    engine = Engine(pair("qwen2")[1], self_check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([[1, 2, 3]] * 2, params)


def test_greedy_takes_the_argmax_and_scores_it_at_temperature_one() -> None:
    actor, rollout = pair("mistral")
    prompt = prompts_of((12,))[0]
    done = Engine(rollout).generate([prompt], SamplingParams(max_tokens=5, temperature=0, top_k=3))[0]
    with torch.no_grad():
        logits = actor(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == done.token_ids
    assert logits.log_softmax(-1).amax(-1).tolist() == done.logprobs
    assert done.kept_mass == [1.0] * 5


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, VOCABULARY]], {}, f"prompt 0 holds {VOCABULARY}, outside the vocabulary 0..{VOCABULARY - 1}"),
        ([[-1]], {}, "prompt 0 holds -1"),
        ([[1]], {"stop_token_ids": [5000]}, "stop_token_ids of prompt 0 holds 5000"),
        ([1, 2], {}, "prompt 0 is not a sequence of token ids"),
        (["ab"], {}, "prompt 0 is not a sequence of token ids"),
        (None, {}, "takes prompts and their params, not NoneType and SamplingParams; pass a list of lists"),
        ([[1]], {"top_k": 2**63}, "top_k must be an integer from 0"),
        ([[1] * 1000], {"max_tokens": 25}, "exceed the model's max_position_embeddings of 1024"),
    ],
)
def test_bad_requests_are_named(prompts: Any, params: dict[str, Any], message: str) -> None:
    _, rollout = pair("llama")
    with pytest.raises(InputError, match=message):
        Engine(rollout, self_check=False).generate(prompts, SamplingParams(**params))


def test_bad_calls_are_named() -> None:
    actor, rollout = pair("llama")
    with pytest.raises(InputError, match=r'precgraph.compile\(actor, mode="infer"\)'):
        Engine(actor)
    with pytest.raises(InputError, match='mode="infer"'):
        Engine(causal_lm("llama"))
    with pytest.raises(InputError, match="block_size must be an integer from 1, not 0"):
        Engine(rollout, block_size=0)
    engine = Engine(rollout, self_check=False)
    with pytest.raises(InputError, match="not list and NoneType"):
        engine.generate([[1]], None)  # type: ignore[arg-type]
    wrong: tuple[Any, ...] = ([SamplingParams()], {"max_tokens": 3}, [])
    for params in wrong:
        with pytest.raises(InputError, match="a sequence of 2"):
            engine.generate([[1], [2]], params)
    assert engine.generate([], SamplingParams()) == []


def test_prompts_may_be_tensors() -> None:
    _, rollout = pair("llama")
    engine = Engine(rollout, self_check=False)
    done = engine.generate(torch.tensor([[5, 6, 7]]), SamplingParams(max_tokens=2, seed=0))  # type: ignore[arg-type]
    assert done[0].prompt_token_ids == [5, 6, 7]


# ---------------------------------------------------------------------------------------- self-check


def test_a_model_whose_text_is_a_part_of_its_config() -> None:
    """Its vocabulary is the text's; of the program the tower for pictures is no part."""
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = Gemma3Config(
        text_config=config("gemma3").to_dict(), vision_config=SiglipVisionConfig(**tower, image_size=28, patch_size=14),
        image_token_index=900, boi_token_index=901, eoi_token_index=902, mm_tokens_per_image=4,
    )  # fmt: skip
    actor = precgraph.compile(Gemma3ForConditionalGeneration._from_config(made, dtype=torch.bfloat16))
    params = SamplingParams(max_tokens=6, seed=1)
    done = Engine(precgraph.compile(actor, "infer")).generate([[2, 5, 6]], params)
    assert worst_difference(actor, done, [params], "left") == 0.0
    with pytest.raises(InputError, match=str(VOCABULARY)):
        precgraph.token_logprobs(actor, torch.tensor([[2, VOCABULARY]]))
    ids = torch.tensor([[2, 5, 6]])
    assert actor(ids, labels=ids).loss.isfinite()


def test_kernels_that_depend_on_the_batch_are_refused() -> None:
    model = causal_lm("llama", num_hidden_layers=1)
    rollout = precgraph.compile(model, mode="infer", recipe=precgraph.Recipe.bf16())
    with pytest.raises(NumericsStateError, match="linear.*depends on the batch"):
        Engine(rollout)
    assert len(Engine(rollout, self_check=False).generate([[1, 2]], SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_weights_that_make_nan_are_not_taken_for_the_machines_fault() -> None:
    """Finite ones: products overflow, and NaN equals nothing."""
    model = causal_lm("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(3e38)
    with pytest.raises(NonFiniteError, match=r"the engine's check; compile\(..., checked=True\) names the node"):
        Engine(precgraph.compile(model, "infer"))


def test_self_check_sees_a_batch_that_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rollout = pair("llama")
    require_row_invariance(rollout)
    logits = Compiled.logits

    def nudged(self: Compiled, hidden: Tensor) -> Tensor:
        exact = logits(self, hidden)
        return exact.nextafter(torch.tensor(torch.inf)) if hidden.shape[1] == 1 else exact

    monkeypatch.setattr(Compiled, "logits", nudged)
    with pytest.raises(NumericsStateError, match="differ between a batch and decoding alone"):
        Engine(rollout)


def test_progress_is_shown_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws nothing live on what is not a terminal
    _, rollout = pair("llama")
    Engine(rollout, self_check=False).generate([[1], [2]], SamplingParams(max_tokens=2), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "4/4" in shown.err
