"""Bad checkpoints on the command line: one clear line, exit code 2, and nothing in a checkpoint is executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from precgraph import Recipe
from precgraph.checkpoint import Checkpoint, export
from precgraph.cli import app
from precgraph.errors import InputError, UnsupportedModelError
from precgraph.loading import _load as fetched
from precgraph.loading import load_config_model, load_model
from precgraph.stacks.pair import parse
from tests.families import causal_lm

INDEX = "model.safetensors.index.json"
WEIGHT = "model.layers.0.mlp.up_proj.weight"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Masters in several files and their export; tests damage copies."""
    folder = tmp_path_factory.mktemp("whole")
    causal_lm("llama").save_pretrained(folder / "masters", max_shard_size="500KB")
    export(folder / "masters", folder / "fp8", Recipe.jet_rl())
    return folder


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def first(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def retensored(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def half(folder: Path) -> None:
    """As a copy leaves it that broke off."""
    data = first(folder).read_bytes()
    first(folder).write_bytes(data[: len(data) // 2])


def header_that_lies(folder: Path) -> None:
    """A header longer than the file."""
    data = first(folder).read_bytes()
    first(folder).write_bytes((1 << 40).to_bytes(8, "little") + data[8:])


def mixed_versions(folder: Path) -> None:
    """A file of another model of the same name: its shapes are others."""
    retensored(_of(folder, WEIGHT), lambda t: t.update({WEIGHT: t[WEIGHT][:-1].clone()}))


def doubled(folder: Path) -> None:
    """A file that is left from another split holds a tensor once more."""
    name = next(iter(load_file(first(folder))))
    last = sorted(folder.glob("*.safetensors"))[-1]
    retensored(last, lambda t: t.update({name: torch.zeros(1)}))


def one_file_too(folder: Path) -> None:
    """A later save as one file, in a directory that holds the files and the index of an earlier one."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def index_of_both(folder: Path) -> None:
    """The index names model.safetensors among others, of which transformers reads nothing."""
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.rename(folder / "model.safetensors")

    def rename(data: dict[str, Any]) -> None:
        data["weight_map"] = {n: "model.safetensors" if f == last.name else f for n, f in data["weight_map"].items()}

    edited(folder / INDEX, rename)


def index_lost(folder: Path) -> None:
    """One file and part of an earlier split: vLLM reads both, transformers the one."""
    one_file_too(folder)
    (folder / INDEX).unlink()


def link_to_nowhere(folder: Path) -> None:
    file = first(folder)
    file.unlink()
    file.symlink_to("/no/such/blob")


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.file, "w"))


def pickled(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), *folder.glob(INDEX)]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "executed")))


def pickle_by_another_name(folder: Path) -> None:
    first(folder).write_bytes(pickle.dumps(Evil(folder / "executed")))


def _of(folder: Path, name: str) -> Path:
    table: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / table[name]


def quantization(change: dict[str, Any]) -> Damage:
    return lambda folder: edited(folder / "config.json", lambda c: c["quantization_config"].update(change))


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: edited(folder / INDEX, change)


# What is damaged, and the words of the one line that says so.
ANY_CHECKPOINT: dict[str, tuple[Damage, str]] = {
    "half written": (half, "is not a whole safetensors file"),
    "empty file": (lambda f: first(f).write_bytes(b""), "is not a whole safetensors file"),
    "header that lies": (header_that_lies, "is not a whole safetensors file"),
    "file missing": (lambda f: first(f).unlink(), "which is not there"),
    "index half written": (lambda f: (f / INDEX).write_text('{"weight_map": {'), "is not valid JSON"),
    "index of nothing": (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "index without a tensor": (index(lambda d: d["weight_map"].pop(WEIGHT)), "the index says nothing"),
    "index of a tensor too many": (index(lambda d: d["weight_map"].update(x=d["weight_map"][WEIGHT])), "'x' is in no"),
    "index elsewhere": (index(lambda d: d["weight_map"].update({WEIGHT: "../../x.safetensors"})), "not a safetensors"),
    "one tensor twice": (doubled, "remove the file that does not belong here"),
    "one file and an index of others": (one_file_too, "and an index that names model-00001-of-"),
    "one file in an index of others": (index_of_both, "and an index that names model-00001-of-"),
    "one file and others without an index": (index_lost, "is in model.safetensors and in model-00001-of-"),
    "link to nowhere": (link_to_nowhere, "which is a link to /no/such/blob, which is not there"),
    "pickle": (pickled, "holds pickled weights, which are never read"),
    "pickle by another name": (pickle_by_another_name, "is not a whole safetensors file"),
}
UNSAID = "no quantization_config"
QUANTIZED: dict[str, tuple[Damage, str]] = {
    "unknown method": (quantization({"quant_method": "mystery"}), "quantised (quant_method 'mystery'), in a way"),
    "no method": (quantization({"quant_method": None}), "quantised (quant_method None), in a way"),
    "scale a tensor": (quantization({"weight_block_size": None}), "one scale a tensor, no weight_block_size), in a"),
    "blocks of words": (quantization({"weight_block_size": "big"}), "is not one or two sizes"),
    "static scales": (quantization({"activation_scheme": "static"}), "(FP8 with activation_scheme 'static'), in a way"),
    "skip list of one word": (quantization({"modules_to_not_convert": "lm_head"}), "= 'lm_head' is no list of names"),
    UNSAID: (
        lambda f: edited(f / "config.json", lambda c: c.pop("quantization_config")), "has no quantization_config",
    ),
    "quantization_config of a word": (
        lambda f: edited(f / "config.json", lambda c: c.update(quantization_config="fp8")),
        "quantization_config must be a table, not 'fp8'",
    ),
    "quantization_config of a list": (
        lambda f: edited(f / "config.json", lambda c: c.update(quantization_config=[])),
        "quantization_config must be a table, not []",
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", [b'{"model_type": "llama",\n', b"[1]", b'{"a": "\xff"}', b"[" * 100_000])
def test_a_malformed_config_is_one_message_whoever_reads_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    messages = set()
    for reader in (load_config_model, Checkpoint, lambda folder: parse(str(folder))):
        with pytest.raises(InputError) as error:
            reader(tmp_path)
        messages.add(str(error.value))
    (message,) = messages
    assert message.startswith(f"{tmp_path / 'config.json'}: ") and "; correct the file, or restore it" in message
    assert "\n" not in message and "at at" not in message


def refused(words: str, *args: object) -> None:
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 2, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and words in lines[0], result.stderr
    assert lines[0].startswith("error: ") and not result.stdout


@pytest.mark.parametrize("case", ANY_CHECKPOINT)
def test_damaged_masters(case: str, whole: Path, tmp_path: Path) -> None:
    damage, words = ANY_CHECKPOINT[case]
    damage(folder := copied(whole / "masters", tmp_path / "masters"))
    refused(words, "export", folder, "-o", tmp_path / "out")
    refused(words, "check", folder, "--level", "weights", "--infer", whole / "fp8")
    refused(words, "bisect", folder)  # whose reader is transformers
    assert not (tmp_path / "out").exists() and not (folder / "executed").exists()


@pytest.mark.parametrize("case", ANY_CHECKPOINT | QUANTIZED)
def test_damaged_fp8_checkpoints(case: str, whole: Path, tmp_path: Path) -> None:
    damage, words = (ANY_CHECKPOINT | QUANTIZED)[case]
    damage(folder := copied(whole / "fp8", tmp_path / "fp8"))
    refused(words, "check", whole / "masters", "--level", "weights", "--infer", folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("case", [case for case in QUANTIZED if case != UNSAID])
def test_configs_alone_that_no_stack_reads(case: str, whole: Path, tmp_path: Path) -> None:
    """The graph level reads the same files; what it serves, it says, and what it cannot read is exit code 2."""
    folder = copied(whole / "fp8", tmp_path / "fp8")
    QUANTIZED[case][0](folder)
    result = CliRunner().invoke(app, ["check", str(folder), "--train", "te", "--infer", str(folder)])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.parametrize("case", [case for case in QUANTIZED if case != UNSAID])
def test_a_model_whose_weights_are_stored_in_a_way_that_nothing_reads(case: str, whole: Path, tmp_path: Path) -> None:
    """Neither side speaks of them, and a verdict would be of another model than the one that was named."""
    damage, words = QUANTIZED[case]
    damage(folder := copied(whole / "fp8", tmp_path / "fp8"))
    refused(words, "check", folder)
    refused(words, "check", folder, "--level", "weights", "--infer", whole / "fp8")


def test_codes_of_which_the_config_says_nothing(whole: Path, tmp_path: Path) -> None:
    """A config alone is of a model in bf16, and so vLLM serves it; where weights are read, these are no masters."""
    damage, _ = QUANTIZED[UNSAID]
    damage(folder := copied(whole / "fp8", tmp_path / "fp8"))
    assert CliRunner().invoke(app, ["check", str(folder)]).exit_code == 0
    served = CliRunner().invoke(app, ["check", str(folder), "--train", "te", "--infer", str(folder), "--json"])
    assert served.exit_code == 1
    assert {f["code"] for f in json.loads(served.stdout)["violations"]} == {"PG108 quantised on one side"}
    name = next(n for n, e in Checkpoint(folder).entries.items() if e.dtype == "F8_E4M3")
    words = f"{folder / Checkpoint(folder).entries[name].shard}: {name} is stored in F8_E4M3, so these are no masters; "
    refuse_as_masters(words + "name the bf16, fp16 or fp32 checkpoint", folder, whole / "fp8", tmp_path / "out")


@pytest.mark.parametrize(("dtype", "word"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_codes_without_scales_are_no_masters(dtype: torch.dtype, word: str, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole / "masters", tmp_path / "masters")
    retensored(_of(folder, WEIGHT), lambda t: t.update({WEIGHT: t[WEIGHT].to(dtype)}))
    words = f"{_of(folder, WEIGHT)}: {WEIGHT} is stored in {word}, so these are no masters"
    refuse_as_masters(words, folder, whole / "fp8", tmp_path / "out")


def refuse_as_masters(words: str, folder: Path, fp8: Path, out: Path) -> None:
    """By every reader of masters."""
    refused(words, "check", folder, "--level", "weights", "--infer", fp8)
    refused(words, "check", folder, "--level", "numerics")
    refused(words, "bisect", folder)
    refused(words, "export", folder, "-o", out)
    assert not out.exists()
    with pytest.raises(UnsupportedModelError, match="so these are no masters"):
        load_model(folder)


def test_tables_of_positions_are_no_codes(whole: Path, tmp_path: Path) -> None:
    """Buffers of integers, which older checkpoints hold."""
    folder = copied(whole / "masters", tmp_path / "masters")
    ids = {"model.position_ids": torch.arange(8)}
    retensored(first(folder), lambda t: t.update(ids))
    edited(folder / INDEX, lambda d: d["weight_map"].update(dict.fromkeys(ids, first(folder).name)))
    assert load_model(folder).get_parameter(WEIGHT).any()


def test_codes_from_the_hub_are_no_masters(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are there once transformers has fetched them."""
    QUANTIZED[UNSAID][0](folder := copied(whole / "fp8", tmp_path / "fp8"))
    monkeypatch.setattr("precgraph.loading._hub_reachable", lambda: True)
    monkeypatch.setattr("precgraph.loading.cached_file", lambda *_, **__: str(folder / "config.json"))
    monkeypatch.setattr("precgraph.loading._load", lambda _, options: fetched(folder, options))
    with pytest.raises(UnsupportedModelError, match="so these are no masters"):
        load_model("someone/some-model")


def test_a_model_that_is_an_fp8_checkpoint_is_said_not_to_be_looked_at(whole: Path) -> None:
    def points(*args: object) -> list[str]:
        result = CliRunner().invoke(app, ["check", *map(str, args), "--json"])
        return [f["message"] for f in json.loads(result.stdout)["not_proved"] if f["code"].startswith("PG913")]

    fp8 = whole / "fp8"
    assert points(fp8) == [f"{fp8} is stored in FP8, blocks of 128x128: neither side reads these codes"]
    assert (
        points(fp8, "--infer", fp8) == points(fp8, "--train", fp8, "--infer", "vllm") == points(whole / "masters") == []
    )


def test_files_of_two_versions(whole: Path, tmp_path: Path) -> None:
    """One file of the masters is of another model: export stops at it and leaves nothing, level weights names it."""
    mixed_versions(folder := copied(whole / "masters", tmp_path / "masters"))
    refused(f"{WEIGHT}: has shape [319, 192]", "export", folder, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    args = ["check", str(folder), "--level", "weights", "--infer", str(whole / "fp8"), "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1 and "PG302" in result.stdout


def test_files_that_no_loader_reads(whole: Path, tmp_path: Path) -> None:
    """Beside an index what it does not name, and beside one file what holds tensors of other names."""
    folder = copied(whole / "masters", tmp_path / "masters")
    one_file_too(folder)
    (folder / "model.safetensors").rename(folder / "model-00009-of-00009.safetensors")
    assert len(Checkpoint(folder).shards) == 4 and load_model(folder).get_parameter(WEIGHT).any()
    (folder / "model-00009-of-00009.safetensors").rename(folder / "model.safetensors")
    for file in [*folder.glob("model-*.safetensors"), folder / INDEX]:
        file.unlink()
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    ours = Checkpoint(folder)
    assert ours.shards == ["model.safetensors"] and torch.equal(
        ours.read(WEIGHT), load_model(folder).get_parameter(WEIGHT)
    )


def test_masters_and_checkpoint_of_two_models(whole: Path, tmp_path: Path) -> None:
    causal_lm("qwen2").save_pretrained(tmp_path / "other")
    result = CliRunner().invoke(
        app, ["check", str(tmp_path / "other"), "--level", "weights", "--infer", str(whole / "fp8"), "--json"]
    )
    assert result.exit_code == 1 and "PG302" in result.stdout
