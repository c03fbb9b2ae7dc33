"""Pages of docs/ whose examples run: each prints what the page says, and every public name has its section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import precgraph

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
PAGES = {page: BLOCK.findall((DOCS / page).read_text()) for page in ("api.md", "embedding.md")}


def imports_trl(code: str) -> bool:
    return re.search(r"^(from|import) trl\b", code, re.MULTILINE) is not None


WITH_TRL = [page for page, blocks in PAGES.items() if any(imports_trl(code) for code, _ in blocks)]


@pytest.fixture
def as_before() -> Iterator[None]:
    """An example that changes a setting of the process may fail before it changes it back."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def test_every_public_name_has_a_section() -> None:
    page = (DOCS / "api.md").read_text()
    headings = " and ".join(re.findall(r"^##+ (.*)$", page, re.MULTILINE)).split(" and ")
    assert sorted({*headings} & {*precgraph.__all__}) == sorted(precgraph.__all__)
    assert {*headings} - {*precgraph.__all__} == {"The embedded engine", "The optimiser", "Errors"}


@pytest.mark.parametrize(
    ("page", "trl"),
    [*((page, False) for page in PAGES), *((page, True) for page in WITH_TRL)],
    ids=[*PAGES, *(f"{page}-trl" for page in WITH_TRL)],
)
def test_every_example_prints_what_the_page_says(
    page: str, trl: bool, as_before: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TRL's blocks, which print how training goes and so are only run, and without."""
    if trl:
        pytest.importorskip("trl", reason="needs TRL, which is not installed (pip install trl)")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code, wanted in PAGES[page]:
        if trl or not imports_trl(code):
            printed = StringIO()
            with redirect_stdout(printed):
                exec(compile(code, page, "exec"), names)
            assert imports_trl(code) or printed.getvalue() == wanted, code
