"""Why each rule matters: what was measured or read, an example, in the words of ``precgraph rule CODE``.

Extends :data:`precgraph.verify.rules.RULES`, whose keys these are; codes, words and remedies are only there.
Imports nothing that is slow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Why:
    """``why`` it changes numbers, the ``effect`` that was measured, and an ``example`` of two sides that differ."""

    why: str
    effect: str = ""
    example: str = ""


WHY: dict[str, Why] = {
    "granularity": Why(
        "Values of one block share a scale. With other blocks, every code beside the largest one changes.",
        "Micro-batches that split a group of 128 tokens change dW by 2 to 4 %; splits at multiples of 128 by 0.",
        "1x128 in the trainer, one scale a tensor in the engine.",
    ),
    "scale_dtype": Why(
        "A scale that is rounded up to a power of two is up to twice as large, so codes lose up to one bit. It must be "
        "rounded before the codes are made.",
        "Rounding after quantising gives 76 % error. ceil(log2(s)) is one power too small just above a power of two.",
        "vLLM with DeepGEMM (VLLM_USE_DEEP_GEMM_E8M0=1, the default) and TransformerEngine (default) round; a trainer "
        "with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, DeepGEMM's casts and torchao do not.",
    ),
    "scale_rule": Why(
        "amax/448, amax*(1/448) and 1/(448/amax) are three different fp32 numbers, each up to one bit from the next.",
        "amax/448 against amax*(1/448) changes 599 of 1024 scales of one random 256x256 tensor.",
        "DeepGEMM divides, vLLM's activations multiply by the reciprocal, TransformerEngine and torchao invert.",
    ),
    "divide": Why(
        "x / s and x * (1/s) round differently, and a value near the middle of two codes falls to the other one.",
        "",
        "vLLM divides activations, DeepGEMM multiplies by the reciprocal.",
    ),
    "amax_floor": Why(
        "Blocks whose largest value is below the floor get the floor's scale: they keep their codes on one side only.",
        "A 128x128 block with a largest value of 1e-6 has another scale under floors of 1e-4 and 1e-10.",
        "1e-4 in DeepGEMM, 1e-10 in vLLM, 1e-12 in torchao, none in TransformerEngine.",
    ),
    "source": Why(
        "A value that is quantised from fp32 and one that was first rounded to bf16 have different maxima and codes.",
        "One random 256x256 tensor: 1388 of 65536 codes and every scale. In the field, fp32 masters against "
        "bf16-rounded ones made the k3 KL grow 25 times in one step.",
        "The trainer quantises fp32 masters, the rollout the bf16 weights that it was sent.",
    ),
    "format": Why("One side multiplies codes and the other values.", "", "An operand in e4m3 against bf16."),
    "rule.gemm": Why(
        "A layer runs in FP8 on one side and in bf16 on the other, usually because the skip lists are matched "
        "differently: in full, as substrings, as regular expressions.",
        "Twice, in two large projects, `mlp.gate`, meant for a router, left `mlp.gate_proj` or `mlp.gate_up_proj` in "
        "bf16 on one side, silently.",
        "`ignore: ['re:.*mlp.gate']` in vLLM leaves out gate_proj; write 're:.*mlp.gate$'.",
    ),
    "requantize": Why(
        "The engine dequantises the checkpoint's codes and quantises them again to power-of-two scales: each weight is "
        "rounded twice, so its codes are those of neither rule.",
        "Accuracy fell by 12 points on one public model whose weights were requantised this way.",
        "vLLM with DeepGEMM loads fp32 scales and requantises unless VLLM_USE_DEEP_GEMM_E8M0=0.",
    ),
    "compute": Why(
        "An operator that computes in bf16 rounds after each step.",
        "RoPE or an fp32 head that autocast turns into bf16: 0.25 in log-probability.",
        "vLLM rotates in bf16, Hugging Face in fp32.",
    ),
    "accumulate": Why("Sums of products in another dtype differ in most results.", "", "fp32 against bf16 sums."),
    "dtype": Why(
        "Every value of the output is rounded to another dtype.",
        "",
        "Logits in bf16 on one side, in fp32 on the other.",
    ),
    "rule": Why(
        "A named choice of the arithmetic (order of a sum, place of a cast) changes the last bits, which an RL loop "
        "turns into a ratio that is not 1.",
        "One row's sum in another order differs in the last bit; over 30 layers that is 1e-2 in log-probability.",
        "A norm that casts before its weight against one that casts after.",
    ),
    "role": Why("A value is used for something else.", "", "A router's logits against a plain projection."),
    "attribute": Why("A constant of the operator differs.", "", "rms_norm_eps 1e-5 against 1e-6."),
    "shape": Why("The parameter has other dimensions.", "", "Two checkpoints of different sizes."),
    "operand": Why("The operator reads another value.", "", "A residual that is added before the norm, not after."),
    "parameter": Why(
        "The operator reads another parameter, or the same one under another tie.", "", "A tied head against its own."
    ),
    "missing operator": Why("The rollout leaves out a step.", "", "A query norm that the engine's model has not."),
    "extra operator": Why("The rollout adds a step.", "", "A logit soft cap in the engine only."),
    "content": Why(
        "Values of buffers and constants change results as attributes do, under equal operators.",
        "",
        "RoPE frequencies of rope_theta 1e4 against 1e6.",
    ),
    "operator": Why("Another operator makes the value.", "", "gelu against gelu_tanh."),
    "numerics": Why(
        "Two kernels of one formula sum in another order unless a test shows equal bits.",
        "With equal linears but other norms, RoPE and attention, log-probabilities still differ by 1e-2.",
        "FlashAttention with num_splits=0 against 1.",
    ),
    "backward": Why("Only gradients depend on it, and a rollout has none.", "", "grad_output in e5m2 against e4m3."),
    "row_invariant": Why(
        "A token's result may depend on the batch that it is computed in.",
        "fp32 linears of torch on a CPU and cuBLAS at most shapes are not row-invariant.",
        "A score computed in a batch of 8 against decoding one token.",
    ),
    "renamed": Why("Parameters were paired by where they are used.", "", "A checkpoint with other names."),
    "not_lowered": Why("Numerics ids say what kernels compute, and graphs that are not lowered have none."),
    "no content": Why("A buffer's values are part of the program, and a model on the meta device has none."),
    "skip pattern": Why(
        "A pattern that is looked for as a substring, or as a regular expression without an end, also matches longer "
        "names.",
        "This left layers silently in bf16 on one side, twice, in two large projects.",
        "mlp.gate in NeMo-RL's quantization_ignored_layer_kws leaves out mlp.gate_proj.",
    ),
    "unused pattern": Why(
        "What the pattern was meant to keep in bf16 is quantised.", "", "The checkpoint's names after a rename."
    ),
}
