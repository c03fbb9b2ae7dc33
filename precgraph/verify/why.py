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
    "unused suppression": Why(
        "A suppression that nothing needs any more would hide the next difference in the same place.",
        "",
        "PG105 for model.layers.*.mlp.* after both sides were given one floor.",
    ),
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
    "requantised": Why(
        "Codes that are dequantised and quantised again are rounded twice: they are those of neither rule, and a later "
        "sync from the masters gives other weights than the ones served.",
        "Accuracy fell by 12 points on one public model whose weights were requantised this way.",
        "An exporter that starts from the FP8 checkpoint instead of the bf16 masters.",
    ),
    "scale rounded after": Why(
        "Codes belong to the scale that they were made with. A scale that is rounded to a power of two afterwards is "
        "up to twice as large, and every value of its block grows with it.",
        "Rounding after quantising gives 76 % error.",
        "Scales of 0.0131 are stored as 0.015625 beside codes that were made with 0.0131.",
    ),
    "scale transposed": Why(
        "A block is multiplied by the scale of another one. For a square weight no shape gives it away.",
        "",
        "weight_scale_inv of a [4096, 4096] weight, written [K/128, N/128].",
    ),
    "scale inverted": Why(
        "weight_scale_inv is what codes are multiplied by; the name says inverse because quantising divides by it. "
        "Values come out wrong by the square of the scale.",
        "",
        "448/amax is stored where amax/448 belongs.",
    ),
    "scale in bf16": Why(
        "A scale with 8 bits of mantissa puts up to 2^-9 on its whole block, and the codes were made with the fp32 "
        "one.",
        "",
        "An exporter that casts the whole state dict with .to(torch.bfloat16).",
    ),
    "scale stale": Why(
        "After an update of the codes alone, a block whose largest value has changed is multiplied by the scale of the "
        "old one.",
        "",
        "A weight sync that sends weight and leaves weight_scale_inv as it was.",
    ),
    "block grid": Why(
        "Where the rows of q, k and v, or of gate and up, are no multiple of 128, blocks that are counted in the fused "
        "weight lie across two parts, and share a scale between them.",
        "",
        "SmolLM2 has 192 rows of k: in the fused weight its blocks start at row 576, in the middle of a block.",
    ),
    "swapped": Why(
        "Weights of one shape are exchanged: each is right by itself, and the model computes something else.",
        "",
        "gate_proj and up_proj, taken apart in the wrong order from gate_up_proj.",
    ),
    "stale weights": Why(
        "The rollout samples with an older policy than the one that is trained, which importance ratios do not see if "
        "the version is not logged.",
        "",
        "The checkpoint of the step before the last optimiser step.",
    ),
    "damaged": Why(
        "Some codes differ under equal scales, which no rule does: bytes were lost, or written by two processes.",
        "",
        "A shard that was read while it was still being copied.",
    ),
    "missing scale": Why(
        "Codes without their scale mean nothing: loaders fail, or take a scale of 1.",
        "",
        "A rename that moved weight and left weight_scale_inv under the old name.",
    ),
    "unconsumed scale": Why(
        "A scale that no codes use is the trace of a weight that was stored plain, or of a name that no longer fits.",
        "",
        "down_proj.weight in bf16 beside down_proj.weight_scale_inv.",
    ),
    "layer precision": Why(
        "The trainer multiplies FP8 codes and the rollout bf16 values, or the other way round.",
        "Twice, in two large projects, a skip pattern left layers in bf16 on one side, silently.",
        "mlp.gate_proj in bf16 because the exporter's pattern was mlp.gate.",
    ),
    "skip list": Why(
        "Loaders decide by modules_to_not_convert, not by the dtype in the file: they read codes as values, or look "
        "for scales that are not there.",
        "",
        "lm_head in bf16, and modules_to_not_convert without it.",
    ),
    "missing tensor": Why(
        "Loaders initialise what they do not find, some of them with no more than a warning.",
        "",
        "A k_norm.weight that an exporter for an older family leaves out.",
    ),
    "unknown tensor": Why(
        "A tensor that the model does not have was meant for one that it has, or comes from another model.",
        "",
        "model.layers.3.mlp.gate.weight in a model without experts.",
    ),
    "missing master": Why(
        "Without its master, nothing can be said of a tensor's bytes.", "", "A sharded save that lacks its last shard."
    ),
    "other bytes": Why(
        "Norms, embeddings and biases are copied, not quantised, so every byte must be the master's.",
        "",
        "An input_layernorm.weight of the step before.",
    ),
    "stored dtype": Why(
        "A plain tensor in another dtype was rounded, or will be when it is loaded.",
        "Routers that see other last bits select other experts: one in ten disagreed in each forward of one report.",
        "The router in fp32 on one side and in bf16 on the other.",
    ),
    "scale value": Why(
        "A scale of 0, infinity or NaN turns its whole block into zeros or NaN.",
        "",
        "A block of zeros without a floor: 0/448 = 0.",
    ),
    "scale shape": Why(
        "Loaders take the block size from the shapes, so a scale too few shifts every block after it.",
        "",
        "Five rows of scales for 704 rows of codes, which need six.",
    ),
    "codes transposed": Why(
        "The weight is read with its dimensions exchanged; for a square weight nothing else gives it away.",
        "",
        "A Conv1D-style [K, N] weight that is stored where a linear's [N, K] belongs.",
    ),
    "all zero": Why(
        "A file that was allocated at its full size and never filled reads as zeros: its header is whole, and its "
        "layers add nothing.",
        "",
        "An exporter that stopped after it had reserved the space, or a copy to a full disk.",
    ),
    "other weights": Why(
        "The codes are far from the master, in no rule's way: it is another model's weight, or another layer's.",
        "",
        "A checkpoint of the instruct model compared with masters of the base model.",
    ),
    "other bits": Why(
        "Two programs of equal annotations made other bits from equal inputs. Either a kernel is not what its numerics "
        "id says, or something that no graph knows differs: versions, threads, the card, memory that was damaged.",
        "torch's fp32 linear gives other bits with another number of threads.",
        "A capture from an H200 against one from an H100, with kernels of one numerics id.",
    ),
    "parameter values": Why(
        "The two sides hold different weights, so nothing that is made from them can agree.",
        "A step of AdamW at 1e-6 changes about 4.5 % of bf16 weights.",
        "A capture that was made before the last update.",
    ),
    "hidden state": Why(
        "Another engine's output of a module differs. Only outputs are known there, so the first that differs is where "
        "to look, and it may be anywhere since the last module that agrees.",
        "Equal linears with other norms, RoPE and attention: 1e-2 in log-probability.",
        "model.layers.0.self_attn of vLLM, which rotates in bf16.",
    ),
    "version": Why(
        "Kernels, casts and the model's own code change between versions.",
        "DeepGEMM 0.1 and 0.2 do not even load with one torch; fixes of casts change codes silently.",
        "transformers 4 in the trainer and 5 in the rollout.",
    ),
    "variable": Why(
        "Engines pick kernels and the rules of their scales by environment variables, which no checkpoint records.",
        "Scales rounded up to powers of two cost up to one bit of every code.",
        "VLLM_USE_DEEP_GEMM_E8M0 set in the trainer's shell and not in the engine's.",
    ),
    "card": Why(
        "Kernels tile by the number of multiprocessors and the size of their memory, and with the tiles goes the order "
        "of sums.",
        "",
        "A trainer on H100s and a rollout on H200s.",
    ),
    "cpu": Why(
        "torch picks kernels by the vector instructions, and divides sums among threads.",
        "fp32 linears and sums over a large vocabulary change with the number of threads.",
        "AVX2 against AVX512.",
    ),
    "flag": Why(
        "Some switches of a process change every fp32 product or every small number.",
        "set_float32_matmul_precision('medium') changes 77 % of logits.",
        "torch.set_flush_denormal(True) in one of two processes.",
    ),
    "digest": Why(
        "The digest covers operators, formats, rules, kernels and versions: two digests are two policies.",
        "",
        "A rollout that was started with yesterday's recipe.",
    ),
    "no effect": Why(
        "A rule may differ and yet never act: a floor that no block is small enough to reach.",
        "",
        "amax floors of 1e-12 and 1e-10 on activations that are never that small.",
    ),
    "not separated": Why(
        "Values of other blocks or dtypes cannot take each other's place, so what follows a difference of that kind "
        "has no equal inputs to be judged on.",
        "",
        "The GEMM behind codes in 64x128 blocks against 128x128.",
    ),
    "not captured": Why(
        "What one side does not show cannot be compared, and agreement of the rest says nothing about it.",
        "",
        "A hook on mlp.down_proj where the engine fuses it away.",
    ),
    "stored quantised": Why(
        "The model's files hold codes, and both sides were compared as if each were made from bf16 masters: what an "
        "engine makes of these files was not looked at.",
        "",
        "check DIR, where DIR is a block FP8 checkpoint, says that the recipes agree and nothing of DIR's skip list.",
    ),
    "no influence": Why(
        "It differs, and no bit depends on it: an interpreter, a default that was written out, a second card.",
        "",
        "VLLM_USE_DEEP_GEMM_E8M0=1 on one side and not set on the other.",
    ),
    "not recorded": Why(
        "A fact that only one record has may be equal on the other machine, or not.",
        "",
        "Digests, which are recorded only with --model.",
    ),
    "backward": Why("Only gradients depend on it, and a rollout has none.", "", "grad_output in e5m2 against e4m3."),
    "row_invariant": Why(
        "A token's result may depend on the batch that it is computed in.",
        "fp32 linears of torch on a CPU and cuBLAS at most shapes are not row-invariant.",
        "A score computed in a batch of 8 against decoding one token.",
    ),
    "renamed": Why("Parameters were paired by where they are used.", "", "A checkpoint with other names."),
    "not_lowered": Why(
        "Numerics ids say what kernels compute, and graphs that are not lowered have none.",
        "",
        "Two graphs of `precgraph show --after fuse_quantize --format json`.",
    ),
    "no content": Why(
        "A buffer's values are part of the program, and a model on the meta device has none.",
        "",
        "inv_freq of a model that was built under torch.device('meta').",
    ),
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
