"""Files that people hand in, nested too deeply or with text that no encoding can write: one line, exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from precgraph.cli import app
from precgraph.strict_json import DEEPEST, parse, sound
from tests.families import config_json
from tests.reports import document

HALF = "\\ud800"


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def refused(words: str, *args: object) -> None:
    """The command says this in one line, and nothing on stdout."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert words in line and "internal error" not in line


# DEEPEST itself is fine; json's own reader gives up far below 100,000.
BAD = [(f'"a{HALF}b"', "half of a surrogate pair"), (deep(DEEPEST), "nested too deeply"), (deep(100_000), "too deeply")]


@pytest.mark.parametrize(("value", "words"), BAD)
def test_every_file_that_is_json(value: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    model = json.dumps(config_json("llama"))
    texts = {
        "report": json.dumps(document()), "graph": '{"nodes": 1, "parameters": 1}', "record": '{"a": 1}',
        "config": model, "log": '{"token_ids": [1]}',
    }  # fmt: skip
    for kind, text in texts.items():
        path.write_text(text[:-1] + f', "extra": {value}}}')
        commands: dict[str, list[tuple[object, ...]]] = {
            "report": [("report", path), ("report", path, "--html", tmp_path / "r.html"), ("diff", path, path)],
            "graph": [("diff", path, path)], "record": [("check", path, path, "--level", "env")],
            "config": [("check", path), ("check", tmp_path / "good.json", "--infer", f"vllm:{path}")],
            "log": [("audit", path)],
        }  # fmt: skip
        (tmp_path / "good.json").write_text(model)
        for command in commands[kind]:
            refused(words, *command)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.toml", f"extra = {deep(DEEPEST)}", "nested too deeply"),
        ("x.toml", f"extra = {deep(100_000)}", "nested too deeply"),
        ("x.yaml", f"extra: {deep(DEEPEST)}", "nested too deeply"),
        ("x.yaml", f"extra: {deep(100_000)}", "nested too deeply"),
        ("x.yaml", f'extra: "{HALF}"', "half of a surrogate pair"),
        ("x.yaml", "extra: &a [*a]", "nested too deeply"),
    ],
)
def test_configurations_recipes_and_suppressions(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    refused(words, "check", "no/such/model", "--train", f"te:{path}")
    if path.suffix == ".toml":
        refused(words, "check", "no/such/model", "--train", path)
        refused(words, "check", "no/such/model", "--suppressions", path)


def test_what_is_sound_stays_as_it_is() -> None:
    values: list[Any] = [{"a": [1, 2.5, None, "\N{GRINNING FACE}"], "é": {"b": True}}, [], "x", 0]
    for value in values:
        assert parse(json.dumps(value)) == value  # an escaped pair is one character
    assert parse(deep(DEEPEST)) is not None
    doubling = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))])
    assert len(sound(yaml.safe_load, doubling)) == 60  # 2**59 paths lead to x


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "precgraph", "report", os.fsencode(tmp_path) + b"/\xff.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "not UTF-8" in done.stderr and "Traceback" not in done.stderr
