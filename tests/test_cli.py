"""The command line: exit codes, one-line errors, JSON for programs, nothing but results on stdout."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from transformers import GPT2Config
from typer.testing import CliRunner, Result

import precgraph
from precgraph import PrecisionGraph, Recipe, TraceError, UnsupportedModelError
from precgraph.cli import app
from precgraph.cli.check import READS
from precgraph.cli.console import progress
from precgraph.cli.show import _pass_names
from precgraph.loading import load_model
from precgraph.lowering import lower as lowering
from precgraph.report import load
from tests.families import CAUSAL_LMS, MORE_LMS, causal_lm, config_json
from tests.test_loading import BAD_CONFIGS

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("traced_once")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def process(*args: object) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "precgraph", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


def assert_error(result: Result, *parts: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that holds ``parts``."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


@pytest.fixture(scope="module")
def llama(config_folder: Callable[[str], Path]) -> Path:
    return config_folder("llama")


def recipe_file(folder: Path, **changes: Any) -> Path:
    """``jet_rl`` as a file, with the keys of ``changes`` (``linear__accumulate``) replaced."""
    data = Recipe.jet_rl().to_dict()
    for key, value in changes.items():
        *tables, last = key.split("__")
        table = data
        for name in tables:
            table = table[name]
        table[last] = value
    path = folder / "recipe.toml"
    Recipe.from_dict(data).save(path)
    return path


@pytest.mark.parametrize("arguments", [("precgraph", "rule"), ("precgraph", "schema"), ("trainer.cli", "--help")])
def test_a_reader_that_goes_away_is_no_verdict(arguments: tuple[str, ...]) -> None:
    """Printed at once, in the buffer until the end, or by the parser: what SIGPIPE does, and not a word."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as gone:
        assert gone.stdout is not None and gone.stderr is not None
        gone.stdout.close()
        assert gone.stderr.read() == b""
        assert gone.wait(60) == 128 + signal.SIGPIPE


# ----------------------------------------------------------------------------------------- startup


def test_help_and_what_is_only_looked_up_start_without_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom precgraph.cli import app\n"
        "for args in (['--help'], ['--version'], ['check', '--help'], ['doctor', '--help'], ['stacks'],\n"
        "             ['stacks', 'te'], ['recipe', 'jet_rl'], ['rule', 'PG103'], ['schema'], ['nonsense']):\n"
        "    print(args, CliRunner().invoke(app, args).exit_code)\n"
        "print(sorted({'torch', 'transformers', 'networkx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = done.stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in lines[:-1]] == ["0"] * 9 + ["2"]
    assert lines[-1] == "[]"


@pytest.mark.parametrize("option", ["-o", "--html", "--sarif", "--junit"])
@pytest.mark.parametrize("target", ["-", ".", "no/such/folder/x"])
def test_a_place_that_is_none_is_said_before_the_work(option: str, target: str) -> None:
    """Not after minutes: the model, which is not there either, has not been looked for yet."""
    result = run("check", "no/such/model", "--level", "numerics", option, target)
    assert result.exit_code == 2
    assert ("- is no file" if target == "-" else f"{target}: cannot be written") in result.stderr
    if option == "-o":
        assert run("bisect", "no/such/model", "-o", target).stderr == run("env", "-o", target).stderr == result.stderr


def test_two_formats_in_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("check", "no/such/model", "-o", "r.json", "--html", tmp_path / "r.json")
    assert result.exit_code == 2 and "two formats have one file" in result.stderr


def test_what_is_read_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the work, under any name that the file has; beside a checkpoint there is room for a result."""
    model, log, engine = tmp_path / "model", tmp_path / "log.jsonl", tmp_path / "engine.yaml"
    model.mkdir()
    (tmp_path / "link").symlink_to(model)
    for path in (model / "config.json", log, engine, tmp_path / "p.txt"):
        path.write_text("broken")
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("check", model, "-o", "link/config.json"), ("check", "model/config.json", "--html", "model/config.json"),
        ("check", model, "--junit", model / "model.safetensors"), ("check", model, "--infer", "vllm:engine.yaml",
         "--sarif", "engine.yaml"), ("check", model, "--train", "mine.toml", "-o", tmp_path / "mine.toml"),
        ("check", model, "--level", "numerics", "--capture", "model/values.safetensors"),
        ("check", model, "--level", "numerics", "--prompt-file", "p.txt", "-o", "p.txt"),
        ("check", "a.json", "b.json", "--level", "env", "-o", "b.json"), ("bisect", model, "-o", "model/config.json"),
        ("audit", log, "--plot", "log.jsonl"), ("report", log, "--html", log),
    ):  # fmt: skip
        if "report" in arguments:
            monkeypatch.setattr("precgraph.report.load", lambda _: {"exit_code": 0})
        assert_error(run(*arguments), "is read, and would be written over; name another file")
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"broken"}
    for place in ("model/result.json", "config.json"):
        assert "written over" not in run("check", model, "-o", place).stderr


def test_out_of_memory_is_no_bug(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*args: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr("precgraph.checking.lowered", allocate)
    assert_error(run("check", llama), "out of memory; take fewer tokens")


def test_libraries_say_nothing(tmp_path: Path) -> None:
    """transformers warns of special tokens outside the vocabulary when it is first imported and reads the config."""
    data = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_layer": 1}
    (tmp_path / "config.json").write_text(json.dumps(data))
    done = process("check", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "bos_token_id" in process("check", tmp_path, "--debug").stderr


def test_progress_keeps_its_clock_beside_a_long_text() -> None:
    """A path may be wider than the line; brackets in it are no markup."""
    screen = Console(file=StringIO(), force_terminal=True, width=40, color_system=None)
    with progress(screen) as step:
        step("reading [red] " + "x" * 29)  # 43 characters in 30 columns
    drawn = screen.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"reading \[red\] x{15}… 0:00:0\d", drawn), drawn


def test_json_is_a_flag_and_a_file_is_named_with_o() -> None:
    commands = typer.main.get_group(app).commands
    options = {(name, opt): p for name, c in commands.items() for p in c.params for opt in p.opts}
    assert all(options[key].is_flag for key in options if key[1] == "--json")
    without = {"recipe", "report", "schema", "show"}
    assert {name for name, opt in options if opt == "--json"} == commands.keys() - without
    assert all((name, "-o") in options for name in ("check", "bisect", "env", "recipe", "export"))


def test_version() -> None:
    assert run("--version").stdout.strip() == f"precgraph {precgraph.__version__}"


def test_the_public_names_are_there_and_lazy() -> None:
    for name in precgraph.__all__:
        assert getattr(precgraph, name) is not None
        assert name in dir(precgraph)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        precgraph.nonsense  # noqa: B018
    code = "import sys, precgraph\nassert 'torch' not in sys.modules\nfrom precgraph import *\nprint(compile, check)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("code", ["import transformers, precgraph", "import precgraph; precgraph.Recipe"])
def test_the_attention_is_registered_however_precgraph_is_reached(code: str) -> None:
    code += "\nfrom transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\nALL_ATTENTION_FUNCTIONS['precgraph']"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# ------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_families_are_consistent(name: str, config_folder: Callable[[str], Path]) -> None:
    result = run("check", config_folder(name), "--level", "graph", "--backend", "reference")
    assert result.exit_code == 0, result.output
    assert "backend reference for" in result.stdout
    assert "consistent: the rollout's program is inside the training forward" in result.stdout
    assert "14 of 14 linear layers quantised" in result.stdout
    assert "reference.linear.fp8_exact_groups" in result.stdout
    assert result.stderr == ""


def test_recipes_that_differ_are_inconsistent_in_the_right_row(llama: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, linear__weight__amax_floor=1e-4)
    result = run("check", llama, "--infer", recipe)
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "inconsistent:" in text
    assert "PG105" in text
    assert "model.layers.{0-1}.{self_attn.q_proj," in text and "mlp.down_proj}" in text  # all linears in one row
    assert "14 × quantize (weight)" in text
    assert "0.0001" in text


def test_a_layer_that_only_one_side_skips(llama: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, select__skip=["model.layers.1.mlp.down_proj"])
    result = run("check", llama, "--train", recipe, "-o", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "linear layers quantised: rollout 14 of 14, training 13 of 14, backend" in result.stdout
    assert "14 of 14 linear layers quantised, backend" in run("check", llama).stdout
    (finding,) = load(tmp_path / "report.json")["violations"]
    assert finding["module"] == "model.layers.1.mlp.down_proj"
    assert "rule.gemm" in finding["attributes"]
    assert finding["remedy"]


def test_a_difference_of_the_backward_is_a_note(llama: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, linear__fuse_projections=False)
    result = run("check", llama, "--train", recipe)
    assert result.exit_code == 0
    assert "Notes" in result.stdout


def test_check_json_has_a_stable_schema(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    result = run("check", llama, "--train", "bf16", "-o", target)
    assert result.exit_code == 1
    assert "inconsistent" in result.stdout  # people still get their table
    data = load(target)  # fits the schema
    assert list(data) == [
        "schema", "tool", "level", "model", "sides", "family", "backend", "device", "recipes", "stacks", "digests",
        "compared", "parts", "subject", "strict", "ok", "exit_code", "causes", "violations", "suppressed", "known",
        "fixed", "not_proved", "notes", "rows",
    ]  # fmt: skip
    assert data["schema"] == 1
    assert data["family"] == "LlamaForCausalLM"
    assert data["ok"] is False
    assert Recipe.from_dict(data["recipes"]["train"]) == Recipe.bf16()
    assert data["digests"]["train"] != data["digests"]["infer"]
    assert set(data["compared"]) == {"nodes", "linears", "quantized_linears", "train", "kernels"}
    assert data["compared"]["quantized_linears"] == 14 and data["compared"]["train"]["quantized_linears"] == 0
    assert data["compared"]["kernels"]["reference.linear.fp8_exact_groups"] == 14
    assert set(data["violations"][0]) == {
        "code", "module", "node", "op", "attributes", "train", "infer", "message", "remedy", "inherited",
        "codes", "fingerprint",
    }  # fmt: skip


def test_stdout_is_nothing_but_json_in_a_process_of_its_own(llama: Path) -> None:
    done = process("check", llama, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    assert done.stderr == ""


def test_the_device_is_this_machines(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = json.loads(run("check", llama, "--json").stdout)
    assert (data["backend"], data["device"]) == ("reference", "cpu")
    for command in ("check", "digest", "show"):
        result = run(command, llama, "--backend", "deep_gemm")  # its modules, or the CPU, are in the way
        assert_error(result)
        assert "meta" not in result.stderr
    data = json.loads(run("digest", llama, "--json").stdout)
    assert (data["backend"], data["device"]) == ("reference", "cpu")


def test_what_is_not_proved_is_said(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(node: Any, *rest: Any) -> Any:
        kernel = choose(node, *rest)
        return dataclasses.replace(kernel, row_invariant=None) if kernel.op == "gated" else kernel

    choose = lowering.select
    monkeypatch.setattr(lowering, "select", unknown)
    result = run("check", llama, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["notes"] == []
    assert [f["code"] for f in data["not_proved"]] == ["PG902 row invariance"] * 2
    assert data["ok"] is True and data["strict"] is False
    text = " ".join(run("check", llama).stdout.split())
    assert "Not proved: " in text and "consistent" not in text
    assert text.startswith("not proved: 2 points; the rest of the rollout's program is inside the training forward ")
    assert "precgraph.compile refuses this program, as nothing says that it treats each token alone: gated" in text
    with pytest.raises(UnsupportedModelError, match="gated is not known to treat each token alone"):
        precgraph.compile(causal_lm("llama"), mode="infer")
    precgraph.compile(causal_lm("llama"), "infer", Recipe.bf16())
    aten = run("check", llama, "--train", "bf16", "--infer", "bf16").stdout
    assert aten.startswith("not proved: ") and "precgraph.compile refuses" not in aten
    assert [f.get("refused") for f in data["not_proved"]] == [True] * 2
    other = json.loads(run("check", llama, "--train", "te", "--infer", "vllm", "--json").stdout)  # compile is not asked
    points = [f for f in other["not_proved"] if f["op"] == "gated"]
    assert len(points) == 2 and not any("refused" in f for f in points)
    assert all(f["message"].endswith("is not known to be row-invariant") for f in points)
    assert "precgraph.compile refuses" not in run("check", llama, "--train", "te", "--infer", "vllm").stdout


def test_strict_fails_what_is_not_proved(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run("check", llama, "--strict").exit_code == 0
    choose = lowering.select

    def unknown(node: Any, *rest: Any) -> Any:
        kernel = choose(node, *rest)
        return dataclasses.replace(kernel, row_invariant=None) if kernel.op == "gated" else kernel

    monkeypatch.setattr(lowering, "select", unknown)
    lax = run("check", llama, "--github")
    assert lax.exit_code == 0 and "::notice title=precgraph check::not proved: 2 points; " in lax.stdout
    assert "::warning title=PG902" in lax.stdout and "::error" not in lax.stdout
    target = tmp_path / "report.json"
    result = run("check", llama, "--strict", "--github", "-o", target)
    assert result.exit_code == 1
    assert result.stdout.startswith("not proved: 2 points, which fail under --strict; the rest of ")
    assert "::error title=precgraph check::not proved: 2 points, which" in result.stdout
    assert "::error title=PG902" in result.stdout and "::warning" not in result.stdout
    data = load(target)  # fits the schema
    assert (data["ok"], data["exit_code"], data["strict"], data["violations"]) == (False, 1, True, [])
    assert run("report", target).exit_code == 1
    assert run("check", llama, "--strict", "--baseline", target).exit_code == 1  # which accepts differences only


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str, tmp_path: Path) -> None:
    content, message = BAD_CONFIGS[case]
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    result = run("check", path)
    assert_error(result, str(path))
    assert re.search(message, result.stderr)


@pytest.mark.parametrize("command", ["check", "show", "digest"])
def test_a_missing_path(command: str) -> None:
    assert_error(run(command, "./no/such/model"), "./no/such/model: no such file or directory; pass a directory")


def test_recipes_that_cannot_be_read(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for text, message in (
        ("[linear]\nacumulate = 'float32'", "unknown key 'linear.acumulate'; did you mean 'accumulate'"),
        ("[linear", "is not valid TOML"),
        ("", "holds no rule"),
        ("# linear.output = 'float32'\n", "holds no rule"),
        ("[linear]\naccumulate = 'int4'", "linear.accumulate = 'int4' is not one of"),
        ("[select]\nmin_features = -1", "select.min_features = -1 is less than 0"),
        ("[linear.weight]\ndtype = 'float8_e4m3fn'\ngranularity = '1x0'", "linear.weight: granularity"),
        (
            "[linear.activation]\ndtype = 'float8_e4m3fn'\ngranularty = '1x128'",
            "linear.activation: unknown key 'granularty'; did you mean 'granularity'?",
        ),
    ):
        path.write_text(text)
        assert_error(run("check", llama, "--train", path), str(path), message)
    engine = tmp_path / "engine.json"
    engine.write_text("{}")
    assert_error(run("check", llama, "--infer", engine), "is not valid TOML", f"vllm:{engine}")
    assert_error(run("check", llama, "--infer", tmp_path / "no.toml"), "no.toml: No such file or directory")
    assert_error(
        run("check", llama, "--infer", "jet_lr"), "no preset or stack is called 'jet_lr' (did you mean 'jet_rl'?)"
    )


def test_a_pattern_that_matches_nothing(llama: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, select__skip=["model.layers.*.mlp.donw_proj"])
    assert_error(
        run("check", llama, "--train", recipe),
        "'model.layers.*.mlp.donw_proj' matches no linear layer",
        "did you mean 'model.layers.*.mlp.down_proj'?",
    )


@pytest.mark.parametrize(
    ("pattern", "full"),
    [
        ("mlp", "model.layers.*.mlp.*"), ("down_proj", "model.layers.*.mlp.down_proj"),
        ("layers.1", "model.layers.1.*.*"), ("self_attn.?_proj", "model.layers.*.self_attn.?_proj"),
    ],
)  # fmt: skip
def test_a_pattern_that_names_a_part_is_spelled_out(llama: Path, tmp_path: Path, pattern: str, full: str) -> None:
    """And what is suggested matches."""
    parts = recipe_file(tmp_path, select__skip=[pattern])
    assert_error(run("check", llama, "--train", parts), f"matches no linear layer; did you mean {full!r}?")
    assert run("check", llama, "--train", recipe_file(tmp_path, select__skip=[full])).exit_code == 1


def test_show_counts_what_the_backward_keeps(llama: Path) -> None:
    """A layer by hand: two norms' inputs, q, k, v, attention's output and log-sum-exps, gate and up."""
    data = json.loads(run("show", llama, "--format", "json").stdout)
    layer = 2 * (192 + 192 + 192 + 96 + 96 + 192 + 2 * 320) + 4 * 6
    assert data["saved_bytes_a_token"]["model.layers.1"] == layer
    assert f"  model.layers.1  {layer}" in run("show", llama).stdout.splitlines()


def test_options_that_are_not_choices(llama: Path, tmp_path: Path) -> None:
    assert_error(
        run("check", llama, "--level", "grahp"), "--level 'grahp' is not one of graph", "did you mean 'graph'?"
    )
    assert_error(
        run("check", llama, "--backend", "cuda"), "no backend is called 'cuda'; choose auto or one of reference"
    )
    assert_error(run("show", llama, "--format", "svg"), "--format 'svg' is not one of text, dot, json")
    assert_error(run("show", llama, "--mode", "eval"), "--mode 'eval' is not one of train, infer")
    assert_error(run("show", llama, "--after", "rise"), "--after 'rise' is not one of", "did you mean 'raise'")
    assert_error(run("show", llama, "--layer", 2), "no layer 2; layers are 0 to 1")
    assert_error(run("show", llama, "--after", "trace", "--diff"), "nothing comes before the trace")
    assert_error(run("show", llama, "--diff", "--format", "dot"), "--diff is text")
    assert_error(run("show", llama, "--format", "json", "--layer", 1), "json is always the whole graph")
    assert_error(run("check", llama, "-o", tmp_path / "no" / "report.json"), "report.json: cannot be written")
    assert_error(run("check", llama, "--capture", tmp_path / "x.safetensors"), "--capture is for level numerics")
    assert_error(run("check", llama, "--prompt-file", "ids.json"), "--prompt-file is for level numerics")


@pytest.mark.parametrize("level", READS)
def test_an_option_that_a_level_does_not_read_is_refused(level: str) -> None:
    """Whatever its value, the default's too; what every level reads is in no row of the table."""
    given = {
        "other": ["b.json"], "train": ["--train", "jet_rl"], "infer": ["--infer", "jet_rl"],
        "backend": ["--backend", "nonsense"], "tokens": ["--tokens", 64], "seed": ["--seed", 0],
        "prompt_file": ["--prompt-file", "ids.json"], "capture": ["--capture", "x.safetensors"], "fix": ["--fix"],
        "diff": ["--diff"],
    }  # fmt: skip
    assert given.keys() == set().union(*READS.values())
    for name, words in given.items():
        result = run("check", "no/such/model", "--level", level, *words)
        assert result.exit_code == 2
        assert (f", not for level {level}; " in result.stderr) == (name not in READS[level]), result.stderr


def test_a_dropout_that_has_no_exact_rollout(tmp_path: Path) -> None:
    data = config_json("llama", attention_dropout=0.1)
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert_error(run("check", tmp_path), "attention_dropout = 0.1", "set it to 0")
    GPT2Config(n_embd=64, n_layer=1, n_head=2, attn_pdrop=0.0, architectures=["GPT2LMHeadModel"]).save_pretrained(
        tmp_path
    )
    assert_error(run("check", tmp_path), "config.resid_pdrop = 0.1, config.embd_pdrop = 0.1; set them to 0")


def test_a_bug_is_no_verdict(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr(PrecisionGraph, "digest", broken)
    assert_error(run("digest", llama), "internal error, ZeroDivisionError: oh no; please report")


def test_debug_shows_the_traceback_before_or_after_the_command() -> None:
    for args in (["--debug", "check", "./no/such"], ["check", "./no/such", "--debug"]):
        result = run(*args)
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert result.stderr.strip().splitlines()[-1].startswith("error: ./no/such: no such file")
    assert "Traceback" not in run("check", "./no/such").stderr


class Branches(nn.Module):
    """Takes a branch that depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y if y.sum() > 0 else -y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Branches()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


def test_a_model_that_cannot_be_traced_names_the_module() -> None:
    model = Outer().to(torch.bfloat16)
    with pytest.raises(TraceError, match="module 'block' cannot be traced.*depends on values") as error:
        precgraph.compile(model, example_inputs=(torch.zeros(1, 4, 32, dtype=torch.bfloat16),))
    assert "\n" not in str(error.value)


def test_a_hybrid_is_refused_by_its_recurrence(tmp_path: Path) -> None:
    data = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(data))
    for command in ("check", "digest", "show"):
        assert_error(run(command, tmp_path), "model.layers.0.linear_attn: Qwen3NextGatedDeltaNet is a recurrence over")


def test_a_config_of_float16_is_taken_as_bfloat16_and_said_once(tmp_path: Path) -> None:
    """Of every command that reads it, on stderr; the digest is that of the program, which is bfloat16's."""
    folders = {}
    for name in ("check", "digest", "show", "bfloat16"):  # one each: models are traced once in this file
        folders[name] = tmp_path / name
        folders[name].mkdir()
        dtype = "bfloat16" if name == "bfloat16" else "float16"
        (folders[name] / "config.json").write_text(json.dumps({**config_json("llama"), "dtype": dtype}))
    results = {name: run(name, folders[name]) for name in ("check", "digest", "show")}
    for name, result in results.items():
        assert result.exit_code == 0
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"note: {folders[name]}/config.json: the config says float16, and masters are bfloat16")
    plain = run("digest", folders["bfloat16"])
    assert plain.stdout == results["digest"].stdout and plain.stderr == ""
    weights = run("check", folders["check"], "--level", "numerics", "--train", "bf16")  # what is refused is not loaded
    assert weights.exit_code == 2 and [x.partition(":")[0] for x in weights.stderr.splitlines()] == ["error"]


# -------------------------------------------------------------------------------------------- show


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_show_after_each_pass(mode: str, llama: Path) -> None:
    names = _pass_names(mode, Recipe.jet_rl())
    assert names[0] == "trace"
    assert names[-1] == "lower"
    for name in names:
        result = run("show", llama, "--mode", mode, "--after", name)
        assert result.exit_code == 0, result.output
        assert f"LlamaForCausalLM, {mode} program" in result.stdout
        assert f"after {name}:" in result.stdout


def test_show_text_folds_layers_that_are_alike(llama: Path) -> None:
    folded = run("show", llama, "--mode", "infer").stdout
    assert folded.count("== model.layers.0-1 (2 alike), forward") == 1
    assert "= attention(" in folded
    assert ".self_attn.q_proj" in folded
    unfolded = run("show", llama, "--mode", "infer", "--all").stdout
    assert unfolded.count("= attention(") == 2
    assert "alike" not in unfolded
    one = run("show", llama, "--mode", "infer", "--layer", 1).stdout
    assert one.count("= attention(") == 1
    assert "model.layers.1, forward" in one
    assert "lm_head" not in one


def test_show_does_not_fold_layers_that_differ(llama: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, select__skip=["model.layers.1.mlp.down_proj"])
    text = run("show", llama, "--recipe", recipe).stdout
    assert "== model.layers.0, forward" in text
    assert "== model.layers.1, forward" in text
    assert "(left out by select.skip)" in text
    assert "== model.layers.0-1 (2 alike), parameters" in text


def test_show_diff_is_what_a_pass_changed(llama: Path) -> None:
    lines = run("show", llama, "--mode", "infer", "--after", "insert_quantize", "--diff").stdout.splitlines()
    assert lines[:2] == ["--- before insert_quantize", "+++ after insert_quantize"]
    added = [line for line in lines if line.startswith("+ ")]
    removed = [line for line in lines if line.startswith("- ")]
    # In the one layer that is shown: 7 linears read codes instead, of 7 weights and 4 activations.
    assert len(removed) == 7
    assert len(added) == 7 + 7 + 4
    assert sum("= quantize(" in line for line in added) == 11
    unchanged = run("show", llama, "--recipe", "bf16", "--after", "insert_quantize", "--diff").stdout
    assert unchanged.strip() == "insert_quantize changes nothing in this model"


def test_show_json_is_the_graph(llama: Path) -> None:
    result = run("show", llama, "--format", "json")
    graph = PrecisionGraph.from_json(json.loads(result.stdout))
    assert graph.digest() == run("digest", llama).stdout.strip()


def test_show_dot_is_well_formed(llama: Path) -> None:
    text = run("show", llama, "--format", "dot").stdout
    nodes = re.findall(r'^    "([^"]+)" \[label="', text, re.MULTILINE)
    edges = re.findall(r'^  "([^"]+)" -> "([^"]+)" \[', text, re.MULTILINE)
    assert text.startswith('digraph "LlamaForCausalLM" {')
    assert text.count("{") == text.count("}")
    assert len(nodes) == len(set(nodes))
    assert edges
    assert {name for edge in edges for name in edge} <= set(nodes)
    # The head reads the last layer, which the first one stands for.
    assert any(a.startswith("add") and b.startswith("rms_norm") for a, b in edges)


# --------------------------------------------------------------------------------- digest and recipe


@pytest.mark.parametrize("family", [*CAUSAL_LMS, *MORE_LMS, "glm4_moe", "qwen2_moe"])
def test_a_digest_is_that_of_the_model_with_its_weights(family: str, exported_anew: None, tmp_path: Path) -> None:
    """Scales of embeddings and whatever else a model keeps outside its checkpoint count; a router's bias does not."""
    causal_lm(family).save_pretrained(tmp_path)
    trained = precgraph.compile(load_model(tmp_path), "train").precgraph.digest  # type: ignore[union-attr]
    for model in (tmp_path, tmp_path / "config.json"):
        assert run("digest", model).stdout.strip() == trained


def test_digests(llama: Path, tmp_path: Path) -> None:
    train, infer = (run("digest", llama, "--mode", mode).stdout.strip() for mode in ("train", "infer"))
    assert re.fullmatch("[0-9a-f]{64}", train)
    assert train == infer
    floor = run("digest", llama, "--recipe", recipe_file(tmp_path, linear__activation__amax_floor=1e-4)).stdout.strip()
    backward = run("digest", llama, "--recipe", recipe_file(tmp_path, linear__fuse_projections=False)).stdout.strip()
    assert floor != train
    assert backward == train  # the digest is of the forward
    data = json.loads(run("digest", llama, "--json").stdout)
    assert list(data) == ["schema", "model", "mode", "backend", "device", "recipe", "digest"]
    assert data["digest"] == train


def test_recipes_are_written_whole_and_never_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    assert run("recipe", "jet_rl", "-o", path).exit_code == 0
    assert Recipe.load(path) == Recipe.jet_rl()
    assert_error(run("recipe", "bf16", "-o", path), "exists already; name another file, or add --force")
    assert Recipe.load(path) == Recipe.jet_rl()
    assert run("recipe", "bf16", "-o", path, "--force").exit_code == 0
    assert Recipe.load(path) == Recipe.bf16()
    assert Recipe.from_dict(tomllib.loads(run("recipe", "jet_rl").stdout)) == Recipe.jet_rl()
    assert_error(run("recipe", "fp4"), "no preset is called 'fp4'", "jet_rl, bf16")
