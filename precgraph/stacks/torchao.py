"""torchao 0.18, blockwise FP8 training.

Read in version 0.18.0: ``torchao/prototype/blockwise_fp8_training/linear.py`` and ``kernels.py``
(``torch_blockwise_scale_act_quant_lhs``, ``torch_blockwise_scale_weight_quant``).
"""

from __future__ import annotations

from precgraph.stacks.base import Built, Request, Stack, fp8, fp8_recipe


def build(request: Request) -> Built:
    """The recipe of ``Float8BlockwiseLinear``: 448/amax in float64, then rounded to fp32."""
    dtype = request.config.get("weight_dtype", "bfloat16")
    rule = {"scale_rule": "max/amax", "amax_floor": 1e-12}
    return Built(fp8_recipe("torchao", request, fp8("1x128", **rule), fp8("128x128", source=dtype, **rule)))


STACK = Stack(
    name="torchao",
    title="torchao Float8BlockwiseLinear",
    version="0.18.0",
    sources=(
        "torchao/prototype/blockwise_fp8_training/kernels.py", "torchao/prototype/blockwise_fp8_training/linear.py",
    ),
    switches={"weight_dtype": "dtype of the parameters that are quantised (bfloat16, float32), from a file"},
    unknown=("which linears are converted: that is the caller's filter function",),
    remedies={
        "scale_rule": "quantise the other side by 448/amax too, or train with another quantiser: torchao has no switch",
        "source": "keep torchao's parameters in the dtype that the other side quantises",
    },
    build=build,
    keys=("weight_dtype",),
)  # fmt: skip
