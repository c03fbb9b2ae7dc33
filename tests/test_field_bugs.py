"""Five bugs that cost others weeks, each found on the command line from configurations alone.

Each comes with the number of layers and one line that says what to set. A Llama and a model with experts; the side that
is right is DeepGEMM's cast from bf16, which many trainers call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from precgraph.cli import app
from tests.families import config_json

LAYERS = 3
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models' and stacks' configurations: no weights anywhere."""
    folder = tmp_path_factory.mktemp("configs")
    for name, content in {
        "llama": config_json("llama", num_hidden_layers=LAYERS),
        # The first layer dense, and experts in the others.
        "moe": config_json("qwen3_moe", num_hidden_layers=LAYERS, mlp_only_layers=[0]),
        "vllm_ignore": {"quantization_config": {"linear": "fp8_per_block", "ignore": ["re:.*mlp.gate"]}},
        "sglang_ignored": {"quantization_config": {**BLOCKS, "ignored_layers": ["mlp.gate"]}},
        "right": {"quantization_config": {**BLOCKS, "ignored_layers": ["model.layers.1.mlp.gate"]}},
        "experts": {"quantization_config": {**BLOCKS, "ignored_layers": ["model.layers.1.mlp.experts"]}},
        "fp32": {"weight_dtype": "float32"},
        "served": {"quantization_config": BLOCKS},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def rows(files: Path, model: str, train: str, infer: str, **env: str) -> list[Row]:
    """The rows of a check that says "inconsistent", or none if it is consistent."""
    train, infer = (f"{s.partition(':')[0]}:{files / s.partition(':')[2]}" if ":" in s else s for s in (train, infer))
    args = ["check", str(files / f"{model}.json"), "--train", train, "--infer", infer, "--json"]
    result = CliRunner(env=env).invoke(app, args)
    assert result.exit_code in (0, 1), result.stderr
    found: list[Row] = [r for r in json.loads(result.stdout)["rows"] if r["state"] == "violation"]
    assert bool(found) == (result.exit_code == 1)
    assert all(r["remedy"] and "\n" not in r["remedy"] for r in found)
    return found


def left_out(found: list[Row]) -> dict[str, tuple[int, str]]:
    """Linears that one side leaves in bf16: the leaf's name to how many layers, and the remedy."""
    plain = [r for r in found if "PG108" in r["codes"]]
    return {r["module"].rpartition(".")[2]: (r["count"], r["remedy"]) for r in plain}


@pytest.mark.parametrize(
    ("stack", "how"),
    [("vllm:vllm_ignore.json", "as a regular expression"), ("sglang_substring:sglang_ignored.json", "as a substring")],
)
def test_a_routers_pattern_leaves_out_gate_up_proj(files: Path, stack: str, how: str) -> None:
    """Engines load gate_proj and up_proj as gate_up_proj, which ``mlp.gate`` hits: both stay in bf16."""
    found = left_out(rows(files, "llama", "deep_gemm", stack))
    assert {leaf: count for leaf, (count, _) in found.items()} == {"gate_proj": LAYERS, "up_proj": LAYERS}
    for _, remedy in found.values():
        assert "mlp.gate" in remedy and how in remedy and "name the layers in full" in remedy


def test_the_same_pattern_beside_experts(files: Path) -> None:
    """It means the router, which no side quantises; the layer without experts is hit, the experts are not."""
    for stack in ("vllm:vllm_ignore.json", "sglang_substring:sglang_ignored.json"):
        found = left_out(rows(files, "moe", "deep_gemm", stack))
        assert {leaf: count for leaf, (count, _) in found.items()} == {"gate_proj": 1, "up_proj": 1}, stack
    assert not left_out(rows(files, "moe", "deep_gemm", "vllm:right.json"))
    experts = left_out(rows(files, "moe", "deep_gemm", "vllm:experts.json"))
    assert {leaf: count for leaf, (count, _) in experts.items()} == {"gate_up_proj": 1, "down_proj": 1}


def test_fp32_masters_against_bf16_ones(files: Path) -> None:
    found = rows(files, "llama", "deep_gemm:fp32.json", "deep_gemm")
    assert {tuple(r["codes"]) for r in found} == {("PG106",)}
    assert sum(r["count"] for r in found) == 7 * LAYERS and len(found) == 7
    assert {r["remedy"] for r in found} == {"cast the weights to bf16 before DeepGEMM's cast, as the other side does"}


def test_requantised_weights_and_the_power_of_two_default(files: Path) -> None:
    """Two bugs of one switch: weights quantised a second time, and activations with other scales."""
    found = rows(files, "llama", "deep_gemm", "vllm:served.json")
    weights = [r for r in found if "PG109" in r["codes"]]
    activations = [r for r in found if "PG102" in r["codes"]]
    assert sum(r["count"] for r in weights) == 7 * LAYERS and sum(r["count"] for r in activations) == 4 * LAYERS
    assert all("VLLM_USE_DEEP_GEMM_E8M0=0" in r["remedy"] for r in (*weights, *activations))
    codes = {
        c
        for r in rows(files, "llama", "deep_gemm", "vllm:served.json", VLLM_USE_DEEP_GEMM_E8M0="0")
        for c in r["codes"]
    }
    assert not {"PG109", "PG102"} & codes
