"""Pages of docs/ whose examples run: each prints what the page says, and every public name has its section."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import precgraph

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_every_public_name_has_a_section() -> None:
    page = (DOCS / "api.md").read_text()
    headings = " and ".join(re.findall(r"^##+ (.*)$", page, re.MULTILINE)).split(" and ")
    assert sorted({*headings} & {*precgraph.__all__}) == sorted(precgraph.__all__)
    assert {*headings} - {*precgraph.__all__} == {"The embedded engine", "The optimiser", "Errors"}


@pytest.mark.parametrize("page", ["api.md", "embedding.md"])
def test_every_example_prints_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those of libraries that are no dependency, where they are not installed."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code, wanted in BLOCK.findall((DOCS / page).read_text()):
        if "\nfrom trl import" in code and find_spec("trl") is None:
            continue
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert "trl" in code or printed.getvalue() == wanted, code
