"""What is refused because it would otherwise be silently wrong: each case once gave a number without an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, CohereForCausalLM

import precgraph
from precgraph import InputError, LoweringError, StaleWeightsError, TraceError, UnsupportedModelError
from precgraph.runtime.vllm.sync import save_weights
from tests.families import causal_lm

IDS = torch.arange(2, 14)[None]


def llama() -> Any:
    return causal_lm("llama")


class Plain(nn.Module):
    """A linear and whatever ``make`` returns from it."""

    def __init__(self, make: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self, x)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def compile_plain(make: Callable[[Any, Tensor], Any]) -> Any:
    return precgraph.compile(Plain(make).bfloat16(), example_inputs=(X,))


# ------------------------------------------------------------------------------------------ models


def test_a_forward_set_on_the_instance() -> None:
    model = llama()
    forward = model.forward
    model.forward = forward
    with pytest.raises(UnsupportedModelError, match="forward was replaced"):
        precgraph.compile(model)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_the_model_itself(register: str) -> None:
    model = llama()
    getattr(model, register)(lambda *args: None)
    with pytest.raises(UnsupportedModelError, match="run twice"):
        precgraph.compile(model)


def test_backward_hooks_name_their_module() -> None:
    model = llama()
    model.model.layers[1].mlp.register_full_backward_hook(lambda *args: None)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp"):
        precgraph.compile(model)


def test_compiling_in_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        precgraph.compile(llama())


def test_a_torch_compiled_model() -> None:
    with pytest.raises(UnsupportedModelError, match=r"torch\.compile"):
        precgraph.compile(torch.compile(llama()))


REPLACED: dict[str, Callable[[Any], None]] = {
    "model.layers.0.mlp.up_proj": lambda m: setattr(m.model.layers[0].mlp, "up_proj", nn.Linear(192, 448)),
    "model.layers": lambda m: setattr(m.model, "layers", m.model.layers[:1]),
    "model.layers.0.mlp.act_fn": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "lm_head": lambda m: setattr(m, "lm_head", nn.Linear(192, 997)),
    "lm_head.weight": lambda m: m.load_state_dict(dict(m.state_dict()), assign=True),
    "model.layers.1.mlp.forward": lambda m: setattr(m.model.layers[1].mlp, "forward", lambda x: 2 * x),
}


@pytest.mark.parametrize("path", REPLACED)
def test_what_is_replaced_after_compile(path: str, tmp_path: Path) -> None:
    """The program would run on without it, and a sync or a file of the weights would hold the old ones."""
    actor = precgraph.compile(llama())
    actor(IDS)
    REPLACED[path](actor)
    where = "replaced" if path == "lm_head.weight" else path.replace(".", r"\.")  # with the weights of all others
    for use in (lambda: actor(IDS), actor.sync, lambda: save_weights(actor, tmp_path / "weights.safetensors")):
        with pytest.raises(StaleWeightsError, match=where):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_that_would_not_run(kind: str) -> None:
    actor = precgraph.compile(llama())
    handle = getattr(actor.model.layers[1].mlp, f"register_{kind}")(lambda *args: None)
    for call in (lambda: actor(IDS), lambda: precgraph.token_logprobs(actor, IDS)):
        with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp.*hooks have changed"):
            call()
    handle.remove()
    actor(IDS)


def test_a_forward_hook_of_the_model_itself_runs() -> None:
    actor, seen = precgraph.compile(llama()), []
    actor.register_forward_hook(lambda module, args, output: seen.append(output.logits.shape))
    actor(IDS)
    assert seen == [(*IDS.shape, 997)]


def test_a_hook_from_before_is_part_of_the_program() -> None:
    model = llama()
    plain = precgraph.compile(copy.deepcopy(model))(IDS).logits
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    doubled = precgraph.compile(model)
    assert not torch.equal(doubled(IDS).logits, plain)
    handle.remove()
    with pytest.raises(UnsupportedModelError, match="hooks have changed"):
        doubled(IDS)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 3)
    with pytest.raises(UnsupportedModelError, match="hooks have changed"):
        doubled(IDS)


def test_logits_that_no_linear_makes() -> None:
    config = CohereConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, logit_scale=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = CohereForCausalLM._from_config(config, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="lm_head"):
        precgraph.compile(model)


def test_a_layer_that_mixes_the_tokens_of_a_batch() -> None:
    model = llama()

    class Mean(nn.Module):
        """Adds the mean of all tokens, whichever sequence they belong to."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) + x.mean(1, keepdim=True)
            return out

    model.model.layers[0].mlp = Mean(model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModelError, match="treat each token alone"):
        precgraph.compile(model)


OUTPUTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a dict": lambda m, x: {"y": m.linear(x)},
    "None beside it": lambda m, x: (m.linear(x), None),
    "a constant": lambda m, x: (m.linear(x), 3.0),
    "the input": lambda m, x: x,
    "one value twice": lambda m, x: (m.linear(x),) * 2,
    "a parameter": lambda m, x: (m.linear(x), m.linear.weight),
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_outputs_that_a_program_cannot_return(what: str) -> None:
    with pytest.raises(UnsupportedModelError, match="must return a tensor"):
        compile_plain(OUTPUTS[what])


def test_a_tuple_of_one_stays_a_tuple() -> None:
    result = compile_plain(lambda m, x: (m.linear(x),))(X)
    assert isinstance(result, tuple) and len(result) == 1 and result[0].shape == (8, 32)


def test_a_number_read_out_of_a_tensor() -> None:
    with pytest.raises(TraceError, match="read out of a tensor"):
        compile_plain(lambda m, x: m.linear(x) * x.sum().item())


def test_a_module_without_tensors() -> None:
    with pytest.raises(UnsupportedModelError, match="nothing to compile"):
        precgraph.compile(nn.ReLU(), example_inputs=(X,))


@pytest.mark.parametrize(("key", "dtype"), [("edge", "float32"), ("master", "float16")])
def test_gradient_rules_that_no_program_has(key: str, dtype: str) -> None:
    data = precgraph.Recipe.jet_rl().to_dict()
    data["gradient"][key] = dtype
    with pytest.raises(LoweringError, match=f"gradient.{key}"):
        precgraph.compile(llama(), recipe=precgraph.Recipe.from_dict(data))


def test_an_output_dtype_that_no_kernel_writes() -> None:
    data = precgraph.Recipe.jet_rl().to_dict()
    data["linear"]["output"] = "float32"
    with pytest.raises(LoweringError, match="no kernel"):
        precgraph.compile(llama(), recipe=precgraph.Recipe.from_dict(data))


@pytest.mark.parametrize("recipe", ["bf16", {}])
def test_a_recipe_is_a_recipe(recipe: Any) -> None:
    with pytest.raises(InputError, match="must be a Recipe"):
        precgraph.compile(llama(), recipe=recipe)


# ------------------------------------------------------------------------------------------ inputs


@pytest.fixture(scope="module")
def actor() -> Any:
    return precgraph.compile(llama())


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1] * 5 + [2] * 7]),
        torch.tensor([[0.0] * 8 + [torch.finfo(torch.float32).min] * 4]),
        torch.full((1, 12), float("nan")),
    ],
    ids=["sequence numbers", "additive", "nan"],
)
def test_masks_that_mean_something_else(actor: Any, mask: Tensor) -> None:
    with pytest.raises(InputError, match="other values than 0 and 1"):
        precgraph.token_logprobs(actor, IDS, mask)


def test_a_gap_in_the_positions(actor: Any) -> None:
    positions = torch.tensor([[*range(6), *range(100, 106)]])
    with pytest.raises(InputError, match="jump from 5 to 100"):
        precgraph.token_logprobs(actor, IDS, position_ids=positions)


@pytest.mark.parametrize("start", [-3, 2**24 - 11, 2**62])
def test_positions_that_are_none(actor: Any, start: int) -> None:
    """fp32, in which RoPE multiplies them, has 2**24 - 1 and not 2**24 + 1."""
    positions = torch.arange(12)[None]
    with pytest.raises(InputError, match=r"position_ids hold .*, outside 0\.\.16777215"):
        precgraph.token_logprobs(actor, IDS, position_ids=positions + start)
    assert precgraph.token_logprobs(actor, IDS, position_ids=positions + 2**24 - 12).isfinite().all()
    with pytest.raises(InputError, match="position_ids must be integers"):
        precgraph.token_logprobs(actor, IDS, position_ids=positions > 0)


@pytest.mark.parametrize("made", [lambda x: x.to("meta"), lambda x: x.to_sparse()], ids=["meta", "sparse"])
@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "position_ids", "cu_seq_lens", "rows", "temperature"])
def test_tensors_without_values(actor: Any, name: str, made: Any) -> None:
    given = {
        "input_ids": IDS, "attention_mask": torch.ones_like(IDS), "position_ids": torch.arange(12)[None],
        "cu_seq_lens": torch.tensor([0, 12]), "rows": torch.tensor([1]), "temperature": torch.ones(1),
    }  # fmt: skip
    precgraph.token_logprobs(actor, **given)
    with pytest.raises(InputError, match=f"^{name} must be a dense tensor with values"):
        precgraph.token_logprobs(actor, **given | {name: made(given[name])})


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("ids", "rows", "shape"),
    [(IDS, torch.empty(0, dtype=torch.int64), (0,)), (IDS[:, :1], None, (1, 0)), (IDS.T, None, (12, 0))],
    ids=["no rows", "one token", "rows of one token"],
)
def test_nothing_to_score_is_differentiable(
    actor: Any, ids: Tensor, rows: Tensor | None, shape: tuple[int, ...], entropy: bool
) -> None:
    """A share of a batch that holds no response adds nothing to the gradients, and does not break the others."""
    found = precgraph.token_logprobs(actor, ids, rows=rows, entropy=entropy)
    actor.zero_grad()
    for out in found if entropy else (found,):
        assert out.shape == shape and out.dtype == torch.float32
        out.sum().backward(retain_graph=True)
    grads = [p.grad for n, p in actor.named_parameters() if "_proj" in n]
    assert grads and all(g is not None and not g.any() for g in grads)
    actor.zero_grad()


def test_labels_on_padding(actor: Any) -> None:
    mask = torch.ones_like(IDS)
    mask[0, 9:] = 0
    with pytest.raises(InputError, match="masked positions"):
        actor(IDS, attention_mask=mask, labels=IDS)
    assert torch.isfinite(actor(IDS, attention_mask=mask, labels=IDS.masked_fill(mask == 0, -100)).loss)


@pytest.mark.parametrize("labels", [IDS.int(), IDS[:, :5], IDS + 5000, IDS - 50], ids=["int32", "shape", "high", "low"])
def test_labels_that_are_none(actor: Any, labels: Tensor) -> None:
    with pytest.raises(InputError, match="labels"):
        actor(IDS, labels=labels)


@pytest.mark.parametrize(
    "temperature", [1e-38, 0.0, float("inf"), float("nan"), None, "1", 10**400, 1j, torch.tensor([1.0], device="meta")]
)
def test_temperatures_that_are_none(actor: Any, temperature: Any) -> None:
    with pytest.raises(InputError, match="temperature"):
        precgraph.token_logprobs(actor, IDS, temperature=temperature)


@pytest.mark.parametrize("ids", [IDS.tolist(), IDS.numpy()], ids=["list", "numpy"])
def test_ids_are_a_tensor(actor: Any, ids: Any) -> None:
    with pytest.raises(InputError, match="must be a tensor"):
        actor(ids)
