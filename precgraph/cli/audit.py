"""``precgraph audit``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from precgraph.cli.console import console, guarded, progress, require_place, write_json
from precgraph.cli.results import Json

if TYPE_CHECKING:
    from precgraph.audit import Audit


@guarded
def audit(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG.jsonl",
            help="A sequence a line. Several files are judged as one log, such as rollout/*.jsonl of a run.",
            show_default=False,
        ),
    ],
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it (needs matplotlib).")] = None,
    as_json: Json = False,
) -> None:
    """Judge a log of rollout and trainer log-probabilities: how far apart, where, and by which known cause.

    Each line holds token_ids, rollout_logprobs, trainer_logprobs, and, if known, version, trainer_version,
    trainer_token_ids, entropy, kept_mass, mask, temperature, top_p, id.
    Exit code 0: no defect; 1: a defect; 2: could not judge.
    """
    require_place(plot, reads=logs)
    with progress() as step:
        step(f"reading {', '.join(map(str, logs))}")
        from precgraph.audit import audit as judge
        from precgraph.audit import plot as draw

        found = judge(*logs)
        if plot is not None:
            step("drawing")
            draw(found, plot)
    if as_json:
        write_json(found.to_json())
    else:
        _print(found)
    raise typer.Exit(found.exit_code)


def _print(found: Audit) -> None:
    from rich.markup import escape
    from rich.table import Table

    out, m = console(), found.measures
    out.print(f"{m['tokens']} tokens of {m['sequences']} sequences")
    if m["tokens"]:
        out.print(
            f"mean |Δ| {m['mean']:.4g}, max {m['max']:.4g}, {m['different']} differ, "
            f"mean exp|Δ| {m['mult_prob_error']:.4f}, mean ratio {m['ratio_mean']:.4f}, k3 {m['k3']:.3g}, "
            f"{m['missing']} missing"
        )
    for name, rows in found.buckets.items():
        table = Table(name, "mean |Δ|", "tokens", title=f"Mismatch by {name}", title_justify="left")
        for label, (mean, tokens) in rows.items():
            table.add_row(label, f"{mean:.4g}", str(tokens))
        out.print(table)
    table = Table("code", "verdict", "what to do", title="Verdicts", title_justify="left", show_lines=True)
    for v in found.verdicts:
        table.add_row(f"[{'red' if v.defect else 'green'}]{v.code}[/]", escape(v.words), escape(v.remedy))
    out.print(table)
