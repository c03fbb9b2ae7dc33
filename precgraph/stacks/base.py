"""What every stack's file gives: a :class:`Stack`, which makes a Recipe from the stack's own configuration.

A rule that its source does not settle is never guessed. It is listed in ``Stack.unknown``, and where a recipe has to
say something, it says what the other side says, so that no finding rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from precgraph.errors import RecipeError
from precgraph.format import Format
from precgraph.recipe import E4M3, LinearRule, Recipe, SelectRule
from precgraph.stacks.matching import Skips

NOT_MODELLED = "norms, RoPE, attention, the activation, the head and the order of sums: compared as if they were equal"
"""What no stack's recipe says."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a stack's recipe is made from.

    ``side`` is "train" or "infer"; ``modules`` are the paths of the model's linear layers; ``config`` is the stack's
    own configuration, parsed, and ``path`` where it was read; ``env`` are environment variables; ``other`` is the other
    side's recipe, once there is one.
    """

    side: str
    modules: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    other: Recipe | None = None

    def switch(self, name: str, default: bool) -> bool:
        """An environment variable of the stack that is 0 or 1."""
        value = self.env.get(name, "1" if default else "0")
        if value not in ("0", "1"):
            raise RecipeError(f"environment: {name} = {value!r} is neither 0 nor 1", path=self.path or None)
        return value == "1"

    def error(self, message: str, remedy: str | None = None) -> RecipeError:
        """A RecipeError that names the configuration's file."""
        return RecipeError(message, path=self.path or None, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Hint:
    """Something in a configuration that does not do what it seems to say, and what to write instead."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Built:
    """The recipe of one side, the layers that its configuration leaves out, and what to know about that.

    ``assumed`` names fields that the source does not settle and that were taken from the other side.
    """

    recipe: Recipe
    skips: Skips = field(default_factory=Skips)
    hints: tuple[Hint, ...] = ()
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A remedy that is an environment variable of ``program``, so that ``--fix`` can try it; ``str()`` is its words."""

    variable: str
    value: str
    program: str

    def __str__(self) -> str:
        return f"set {self.variable}={self.value} for {self.program}"


@dataclass(frozen=True, slots=True)
class Stack:
    """One stack: where its rules were read, what switches them, what is not known, and how to change each.

    ``remedies`` maps an attribute of a finding ("scale_dtype") to what to set in this stack. ``keys`` are all that
    ``build`` reads of a configuration, dotted, inside a table ``root`` if the file has one; ``dashes``: they may be
    written as options are (--fp8-format). ``variables`` are the environment variables that it reads.
    """

    name: str
    title: str
    version: str
    sources: tuple[str, ...]
    switches: Mapping[str, str]
    unknown: tuple[str, ...]
    remedies: Mapping[str, str | Setting]
    build: Callable[[Request], Built]
    keys: tuple[str, ...]
    variables: tuple[str, ...] = ()
    root: str = ""
    dashes: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that remedies set."""
        return {s.variable: s.value for s in self.remedies.values() if isinstance(s, Setting)}


def fp8(granularity: str, **rules: Any) -> Format:
    """An E4M3 format with the rules that differ from the defaults."""
    return Format(dtype=E4M3, granularity=granularity, **rules)


def taken(fmt: Format, other: Format | None, *names: str) -> Format:
    """``fmt`` with the fields ``names``, which its source does not settle, as the other side has them."""
    if other is None or not other.is_quantized:
        return fmt
    return replace(fmt, **{name: getattr(other, name) for name in names})


def fp8_recipe(
    name: str,
    request: Request,
    activation: Format,
    weight: Format,
    skips: Skips | None = None,
    gradient: Format | None = None,
) -> Recipe:
    """A recipe whose linears multiply ``activation`` by ``weight``.

    The backward's operands follow the activation's rule, with ``gradient`` for those of the gradient; an engine that
    has no backward gets the other side's.
    """
    gradient = gradient or activation
    tokens = f"{activation.block[1]}x1"
    backward: dict[str, Any] = {
        "grad_output": gradient,
        "wgrad_grad_output": replace(gradient, granularity=tokens),
        "wgrad_activation": replace(activation, granularity=tokens),
    }
    if request.side == "infer" and request.other is not None and request.other.linear.weight is not None:
        backward = {key: getattr(request.other.linear, key) for key in backward}
    skip = tuple(skips.by_module) if skips else ()
    return Recipe(name=name, linear=LinearRule(activation, weight, **backward), select=SelectRule(skip=skip))


def plain_recipe(name: str) -> Recipe:
    """A recipe of a stack that runs its linears in the model's dtype."""
    return Recipe(name=name, linear=LinearRule(None, None, None, None, None))


def other_weight(request: Request) -> Format | None:
    """The other side's weight format."""
    return request.other.linear.weight if request.other else None


def other_activation(request: Request) -> Format | None:
    """The other side's activation format."""
    return request.other.linear.activation if request.other else None


def table(request: Request, config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The table at ``path``, empty if there is none; RecipeError for anything else there."""
    value = lookup(config, *path)
    if value is not None and not isinstance(value, Mapping):
        raise request.error(f"{'.'.join(path)} = {value!r} is no table")
    return value or {}


def strings(request: Request, value: Any) -> list[str]:
    """A list of names of layers, or none."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise request.error(f"the list of ignored layers is {value!r}", "write a list of strings")
    return value


def lookup(config: Mapping[str, Any], *path: str) -> Any:
    """The value at ``path`` in nested tables, or None."""
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
