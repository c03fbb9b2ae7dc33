"""Arguments of :class:`precgraph.vllm.LLM` that are refused before vLLM starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from precgraph.errors import DigestError, InputError
from precgraph.runtime.compiled import Compiled


def require_whole(digest: Any) -> None:
    """DigestError for what is no program's digest, a part of one too."""
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
        raise DigestError(f"{digest!r:.80} is no program's digest", remedy="pass all of what precgraph digest prints")


def whole_digest(digest: str | None, actor: Compiled | None) -> str | None:
    """What the engine must run; a digest that cannot be it is refused before there is an engine, whose end would end
    others in this process."""
    if digest is not None:
        require_whole(digest)
    if actor is None:
        return digest
    if digest not in (None, actor.digest):
        raise DigestError("the digest is not the actor's", remedy="leave it out: the actor brings its own")
    return actor.digest


def refuse(engine_args: dict[str, Any]) -> None:
    """What the configuration hook would refuse too, here as a typed error before vLLM starts."""
    from precgraph.runtime.vllm.config import DIVIDED, own_options, require_undivided  # which import vLLM

    own_options(engine_args.get("additional_config"))

    for name in DIVIDED:
        size = engine_args.get(name, 1)
        if type(size) is not int or size < 1:
            raise InputError(f"{name} = {size!r} is no number of devices", remedy="leave it out, or pass 1")
        require_undivided(name, size)
    if engine_args.get("load_format", "dummy") != "dummy":
        raise InputError("load_format is precgraph's to choose", remedy='leave it out; "dummy" makes random weights')
    if not isinstance(engine_args.get("hf_overrides", {}), Mapping):
        raise InputError("hf_overrides is no table", remedy="pass a dict: architecture and recipe are added to it")
    for name in ("model_loader_extra_config", "worker_cls", "quantization", "logits_processors"):
        if engine_args.get(name):
            raise InputError(f"{name} is precgraph's to choose", remedy="leave it out")
