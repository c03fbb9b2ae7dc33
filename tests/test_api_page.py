"""docs/api.md: every public name has its section, and every example runs and prints what the page says."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import precgraph

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_every_public_name_has_a_section() -> None:
    headings = " and ".join(re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)).split(" and ")
    assert sorted({*headings} & {*precgraph.__all__}) == sorted(precgraph.__all__)
    assert {*headings} - {*precgraph.__all__} == {"The embedded engine", "Errors"}


def test_every_example_prints_what_the_page_says() -> None:
    names: dict[str, Any] = {}
    for code, wanted in BLOCK.findall(PAGE):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, "docs/api.md", "exec"), names)
        assert printed.getvalue() == wanted, code
