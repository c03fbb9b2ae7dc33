"""What becomes of a check's result: the options of the formats, and what they write."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precgraph.cli.console import console, require_place, write_file, write_json, write_result
from precgraph.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from precgraph.fix import Plan
    from precgraph.verify import Report

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonFile = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the JSON to a file too.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")]
Sarif = Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write SARIF 2.1.0.")]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
GitHub = Annotated[bool, typer.Option("--github", help="Print annotations for GitHub Actions too.")]
Suppressions = Annotated[
    Path | None,
    typer.Option(
        "--suppressions",
        metavar="FILE",
        help="Accepted findings with their reasons. Otherwise precgraph.toml or pyproject.toml in this folder.",
    ),
]
Baseline = Annotated[
    Path | None, typer.Option("--baseline", metavar="FILE", help="An earlier result (-o): only what it lacks fails.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 too where a point is not proved.")]
Fix = Annotated[
    bool,
    typer.Option(
        "--fix",
        help="Edit the recipe file or skip list, or write precgraph.env here, where that is safe; then check again.",
    ),
]
Diff = Annotated[bool, typer.Option("--diff", help="Show what --fix would change, and the verdict; change nothing.")]


@dataclass(frozen=True)
class Formats:
    """Which files to write, ``output`` being that of the JSON; with ``as_json`` stdout holds that and nothing else.
    None of them may be among ``reads``."""

    as_json: bool = False
    output: Path | None = None
    html: Path | None = None
    sarif: Path | None = None
    junit: Path | None = None
    github: bool = False
    reads: tuple[str | Path | None, ...] = ()

    def __post_init__(self) -> None:
        files = [path for path in (self.output, self.html, self.sarif, self.junit) if path is not None]
        require_place(*files, reads=self.reads)
        regular = [path.resolve() for path in files if path.is_file() or not path.exists()]
        if len(set(regular)) < len(regular):
            raise InputError("two formats have one file", remedy="name a file for each")
        if self.github and self.as_json:
            raise InputError("--json and --github both want stdout", remedy="write the JSON to a file: -o FILE")

    def write(self, document: Mapping[str, Any], *, brief: bool = False) -> None:
        """Write every format; tables (``brief``: the verdict alone), and annotations after them, go to stdout."""
        from precgraph.report import github, html, junit, sarif

        if self.html is not None:
            write_file(self.html, html.render(document))
        if self.sarif is not None:
            write_json(sarif.render(document), self.sarif)
        if self.junit is not None:
            write_file(self.junit, junit.render(document))
        write_result(document, self.as_json, self.output, _show_verdict if brief else _show)
        if self.github:
            for line in github.render(document):
                typer.echo(line)


def _show(document: Mapping[str, Any]) -> None:
    from precgraph.report.terminal import show

    show(document, console())


def _show_verdict(document: Mapping[str, Any]) -> None:
    from precgraph.report.terminal import show_verdict

    show_verdict(document, console())


class Output:
    """The formats, suppressions and baseline of one check, read first, so that errors come early; what else it does."""

    def __init__(
        self,
        formats: Formats,
        suppressions: Path | None,
        baseline: Path | None,
        *,
        strict: bool,
        fix: bool,
        diff: bool,
    ) -> None:
        from precgraph.report import load, suppress

        if diff and formats.as_json:
            raise InputError("--json and --diff both want stdout", remedy="write the JSON to a file: -o FILE")
        self.formats, self.strict, self.fix, self.diff = formats, strict, fix, diff
        path = suppressions or suppress.find(Path())
        self.suppressions = suppress.read(path) if path else ()
        self.baseline = load(baseline) if baseline else None

    def mend(self, plan: Callable[[], Plan]) -> Plan | None:
        """Show (``--diff``) or carry out (``--fix``) a plan, and return it if files were changed: a check is due.

        What was done, and what is left to do by hand, goes to stderr.
        """
        if not (self.fix or self.diff):
            return None
        from precgraph.report import one_line

        made = plan()
        if self.diff:
            typer.echo(made.diff(), nl=False)
        else:
            made.apply()
            for change in made.changes:
                typer.echo(one_line(f"{change.verb} {change.words}"), err=True)
        for words in made.by_hand:
            typer.echo(one_line(f"by hand: {words}"), err=True)
        return made if made.changes and not self.diff else None

    def as_it_is(self) -> Output:
        """The same output, without mending anything."""
        other = copy(self)
        other.fix = other.diff = False
        return other

    def document(self, report: Report, context: Mapping[str, Any]) -> dict[str, Any]:
        """The document of a report; ``context`` has "level", "compared" and what else belongs to the level."""
        from precgraph.report import build

        where = {"subject": _subject(context)} if "sides" in context else {}
        about = {**context, **where}
        return build(report, about, suppressions=self.suppressions, baseline=self.baseline, strict=self.strict)

    def conclude(self, report: Report, context: Mapping[str, Any], *, brief: bool = False) -> int:
        """Write the document in every format that was asked for; its exit code. After a diff, or with ``brief``, stdout
        gets the verdict alone, so that what was said before it stays in sight."""
        document = self.document(report, context)
        self.formats.write(document, brief=brief or self.diff)
        return int(document["exit_code"])


def _subject(context: Mapping[str, Any]) -> str:
    """The file that a finding is about: the rollout side's, else the training side's, else the model's."""
    sides = [context["sides"][side] for side in ("infer", "train")]
    named = [Path(spec.partition(":")[2] or spec) for spec in sides] + [Path(context["model"])]
    found = [file for path in named for file in (path, path / "config.json") if file.is_file()]
    if not found:
        return str(context["model"])
    path = found[0].resolve()
    return (path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path).as_posix()
