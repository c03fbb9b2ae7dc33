"""vLLM 0.32: block FP8 checkpoints and online block FP8, on a GPU that DeepGEMM runs on.

Read in version 0.32.0: ``vllm/envs.py``, ``model_executor/layers/quantization/fp8.py`` and ``online/``,
``quantization/utils/fp8_utils.py`` (``_per_token_group_quant_fp8``, ``requant_weight_ue8m0_inplace``),
``quantization/utils/quant_utils.py`` (``is_layer_skipped``), ``utils/deep_gemm.py`` (``per_block_cast_to_fp8``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precgraph.format import Format
from precgraph.stacks.base import (
    Built,
    Request,
    Setting,
    Stack,
    fp8,
    fp8_recipe,
    lookup,
    other_weight,
    plain_recipe,
    strings,
    taken,
)
from precgraph.stacks.matching import exact, regex_or_glob, skips
from precgraph.stored import StoredWeights

_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "auto": "", None: ""}


def build(request: Request) -> Built:
    """The recipe of an engine's arguments, a checkpoint's config.json, or (without either) ``fp8_per_block``."""
    config = request.config
    stored = config.get("quantization_config") or lookup(config, "hf_overrides", "quantization_config")
    if isinstance(stored, Mapping) and "quant_method" in stored:
        return _checkpoint(request, stored)
    online = stored if isinstance(stored, Mapping) else {}
    method = config.get("quantization", None if config and not online else "fp8_per_block")
    if method is None:
        return Built(plain_recipe("vllm"))
    method = online.get("linear", method)
    if method != "fp8_per_block":
        raise request.error(
            f"vLLM's quantization {method!r} is not modelled", "use fp8_per_block, or a block FP8 checkpoint"
        )
    left_out = skips(strings(request, online.get("ignore")), request.modules, regex_or_glob)
    return Built(fp8_recipe("vllm", request, activation(request), online_weight(request), left_out), left_out)


def _checkpoint(request: Request, stored: Mapping[str, Any]) -> Built:
    weight, assumed = stored_weight(request, stored)
    left_out = skips(ignored_layers(request, stored), request.modules, exact)
    if not powers_of_two(request) and weight.powers_of_two:
        raise request.error(
            "the checkpoint's scales are powers of two, and activations with fp32 scales beside them are not modelled",
            "leave VLLM_USE_DEEP_GEMM_E8M0 at 1",
        )
    act, weight = activation(request, weight.block[0]), requantized(request, weight)
    return Built(fp8_recipe("vllm", request, act, weight, left_out), left_out, (), assumed)


def activation(request: Request, group: int = 128) -> Format:
    """Activations, quantised in groups along a row before every GEMM."""
    named = [request.config.get(key) for key in ("dtype", "torch_dtype")]
    for value in named:
        if not isinstance(value, str | None):
            raise request.error(f"dtype = {value!r} is no name", "write bfloat16, float16 or auto")
    dtype = _DTYPES.get(named[0]) or _DTYPES.get(named[1]) or "bfloat16"
    scale = "ue8m0_log2" if powers_of_two(request) else "float32"
    return fp8(f"1x{group}", scale_dtype=scale, scale_rule="amax*(1/max)", amax_floor=1e-10, source=dtype)


def online_weight(request: Request) -> Format:
    """Weights that the engine quantises as it loads them; for DeepGEMM they are quantised a second time."""
    return requantized(request, fp8("128x128", divide="reciprocal", amax_floor=1e-4))


def powers_of_two(request: Request) -> bool:
    """Whether activations get power-of-two scales, and weights are requantised to them."""
    return request.switch("VLLM_USE_DEEP_GEMM", True) and request.switch("VLLM_USE_DEEP_GEMM_E8M0", True)


def requantized(request: Request, weight: Format) -> Format:
    """``weight`` as DeepGEMM is given it."""
    if not powers_of_two(request) or weight.scale_dtype != "float32":
        return weight
    return Format.from_dict({**weight.to_dict(), "requantize": "ue8m0"})


def stored_weight(request: Request, stored: Mapping[str, Any]) -> tuple[Format, tuple[str, ...]]:
    """A checkpoint's weights. How they were rounded is not in its config: that is the other side's rule, and said."""
    rows, columns = _block(request, stored)
    scale = "ue8m0" if stored.get("scale_fmt") == "ue8m0" else "float32"
    fields = ("scale_rule", "divide", "amax_floor", "source")
    other = other_weight(request)
    weight = fp8(f"{rows}x{columns}", scale_dtype=scale)
    return taken(weight, other, *fields), tuple(f"weight.{name}" for name in fields)


def _block(request: Request, stored: Mapping[str, Any]) -> tuple[int, int]:
    found = StoredWeights.parse(stored, request.path)
    if found.fp8 is None:
        raise request.error(
            f"quantization_config: {found.other} is not modelled",
            "use a block FP8 checkpoint: weight_block_size = [128, 128] and activation_scheme = dynamic",
        )
    _require_two_sizes(request, stored["weight_block_size"])
    return found.fp8.block


# ------------------------------------------------------- how vLLM, and SGLang like it, reads a quantization_config


def _require_two_sizes(request: Request, size: Any) -> None:
    """Fp8Config takes the length of a weight_block_size; 128 and [128], which other loaders read, are errors there."""
    if not isinstance(size, list) or len(size) != 2:
        raise request.error(
            f"quantization_config: weight_block_size = {size!r} is not two sizes, and the engine takes no other",
            "write [128, 128]",
        )


def ignored_layers(request: Request, stored: Mapping[str, Any]) -> list[str]:
    """The skip list: of two, the one by the engine's own name, where transformers takes modules_to_not_convert."""
    return strings(request, stored.get("ignored_layers") or stored.get("modules_to_not_convert"))


UNKNOWN = (
    "the C++ activation kernel: only its Triton twin was read; earlier versions divided by 448 and raised tiny scales",
    "layers whose rows are no multiple of 64 or columns none of 128 take another kernel, without requantised weights",
)
_FP32_SCALES = Setting("VLLM_USE_DEEP_GEMM_E8M0", "0", "vLLM")
REMEDIES: Mapping[str, str | Setting] = {
    "scale_dtype": _FP32_SCALES,
    "requantize": _FP32_SCALES,
    "source": "give vLLM the trainer's dtype (--dtype)",
    "rule.gemm": "list the same layers in vLLM's ignored_layers (full paths) or ignore",
    "granularity": "write the checkpoint with the trainer's weight_block_size",
}

VARIABLES = ("VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0")
STORED_KEYS = tuple(
    f"quantization_config.{key}"
    for key in (
        "quant_method", "activation_scheme", "weight_block_size", "scale_fmt", "ignored_layers",
        "modules_to_not_convert", "linear", "ignore",
    )
)  # fmt: skip

STACK = Stack(
    name="vllm",
    title="vLLM",
    version="0.32.0",
    sources=(
        "vllm/envs.py", "vllm/utils/deep_gemm.py", "vllm/model_executor/layers/quantization/fp8.py",
        "vllm/model_executor/layers/quantization/online/", "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "vllm/model_executor/layers/quantization/utils/quant_utils.py",
    ),
    switches={
        "quantization_config": "of config.json or hf_overrides: weight_block_size, ignored_layers (by full path)",
        "quantization": "fp8_per_block: weights are quantised as they are loaded; `ignore` takes regexes and globs",
        "dtype": "what activations are in before they are quantised",
        "VLLM_USE_DEEP_GEMM_E8M0": "default 1: powers of two, and weights rounded twice; 0: fp32 scales",
        "VLLM_USE_DEEP_GEMM": "default 1; 0 leaves scales in fp32",
    },
    unknown=UNKNOWN,
    remedies=REMEDIES,
    build=build,
    keys=("quantization", "dtype", "torch_dtype", *STORED_KEYS, *(f"hf_overrides.{key}" for key in STORED_KEYS)),
    variables=VARIABLES,
)  # fmt: skip
