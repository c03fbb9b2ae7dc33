"""Registration, versions and refusals: what goes wrong says so before anything is served."""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precgraph
from precgraph import Recipe
from precgraph.errors import DigestError, InputError, RecipeError, UnsupportedModelError
from precgraph.runtime.sampling import SamplingParams
from precgraph.runtime.vllm import ARCHITECTURE, RUNNER, register
from precgraph.runtime.vllm.preserve import preserved_state
from precgraph.runtime.vllm.versions import SYMBOLS, Symbol, key_value_views, misfits, require_version
from tests.vllm.conftest import TINY_ENGINE

ARCHITECTURES = {"architectures": [ARCHITECTURE]}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
STORE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


# --------------------------------------------------------------------------- what needs no vLLM


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.33.2", "0.31.0rc1"])
def test_versions_of_the_range(version: str) -> None:
    require_version(version)


@pytest.mark.parametrize("version", ["0.5.4", "0.25.1", "0.34.0", "1.0.0", "dev"])
def test_versions_outside_say_so(version: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"vLLM {version} is outside .*, 0.26 to 0.33; pip install"):
        require_version(version)


@pytest.mark.parametrize("layout", ["[2, blocks, Hkv, block, D]", "[blocks, Hkv, block, 2·D]"])
def test_both_cache_layouts(layout: str) -> None:
    """Views, so that what is written through them is in the cache."""
    old = layout.startswith("[2")
    cache = torch.zeros(2, 5, 3, 4, 8) if old else torch.zeros(5, 3, 4, 16)
    keys, values = key_value_views([cache] if old else cache, 8)
    assert keys.shape == values.shape == (5, 4, 3, 8)
    keys[1, 2, 0] = 1.0
    values[1, 2, 0] = 2.0
    wanted = (cache[0, 1, 0, 2], cache[1, 1, 0, 2]) if old else (cache[1, 0, 2, :8], cache[1, 0, 2, 8:])
    assert bool((wanted[0] == 1).all()) and bool((wanted[1] == 2).all()) and float(cache.sum()) == 8 + 16


def test_a_misfit_is_named() -> None:
    gone = Symbol("json", "decoder.JSONDecoder.decode_all")
    changed = Symbol("json", "dumps", takes=("obj", "colour"), has=("__doc__",))
    lines = misfits((gone, changed, Symbol("no_such_package", "x")))
    assert len(lines) == 3
    assert lines[0].startswith("json:decoder.JSONDecoder.decode_all is gone")
    assert lines[1] == "json:dumps no longer takes 'colour'"
    assert lines[2].startswith("no_such_package:x is gone")


def imported_of_vllm(source: str) -> set[tuple[str, str]]:
    """Module and name of all that a file imports from vLLM, or reads from a module of it that it imports."""
    found, modules = set(), {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
            found |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            ours = (alias for alias in node.names if alias.name.split(".")[0] == "vllm")
            modules |= {alias.asname or alias.name: alias.name for alias in ours}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
            found.add((module, node.attr))
    return found


def test_what_a_file_imports_of_vllm() -> None:
    source = "import json, vllm\nimport vllm.a.b\nimport vllm.c as d\nfrom json import x\nfrom vllm.e import F as G\n"
    uses = "def use():\n    from vllm import H\n    return vllm.LLM(json.I), vllm.a.b.J.k, d.L, G.m\n"
    wanted = {("vllm.e", "F"), ("vllm", "H"), ("vllm", "LLM"), ("vllm.a.b", "J"), ("vllm.c", "L")}
    assert imported_of_vllm(source + uses) - {("vllm", "a")} == wanted


def test_all_that_is_imported_of_vllm_is_listed() -> None:
    """So that what another vLLM lacks is named by the test of the installed one, on a CPU what a GPU needs too."""
    package = Path(precgraph.__file__).parent
    imported = {s for f in (package / "runtime" / "vllm").glob("*.py") for s in imported_of_vllm(f.read_text())}
    imported |= imported_of_vllm((package / "vllm.py").read_text())
    listed = {(symbol.module, symbol.name.split(".")[0]) for symbol in SYMBOLS}
    assert len(imported) > 25 and imported - listed == set()


def used_of_configs(source: str) -> set[tuple[str, str]]:
    """Class and field of all that a file reads or sets in a part of vLLM's configuration: ``x.model_config.y``, and
    ``z.y`` where ``z = x.model_config``."""
    tree, held = ast.parse(source), dict[str, str]()

    def part(node: ast.AST) -> str | None:
        name = node.attr if isinstance(node, ast.Attribute) else held.get(ast.unparse(node))
        return name if name and name.endswith("_config") else None

    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                held |= {ast.unparse(n): found for n, v in zip(names, values, strict=True) if (found := part(v))}
            case ast.Assign([ast.Name(name)], value) if found := part(value):
                held[name] = found
    attributes = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return {(name.title().replace("_", ""), n.attr) for n in attributes if (name := part(n.value))}


def test_what_a_file_uses_of_configs() -> None:
    source = "def f(vllm_config):\n    a, b = vllm_config.model_config, vllm_config.load_config\n    a.c = b.d.e\n"
    more = "    g = h.i.cache_config\n    return g.j, vllm_config.load_config.k, h.l\n"
    wanted = {("ModelConfig", "c"), ("LoadConfig", "d"), ("CacheConfig", "j"), ("LoadConfig", "k")}
    assert used_of_configs(source + more) == wanted


def test_all_fields_that_are_used_of_configs_are_listed() -> None:
    """One that a later vLLM renames could be set and mean nothing: ``disable_cascade_attn``, for one."""
    files = (Path(precgraph.__file__).parent / "runtime" / "vllm").glob("*.py")
    listed = {(s.name, field) for s in SYMBOLS if s.module == "vllm.config" for field in s.has}
    used = {u for file in files for u in used_of_configs(file.read_text())}
    assert ("ModelConfig", "disable_cascade_attn") in used
    assert used - listed == set()


def test_entry_point_is_a_lazy_string() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "precgraph"]
    assert found.value == "precgraph.runtime.vllm:register" and found.load() is register


# --------------------------------------------------------------------------- the installed vLLM


@pytest.mark.vllm
def test_the_installed_vllm_fits() -> None:
    """Read against every symbol that the plugin uses; a line names one that no longer fits."""
    require_version()
    assert misfits() == [] and len(SYMBOLS) > 20


@pytest.mark.vllm
def test_registering_again_changes_nothing() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    register()
    before = set(ModelRegistry.get_supported_archs())
    register()
    assert set(ModelRegistry.get_supported_archs()) == before and ARCHITECTURE in before
    assert ARCHITECTURE in MODELS_CONFIG_MAP


@pytest.mark.vllm
def test_a_fresh_process_finds_it_by_the_entry_point() -> None:
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); import sys;"
        "from vllm import ModelRegistry;"
        f"assert {ARCHITECTURE!r} in ModelRegistry.get_supported_archs();"
        "assert 'precgraph.runtime.vllm.model' not in sys.modules, 'registration must not load the model'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.vllm
def test_other_models_are_left_alone(checkpoint: Callable[..., Any]) -> None:
    """A plain model keeps vLLM's worker, sampler and log-probabilities."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(checkpoint("qwen3")[1], skip_tokenizer_init=True).create_engine_config()
    assert "precgraph" not in config.parallel_config.worker_cls
    assert not config.model_config.logits_processors and config.model_config.logprobs_mode == "raw_logprobs"


@pytest.mark.vllm
def test_the_plain_way_is_the_same_engine(checkpoint: Callable[..., Any]) -> None:
    """What ``vllm serve --hf-overrides`` configures."""
    from vllm.engine.arg_utils import EngineArgs

    model = checkpoint("qwen3")[1]
    for recipe in ("jet_rl", Recipe.jet_rl().to_dict()):
        overrides = {**ARCHITECTURES, "precgraph": recipe}
        config = EngineArgs(model, skip_tokenizer_init=True, hf_overrides=overrides).create_engine_config()
        assert config.parallel_config.worker_cls.startswith("precgraph.")
        assert config.model_config.logits_processors == ["precgraph.runtime.vllm.params:ExactGate"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, "carries no recipe"),
        ({"precgraph": "jet_rll"}, "did you mean 'jet_rl'"),
        ({"precgraph": {"liner": {}}}, "unknown key 'liner'; did you mean 'linear'"),
        ({"precgraph": 3}, "must be a preset's name or a table"),
    ],
)
def test_wrong_recipes(overrides: dict[str, Any], message: str, checkpoint: Callable[..., Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(checkpoint("qwen3")[1], skip_tokenizer_init=True, hf_overrides={**ARCHITECTURES, **overrides})
    with pytest.raises(Exception, match=message):  # vLLM wraps a RecipeError, which is a ValueError
        args.create_engine_config()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 2}, "on each device, .* or vllm serve --data-parallel-size 2$"),
        ({"pipeline_parallel_size": 2}, "vllm serve --data-parallel-size 2$"),
        ({"dtype": "float16"}, "model dtype float16, and the program's is bfloat16; pass --dtype bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
        ({"worker_cls": "somebody.elses.Worker"}, "would replace the plugin's worker"),
        ({"logits_processors": ["somebody:Processor"]}, "custom logits processors"),
        ({"enable_lora": True}, "LoRA does not go with an exact rollout"),
        ({"speculative_config": DRAFTS}, "speculative decoding does not go with an exact rollout"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds does not go with an exact rollout"),
        ({"kv_transfer_config": STORE}, "kv_transfer_config: a store .* those of older weights; leave it out"),
        ({"kv_offloading_size": 1.0}, "kv_offloading_size: a store outside the prefix cache"),
        ({"weight_transfer_config": {"backend": "ipc"}}, "weight_transfer_config: .* by the four calls of"),
        ({"additional_config": {"precgraph": {"digset": "0" * 64}}}, "unknown key 'digset'; known keys: digest"),
        ({"additional_config": {"precgraph": {"digest": 7}}}, "7 is no program's digest; pass all of"),
    ],
)
def test_refused_engine_arguments(arguments: dict[str, Any], message: str, checkpoint: Callable[..., Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    overrides = {**ARCHITECTURES, "precgraph": "jet_rl"}
    args = EngineArgs(
        **{"model": checkpoint("qwen3")[1], "skip_tokenizer_init": True, "hf_overrides": overrides, **arguments}
    )  # fmt: skip
    with pytest.raises(Exception, match=message):
        args.create_engine_config()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"digset": "0" * 64}, InputError, "]: unknown key 'digset'; known keys: digest$"),
        ("0" * 64, InputError, r'^additional_config\["precgraph"\]: .0+. is no table; pass a dict; known keys'),
        (None, InputError, "None is no table"),
        ({"digest": 7}, DigestError, "^7 is no program's digest; pass all of what precgraph digest prints$"),
        ({"digest": None}, DigestError, "None is no program's digest"),
        ({"digest": "0" * 12}, DigestError, "'0{12}' is no program's digest"),
    ],
)
def test_options_that_would_check_nothing(
    own: Any, error: type[Exception], message: str, checkpoint: Callable[..., Any], start: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=message):
        start(checkpoint("qwen3")[1], additional_config={"precgraph": own})


@pytest.mark.vllm
def test_what_is_no_option_of_the_plugin_passes() -> None:
    from precgraph.runtime.vllm.config import own_options

    for additional in (None, {}, {"gdn_prefill_backend": "triton"}, object()):  # vLLM takes objects that have a hash
        assert own_options(additional) == {}
    assert own_options({"precgraph": {"digest": "0f" * 32}}) == {"digest": "0f" * 32}


@pytest.mark.vllm
def test_tensor_parallel_is_a_typed_error(checkpoint: Callable[..., Any], start: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="on each device, .* or vllm serve --data-parallel-size 4$"):
        start(checkpoint("qwen3")[1], tensor_parallel_size=4)
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        with pytest.raises(UnsupportedModelError, match=f"^{name} = 2 .*; run an engine .* --data-parallel-size 2$"):
            start(checkpoint("qwen3")[1], **{name: 2})
    for size in (None, "2", 0, True):
        with pytest.raises(InputError, match=f"tensor_parallel_size = {size!r} is no number of devices"):
            start(checkpoint("qwen3")[1], tensor_parallel_size=size)
    for overrides in (None, lambda config: config):
        with pytest.raises(InputError, match="hf_overrides is no table"):
            start(checkpoint("qwen3")[1], hf_overrides=overrides)
    for recipe in ("jet_rl", {"linear": {}}):
        with pytest.raises(InputError, match=r"^recipe must be a Recipe, not .*; pass Recipe.preset\(name\)"):
            start(checkpoint("qwen3")[1], recipe=recipe)
    with pytest.raises(InputError, match="quantization is precgraph's to choose"):
        start(checkpoint("qwen3")[1], quantization="fp8")


@pytest.mark.vllm
def test_which_runner_is_taken(
    checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the hook: V1; V2 where it is asked for and requests can be refused, by a processor or before vLLM has them."""
    from vllm import triton_utils

    from precgraph.runtime.vllm import config
    from precgraph.runtime.vllm.params import ExactGate

    args = _engine_args(checkpoint("qwen3")[1])
    monkeypatch.setenv(RUNNER, "2")
    with pytest.raises(Exception, match=f"{RUNNER}=2 is neither 0 nor 1; unset it"):
        args.create_engine_config()
    with pytest.raises(UnsupportedModelError, match=f"{RUNNER}=2"):
        start(checkpoint("qwen3")[1])
    assert os.environ[RUNNER] == "2"
    processor = config.v2_processor()
    assert processor is not None and issubclass(ExactGate, processor)
    monkeypatch.setenv(RUNNER, "1")
    monkeypatch.setattr(triton_utils, "HAS_TRITON", False)
    with pytest.raises(UnsupportedModelError, match=f"{RUNNER}=1: the V2 runner needs Triton; install Triton"):
        start(checkpoint("qwen3")[1])
    monkeypatch.setattr(config, "asks_for_v2", lambda: True)  # as with Triton, which vLLM's modules would look for
    monkeypatch.setattr(config, "v2_processor", lambda: None)  # as up to 0.30
    with pytest.raises(Exception, match=f"{RUNNER}=1: the V2 runner of this vLLM takes no .*by precgraph.vllm.LLM"):
        args.create_engine_config()
    with config.requests_checked():
        config._require_gate()
    monkeypatch.undo()
    monkeypatch.setenv(RUNNER, "0")  # what was comes back, whatever the hook sets
    monkeypatch.delenv(RUNNER)
    assert not args.create_engine_config().use_v2_model_runner


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("asked", "cuda", "triton", "v2"),
    [
        (None, True, True, True),
        (None, True, False, False),
        (None, False, True, False),
        ("0", True, True, False),
        ("1", False, True, True),
    ],
)
def test_which_runner_our_own_engine_takes(
    asked: str | None, cuda: bool, triton: bool, v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import platforms, triton_utils

    from precgraph.runtime.vllm.config import takes_v2

    monkeypatch.setenv(RUNNER, asked or "")
    monkeypatch.setattr(type(platforms.current_platform), "is_cuda", lambda self: cuda)
    monkeypatch.setattr(triton_utils, "HAS_TRITON", triton)
    assert takes_v2() is v2


@pytest.mark.vllm
def test_a_runner_that_vllm_takes_all_the_same(checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some settings of vLLM's override the variable: in the front end, or in the process of a worker alone."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from precgraph.runtime.vllm.worker import ExactWorker

    monkeypatch.setenv(RUNNER, "0")
    worker = ExactWorker()
    worker.model_runner = type("GPUModelRunner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})()
    with pytest.raises(UnsupportedModelError, match=f"runner of vllm.v1.worker.gpu.model_runner although {RUNNER}=0"):
        worker.load_model()
    worker.model_runner = GPUModelRunner.__new__(GPUModelRunner)
    with pytest.raises(AttributeError, match="load_model"):  # gets as far as vLLM's own worker, which is missing here
        worker.load_model()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    with pytest.raises(Exception, match=f"takes its other model runner although {RUNNER}=0"):
        _engine_args(checkpoint("qwen3")[1]).create_engine_config()


def _engine_args(path: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(path, skip_tokenizer_init=True, hf_overrides={**ARCHITECTURES, "precgraph": "jet_rl"})


@pytest.mark.vllm
def test_an_unknown_family(checkpoint: Callable[..., Any], start: Callable[..., Any]) -> None:
    path = Path(checkpoint("llama")[1])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    with pytest.raises(UnsupportedModelError, match="knows no model type 'lama'; did you mean 'llama'"):
        start(path)


@pytest.mark.vllm
def test_another_digest_stops_the_engine(checkpoint: Callable[..., Any], start: Callable[..., Any]) -> None:
    with pytest.raises(DigestError, match="the engine runs program .*, the trainer 123456789abc"):
        start(checkpoint("qwen3")[1], digest="123456789abcdef0" * 4)


@pytest.mark.vllm
def test_every_worker_is_asked(checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: Any) -> None:
    """One among several that runs another program."""
    from precgraph.vllm import LLM

    call, other = LLM._call, {"digest": "0" * 64, "version": 1, "checksum": 7}
    monkeypatch.setattr(LLM, "_call", lambda llm, *args: [*call(llm, *args), other])
    with pytest.raises(DigestError, match="the engine runs program 0{12}, the trainer "):
        start(checkpoint("qwen3")[1])


@pytest.mark.vllm
def test_another_digest_stops_the_plain_way_too(checkpoint: Callable[..., Any]) -> None:
    """``vllm serve --additional-config``: the worker compares."""
    import vllm

    overrides = {**ARCHITECTURES, "precgraph": "jet_rl"}
    options = {"precgraph": {"digest": "123456789abcdef0" * 4}}
    arguments = {**TINY_ENGINE, "dtype": "bfloat16", "hf_overrides": overrides, "additional_config": options}
    with preserved_state(), pytest.raises(DigestError, match="the trainer runs 123456789abc"):
        vllm.LLM(model=checkpoint("qwen3")[1], **arguments)


@pytest.mark.vllm
@pytest.mark.parametrize("fault", ["shape", "missing", "extra"])
def test_a_checkpoint_that_does_not_fit(fault: str, checkpoint: Callable[..., Any], start: Callable[..., Any]) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(checkpoint("qwen3")[1])
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "shape":
        tensors[name] = tensors[name][:, :-8].contiguous()
    elif fault == "missing":
        del tensors[name]
    else:
        tensors[name.replace("down_proj", "down_proj.base_layer")] = tensors.pop(name)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    messages = {"shape": r"holds bfloat16\[160, 280\]", "missing": "lacks 1 of", "extra": "it lacks 'model.layers.1"}
    with pytest.raises(InputError, match=messages[fault]):
        start(path)


@pytest.mark.vllm
def test_the_trainers_process_is_left_as_it_was(
    checkpoint: Callable[..., Any], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM seeds every generator, and replaces torch.set_num_threads by a function that does nothing.

    Nor does what follows the start show; only a request without a seed takes a number of torch's generator.
    """
    import random

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # torchrun's
    gc.unfreeze()
    model, path = checkpoint("qwen3")
    names = (RUNNER, "VLLM_ENABLE_V1_MULTIPROCESSING", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    states: list[Callable[[], Any]] = [
        lambda: torch.get_rng_state().tolist(), random.getstate, lambda: str(np.random.get_state()),
        torch.get_num_threads, lambda: torch.set_num_threads, torch.get_default_dtype, lambda: os.sched_getaffinity(0),
        lambda: [os.environ.get(n) for n in names], lambda: model.config._attn_implementation,
        lambda: sys.excepthook, gc.get_freeze_count, gc.get_threshold, gc.isenabled, torch.is_grad_enabled,
        torch.get_float32_matmul_precision,
    ]  # fmt: skip
    torch.manual_seed(21)
    before = [state() for state in states]
    actor = precgraph.compile(model, "train")
    llm = start(path, actor=actor)
    assert [state() for state in states] == before
    actor.sync()
    llm.sync()
    llm.generate([[1, 2, 3]] * 2, [SamplingParams(max_tokens=3, seed=i) for i in range(2)])
    llm.shutdown()
    assert [state() for state in states] == before
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_what_a_process_group_and_a_frozen_heap_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vLLM's groups were there before the test: a variable that was not set, the hook, and the heap."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    gc.unfreeze()  # what another test may have left
    hook = sys.excepthook
    with pytest.raises(KeyboardInterrupt), preserved_state():
        os.environ["LOCAL_RANK"] = "0"
        sys.excepthook = lambda *error: None
        gc.freeze()
        raise KeyboardInterrupt
    assert "LOCAL_RANK" not in os.environ and sys.excepthook is hook and gc.get_freeze_count() == 0
    gc.freeze()  # a trainer's own
    with preserved_state():
        pass
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert frozen > 0


def test_recipe_error_is_a_value_error() -> None:
    """What the configuration hook raises passes through vLLM's validation with its message."""
    assert issubclass(RecipeError, ValueError)


def test_the_example_says_at_once_that_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is converted: with what target to make the environment, and what to run then."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "vllm_serve.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["vllm_serve.py"])
    with pytest.raises(SystemExit, match="make setup-vllm, then .venv-vllm/bin/python examples/vllm_serve.py"):
        example["main"]()
