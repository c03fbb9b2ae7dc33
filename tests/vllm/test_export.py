"""FP8 checkpoints of ``precgraph export`` in real vLLM: served as the bytes that they are, rescored to 0.0."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import precgraph
from precgraph.checkpoint import Fp8Checkpoint, export
from precgraph.errors import InputError
from precgraph.loading import load_model
from precgraph.recipe import Recipe, SelectRule
from precgraph.runtime.sampling import SamplingParams
from tests.families import causal_lm
from tests.vllm.conftest import largest_difference

pytestmark = pytest.mark.vllm
# Widths of one family whose experts are whole blocks; the others end within blocks.
FAMILIES: dict[str, dict[str, int]] = {
    "qwen3": {}, "llama": {}, "qwen3_moe": {"moe_intermediate_size": 128}, "glm4_moe": {"moe_intermediate_size": 128}
}  # fmt: skip


def model_of(llm: Any) -> Any:
    return llm.engine.llm_engine.model_executor.driver_worker.worker.model_runner.model


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_served_and_rescored_to_zero(
    family: str, start: Callable[..., Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    """The trainer's own weights are bf16 masters; the engine has seen nothing but codes and scales."""
    actor = precgraph.compile(causal_lm(family, **FAMILIES[family]), "train")
    export(actor, tmp_path / "fp8", Recipe.jet_rl())
    checkpoint = Fp8Checkpoint(tmp_path / "fp8")
    llm = start(tmp_path / "fp8", digest=actor.precgraph.graph.digest())
    samples = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.7))
    assert all(len(s.token_ids) == 12 for s in samples)
    assert largest_difference(actor, samples, 0.7) == 0.0
    served = model_of(llm).weights()
    parts, seen = model_of(llm).places, 0
    for name in checkpoint.weights:
        part = parts[name]
        codes, scales = served[part.path], served[part.path + "_scale_inv"]
        assert torch.equal(part.of(codes).view(torch.uint8), checkpoint.read(name).view(torch.uint8)), name
        if part.expert is not None:
            scales = scales[part.expert, part.rows[0] // 128 : -(-part.rows[1] // 128)]
        assert torch.equal(scales, checkpoint.scale(name)), name
        seen += 1
    assert seen == len(checkpoint.weights) >= 14
    llm.shutdown()


def test_the_exports_recipe_is_what_runs(start: Callable[..., Any], prompts: list[list[int]], tmp_path: Path) -> None:
    """Scales of powers of two, for activations too, of which the bytes say nothing."""
    rules = Recipe.jet_rl().linear
    powers = {k: replace(getattr(rules, k), scale_dtype="ue8m0") for k in ("activation", "weight")}
    actor = precgraph.compile(causal_lm("llama"), "train", replace(Recipe.jet_rl(), linear=replace(rules, **powers)))
    export(actor, tmp_path / "fp8")
    llm = start(tmp_path / "fp8", digest=actor.precgraph.digest)
    assert largest_difference(actor, llm.generate(prompts[:4], SamplingParams(max_tokens=6)), 1.0) == 0.0
    llm.shutdown()


def test_changed_codes_are_what_is_served(start: Callable[..., Any], prompts: list[list[int]], tmp_path: Path) -> None:
    """Nothing is quantised again on the way: a checkpoint with one other scale gives other log-probabilities."""
    actor = precgraph.compile(causal_lm("llama"), "train")
    export(actor, tmp_path / "fp8", Recipe.jet_rl())
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    llm = start(tmp_path / "fp8")
    samples = llm.generate(prompts[:4], SamplingParams(max_tokens=6, temperature=1.0))
    assert largest_difference(actor, samples, 1.0) > 0.0
    llm.shutdown()


@pytest.mark.parametrize("fault", ["recipe", "block", "scale", "missing"])
def test_exports_that_do_not_fit_are_refused(fault: str, start: Callable[..., Any], tmp_path: Path) -> None:
    down = "model.layers.1.mlp.down_proj"
    export(causal_lm("llama"), tmp_path / "fp8", Recipe.jet_rl())
    folder, recipe, words = tmp_path / "fp8", Recipe.jet_rl(), ""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    match fault:
        case "recipe":
            recipe, words = (
                replace(recipe, select=SelectRule(skip=(down,))),
                f"{down}.weight: the checkpoint holds float8",
            )
        case "block":
            config["quantization_config"]["weight_block_size"], words = [192, 128], "is \\[.*\\], not|blocks are"
        case "scale":
            tensors[f"{down}.weight_scale_inv"] *= 0
            words = f"{down}.weight: not every scale"
        case "missing":
            del tensors["model.norm.weight"]
            words = "model.norm.weight: the checkpoint lacks"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        start(folder, recipe=recipe)


@pytest.mark.slow
def test_smollm2(smollm2_gguf: Path, start: Callable[..., Any], tmp_path: Path) -> None:
    """Real weights, from a checkpoint in bf16 and from an FP8 one alone: 30 layers, hidden 576, a KV width of 192, tied
    embeddings; no width a multiple of 128. Prompts in chunks, a prefix from the cache, and other weights at last."""
    model = load_model(smollm2_gguf)
    model.save_pretrained(tmp_path / "bf16")
    actor = precgraph.compile(model, "train")
    export(actor, tmp_path / "fp8", Recipe.jet_rl())
    prompts = [[1, 4093, 198, *range(300 + 40 * i, 300 + 40 * i + 5 + 20 * i)] for i in (0, 2, 7)]
    prompts.append([*prompts[2][:130], 5, 6])  # a prefix of the one before, which takes two steps to read
    params = SamplingParams(max_tokens=8, temperature=0.7)
    for folder in ("bf16", "fp8"):
        llm = start(tmp_path / folder, max_model_len=256)
        samples = llm.generate(prompts, params)
        assert largest_difference(actor, samples, 0.7) == 0.0
        assert samples[3].cached_tokens == 128
        if folder == "bf16":
            llm.shutdown()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
        model.model.layers[3].mlp.down_proj.weight.neg_()
    actor.sync()
    llm.sync(actor)
    after = llm.generate(prompts[2:], params)
    assert after[0].cached_tokens == 0 and largest_difference(actor, after, 0.7) == 0.0


def test_the_plain_way_names_the_override_that_an_export_needs(tmp_path: Path) -> None:
    """``vllm serve DIR`` with the architecture and the recipe alone; with the null it is an engine's configuration."""
    from vllm.engine.arg_utils import EngineArgs

    export(causal_lm("llama"), tmp_path / "fp8", Recipe.jet_rl())
    overrides: dict[str, Any] = {"architectures": ["PrecGraphForCausalLM"], "precgraph": "jet_rl"}

    def configured(**more: Any) -> Any:
        arguments = {"model": str(tmp_path / "fp8"), "skip_tokenizer_init": True, "dtype": "bfloat16"}
        return EngineArgs(**arguments, hf_overrides=overrides | more).create_engine_config()

    with pytest.raises(Exception, match='add "quantization_config": null to --hf-overrides'):  # vLLM wraps ours
        configured()
    assert configured(quantization_config=None).model_config.quantization is None
