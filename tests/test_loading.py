"""MODEL to model: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import precgraph
from precgraph.errors import InputError, PrecGraphError, RoundingWarning, UnsupportedModelError
from precgraph.gguf_files import parsed_once
from precgraph.loading import find, load_config_model, load_model
from tests.families import CAUSAL_LMS, causal_lm, config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def write(folder: Path, content: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# ---------------------------------------------------------------------------------------- accepted


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_a_saved_model_loads_with_the_same_bits(name: str, tmp_path: Path) -> None:
    model = causal_lm(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    wanted = dict(model.named_parameters())
    found = dict(loaded.named_parameters())
    assert type(loaded) is type(model)
    assert found.keys() == wanted.keys()
    assert all(p.dtype == torch.bfloat16 and torch.equal(p, wanted[n]) for n, p in found.items())
    assert not loaded.training


def test_a_config_that_names_vllms_plugin_is_the_model_of_its_type(tmp_path: Path) -> None:
    """As docs/vllm.md has it, architecture and recipe in config.json: the trainer reads the same directory."""
    model = causal_lm("llama")
    model.save_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    own = {"architectures": ["PrecGraphForCausalLM"], "precgraph": "jet_rl"}
    write(tmp_path, {**plain, **own})
    loaded = load_model(tmp_path)
    assert type(loaded) is type(load_config_model(tmp_path)) is type(model)
    assert all(torch.equal(p, loaded.get_parameter(n)) for n, p in model.named_parameters())
    write(tmp_path, {**own, "model_type": "t5"})
    with pytest.raises(UnsupportedModelError, match="PrecGraphForCausalLM is not .*; no model of type 't5' is one"):
        load_config_model(tmp_path)


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_a_config_alone_makes_the_same_model_without_weights(name: str, tmp_path: Path) -> None:
    model = causal_lm(name)
    write(tmp_path, {**model.config.to_dict(), "architectures": [type(model).__name__]})
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        loaded = load_config_model(source)
        assert type(loaded) is type(model)
        assert {n: p.shape for n, p in loaded.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
        assert {(p.device.type, p.dtype) for p in loaded.parameters()} == {("meta", torch.bfloat16)}
        assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_graph_level_reads_no_weights(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    write(tmp_path, "not weights at all", "model.safetensors")
    assert load_config_model(tmp_path).device.type == "meta"


def test_a_quantised_checkpoint_has_a_graph_but_no_masters(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    assert load_config_model(tmp_path).dtype == torch.bfloat16
    with pytest.raises(UnsupportedModelError, match="stored quantised .FP8, blocks of 128x128., .*dequantise"):
        load_model(tmp_path)


def test_remote_code_of_a_type_that_transformers_has_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    write(tmp_path, "raise SystemExit('executed')", "evil.py")
    assert type(load_config_model(tmp_path)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_than_bfloat16_is_rounded_and_said(key: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """compile takes no such model from memory; a checkpoint of one is loaded as the remedy there has it."""
    model = causal_lm("llama")
    model.save_pretrained(tmp_path)
    stored = {n: (3 * w + 1).to(dtype) for n, w in load_file(tmp_path / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    data = {k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if k != "dtype"}
    write(tmp_path, {**data, key: name})
    for load in (load_config_model, load_model):
        with pytest.warns(RoundingWarning, match=f"config.json: the config says {name}, .*--dtype bfloat16") as said:
            rounded = load(tmp_path)
        assert len(said) == 1
    assert all(torch.equal(rounded.get_parameter(n), w.bfloat16()) for n, w in stored.items())
    with pytest.raises(UnsupportedModelError, match=f"the parameter is {name}; master weights are bfloat16; load with"):
        precgraph.compile(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_nothing_is_said_of_bfloat16(dtype: str | None, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write(tmp_path, {**LLAMA, "dtype": dtype})
    load_config_model(tmp_path)
    assert not [w for w in recwarn if issubclass(w.category, RoundingWarning)]


def test_nothing_is_said_of_what_is_refused_or_no_master(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = write(tmp_path, {**LLAMA, "dtype": "float16"})
    for bare in (path, tmp_path):  # neither has weights
        with pytest.raises(PrecGraphError):
            load_model(bare)
    load_config_model(tmp_path, warn=False)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write(tmp_path, {**LLAMA, "dtype": "float16", "quantization_config": fp8})
    load_config_model(tmp_path)
    assert not [w for w in recwarn if issubclass(w.category, RoundingWarning)]


# ----------------------------------------------------------------------------------------- refused

BAD_CONFIGS = {
    "not json": ('{"model_type": "llama",', "not valid JSON.*line 1"),
    "not a table": ([1], "holds no table"),
    "empty": ({}, "no model_type and so no architecture.*add model_type and architectures"),
    "type not a name": ({**LLAMA, "model_type": ["llama"]}, "knows no model type"),
    "no architectures": (
        {k: v for k, v in LLAMA.items() if k != "architectures"},
        r'no architectures.*add "architectures": \["LlamaForCausalLM"\]',
    ),
    "null architectures": ({**LLAMA, "architectures": None}, "no architectures"),
    "unknown type": ({**LLAMA, "model_type": "lama"}, "knows no model type 'lama'.*did you mean 'llama'"),
    "remote code": (
        {**LLAMA, "model_type": "zz", "auto_map": {"AutoModelForCausalLM": "x.Y"}},
        "needs code that comes with the model, which is never executed.*precgraph.compile",
    ),
    "other head": (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification is not a causal language model.*use LlamaForCausalLM",
    ),
    "class of another type": (
        {**LLAMA, "model_type": "qwen2"},
        "model_type is 'qwen2', and architectures names LlamaForCausalLM, which is of 'llama'; correct the one",
    ),
    "encoder and decoder": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "not a causal language model.*no model of type 't5' is one",
    ),
    "wrong value": ({**LLAMA, "hidden_size": "wide"}, "cannot build this model.*hidden_size"),
    "uneven heads": ({**LLAMA, "hidden_size": 63}, "cannot build this model.*multiple of"),
    "uneven kv heads": ({**LLAMA, "num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of"),
    "quantization of a word": (
        {**LLAMA, "quantization_config": "fp8"},
        "quantization_config must be a table, not 'fp8'",
    ),
    "no layers": ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "no width": ({**LLAMA, "hidden_size": 0}, "hidden_size is 0"),
    "no vocabulary": ({**LLAMA, "vocab_size": 0}, "vocab_size is 0"),
    "unknown activation": ({**LLAMA, "hidden_act": "swash"}, "cannot build this model.*swash"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
@pytest.mark.parametrize("load", [load_config_model, load_model])
def test_a_bad_config_is_one_line_that_names_the_file(load: Any, case: str, tmp_path: Path) -> None:
    content, message = BAD_CONFIGS[case]
    path = write(tmp_path, content)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(PrecGraphError, match=message) as error:
        load(tmp_path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.remedy


def test_missing_paths(tmp_path: Path) -> None:
    for name in (tmp_path / "no", "./no/such", "/no/such", "a/b/c", "no.gguf", "config.json"):
        with pytest.raises(InputError, match=f"{name}: no such file or directory"):
            find(name)


def test_no_name_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="name is empty"):
        find("")
    assert find(".").weights == "."


def test_a_hub_id_without_a_network_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> None:
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(InputError, match="someone/some-model: no such file or directory, and huggingface.co cannot be"):
        find("someone/some-model")


def test_directories_that_hold_no_model_or_several(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a config.json nor a .gguf"):
        find(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path, "GGUF", name)
    with pytest.raises(InputError, match=r"holds 2 .gguf files; name one, such as .*a\.gguf"):
        find(tmp_path)
    with pytest.raises(InputError, match="neither a config.json nor a .gguf file"):
        find(write(tmp_path, "hello", "notes.txt"))


def test_a_config_alone_has_no_weights_to_load(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no weights.*pass the checkpoint's directory"):
        load_model(write(tmp_path, LLAMA))


def test_pickles_are_never_read(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    with pytest.raises(InputError, match=r"holds no \*.safetensors"):
        load_model(tmp_path)
    write(tmp_path, "a pickle", "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled weights, which are never read.*save_pretrained"):
        load_model(tmp_path)


def test_weights_that_are_absent_misshapen_or_broken(tmp_path: Path) -> None:
    causal_lm("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    whole = weights.pop(name)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"lacks '{name}', one of 1 such weights"):
        load_model(tmp_path)
    save_file({**weights, name: whole[1:].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"has '{name}' of shape \[287, 160\]"):
        load_model(tmp_path)
    file.write_bytes(b"\0" * 40)
    with pytest.raises(InputError, match="model.safetensors: is not a whole safetensors file.*copy it again"):
        load_model(tmp_path)


# -------------------------------------------------------------------------------------------- GGUF


def test_gguf_needs_its_extra_and_its_magic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="not a GGUF file"):
        load_config_model(write(tmp_path, "gguf in name only", "bad.gguf"))
    real = write(tmp_path, "GGUF and then nothing", "real.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs gguf, which is not installed; pip install 'precgraph\[gguf\]'"):
        load_config_model(real)


def small_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A two-layer Llama as an fp32 GGUF, written with the gguf package; returns its tensors by GGUF name."""
    gguf = pytest.importorskip("gguf", reason="needs the gguf package (pip install 'precgraph[gguf]')")
    pytest.importorskip("accelerate", reason="transformers reads a GGUF through accelerate")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(97)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(97)])
    writer.add_token_merges(["t 1"])
    shapes = {"token_embd.weight": (97, 64), "output_norm.weight": (64,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.{n}.weight": s
            for n, s in {
                "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
                "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96), "attn_norm": (64,), "ffn_norm": (64,),
            }.items()
        }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    for name, value in tensors.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_gguf_config_and_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tensors = small_gguf(path)
    graph_model = load_config_model(path)
    assert graph_model.device.type == "meta"
    assert graph_model.config.tie_word_embeddings  # the file has no output.weight
    model = load_model(tmp_path)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in graph_model.named_parameters()}
    layer = model.model.layers[1]
    assert torch.equal(layer.mlp.down_proj.weight, tensors["blk.1.ffn_down.weight"].bfloat16())
    assert torch.equal(layer.self_attn.v_proj.weight, tensors["blk.1.attn_v.weight"].bfloat16())


@pytest.mark.parametrize("left", [0.9, 0.1])  # within the tensors, within the metadata
def test_a_gguf_that_is_cut_off(left: float, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    small_gguf(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * left)])
    for load in (load_model, load_config_model):
        with pytest.raises(InputError, match="tiny.gguf: is not a whole GGUF file: .*; copy it again"):
            load(path)


def test_a_gguf_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its config and its tensors, and for both ways to load it inside one block; and nothing of it stays."""
    path = tmp_path / "tiny.gguf"
    small_gguf(path)
    import gguf

    opened: list[Path] = []

    class Counted(gguf.GGUFReader):  # type: ignore[misc]
        def __init__(self, path: Any) -> None:
            opened.append(Path(path))
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    load_model(path)
    assert opened == [path] and gguf.GGUFReader is Counted
    with parsed_once():
        load_config_model(path)
        load_model(path)
    assert opened == [path] * 2 and gguf.GGUFReader is Counted
    path.write_bytes(path.read_bytes()[:999])
    with pytest.raises(InputError, match="not a whole GGUF file"):
        load_model(path)
    assert gguf.GGUFReader is Counted


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/no/such/blob")
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(InputError, match="config.json: is a link to /no/such/blob, which is not there"):
            find(name)


def test_loading_is_silent_and_leaves_the_switches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    logged, handler = [], logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    before, downloads = transformers_logging.get_verbosity(), are_progress_bars_disabled()
    try:
        transformers_logging.set_verbosity_warning()
        load_model(tmp_path)
        printed = capsys.readouterr()
        assert (printed.out, printed.err, logged) == ("", "", [])
        assert transformers_logging.is_progress_bar_enabled() and are_progress_bars_disabled() is downloads
        transformers_logging.set_verbosity_info()
        load_model(tmp_path)
        assert "GGUF tensors" in capsys.readouterr().err and any("Loading a GGUF" in line for line in logged)
    finally:
        logger.removeHandler(handler)
        transformers_logging.set_verbosity(before)


def test_a_gguf_model_saves_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    small_gguf(path)
    model = load_model(path)
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = causal_lm("llama")
    assert config("llama").tie_word_embeddings
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_hub_id_is_read_from_its_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, LLAMA)
    asked: list[tuple[str, str, bool]] = []

    def cached_file(name: str, file: str, *, local_files_only: bool) -> str:
        asked.append((name, file, local_files_only))
        return str(path)

    monkeypatch.setattr("precgraph.loading.cached_file", cached_file)
    monkeypatch.setattr("precgraph.loading._hub_reachable", lambda: True)
    assert load_config_model("someone/some-model").config.hidden_size == 64
    assert asked == [("someone/some-model", "config.json", False)]


def test_blocks_of_two_threads_end_in_any_order() -> None:
    """What the package gguf has is its own again when the last block has ended, and shared until then."""
    gguf = pytest.importorskip("gguf")
    own = gguf.GGUFReader
    first, second = parsed_once(), parsed_once()
    first.__enter__()
    second.__enter__()
    shared = gguf.GGUFReader
    assert shared is not own
    first.__exit__(None, None, None)
    assert gguf.GGUFReader is shared
    second.__exit__(None, None, None)
    assert gguf.GGUFReader is own
