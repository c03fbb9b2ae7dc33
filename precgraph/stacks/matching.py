"""How each stack decides that a skip pattern names a layer. The differences left layers silently in BF16, twice.

A pattern ``mlp.gate`` that is meant for a router also matches ``mlp.gate_proj`` and ``mlp.gate_up_proj`` where it is
looked for as a substring or as an unanchored regular expression.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from precgraph.errors import RecipeError

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What engines load as one layer (vLLM 0.32, ``packed_modules_mapping`` of Llama and Qwen3)."""


@dataclass(frozen=True, slots=True)
class Skips:
    """Layers that a configuration leaves out: ``by_module`` maps each to the pattern that did, ``unmatched`` are the
    patterns that name no linear layer, ``how`` says in words how patterns are matched."""

    by_module: Mapping[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    how: str = ""

    def accidental(self) -> Mapping[str, tuple[str, ...]]:
        """Pattern to the layers that it matches without naming them component by component."""
        found: dict[str, list[str]] = {}
        for module, pattern in self.by_module.items():
            if not _names(pattern, module):
                found.setdefault(pattern, []).append(module)
        return {pattern: tuple(modules) for pattern, modules in found.items()}


HEAD = "lm_head"
"""A linear layer that no rule of a stack's recipe is about, so that it is none of ``modules``; lists name it."""
Matcher = Callable[[str, str], bool]


def exact(pattern: str, module: str) -> bool:
    """vLLM 0.32 block FP8 checkpoints: ``is_layer_skipped``, match mode "exact"; one expert stands for all."""
    return pattern == module or (module.endswith(".experts") and module in pattern)


def substring(pattern: str, module: str) -> bool:
    """SGLang before PR 23486; NeMo-RL's ``quantization_ignored_layer_kws``."""
    return pattern in module


def path(pattern: str, module: str) -> bool:
    """SGLang since PR 23486, ``_module_path_match``: whole components, anywhere."""
    return f".{pattern}." in f".{module}."


def regex_or_glob(pattern: str, module: str) -> bool:
    """vLLM 0.32 online quantisation, ``is_equal_or_regex_match``: "re:" need not match to the end."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module or fnmatch.fnmatch(module, pattern)


HOW: Mapping[Matcher, str] = {
    exact: "by its full path", substring: "as a substring", path: "by whole components",
    regex_or_glob: "as a regular expression that need not reach the end, or as a glob",
}  # fmt: skip


def skips(
    patterns: Iterable[str], modules: Sequence[str], matcher: Matcher, *, fused: Mapping[str, tuple[str, ...]] = FUSED
) -> Skips:
    """The layers among ``modules`` that an engine leaves out.

    Layers that it fuses are left out together: by a pattern for the fused name, or by patterns for all of them;
    RecipeError if only some are named, which engines refuse too. All experts of a layer are one layer of an engine.
    """
    wanted = list(patterns)
    used: Counter[str] = Counter()
    by_module: dict[str, str] = {}
    groups = {part: name for name, parts in fused.items() for part in parts}
    present = set(modules)
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        whole = f"{parent}.{groups[leaf]}" if leaf in groups else module
        own = module
        if parent.endswith(".experts"):
            whole = own = parent
        hit = _first(wanted, whole, matcher) or _first(wanted, own, matcher)
        if hit:
            by_module[module] = hit
            used[hit] += 1
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        parts = [f"{parent}.{part}" for part in fused.get(groups.get(leaf, ""), ())]
        missing = [part for part in parts if part in present and part not in by_module]
        if module in by_module and missing:
            raise RecipeError(
                f"{module} is left out and {missing[0]} is not, but the engine runs them as one layer",
                remedy="name all of them, or none",
            )
    return Skips(by_module, tuple(p for p in wanted if not used[p] and not matcher(p, HEAD)), HOW[matcher])


def _first(patterns: Sequence[str], module: str, matcher: Matcher) -> str | None:
    return next((p for p in patterns if matcher(p, module)), None)


def _names(pattern: str, module: str) -> bool:
    """Whether the pattern's words are whole components of the path, in order and side by side."""
    words = re.sub(r"^(re:)?(\^|\.\*|\*)*\.?", "", pattern).replace("\\.", ".").rstrip("$").strip(".").split(".")
    parts = module.split(".")
    for group, members in FUSED.items():  # a fused name names its members
        if words[-1] == group and parts[-1] in members:
            parts[-1] = group
    windows = (parts[i : i + len(words)] for i in range(len(parts) - len(words) + 1))
    return any(all(fnmatch.fnmatchcase(p, w) for p, w in zip(window, words, strict=True)) for window in windows)
