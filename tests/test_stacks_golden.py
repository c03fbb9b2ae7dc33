"""Every pair of stacks against a golden table, and the golden table against rules written down by hand.

``tests/golden/stacks.json`` holds, for each pair with its default settings, how many quantisers of weights and of
activations, and how many linears, have each code: findings on a Llama of two layers. ``PYTHONPATH=. python
tests/test_stacks_golden.py`` writes it anew, which is right only where a stack's rules have changed.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from precgraph.checking import lowered
from precgraph.graph import PrecisionGraph
from precgraph.recipe import Recipe
from precgraph.stacks import STACKS
from precgraph.stacks.pair import linear_modules, parse, resolve
from precgraph.trace import trace
from precgraph.verify import check_inclusion
from tests.families import meta_lm

GOLDEN = Path(__file__).parent / "golden" / "stacks.json"
LINEARS, VALUES = 14, 8  # of two layers: seven linears each, which read four values
Counts = dict[str, dict[str, int]]

# ------------------------------------------------------------------------------------ rules by hand

ANY = "?"  # the stack's source does not settle it: whatever the other side does


class Rule(NamedTuple):
    """How one operand is quantised, as the sources spell it."""

    floor: float | str
    scale: str
    quantise: str
    rounded: str
    twice: bool = False


# deep_gemm/utils/math.py: amax.clamp(1e-4) / 448, then x * (1 / s); use_ue8m0 is off by default here.
DEEP_GEMM = Rule(1e-4, "amax / 448", "x * (1 / s)", "no")
# vllm fp8_utils.py, _per_token_group_quant_fp8: max(amax, eps=1e-10) * (1 / 448), x / s; with DeepGEMM scales are
# exp2(ceil(log2(s))), the default of VLLM_USE_DEEP_GEMM_E8M0.
VLLM = Rule(1e-10, "amax * (1 / 448)", "x / s", "exp2(ceil(log2))")
VLLM_FP32 = VLLM._replace(rounded="no")  # VLLM_USE_DEEP_GEMM_E8M0=0, which NeMo-RL sets
# torchao blockwise kernels.py: 448 / max(amax, 1e-12) in float64, x * s.
TORCHAO = Rule(1e-12, "448 / amax", "x * s", "no")
# TransformerEngine quantize_scale_calc.py: 448 / amax, amax_epsilon 0; power of two by its bits unless
# NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, which slime and SkyRL set.
TE = Rule(0.0, "448 / amax", "x * s", "bits")
TE_FP32 = TE._replace(rounded="no")
# sglang fp8_kernel.py: eps 1e-10, fp32 scales on Hopper; its C++ division was not read, nor what rounded a checkpoint.
SGLANG = Rule(1e-10, ANY, ANY, "no")
STORED = Rule(ANY, ANY, ANY, "no")
PLAIN = None  # the linears run in bf16

# Activation and weight as trainer, then as rollout.
BY_HAND: dict[str, tuple[tuple[Rule, Rule] | None, tuple[Rule, Rule] | None]] = {
    "deep_gemm": ((DEEP_GEMM, DEEP_GEMM),) * 2,
    # Online: DeepGEMM's cast with its floor of 1e-4, then requant_weight_ue8m0_inplace.
    "vllm": ((VLLM, DEEP_GEMM._replace(twice=True)),) * 2,
    "torchao": ((TORCHAO, TORCHAO),) * 2,
    "transformer_engine": ((TE, TE),) * 2,
    "megatron": ((TE, TE),) * 2,
    "sglang": ((SGLANG, STORED),) * 2,
    "sglang_substring": ((SGLANG, STORED),) * 2,
    # verl fp8_kernel.py: Triton, eps 1e-10, amax / 448, then times 1 / s; FSDP trains in bf16; vLLM serves.
    "verl": (PLAIN, (VLLM, Rule(1e-10, "amax / 448", "x * (1 / s)", "no", twice=True))),
    # slime fp8_kernel.py, blockwise_cast_to_fp8_triton: the same, served by SGLang.
    "slime": ((TE_FP32, TE_FP32), (SGLANG, Rule(1e-10, "amax / 448", "x * (1 / s)", "no"))),
    # NeMo-RL generation/fp8.py, cast_tensor_to_fp8_blockwise: 448 / amax without a floor, times x.
    "nemo_rl": ((TE, TE), (VLLM_FP32, TE_FP32)),
    # prime-rl models/fp8.py: the scale, amax / 448, is at least 1e-12; x / s. Its trainer is bf16.
    "prime_rl": (PLAIN, (VLLM, Rule(448e-12, "amax / 448", "x / s", "no", twice=True))),
    # SkyRL serialized_fp8.py: max(epsilon, 1e-10), amax / 448, x / s; fp32 scales.
    "skyrl": ((TE_FP32, TE_FP32), (VLLM, Rule(1e-10, "amax / 448", "x / s", "no", twice=True))),
}


def differing(a: Rule, b: Rule) -> set[str]:
    """Codes by hand. "x * s" belongs to 448 / amax, so PG103 says it; PG104 is about a reciprocal of the scale."""
    pairs = {
        "PG105": (a.floor, b.floor), "PG103": (a.scale, b.scale), "PG102": (a.rounded, b.rounded),
        "PG104": tuple(r.quantise if r.quantise in (ANY, "x * (1 / s)") else "" for r in (a, b)),
        "PG109": (a.twice, b.twice),
    }  # fmt: skip
    return {code for code, (x, y) in pairs.items() if x != y and ANY not in (x, y)}


def by_hand(train: str, infer: str) -> Counts:
    ours, theirs = BY_HAND[train][0], BY_HAND[infer][1]
    if ours is None or theirs is None:
        # One finding a linear; its operands are stored in other formats too.
        return {} if ours is theirs else {"linears": {"PG107": LINEARS, "PG108": LINEARS}}
    found = {
        "weights": dict.fromkeys(sorted(differing(ours[1], theirs[1])), LINEARS),
        "activations": dict.fromkeys(sorted(differing(ours[0], theirs[0])), VALUES),
    }
    return {part: counts for part, counts in found.items() if counts}


# ----------------------------------------------------------------------------------- what is found


@cache
def _traced() -> tuple[object, tuple[str, ...]]:
    traced = trace(meta_lm("llama"))
    return traced, linear_modules(traced.graph)


_GRAPHS: dict[tuple[str, str], PrecisionGraph] = {}


def _graph(mode: str, recipe: Recipe) -> PrecisionGraph:
    key = (mode, json.dumps(recipe.to_dict(), sort_keys=True))
    if key not in _GRAPHS:
        _GRAPHS[key] = lowered(_traced()[0], mode, recipe)  # type: ignore[arg-type]
    return _GRAPHS[key]


def found(train: str, infer: str) -> Counts:
    """How often the check of a pair finds each code."""
    sides = resolve(parse(train), parse(infer), _traced()[1], {})
    report = check_inclusion(_graph("train", sides[0].recipe), _graph("infer", sides[1].recipe))
    counts: dict[str, Counter[str]] = {}
    for f in report.violations:
        part = "linears" if f.op != "quantize" else "weights" if f.module.endswith("_proj") else "activations"
        counts.setdefault(part, Counter()).update(f.numbers())
    return {part: dict(sorted(c.items())) for part, c in sorted(counts.items())}


@pytest.fixture(scope="module")
def golden() -> dict[str, Counts]:
    table: dict[str, Counts] = json.loads(GOLDEN.read_text())
    return table


def test_every_pair_is_in_the_table(golden: dict[str, Counts]) -> None:
    assert set(BY_HAND) == set(STACKS)
    assert set(golden) == {f"{a} to {b}" for a, b in itertools.product(STACKS, repeat=2)}


def test_the_table_follows_from_the_rules_by_hand(golden: dict[str, Counts]) -> None:
    for train, infer in itertools.product(BY_HAND, repeat=2):
        assert golden[f"{train} to {infer}"] == by_hand(train, infer), (train, infer)


@pytest.mark.parametrize("train", BY_HAND)
def test_what_is_found_is_in_the_table(train: str, golden: dict[str, Counts]) -> None:
    for infer in BY_HAND:
        assert found(train, infer) == golden[f"{train} to {infer}"], (train, infer)


if __name__ == "__main__":
    lines = (f"{json.dumps(f'{a} to {b}')}: {json.dumps(found(a, b))}" for a, b in itertools.product(STACKS, repeat=2))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
