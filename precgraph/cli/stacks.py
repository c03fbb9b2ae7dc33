"""``precgraph stacks``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from precgraph.cli.console import console, guarded, write_json
from precgraph.cli.results import Json

if TYPE_CHECKING:
    from precgraph.stacks import Stack


@guarded
def stacks(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One stack, with its sources.")] = None,
    as_json: Json = False,
) -> None:
    """List the stacks that --train and --infer know, and the rules by which each quantises without configuration."""
    from precgraph.stacks import NOT_MODELLED, STACKS, get

    chosen = [get(name)] if name else list(STACKS.values())
    data = [_stack(stack) for stack in chosen]
    if as_json:
        write_json({"schema": 1, "not_modelled": NOT_MODELLED, "stacks": data})
    elif name:
        _print_one(data[0])
    else:
        _print_table(data, NOT_MODELLED)


def _stack(stack: Stack) -> dict[str, Any]:
    """A stack as plain data; ``rules`` are those of each side without configuration, a side in bf16 being null."""
    from precgraph.stacks import Request

    rules = {}
    for side in ("train", "infer"):
        built = stack.build(Request(side))
        linear = built.recipe.linear
        formats = {"activation": linear.activation, "weight": linear.weight}
        rules[side] = {
            key: fmt and {"short": str(fmt), **fmt.to_dict(), "taken_from_the_other_side": _assumed(built.assumed, key)}
            for key, fmt in formats.items()
        }
    return {
        "name": stack.name, "title": stack.title, "version": stack.version, "sources": list(stack.sources),
        "rules": rules, "switches": dict(stack.switches), "unknown": list(stack.unknown),
    }  # fmt: skip


def _assumed(assumed: tuple[str, ...], operand: str) -> list[str]:
    return [name.partition(".")[2] for name in assumed if name.startswith(operand + ".")]


def _print_table(data: list[dict[str, Any]], not_modelled: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("stack", "side", "operand", "block", "scale", "quantise", "floor", "powers of two", "of")
    for column in table.columns:
        column.overflow = "fold"
    for stack in data:
        for side, operands in _sides(stack["rules"]):
            for operand, fmt in operands.items():
                cells = _cells(fmt) if fmt else ["bf16", "", "", "", "", ""]
                table.add_row(stack["name"], side, operand, *map(escape, cells))
    out = console()
    out.print(table)
    out.print("? means: not settled by what was read, and so taken from the other side. Not compared: " + not_modelled)
    out.print("`precgraph stacks NAME` names sources, switches and what is unknown.")


def _sides(rules: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if rules["train"] == rules["infer"]:
        return [("both", rules["train"])]
    return list(rules.items())


def _cells(fmt: dict[str, Any]) -> list[str]:
    """Block, scale, quantise, floor, powers of two, source dtype."""
    unsure = fmt["taken_from_the_other_side"]
    inverts = fmt["scale_rule"] == "max/amax"
    quantise = "x*inverse" if inverts else "x/s" if fmt["divide"] == "true" else "x*(1/s)"
    power = {"float32": "no", "ue8m0": "yes", "ue8m0_log2": "yes, by log2"}[fmt["scale_dtype"]]
    power = "rounded twice" if fmt.get("requantize") else power
    cells = {
        "granularity": fmt["granularity"], "scale_rule": fmt["scale_rule"], "divide": quantise,
        "amax_floor": f"{fmt['amax_floor']:g}", "scale_dtype": power, "source": fmt["source"],
    }  # fmt: skip
    return ["?" if name in unsure else str(cell) for name, cell in cells.items()]


def _print_one(stack: dict[str, Any]) -> None:
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{stack['name']}[/]  {escape(stack['title'])}, {escape(stack['version'])}")
    for side, operands in _sides(stack["rules"]):
        for operand, fmt in operands.items():
            short = fmt["short"] if fmt else "bf16"
            unsure = fmt and fmt["taken_from_the_other_side"]
            out.print(
                f"  {side} {operand}: {short}"
                + (f" (taken from the other side: {', '.join(unsure)})" if unsure else "")
            )
    for title, lines in (
        ("Configuration", [f"{key}: {value}" for key, value in stack["switches"].items()]),
        ("Unknown", stack["unknown"]), ("Read in", stack["sources"]),
    ):  # fmt: skip
        out.print(f"[bold]{title}[/]")
        for line in lines:
            out.print(f"  {escape(line)}", highlight=False)
