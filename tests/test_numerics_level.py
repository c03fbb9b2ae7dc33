"""Level numerics: the first node that differs, every node that differs by itself, and nothing where all is equal."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, fx
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from precgraph import probe
from precgraph.attention import IMPLEMENTATION
from precgraph.capture import Capture
from precgraph.checking import lowered
from precgraph.cli import app
from precgraph.errors import InputError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, annotate
from precgraph.lowering.lower import lower
from precgraph.passes.pipeline import build
from precgraph.probe import Run, compare_runs, load_pair
from precgraph.quantizer import QTensor, dequantize, quantize
from precgraph.recipe import Recipe, SelectRule
from precgraph.report import load
from precgraph.report.numerics import measures
from precgraph.runtime.store import WeightStore
from precgraph.trace import Trace, trace
from precgraph.verify.numerics import Numerics, mismatch
from precgraph.verify.report import Report
from precgraph.verify.values import compare
from tests.families import CAUSAL_LMS, VOCABULARY, causal_lm
from tests.surgery import insert, set_argument, set_spec, swap, swap_parameters

JET = Recipe.jet_rl()
assert JET.linear.activation is not None
assert JET.linear.weight is not None
IDS = torch.randint(0, VOCABULARY, (20,), generator=torch.Generator().manual_seed(0))
LINEARS = tuple(f"self_attn.{p}_proj" for p in "qkvo") + tuple(f"mlp.{p}_proj" for p in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def llama() -> Trace:
    return trace(causal_lm("llama"))


def measure(traced: Trace, train: Recipe, infer: Recipe) -> Numerics:
    store = WeightStore(traced.tensors)
    runs = [Run(lowered(traced, mode, recipe, "reference"), store, IDS)
            for mode, recipe in (("train", train), ("infer", infer))]  # fmt: skip
    return compare_runs(runs[0], runs[1], IDS)


def linear(**changes: Any) -> Recipe:
    return replace(JET, linear=replace(JET.linear, **changes))


def found(outcome: Numerics) -> set[tuple[str, str, str]]:
    return {(f.code.partition(" ")[0], f.module, f.op) for f in outcome.report.violations}


@pytest.mark.parametrize("family", [*CAUSAL_LMS, "gemma2", "qwen3_moe", "deepseek_v3"])
def test_one_recipe_gives_no_differing_bit(family: str) -> None:
    outcome = measure(trace(causal_lm(family)), JET, JET)
    assert outcome.report.ok
    assert outcome.report.exit_code == outcome.differing == 0
    assert outcome.first is None
    assert not outcome.report.notes
    assert outcome.report.compared > 40
    assert all(delta.bits == 0 and delta.largest == 0 for _, delta in outcome.growth)
    assert outcome.logprobs is not None
    assert (outcome.logprobs.tokens, outcome.logprobs.differing, outcome.logprobs.k3) == (len(IDS) - 1, 0, 0.0)


def test_a_skipped_layer_is_the_only_cause_and_the_first_to_differ(llama: Trace) -> None:
    """Everything before layer 1's down projection is equal, and everything after it only inherits."""
    layer = "model.layers.1.mlp.down_proj"
    outcome = measure(llama, JET, replace(JET, select=SelectRule(skip=(layer,))))
    assert found(outcome) == {("PG108", layer, "linear")}
    assert outcome.first is not None
    assert (outcome.first.module, outcome.first.op) == (layer, "linear")
    # After it: the residual, the norm and the logits.
    assert outcome.differing == 4
    assert outcome.report.violations[0].inherited == 3
    growth = dict(outcome.growth)
    assert growth["model.layers.0"].differing == 0
    assert 0 < growth["model.layers.1"].relative < 0.2
    assert growth["head"].differing > 0


def test_an_activation_rule_differs_at_every_quantiser_and_nowhere_else(llama: Trace) -> None:
    """The first is that of layer 0's input; later ones have other inputs, and still are found by themselves."""
    outcome = measure(llama, JET, linear(activation=replace(JET.linear.activation, divide="reciprocal")))
    places = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    assert found(outcome) == {("PG104", f"model.layers.{n}.{p}", "quantize") for n in (0, 1) for p in places}
    assert outcome.first is not None
    assert (outcome.first.module, outcome.first.op) == ("model.layers.0.input_layernorm", "quantize")
    # Division and multiplication by the reciprocal give the same scales: only codes differ.
    assert all(c.alone is not None and c.alone.scales == 0 and c.alone.bits > 0 for c in outcome.causes)


def test_blocks_of_another_size_have_no_equal_bits_but_numbers(llama: Trace) -> None:
    outcome = measure(llama, JET, linear(weight=replace(JET.linear.weight, granularity="64x128")))
    assert found(outcome) == {("PG101", f"model.layers.{n}.{m}", "quantize") for n in (0, 1) for m in LINEARS}
    assert all(not c.delta.same_storage and 0 < c.delta.largest < 1 for c in outcome.causes)


def test_bf16_rollout(llama: Trace) -> None:
    """Every linear by itself; norms and attention of the other arithmetic too, as their kernels' names say."""
    outcome = measure(llama, JET, Recipe.bf16())
    linears = {(m, op) for code, m, op in found(outcome) if code == "PG108"}
    assert linears == {(f"model.layers.{n}.{m}", "linear") for n in (0, 1) for m in LINEARS}
    assert outcome.first is not None
    assert outcome.logprobs is not None
    assert outcome.logprobs.k3 > 1e-4


def test_a_flipped_bit_of_one_weight_is_the_first_and_only_cause(llama: Trace) -> None:
    """The packs of the rollout are made from a master of which one bit was flipped: no rule is to blame."""
    path = "model.layers.1.mlp.up_proj.weight"
    masters = dict(llama.tensors)
    masters[path] = masters[path].detach().clone()
    masters[path].view(torch.int16)[3, 5] ^= 1 << 6
    graphs = [lowered(llama, mode, JET, "reference") for mode in ("train", "infer")]
    runs = [Run(g, WeightStore(t), IDS) for g, t in zip(graphs, (llama.tensors, masters), strict=True)]
    outcome = compare_runs(runs[0], runs[1], IDS)
    assert found(outcome) == {("PG502", path.removesuffix(".weight"), "quantize")}
    assert outcome.first is not None
    assert outcome.first.module == path.removesuffix(".weight")


# ------------------------------------------------------------------------------------------- values


def test_differing_bits_are_counted() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 0.0])
    b = torch.tensor([1.0, 2.0, 3.0, -0.0])
    delta = compare(a, b)
    assert (delta.values, delta.differing, delta.bits, delta.all_bits, delta.largest) == (4, 1, 1, 128, 0.0)
    b.view(torch.int32)[1] ^= 0b1011
    delta = compare(a, b)
    assert (delta.differing, delta.bits) == (2, 4)
    assert delta.largest == 11 * 2**-22  # 2.0 has an ulp of 2^-22


def test_nan_equals_itself_and_is_infinitely_far_from_a_number() -> None:
    a = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    assert not compare(a, a.clone()).differs
    assert compare(a, torch.zeros_like(a)).largest == float("inf")


def test_codes_are_compared_as_bytes_and_as_values() -> None:
    x = torch.linspace(-3, 3, 256).view(2, 128).to(torch.bfloat16)
    q = quantize(x, JET.linear.activation)  # type: ignore[arg-type]
    codes = q.codes.clone()
    codes.view(torch.uint8)[1, 7] ^= 0b11
    other = QTensor(codes, q.scales, q.shape, q.format)
    delta = compare(q, other)
    assert (delta.values, delta.differing, delta.bits, delta.scales) == (256, 1, 2, 0)
    assert delta.largest == float((dequantize(q) - dequantize(other)).abs().max())
    doubled = QTensor(q.codes, q.scales * 2, q.shape, q.format)
    assert compare(q, doubled).scales == 2


def test_a_value_against_its_quantised_form_is_compared_as_numbers() -> None:
    x = torch.linspace(-3, 3, 256).view(2, 128).to(torch.bfloat16)
    delta = compare(x, quantize(x, Format(dtype="float8_e4m3fn", granularity="1x128")))
    assert not delta.same_storage
    assert 0 < delta.largest <= 3 * 2**-4


def test_k3() -> None:
    train: Tensor = torch.tensor([-1.0, -2.0])
    out = mismatch(train, torch.tensor([-1.5, -2.0]))
    assert out.k3 == pytest.approx((torch.tensor(0.5).double().exp().item() - 1.5) / 2)
    assert (out.largest, out.mean, out.differing) == (0.5, 0.25, 1)


def test_numbers_that_json_lacks_are_null() -> None:
    broken = mismatch(torch.tensor([torch.nan, -1.0]), torch.tensor([-1.0, -1.0]))
    found = measures(Numerics(Report(1), None, (), (), broken, 1))["logprobs"]
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "tokens": 2, "differing": 1, "mean": None, "largest": None, "k3": None,
    }  # fmt: skip


# ----------------------------------------------------------------------------- command line, captures


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["check", *(str(a) for a in args), "--level", "numerics"])


def report(path: Path) -> dict[str, Any]:
    """A document that fits the published schema."""
    return load(path)


@pytest.fixture(scope="module", autouse=True)
def pairs() -> Iterator[None]:
    """Every model is traced and built once for each pair of sides."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(lambda *sides: load_pair(*sides, {}, lambda _: None))
        patch.setattr(probe, "load_pair", lambda model, *rest: once(str(model), *rest[:3]))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny Llama."""
    path = tmp_path_factory.mktemp("llama")
    causal_lm("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def captured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rollout's values on 16 tokens, captured by the command."""
    path = tmp_path_factory.mktemp("captures") / "rollout.safetensors"
    result = run(folder, "--tokens", 16, "--capture", path)
    assert result.exit_code == 0, result.output
    assert not [p for p in path.parent.iterdir() if p != path]
    return path


def test_two_recipes_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out.json", tmp_path / "r.toml"
    replace(JET, select=SelectRule(skip=("model.layers.1.mlp.down_proj",))).save(recipe)
    result = run(folder, "--infer", recipe, "--tokens", 16, "-o", out)
    assert result.exit_code == 1, result.output
    assert "first divergence: model.layers.1.mlp.down_proj, linear" in result.stdout
    data = report(out)
    (violation,) = data["violations"]
    assert (violation["code"][:5], violation["module"]) == ("PG108", "model.layers.1.mlp.down_proj")
    assert data["numerics"]["first"]["module"] == "model.layers.1.mlp.down_proj"
    assert data["numerics"]["growth"][1]["segment"] == "model.layers.0"
    assert data["numerics"]["growth"][1]["differing"] == 0
    assert data["numerics"]["logprobs"]["tokens"] == 15
    assert data["probe"] == {"tokens": 16, "seed": 0, "prompt_file": None}


def test_a_report_read_again_and_its_page_show_what_the_check_showed(folder: Path, tmp_path: Path) -> None:
    """Growth, causes and log-probabilities are of the document, and its schema says what they are."""
    out, page, recipe = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "r.toml"
    replace(JET, select=SelectRule(skip=("model.layers.1.mlp.down_proj",))).save(recipe)
    result = run(folder, "--infer", recipe, "--tokens", 16, "-o", out, "--html", page)
    again = CliRunner().invoke(app, ["report", str(out)])
    assert (again.stdout, again.exit_code) == (result.stdout, 1)
    data = report(out)
    (cause,) = data["numerics"]["causes"]
    shown = (
        f"{cause['alone']['share']:.2%}",
        f"{cause['alone']['largest']:.3g}",
        f"{data['numerics']['logprobs']['k3']:.3g}",
    )
    for text in (again.stdout, page.read_text()):
        assert "How the difference grows" in text and "Differ by themselves, on equal inputs" in text
        assert "first divergence: model.layers.1.mlp.down_proj, linear" in text
        assert all(number in text for number in shown)
        assert "log-probabilities of 15 probe tokens" in text
    for key in ("first", "causes", "growth", "logprobs"):
        whole = {k: v for k, v in data["numerics"].items() if k != key}
        for broken in (whole, {**whole, key: "x"}):
            out.write_text(json.dumps({**data, "numerics": broken}))
            with pytest.raises(InputError, match="is no report"):
                report(out)


@pytest.mark.parametrize("side", ["--train", "--infer"])
def test_a_side_that_is_none_is_said_before_weights_are_read(side: str) -> None:
    result = run("no/such/model", side, "jet-rl")
    assert result.exit_code == 2
    assert "no preset or stack is called 'jet-rl'" in result.stderr


def test_a_capture_holds_what_the_program_computes(captured: Path, folder: Path) -> None:
    """The logits in the file are those of the compiled rollout; the file is plain safetensors."""
    import precgraph

    capture = Capture(captured)
    assert capture.graph is not None
    model = precgraph.compile(causal_lm("llama"), mode="infer", backend="reference")
    with torch.no_grad():
        logits = model(capture.ids[None]).logits
    node = capture.modules()["lm_head"]
    assert torch.equal(load_file(captured)[node], logits)
    assert capture.about["environment"]["versions"]["torch"] == torch.__version__
    assert capture.about["digest"] == model.precgraph.graph.digest()


def test_a_capture_of_the_same_program_is_equal(captured: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(folder, "--infer", captured, "-o", out)
    assert result.exit_code == 0, result.output
    data = report(out)
    assert (data["compared"]["differing"], data["numerics"]["logprobs"]["differing"]) == (0, 0)
    assert data["compared"]["values"] > 40
    assert run(captured, captured).exit_code == 0


def edited(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The same capture with some tensors changed."""
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(source)
    change(tensors)
    save_file(tensors, target, metadata=metadata)
    return target


def test_a_flipped_bit_in_a_capture_is_found_by_itself(captured: Path, folder: Path, tmp_path: Path) -> None:
    """Only one stored value differs, so neither what comes before nor what comes after is to blame."""
    capture = Capture(captured)
    assert capture.graph is not None
    node = capture.modules()["model.layers.0.mlp.down_proj"]

    def flip(tensors: dict[str, Tensor]) -> None:
        tensors[node].view(torch.int16)[0, 3, 5] ^= 1

    other = edited(captured, tmp_path / "flipped.safetensors", flip)
    for sides in ((folder, "--infer", other), (captured, other)):
        out = tmp_path / "out.json"
        assert run(*sides, "-o", out).exit_code == 1
        data = report(out)
        first = data["numerics"]["first"]
        assert (first["node"], first["delta"]["differing"], first["delta"]["bits"]) == (node, 1, 1)
        named = {(v["code"][:5], v["module"]) for v in data["violations"]}
        assert ("PG502", "model.layers.0.mlp.down_proj") in named
    # Run on the captured values, the residual after it is another than the one that was captured.
    assert len(named) == 1


def test_other_weights_are_named(folder: Path, captured: Path, tmp_path: Path) -> None:
    model = causal_lm("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    out = tmp_path / "out.json"
    assert run(tmp_path / "other", "--infer", captured, "-o", out).exit_code == 1
    data = report(out)
    assert {(v["code"][:5], v["module"]) for v in data["violations"]} == {("PG503", "model.layers.1.mlp.up_proj")}
    assert data["violations"][0]["inherited"] > 3


def hooked(model: Any, ids: Tensor, modules: tuple[str, ...]) -> dict[str, Tensor]:
    """What docs/numerics.md shows: outputs of stock transformers' modules by forward hooks."""
    taken: dict[str, Tensor] = {"input_ids": ids}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            taken[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in modules]
    with torch.no_grad():
        model(ids[None])
    for handle in handles:
        handle.remove()
    return taken


MODULES = (
    "model.embed_tokens", *(f"model.layers.{n}{m}" for n in (0, 1) for m in (
        "", ".input_layernorm", ".self_attn", ".self_attn.q_proj", ".mlp", ".mlp.down_proj")), "model.norm", "lm_head",
)  # fmt: skip


def test_hidden_states_of_stock_transformers(folder: Path, tmp_path: Path) -> None:
    """The bf16 preset is Hugging Face bit for bit, every module; jet_rl first differs at the first linear.

    With torch's own attention, the projections before it agree and the attention does not.
    """
    path, out = tmp_path / "hf.safetensors", tmp_path / "out.json"
    model = causal_lm("llama").eval()
    model.set_attn_implementation(IMPLEMENTATION)
    save_file(hooked(model, IDS, MODULES), path)
    result = run(folder, "--train", "bf16", "--infer", path, "-o", out)
    assert result.exit_code == 0, result.output
    assert report(out)["compared"] == {"modules": len(MODULES), "differing": 0, "hidden": 0}
    assert report(out)["numerics"]["logprobs"]["differing"] == 0
    assert run(folder, "--train", "jet_rl", "--infer", path, "-o", out).exit_code == 1
    data = report(out)
    (violation,) = data["violations"]
    assert (violation["code"][:5], violation["module"]) == ("PG504", "model.layers.0.self_attn.q_proj")
    assert [g["segment"] for g in data["numerics"]["growth"]] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
    ]  # fmt: skip
    model.set_attn_implementation("sdpa")
    save_file(hooked(model, IDS, MODULES), path)
    assert run(folder, "--train", "bf16", "--infer", path, "-o", out).exit_code == 1
    assert report(out)["numerics"]["first"]["module"] == "model.layers.0.self_attn"


def test_foreign_captures_that_do_not_fit(folder: Path, captured: Path, tmp_path: Path) -> None:
    taken = hooked(causal_lm("llama").eval(), IDS, ("model.layers.0.mlp", "lm_head"))

    def saved(**changes: Any) -> Path:
        save_file({k: v for k, v in {**taken, **changes}.items() if v is not None}, tmp_path / "x.safetensors")
        return tmp_path / "x.safetensors"

    def error(*args: object) -> str:
        result = run(*args)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        return result.stderr

    name = "model.layers.0.mlp"
    assert "input_ids" in error(folder, "--infer", saved(input_ids=None))
    codes = taken[name].to(torch.float8_e4m3fn)
    assert f"{name}: its output was captured as float8_e4m3fn" in error(folder, "--infer", saved(**{name: codes}))
    assert f"{name}: its output is [20, 7]" in error(folder, "--infer", saved(**{name: taken[name][..., :7].clone()}))
    assert "20 tokens" in error(folder, "--infer", saved(**{name: taken[name][:, :9].clone()}))
    renamed = saved(**{name: None, "lm_head": None, "layer0.mlp": taken[name]})
    assert "named after a module" in error(folder, "--infer", renamed)
    assert "outside the vocabulary" in error(folder, "--infer", saved(input_ids=IDS + VOCABULARY))
    assert "other tokens" in error(captured, saved())
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(captured.read_bytes()[:-100])
    assert "whole safetensors" in error(folder, "--infer", cut)
    assert "no meaning beside a capture" in error(folder, "--infer", captured, "--capture", tmp_path / "y.safetensors")
    assert "must run" in error(folder, "--train", captured)
    assert "no weights" in error(folder / "config.json")
    assert "none.safetensors: cannot be read" in error(folder, "--infer", tmp_path / "none.safetensors")
    assert "--infer is empty" in error(folder, "--infer", "")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (tmp_path, pipe):
        assert f"{target}: cannot be written" in error(folder, "--tokens", 4, "--capture", target)
        assert not list(target.parent.glob(f"{target.name}.*"))
    assert pipe.is_fifo()
    assert "--seed" in error(folder, "--seed", 2**70)


def test_a_capture_on_a_full_disk_names_its_file(captured: Path, folder: Path, tmp_path: Path, full_disk: Any) -> None:
    """While the first values come, and for the last bytes of the file, which has the header too."""
    path = tmp_path / "x.safetensors"
    for size in (0, 4096, captured.stat().st_size - 100):
        with full_disk(size):
            result = run(folder, "--tokens", 16, "--capture", path)
        assert result.exit_code == 2 and f"{path}: cannot be written: File too large; make room" in result.stderr
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [{"quantized": 3}, {"parts": {"rope_table": "x"}}, {"weights": {"x": 3}}, {"parameters": []}, {"about": 3}],
)
def test_metadata_of_another_shape_is_refused(change: dict[str, Any], captured: Path, tmp_path: Path) -> None:
    with safe_open(captured, framework="pt") as file:
        metadata = file.metadata()
    metadata["precgraph"] = json.dumps({**json.loads(metadata["precgraph"]), **change})
    save_file(load_file(captured), tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(InputError, match=f"metadata whose {next(iter(change))!r} cannot be read"):
        Capture(tmp_path / "x.safetensors")


def test_a_missing_module_is_said(folder: Path, tmp_path: Path) -> None:
    taken = hooked(causal_lm("llama").eval(), IDS, ("model.embed_tokens",))
    path, out = tmp_path / "x.safetensors", tmp_path / "out.json"
    save_file({**taken, "model.layers.0.self_attn.qkv_proj": torch.zeros(20, 384)}, path)
    shown = run(folder, "--train", "bf16", "--infer", path, "-o", out)
    assert shown.exit_code == 0, shown.output
    absent, few = report(out)["not_proved"]
    assert (absent["code"][:5], absent["module"]) == ("PG910", "model.layers.0.self_attn.qkv_proj")
    assert (few["code"][:5], few["module"]) == ("PG910", "")
    assert "not proved: 2 points; 1 module compared, and none differs" in shown.stdout
    assert few["message"] == "1 of 30 modules were captured, and nothing after model.embed_tokens was compared"


def test_a_capture_of_part_of_the_program_proves_nothing_of_the_rest(
    folder: Path, captured: Path, tmp_path: Path
) -> None:
    """Without the logits there is no verdict; with them, what was compared is said."""
    capture = Capture(captured)
    assert capture.graph is not None
    nodes = capture.modules()
    one, most = (tmp_path / f"{name}.safetensors" for name in ("one", "most"))
    node = nodes["model.layers.0.mlp.down_proj"]
    with safe_open(captured, framework="pt") as file:
        about = json.loads(file.metadata()["precgraph"])
    about |= {"quantized": {}, "parts": {}, "weights": {}}
    save_file({k: v for k, v in load_file(captured).items() if k in ("input_ids", node)}, one,
              metadata={"precgraph": json.dumps(about)})  # fmt: skip
    for sides in ((folder, "--infer", one), (one, one), (captured, one)):
        result = run(*sides)
        assert result.exit_code == 2, result.output
        assert re.search(r"only 1 of \d\d values could be compared, and not the logits", result.stderr)
    edited(captured, most, lambda tensors: tensors.pop(node))
    for sides in ((folder, "--infer", most), (captured, most)):
        out = tmp_path / "out.json"
        assert run(*sides, "-o", out).exit_code == 0
        data = report(out)
        (few,) = data["not_proved"]
        had = data["compared"]["values"]
        assert few["message"] == f"a capture has {had} of the {had + 1} values; the others were not compared"


def test_prompt_files(folder: Path, tmp_path: Path) -> None:
    good, bad, out = tmp_path / "ids.json", tmp_path / "bad.json", tmp_path / "out.json"
    good.write_text(json.dumps([5, 6, 7, 8]))
    assert run(folder, "--prompt-file", good, "-o", out).exit_code == 0
    assert report(out)["probe"]["tokens"] == 4
    for text in ("[1", '["a", "b"]', "[1]", "{}", f"[1, {2**70}]", "[" * 100_000):
        bad.write_text(text)
        result = run(folder, "--prompt-file", bad)
        assert result.exit_code == 2 and "bad.json" in result.stderr, result.output


@pytest.mark.parametrize(("text", "said"), [("", "is 0 tokens"), ("a", "is 1 token of"), ("a a a", "")])
def test_a_prompt_of_text(text: str, said: str, folder: Path, tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 5, "?": 0}, "?"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    shutil.copytree(folder, tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text(text)
    result = run(tmp_path / "model", "--prompt-file", tmp_path / "prompt.txt")
    assert result.exit_code == (2 if said else 0), result.output
    assert said in result.stderr


def test_more_tokens_than_the_model_has_positions_for(folder: Path) -> None:
    result = run(folder, "--tokens", 1025)
    assert result.exit_code == 2 and "1025 tokens exceed the model's max_position_embeddings of 1024" in result.stderr


def test_the_snippet_of_the_documentation(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It captures from stock transformers; with torch's own attention, only what attention makes differs first."""
    text = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    snippet = snippet.replace("my-model", str(folder)).replace("[1, 52, 7, 300, 41]", str(IDS.tolist()))
    exec(snippet, {})
    out = tmp_path / "out.json"
    assert run(folder, "--train", "bf16", "--infer", "hidden.safetensors", "-o", out).exit_code == 1
    data = report(out)
    assert data["compared"]["modules"] == 2 * 11 + 3
    # o_proj is the last thing in self_attn: their outputs are one value, and o_proj's path is the longer one.
    assert data["numerics"]["first"]["module"] in ("model.layers.0.self_attn", "model.layers.0.self_attn.o_proj")
    assert data["not_proved"] == []


# ------------------------------------------------------------------- defects planted in one program


def _scaled(by: float) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda graph, node: graph.call_function(torch.ops.aten.mul.Tensor, (node, by))


L0, L1 = "model.layers.0", "model.layers.1"
KV = [f"{L1}.self_attn.{p}_proj" for p in "kv"]
# What is done to the rollout, the causes, and the module where the two first differ.
DEFECTS: dict[str, tuple[Callable[[PrecisionGraph], object], set[tuple[str, str, str]], str]] = {
    "eps of the last norm": (
        lambda g: set_argument(g, "rms_norm", "model.norm", 2, 1e-2), {("PG301", "model.norm", "rms_norm")},
        "model.norm",
    ),
    "attention's scale": (
        lambda g: set_spec(g, f"{L1}.self_attn", scale=0.125), {("PG301", f"{L1}.self_attn", "attention")},
        f"{L1}.self_attn",
    ),
    "gate and up exchanged": (lambda g: swap(g, "gated", f"{L1}.mlp"), {("PG401", f"{L1}.mlp", "gated")}, f"{L1}.mlp"),
    "key and value weights exchanged": (
        lambda g: swap_parameters(g, *(f"{m}.weight" for m in KV)), {("PG402", m, "quantize") for m in KV}, KV[0]
    ),
    "another activation": (
        lambda g: set_argument(g, "gated", f"{L0}.mlp", 2, "gelu"), {("PG301", f"{L0}.mlp", "gated")}, f"{L0}.mlp"
    ),
    "an operator too many": (
        lambda g: insert(g, "rms_norm", f"{L1}.post_attention_layernorm", _scaled(1.5)),
        {("PG404", f"{L1}.post_attention_layernorm", "aten.mul.Tensor")}, f"{L1}.post_attention_layernorm",
    ),
    "two, the second behind the first": (
        lambda g: (set_argument(g, "rms_norm", f"{L0}.input_layernorm", 2, 1e-2), swap(g, "gated", f"{L1}.mlp")),
        {("PG301", f"{L0}.input_layernorm", "rms_norm"), ("PG401", f"{L1}.mlp", "gated")}, f"{L0}.input_layernorm",
    ),
}  # fmt: skip


def planted(traced: Trace, mutate: Callable[[PrecisionGraph], object]) -> Numerics:
    """The measurement of a rollout that was changed before its kernels were chosen."""
    infer = build(traced.graph, "infer", JET, check=True)
    mutate(infer)
    infer.graph.lint()
    infer = lower(infer, "reference", torch.device("cpu"))
    store = WeightStore(traced.tensors)
    return compare_runs(Run(lowered(traced, "train", JET, "reference"), store, IDS), Run(infer, store, IDS), IDS)


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defects(llama: Trace, name: str) -> None:
    mutate, causes, first = DEFECTS[name]
    outcome = planted(llama, mutate)
    assert found(outcome) == causes
    assert outcome.first is not None
    assert outcome.first.module == first
    # Layer 0 is equal where nothing was done to it.
    assert (dict(outcome.growth)[L0].differing == 0) == (not any(m.startswith(L0) for _, m, _ in causes))
    assert outcome.logprobs is not None
    assert outcome.logprobs.differing > 0


def test_programs_that_are_not_cut_alike_run_one_after_the_other(llama: Trace) -> None:
    """A training program in one piece, as a value that two later segments read makes it."""
    train = lowered(llama, "train", JET, "reference")
    for node in train:
        annotate(node, segment="model")
    store = WeightStore(llama.tensors)
    runs = Run(train, store, IDS), Run(lowered(llama, "infer", JET, "reference"), store, IDS)
    assert (len(runs[0].segments), len(runs[1].segments)) == (1, 4)
    outcome = compare_runs(*runs, IDS)
    assert outcome.report.ok
    assert outcome.hidden == outcome.differing == 0


def test_values_are_dropped_layer_by_layer(llama: Trace) -> None:
    """What is left between two layers: the residual, RoPE's tables, what the caller gave and no weights."""
    run_ = Run(lowered(llama, "infer", JET, "reference"), WeightStore(llama.tensors), IDS)
    for index in range(2):
        run_.segment(index, lambda _, value: value)
        run_.release()
        tensors = [v for v in run_.live.values() if isinstance(v, Tensor)]
        assert len(tensors) == 3
        assert not run_.store.packs


def test_another_models_capture_does_not_fit(captured: Path, tmp_path: Path) -> None:
    causal_lm("qwen2").save_pretrained(tmp_path / "qwen2")
    result = run(tmp_path / "qwen2", "--infer", captured)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "on one side and" in result.stderr


def test_the_last_norm_changes_two_values_only(llama: Trace) -> None:
    """Its own and the logits."""
    outcome = planted(llama, DEFECTS["eps of the last norm"][0])
    assert outcome.differing == 2
    assert outcome.report.violations[0].inherited == 1


def test_an_operator_that_changes_nothing_is_a_note(llama: Trace) -> None:
    outcome = planted(llama, lambda g: insert(g, "rms_norm", f"{L1}.post_attention_layernorm", _scaled(1.0)))
    assert outcome.report.ok
    (note,) = outcome.report.notes
    assert note.code.startswith("PG908")
    assert "PG404" in note.message
