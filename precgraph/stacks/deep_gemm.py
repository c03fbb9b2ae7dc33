"""DeepGEMM's own casts, which many trainers call.

Read in ``deep_gemm/utils/math.py`` (commit 38939a4c): ``per_token_cast_to_fp8``, ``per_block_cast_to_fp8``,
``ceil_to_ue8m0``.
"""

from __future__ import annotations

from precgraph.stacks.base import Built, Request, Stack, fp8, fp8_recipe


def build(request: Request) -> Built:
    """The recipe of the casts with ``use_ue8m0`` and ``weight_dtype`` of the configuration."""
    scale = "ue8m0" if request.config.get("use_ue8m0", False) else "float32"
    rule = {"scale_dtype": scale, "divide": "reciprocal", "amax_floor": 1e-4}
    weight = fp8("128x128", source=request.config.get("weight_dtype", "bfloat16"), **rule)
    return Built(fp8_recipe("deep_gemm", request, fp8("1x128", **rule), weight))


STACK = Stack(
    name="deep_gemm",
    title="DeepGEMM's casts",
    version="2.6 (commit 38939a4c)",
    sources=("deep_gemm/utils/math.py",),
    switches={
        "use_ue8m0": "argument of the casts, default false here: scales rounded up to powers of two",
        "weight_dtype": "dtype of the weights that are cast (bfloat16, float32)",
    },
    unknown=(
        "on CUDA, torch divides by the number 448 by multiplying with its reciprocal; the source says amax / 448",
    ),
    remedies={
        "scale_dtype": "pass the same use_ue8m0 to DeepGEMM's casts",
        "source": "cast the weights to bf16 before DeepGEMM's cast, as the other side does",
    },
    build=build,
    keys=("use_ue8m0", "weight_dtype"),
)
