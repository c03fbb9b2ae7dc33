"""``precgraph check --level numerics``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precgraph.cli.console import progress
from precgraph.cli.results import Output
from precgraph.errors import InputError, UnsupportedModelError
from precgraph.strict_json import sound

if TYPE_CHECKING:
    from torch import Tensor

    from precgraph.verify.numerics import Numerics

SUFFIX = ".safetensors"
Step = Callable[[str], None]


def check_values(
    model: str,
    other: str | None,
    train: str,
    infer: str,
    backend: str,
    probe: tuple[int, int, str | None],
    capture: str | None,
    output: Output,
) -> int:
    """Run both sides (or read captures) and say which nodes make other bits; the exit code.

    ``probe`` is how many random tokens, their seed, and the file of a prompt in their place.
    """
    captures = (model, other) if other is not None else (infer,) if infer.endswith(SUFFIX) else ()
    if captures and (capture or probe[2]):
        option = "--capture" if capture else "--prompt-file"
        raise InputError(f"{option} has no meaning beside a capture", remedy="its tokens and values are those compared")
    if train.endswith(SUFFIX):
        raise InputError("the training side must run", remedy="pass the capture as --infer, or two captures")
    with progress() as step:
        step("starting torch")
        if other is not None:
            outcome, context = _two_captures(model, other)
        else:
            outcome, context = _run(model, train, infer, backend, probe, capture, step)
    from precgraph.report.numerics import measures

    context |= {"level": "numerics", "numerics": measures(outcome)}
    unit = "modules" if outcome.report.unit == "modules" else "values"
    context["compared"] = {unit: outcome.report.compared, "differing": outcome.differing, "hidden": outcome.hidden}
    return output.conclude(outcome.report, context)


def _two_captures(train: str, infer: str) -> tuple[Numerics, dict[str, Any]]:
    from precgraph.capture import Capture
    from precgraph.probe import compare_captures

    ours, theirs = Capture(train), Capture(infer)
    outcome = compare_captures(ours, theirs)
    return outcome, {"model": train, "sides": {"train": train, "infer": infer}, "probe": {"tokens": len(ours.ids)}}


def _run(
    name: str,
    train: str,
    infer: str,
    backend: str,
    probe: tuple[int, int, str | None],
    capture: str | None,
    step: Step,
) -> tuple[Numerics, dict[str, Any]]:
    from precgraph.capture import Capture, CaptureWriter
    from precgraph.environment import record
    from precgraph.lowering.lower import backend_name
    from precgraph.probe import compare_runs, compare_with_capture, load_pair, parameter_hashes
    from precgraph.stacks.pair import linear_modules
    from precgraph.stacks.remedies import explain
    from precgraph.verify.rules import RULES

    stored = Capture(infer) if infer.endswith(SUFFIX) else None
    pair = load_pair(name, train, "" if stored else infer, backend, os.environ, step)
    ids = stored.ids if stored else probe_tokens(name, *probe, pair.vocabulary)
    pair.require(ids)
    if stored:
        outcome = compare_with_capture(pair.run("train", ids), stored, ids, step)
    elif capture is None:
        outcome = compare_runs(pair.run("train", ids), pair.run("infer", ids), ids, step)
    else:
        graph = pair.graphs["infer"]
        about = {"model": name, "side": infer, "recipe": pair.sides[1].recipe.to_dict(), "environment": record()}
        with CaptureWriter(capture, graph, ids, about) as writer:
            step("hashing the parameters")
            writer.parameters(parameter_hashes(graph, pair.store))
            outcome = compare_runs(pair.run("train", ids), pair.run("infer", ids), ids, step, writer)
    if not stored:
        report = explain(outcome.report, pair.sides, linear_modules(pair.trace.graph), os.environ)
        if Path(infer).is_dir():
            report = report.with_weights_open(
                RULES["not captured"],
                f"the weights that {infer} stores were not read; the rollout's were made from the masters by its rule",
                "compare them: --level weights",
            )
        outcome = replace(outcome, report=report)
    recipes = {"train": pair.sides[0].recipe.to_dict(), "infer": None if stored else pair.sides[1].recipe.to_dict()}
    context = {
        "model": name, "sides": {"train": train, "infer": infer}, "family": pair.family, "recipes": recipes,
        "backend": backend_name(backend, pair.device), "device": pair.device.type,
        "probe": {"tokens": len(ids), "seed": None if stored or probe[2] else probe[1], "prompt_file": probe[2]},
        "digests": {mode: graph.digest() for mode, graph in pair.graphs.items()},
    }  # fmt: skip
    return outcome, context


def probe_tokens(model: str, tokens: int, seed: int, prompt_file: str | None, vocabulary: int) -> Tensor:
    """The ids of a prompt file (JSON: ids as they are; text: by the model's tokenizer), or random ones."""
    import torch

    if prompt_file is None:
        if tokens < 2:
            raise InputError(f"--tokens {tokens}", remedy="2 or more: the last of them only ends the sequence")
        if not -(2**63) <= seed < 2**63:
            raise InputError(f"--seed {seed}", remedy="a seed has 64 bits")
        return torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
    try:
        text = Path(prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", path=prompt_file) from None
    ids: Any = _parse(text, prompt_file) if prompt_file.endswith(".json") else _tokenize(text, model)
    if not prompt_file.endswith(".json") and len(ids) < 2:
        raise InputError(
            f"its text is {len(ids)} token{'s' * (len(ids) != 1)} of the model's tokenizer", path=prompt_file,
            remedy="write a text of two or more",
        )  # fmt: skip
    if not isinstance(ids, list) or len(ids) < 2 or not all(type(i) is int and i.bit_length() < 64 for i in ids):
        raise InputError("is no list of two or more token ids", path=prompt_file, remedy="write [1, 2, 3], or a text")
    return torch.tensor(ids)


def _parse(text: str, path: str) -> Any:
    try:
        return sound(json.loads, text)
    except ValueError as error:
        raise InputError(f"is not valid JSON: {error}", path=path) from None


def _tokenize(text: str, model: str) -> Any:
    from transformers import AutoTokenizer

    from precgraph.loading import find

    source = find(model)
    try:
        if source.gguf:
            tokenizer = AutoTokenizer.from_pretrained(source.config.parent, gguf_file=source.config.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source.weights or source.config.parent)
        return tokenizer(text)["input_ids"]
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"its tokenizer cannot be loaded: {line}", path=model, remedy="pass token ids in a .json file"
        ) from None
