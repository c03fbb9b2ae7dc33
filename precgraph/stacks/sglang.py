"""SGLang on Hopper, serving a block FP8 checkpoint.

Read in 2026's main: ``layers/deep_gemm_wrapper/configurer.py`` (powers of two only on sm_100 and sm_120),
``layers/quantization/fp8_kernel.py`` (``sglang_per_token_group_quant_fp8``: eps 1e-10),
``layers/quantization/utils.py`` (``is_layer_skipped``), whose matching pull request 23486 changed in April 2026 from
substrings to whole components.
"""

from __future__ import annotations

from collections.abc import Mapping

from precgraph.format import Format
from precgraph.stacks.base import (
    Built,
    Request,
    Stack,
    fp8,
    fp8_recipe,
    lookup,
    other_activation,
    plain_recipe,
    taken,
)
from precgraph.stacks.matching import Matcher, path, skips, substring
from precgraph.stacks.vllm import STORED_KEYS, ignored_layers, stored_weight


def activation(request: Request) -> tuple[Format, tuple[str, ...]]:
    """Activations; how the kernel divides was not read, and is taken from the other side."""
    fmt = fp8("1x128", amax_floor=1e-10)
    return taken(fmt, other_activation(request), "scale_rule", "divide"), ("activation.scale_rule", "activation.divide")


def _build(request: Request, name: str, matcher: Matcher) -> Built:
    config = request.config
    stored = config.get("quantization_config") or lookup(config, "hf_overrides", "quantization_config")
    if not isinstance(stored, Mapping):
        if config:
            return Built(plain_recipe(name))
        stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weight, assumed = stored_weight(request, stored)
    left_out = skips(ignored_layers(request, stored), request.modules, matcher)
    act, more = activation(request)
    return Built(fp8_recipe(name, request, act, weight, left_out), left_out, (), (*assumed, *more))


def build(request: Request) -> Built:
    """The recipe of a checkpoint's quantization_config; without one, of a plain 128x128 checkpoint."""
    return _build(request, "sglang", path)


def build_substring(request: Request) -> Built:
    """The same with skip patterns as they were matched before pull request 23486."""
    return _build(request, "sglang_substring", substring)


_SOURCES = (
    "python/sglang/srt/layers/deep_gemm_wrapper/configurer.py", "python/sglang/srt/layers/quantization/fp8_kernel.py",
    "python/sglang/srt/layers/quantization/utils.py",
)  # fmt: skip
_UNKNOWN = (
    "how the activation kernel divides (sgl-kernel): taken from the other side",
    "how a checkpoint's weights were rounded: not in its config, taken from the other side",
)
_REMEDIES = {
    "scale_dtype": "on Hopper SGLang takes fp32 scales: give the other side fp32 scales",
    "amax_floor": "give the other side's activations a floor of 1e-10",
    "rule.gemm": "name the layers in full in the checkpoint's ignored_layers or modules_to_not_convert",
}
_SWITCHES = {"quantization_config": "of config.json: weight_block_size, ignored_layers, modules_to_not_convert"}
_KEYS = (*STORED_KEYS, *(f"hf_overrides.{key}" for key in STORED_KEYS))

STACK = Stack("sglang", "SGLang", "main since April 2026", _SOURCES, _SWITCHES, _UNKNOWN, _REMEDIES, build, _KEYS)
SUBSTRING = Stack(
    "sglang_substring", "SGLang, skip lists as substrings", "before pull request 23486 (April 2026)",
    _SOURCES, _SWITCHES, _UNKNOWN, _REMEDIES, build_substring, _KEYS,
)  # fmt: skip
