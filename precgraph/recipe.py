"""Recipe: which tensor gets which :class:`~precgraph.format.Format`, and every other numeric rule of a program.

A recipe is plain data. :meth:`Recipe.save` writes every rule out, so that a recipe file shows all that can change a
bit; :meth:`Recipe.load` refuses keys that it does not know and names the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from precgraph.errors import InputError, RecipeError
from precgraph.format import Format
from precgraph.strict_json import sound

E4M3 = "float8_e4m3fn"
PRESETS = ("jet_rl", "bf16")
DTYPES = ("bfloat16", "float16", "float32")
# Table and key of the rules that no forward value depends on.
BACKWARD_RULES = (
    ("linear", "grad_output"), ("linear", "wgrad_grad_output"), ("linear", "wgrad_activation"),
    ("linear", "fuse_projections"), ("gradient", "edge"), ("gradient", "master"),
)  # fmt: skip


def _fp8(granularity: str) -> Format:
    return Format(dtype=E4M3, granularity=granularity)


@dataclass(frozen=True, slots=True)
class LinearRule:
    """The three GEMMs of a linear layer; a format of None leaves that operand in the model's dtype.

    ``activation`` and ``weight`` are FProp's operands; DGrad multiplies ``grad_output`` by the same ``weight``;
    WGrad multiplies ``wgrad_grad_output`` by ``wgrad_activation``, which is what the forward saves. ``accumulate`` is
    the dtype in which products are summed, ``output`` the dtype that a GEMM writes, to which ``bias`` is added.
    """

    activation: Format | None = _fp8("1x128")
    weight: Format | None = _fp8("128x128")
    grad_output: Format | None = _fp8("1x128")
    wgrad_grad_output: Format | None = _fp8("128x1")
    wgrad_activation: Format | None = _fp8("128x1")
    accumulate: str = "float32"
    output: str = "bfloat16"
    bias: str = "after_rounding"
    fuse_projections: bool = True


# The fields of LinearRule that are formats: absent in a file if that operand is not quantised.
LINEAR_FORMATS = ("activation", "weight", "grad_output", "wgrad_grad_output", "wgrad_activation")


@dataclass(frozen=True, slots=True)
class SelectRule:
    """Which linear layers the linear rule leaves out. ``skip`` holds module paths, ``*`` standing for any run of
    characters within one component (``model.layers.*.mlp.down_proj``); a pattern must match. ``routers`` keeps every
    linear that feeds a top-k in the model's dtype, ``min_features`` every one with fewer rows or columns."""

    skip: tuple[str, ...] = ()
    routers: bool = True
    min_features: int = 16


@dataclass(frozen=True, slots=True)
class HeadRule:
    """lm_head: dtype of its operands and of the logits."""

    operands: str = "bfloat16"
    logits: str = "float32"


@dataclass(frozen=True, slots=True)
class NormRule:
    """RMSNorm: dtype of its arithmetic, and order of its sum (``pieces512``: pieces of 512 in order, then halves).

    Where the result is rounded, before or after the weight, is the ``model``'s own definition."""

    compute: str = "float32"
    reduction: str = "pieces512"
    cast: str = "model"


@dataclass(frozen=True, slots=True)
class RopeRule:
    """RoPE: dtype of the cos and sin tables and of the rotation; ``model`` keeps what the model's code says."""

    table: str = "model"
    compute: str = "model"


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Attention: dtypes of scores and softmax, and of the probabilities that multiply V."""

    softmax: str = "float32"
    probabilities: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class ActivationRule:
    """Gated units: dtype in which the activation function is computed before it is rounded to the model's dtype."""

    compute: str = "float32"


@dataclass(frozen=True, slots=True)
class GradientRule:
    """Dtype of the gradients carried between operators, and of the gradients of linears' weights.

    ``master = "float32"``: a WGrad's fp32 sums are not rounded but added, backward after backward, to the parameter's
    fp32 ``main_grad`` (Megatron-LM's name) by ``backward()``, instead of to its ``.grad``. The optimiser reads
    ``main_grad`` and sets it to None; what other operators add to a parameter, the embedding to a tied head's, is in
    ``.grad`` as ever, to be added to it. The split into micro-batches then changes the order of fp32 additions alone.
    """

    edge: str = "bfloat16"
    master: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A full set of numeric rules for both programs.

    ``arithmetic`` says how the operators that are not FP8 GEMMs sum and round: ``exact`` (orders fixed by precgraph,
    independent of batch and threads) or ``aten`` (torch's own kernels, as Hugging Face runs them).

    Presets: :meth:`jet_rl` (arXiv 2601.14243: unified FP8) and :meth:`bf16` (the model as Hugging Face runs it).
    """

    name: str = "jet_rl"
    arithmetic: str = "exact"
    linear: LinearRule = field(default_factory=LinearRule)
    select: SelectRule = field(default_factory=SelectRule)
    lm_head: HeadRule = field(default_factory=HeadRule)
    norm: NormRule = field(default_factory=NormRule)
    rope: RopeRule = field(default_factory=RopeRule)
    attention: AttentionRule = field(default_factory=AttentionRule)
    activation: ActivationRule = field(default_factory=ActivationRule)
    gradient: GradientRule = field(default_factory=GradientRule)

    def __post_init__(self) -> None:
        _choice("arithmetic", self.arithmetic, ("exact", "aten"))
        if self.select.min_features < 0:
            raise RecipeError(f"select.min_features = {self.select.min_features} is less than 0")
        for key, value in (
            ("linear.accumulate", self.linear.accumulate), ("linear.output", self.linear.output),
            ("lm_head.operands", self.lm_head.operands), ("lm_head.logits", self.lm_head.logits),
            ("norm.compute", self.norm.compute), ("attention.softmax", self.attention.softmax),
            ("attention.probabilities", self.attention.probabilities), ("activation.compute", self.activation.compute),
            ("gradient.edge", self.gradient.edge), ("gradient.master", self.gradient.master),
        ):  # fmt: skip
            _choice(key, value, DTYPES)
        _choice("linear.bias", self.linear.bias, ("after_rounding",))
        _choice("norm.cast", self.norm.cast, ("model",))
        _choice("norm.reduction", self.norm.reduction, ("pieces512", "aten"))
        _choice("rope.table", self.rope.table, ("model", *DTYPES))
        _choice("rope.compute", self.rope.compute, ("model", *DTYPES))
        one_sided = (self.linear.activation is None) != (self.linear.weight is None)
        if one_sided:
            raise RecipeError("linear.activation and linear.weight must both be quantised or both be left out")
        if self.linear.activation and self.linear.weight:
            self._check_operands(self.linear.activation, self.linear.weight)

    @staticmethod
    def _check_operands(activation: Format, weight: Format) -> None:
        if activation.powers_of_two != weight.powers_of_two:
            kinds = ["powers of two" if fmt.powers_of_two else "float32" for fmt in (activation, weight)]
            raise RecipeError(
                f"linear.activation has scales of {kinds[0]} and linear.weight of {kinds[1]}: one GEMM takes one kind; "
                "set scale_dtype alike"
            )
        if activation.block[1] != weight.block[1]:
            raise RecipeError(
                f"linear.activation is grouped by {activation.block[1]} along K, linear.weight by {weight.block[1]}: "
                "a GEMM needs one grouping of K; set both granularities alike"
            )

    @classmethod
    def jet_rl(cls) -> Self:
        """E4M3 for all three GEMMs, fp32 scales amax/448, 1×128 and 128×128 (paper, method section)."""
        return cls()

    @classmethod
    def bf16(cls) -> Self:
        """No FP8 and torch's own kernels: bit for bit what Hugging Face computes in the model's dtype."""
        return cls(
            name="bf16",
            arithmetic="aten",
            linear=LinearRule(None, None, None, None, None, fuse_projections=False),
            lm_head=HeadRule(logits="bfloat16"),
            norm=NormRule(reduction="aten"),
        )

    @classmethod
    def preset(cls, name: str) -> Self:
        """A preset by name."""
        if name not in PRESETS:
            raise RecipeError(f"no preset is called {name!r}{_nearest(name, PRESETS)}; presets: {', '.join(PRESETS)}")
        return {"jet_rl": cls.jet_rl, "bf16": cls.bf16}[name]()

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data, every rule spelled out; formats left out are absent."""
        return _dump(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`. Rules that are absent keep ``jet_rl``'s values, except formats of ``[linear]``,
        which are absent only if that operand is not quantised. Raises RecipeError on an unknown key, and for no key
        at all."""
        if not data:
            raise RecipeError(
                "holds no rule", remedy="a recipe needs one at least; `precgraph recipe jet_rl` writes all"
            )
        recipe: Self = _load(cls, data, "")
        return recipe

    def save(self, path: str | Path) -> None:
        """Write the recipe as TOML."""
        import tomlkit  # only writing needs it, and importing precgraph should not

        document = tomlkit.document()
        document.add(tomlkit.comment("precgraph recipe: every rule that can change a bit of the result"))
        document.add(
            tomlkit.comment("FP8 codes are rounded to nearest even after clamping to the dtype's largest value")
        )
        document.update(self.to_dict())
        Path(path).write_text(tomlkit.dumps(document))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML recipe; errors are RecipeError and name the file."""
        try:
            return cls.from_dict(sound(tomllib.loads, Path(path).read_text()))
        except OSError as error:
            raise RecipeError(f"recipe {path}: {error.strerror or error}") from None
        except RecipeError as error:
            raise RecipeError(f"recipe {path}: {error}") from None
        except ValueError as error:  # of TOML, of UTF-8
            stack = f"an engine's configuration is named with its engine: vllm:{path}"
            remedy = stack if Path(path).suffix == ".json" else None
            raise RecipeError(f"recipe {path} is not valid TOML: {error}", remedy=remedy) from None

    def skips(self, module: str) -> bool:
        """Whether a ``select.skip`` pattern names this module path."""
        return any(matches(pattern, module) for pattern in self.select.skip)

    def require_patterns_used(self, modules: Iterable[str]) -> None:
        """RecipeError if a skip pattern matches none of ``modules`` (the model's linear layers)."""
        paths = list(modules)
        for pattern in self.select.skip:
            if not any(matches(pattern, m) for m in paths):
                raise RecipeError(f"select.skip pattern {pattern!r} matches no linear layer{_meant(pattern, paths)}")


def require_recipe(recipe: object) -> None:
    """InputError for an argument that is neither a recipe nor left out."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(
            f"recipe must be a Recipe, not {recipe!r:.80}",
            remedy="pass Recipe.preset(name), Recipe.load(path) or Recipe.from_dict(table)",
        )


def matches(pattern: str, module: str) -> bool:
    """Component by component, so that ``mlp.gate`` never matches ``mlp.gate_proj`` and ``*`` never crosses a dot."""
    wanted, parts = pattern.split("."), module.split(".")
    return len(wanted) == len(parts) and all(fnmatch.fnmatchcase(p, w) for w, p in zip(wanted, parts, strict=True))


def _choice(key: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise RecipeError(f"{key} = {value!r} is not one of {', '.join(allowed)}")


def _nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _meant(pattern: str, paths: Sequence[str]) -> str:
    """The pattern in full, if it names a part of a path (``mlp``); else a path that looks like it."""
    words = pattern.split(".")
    for parts in (path.split(".") for path in paths):
        for i in range(len(parts) - len(words) + 1):
            if all(fnmatch.fnmatchcase(p, w) for p, w in zip(parts[i:], words, strict=False)):
                before = ["*" if p.isdigit() else p for p in parts[:i]]
                full = ".".join([*before, *words, *"*" * (len(parts) - i - len(words))])
                return f"; did you mean {full!r}?"
    if "*" in pattern:  # of every layer, as the pattern is
        paths = list(dict.fromkeys(".".join("*" if p.isdigit() else p for p in path.split(".")) for path in paths))
    return _nearest(pattern, paths)


def _dump(rule: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in dataclasses.fields(rule):
        value = getattr(rule, f.name)
        if isinstance(value, Format):
            out[f.name] = value.to_dict()
        elif dataclasses.is_dataclass(value):
            out[f.name] = _dump(value)
        elif value is not None:
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


_TABLES: dict[str, type] = {
    "linear": LinearRule, "select": SelectRule, "lm_head": HeadRule, "norm": NormRule, "rope": RopeRule,
    "attention": AttentionRule, "activation": ActivationRule, "gradient": GradientRule,
}  # fmt: skip


def _load(rule: type, data: Mapping[str, Any], path: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(rule)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in fields:
            raise RecipeError(f"unknown key {path + key!r}{_nearest(key, fields)}")
        values[key] = _value(rule, fields[key], value, path + key)
    if rule is LinearRule:
        values = dict.fromkeys(LINEAR_FORMATS) | values
    return rule(**values)


def _value(rule: type, f: dataclasses.Field[Any], value: Any, path: str) -> Any:
    if rule is Recipe and f.name in _TABLES:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{path} must be a table")
        return _load(_TABLES[f.name], value, path + ".")
    if rule is LinearRule and f.name in LINEAR_FORMATS:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{path} must be a table such as {{ dtype = {E4M3!r}, granularity = '1x128' }}")
        try:
            return Format.from_dict(value)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error.message.removeprefix('format: ')}", remedy=error.remedy) from None
    kind = str(f.type)
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise RecipeError(f"{path} must be a list of strings")
        return tuple(value)
    expected = {"str": str, "bool": bool, "int": int}[kind]
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise RecipeError(f"{path} must be a {kind}, not {value!r}")
    return value
