"""The table of rules: every kind of finding, its code, and what to do. Imports nothing that is slow.

Families: PG0xx the check's own settings, PG1xx formats, PG2xx dtypes and numeric rules, PG3xx constants, PG4xx
structure, PG5xx kernels and measured values, PG6xx stored bytes, PG7xx machines, PG9xx what is no difference by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of difference: its number and name, the rule in words, and what to do when the two programs differ in it;
    ``by_recipe``: that is to give both one recipe."""

    number: str
    name: str
    words: str
    remedy: str
    by_recipe: bool = False

    @property
    def code(self) -> str:
        """Number and name, as findings carry them."""
        return f"{self.number} {self.name}"


def _by_recipe(number: str, name: str, words: str) -> Rule:
    return Rule(number, name, words, "give both programs one recipe", by_recipe=True)


RULES: dict[str, Rule] = {
    # The check itself.
    "unused suppression": Rule(
        "PG001", "unused suppression", "whether each suppression names a finding that is there",
        "remove it, or correct it",
    ),
    # The programs.
    "granularity": _by_recipe("PG101", "granularity", "the block of values that shares one scale"),
    "scale_dtype": _by_recipe("PG102", "scale dtype", "what a scale is rounded to before it is used"),
    "scale_rule": _by_recipe("PG103", "scale rule", "how a scale is computed from the largest value of a block"),
    "divide": _by_recipe("PG104", "division", "true division by the scale, or multiplication by its reciprocal"),
    "amax_floor": _by_recipe("PG105", "amax floor", "the least value that a block's maximum is taken to be"),
    "source": _by_recipe("PG106", "source dtype", "the dtype that a value is rounded to before it is quantised"),
    "format": _by_recipe("PG107", "format", "whether a value is stored quantised, and how"),
    "rule.gemm": Rule(
        "PG108", "quantised on one side", "whether a linear's GEMM multiplies quantised operands",
        "give both programs the same linear rule and the same select.skip, select.routers and min_features",
    ),
    "requantize": _by_recipe("PG109", "quantised twice", "whether codes are quantised again to other scales"),
    "compute": _by_recipe("PG201", "compute dtype", "the dtype of the arithmetic"),
    "accumulate": _by_recipe("PG202", "accumulation", "the dtype in which products are summed"),
    "dtype": _by_recipe("PG203", "dtype", "the dtype that a value is rounded to"),
    "rule": _by_recipe("PG204", "numeric rule", "a named choice of the arithmetic: casts, reduction order, rounding"),
    "role": Rule("PG205", "role", "what a value is used as", "build both programs from one model with one version"),
    "attribute": Rule("PG301", "attribute", "a constant of the operator", "load both programs from one config"),
    "shape": Rule("PG302", "shape", "the shape of a parameter", "load both programs from one config"),
    "content": Rule(
        "PG303", "buffer values", "the values of a buffer or constant",
        "load both programs from one config; keep buffers as they are",
    ),
    "operand": Rule("PG401", "operand", "which value the operator reads", "build both programs from one model"),
    "parameter": Rule(
        "PG402", "parameter", "which parameter is read", "tie, load and name parameters alike in both programs"
    ),
    "missing operator": _by_recipe(
        "PG403", "missing operator", "an operator of the training forward that the rollout lacks"
    ),
    "extra operator": _by_recipe(
        "PG404", "extra operator", "an operator of the rollout that the training forward lacks"
    ),
    "operator": Rule("PG405", "other operator", "which operator makes a value", "build both programs from one model"),
    "numerics": Rule(
        "PG501", "kernel", "the numerics id of the kernel", "lower both programs for one backend and one device"
    ),
    # Level numerics: what runs show and graphs do not.
    "other bits": Rule(
        "PG502", "other bits", "whether a node makes the same bits from equal inputs, its annotation being the same",
        "run both sides with the same versions and threads; report the kernel if they still differ",
    ),
    "parameter values": Rule(
        "PG503", "parameter values", "the values of a parameter on both sides", "load both sides from one checkpoint"
    ),
    "hidden state": Rule(
        "PG504", "hidden state", "the output of a module, as another engine captured it",
        "look at what the module computes in that engine: precgraph check MODEL --infer STACK",
    ),
    # Level weights: what is wrong with stored bytes.
    "requantised": Rule(
        "PG601", "quantised twice",
        "whether codes are made from the master, or from a weight that was quantised before",
        "quantise the masters once, by the trainer's recipe",
    ),
    "scale rounded after": Rule(
        "PG602", "scale rounded after", "whether a scale is rounded to a power of two before codes are made with it",
        "round first, then quantise",
    ),
    "scale transposed": Rule(
        "PG603", "scale transposed", "the order of a scale's two dimensions", "store [N, K] blocks"
    ),
    "scale inverted": Rule(
        "PG604", "scale inverted", "whether codes are multiplied by the stored scale, or divided", "store amax / max"
    ),
    "scale in bf16": Rule("PG605", "scale in bf16", "the dtype that a scale is stored in", "store fp32 scales"),
    "scale stale": Rule(
        "PG606", "stale scale", "whether codes and scales were made together", "quantise again after every update"
    ),
    "block grid": Rule(
        "PG607", "block grid", "where blocks start in the parts of a fused weight", "quantise each part on its own"
    ),
    "swapped": Rule("PG608", "swapped", "which weight the codes belong to", "correct the names in the exporter"),
    "stale weights": Rule(
        "PG609", "stale weights", "which version of the masters was quantised", "export the masters that are served"
    ),
    "damaged": Rule("PG610", "damaged bytes", "whether every byte arrived", "copy the file again"),
    "missing scale": Rule("PG611", "missing scale", "whether codes have their scale", "export the checkpoint again"),
    "unconsumed scale": Rule(
        "PG612", "unconsumed scale", "whether each scale has codes to multiply", "remove it, or store its weight in FP8"
    ),
    "layer precision": Rule(
        "PG613", "layer precision", "whether a layer is stored quantised",
        "give exporter and trainer the same select rule",
    ),
    "skip list": Rule(
        "PG614", "skip list", "whether modules_to_not_convert says what is stored", "name the plain layers in full"
    ),
    "missing tensor": Rule("PG615", "missing tensor", "whether every tensor is stored", "export the checkpoint again"),
    "unknown tensor": Rule(
        "PG616", "unknown tensor", "whether every stored tensor is the model's", "remove it, or correct the config"
    ),
    "missing master": Rule("PG617", "missing master", "whether every tensor has a master", "restore the masters"),
    "other bytes": Rule(
        "PG618", "other bytes", "the bytes of a tensor that is not quantised", "export the masters that are served"
    ),
    "stored dtype": _by_recipe("PG619", "stored dtype", "the dtype of a tensor that is not quantised"),
    "scale value": Rule(
        "PG620", "scale value", "whether scales are positive and finite", "look for NaN or zero blocks in the exporter"
    ),
    "scale shape": Rule(
        "PG621", "scale shape", "how many scales a weight has, and of which dtype", "store [N, K] blocks"
    ),
    "codes transposed": Rule("PG622", "codes transposed", "the order of a weight's two dimensions", "store [N, K]"),
    "all zero": Rule(
        "PG623", "all zero", "whether a tensor was ever written", "write that file again, from what it was made of"
    ),
    "other weights": Rule(
        "PG699", "unexplained", "whether the weight is the master's at all", "name the masters that it was made from"
    ),
    # Level env: two machines.
    "version": Rule("PG701", "version", "the version of a package that computes", "install the same version on both"),
    "variable": Rule(
        "PG702", "environment variable", "a variable that can change bits", "set it alike for both processes"
    ),
    "card": Rule(
        "PG703", "card", "the kind of GPU", "run both sides on one kind of card, or measure: --level numerics"
    ),
    "cpu": Rule(
        "PG704", "CPU", "the CPU's vector instructions and the number of threads",
        "set ATEN_CPU_CAPABILITY and OMP_NUM_THREADS alike, or use exact kernels only",
    ),
    "flag": Rule(
        "PG705", "process flag", "a global switch that changes fp32 results", "set it alike in both processes"
    ),
    "digest": Rule("PG706", "digest", "the digest of the program", "compare the programs: precgraph check MODEL"),
    # What is no difference by itself.
    "backward": Rule(
        "PG901", "backward only", "a rule of the backward, which no forward value depends on", "none is needed"
    ),
    "row_invariant": Rule(
        "PG902", "row invariance", "whether a token's result is independent of the tokens beside it",
        "replace the operator by one with an exact kernel",
    ),
    "renamed": Rule(
        "PG903", "other names", "parameters that were matched by structure because their names differ",
        "compare the weights too: --level weights",
    ),
    "not_lowered": Rule(
        "PG904", "kernels not compared", "which kernels run the two programs", "lower both, then check"
    ),
    "skip pattern": Rule(
        "PG905", "skip pattern", "whether a skip list leaves out only layers that it names", "name the layers in full"
    ),
    "unused pattern": Rule(
        "PG906", "unused pattern", "whether each pattern of a skip list names a linear layer", "correct or remove it"
    ),
    "no content": Rule(
        "PG907", "buffer values unknown", "a buffer or constant without values (meta device)",
        "check the models with their values loaded",
    ),
    "no effect": Rule(
        "PG908", "no effect measured", "a difference of the annotation that changed no bit on the probe tokens",
        "none for these tokens; other tokens may show it",
    ),
    "not separated": Rule(
        "PG909", "not measured alone",
        "a difference whose inputs could not be made equal, so its own effect is unknown",
        "remove the differences before it, then measure again",
    ),
    "not captured": Rule(
        "PG910", "not captured", "a value that one side's capture lacks", "capture the outputs of the same modules"
    ),
    "no influence": Rule("PG911", "no influence", "a difference of the machines that changes no bit", "none is needed"),
    "not recorded": Rule("PG912", "not recorded", "a fact that one record lacks", "write both records alike"),
    "stored quantised": Rule(
        "PG913", "stored quantised", "whether the model's own quantization_config is part of the check",
        "name its directory as --infer",
    ),
}  # fmt: skip


_BY_CODE = {rule.code: rule for rule in RULES.values()}


def rule_of(code: str) -> Rule:
    """The rule that a finding's code names."""
    return _BY_CODE[code]


def rule(attribute: str) -> Rule:
    """The rule that an attribute of a node belongs to."""
    if attribute in RULES:
        return RULES[attribute]
    return RULES["rule" if attribute.startswith("rule.") else "attribute"]
