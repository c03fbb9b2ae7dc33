"""From the MODEL argument of the command line to a model.

MODEL is a directory with a config.json (and ``*.safetensors``), a config.json alone, a ``.gguf`` file or a directory
that holds one, or a hub id. Code that comes with a model is never executed, pickled weights are never read.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import re
import socket
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import utils as hub_utils
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_gguf_pytorch_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from precgraph.errors import InputError, RoundingWarning, UnsupportedModelError
from precgraph.gguf_files import parsed_once
from precgraph.runtime.vllm import ARCHITECTURE
from precgraph.skeleton import skeleton
from precgraph.stored import StoredWeights, quantization_table
from precgraph.tables import read_table
from precgraph.weight_files import Checkpoint, link_without_target

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_HOST = "huggingface.co"
_AUTO: Any = AutoModelForCausalLM  # its factories are not typed
_SCREEN: Any = transformers_logging  # nor are these
_DOWNLOADS: Any = hub_utils
_GGUF_FILES: Any = modeling_gguf_pytorch_utils
_ADVICE = "transformers.quantizers.quantizer_gguf"
_T = TypeVar("_T")
_NO_PROGRAM = ("_name_or_path", "dtype", "quantization_config", "transformers_version", "use_cache")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is: ``config`` is its config.json or its GGUF file, ``weights`` what from_pretrained takes.

    ``weights`` is None for a config.json alone; ``gguf`` says which of the two kinds it is.
    """

    name: str
    config: Path
    weights: str | None
    gguf: bool = False


def load_config_model(model: str | Path | Source, *, warn: bool = True) -> PreTrainedModel:
    """The causal language model that MODEL describes, bf16, its parameters on the meta device: no weights are read.

    A ``quantization_config`` is ignored, since the recipe says what is quantised. Masters of another dtype than
    bfloat16 get a RoundingWarning, unless ``warn`` is False: where the weights are loaded too, or are not masters.
    Raises InputError (missing path, malformed config, missing extra) or UnsupportedModelError (unknown model type,
    remote code, not a causal LM).
    """
    source = find(model)
    config = _gguf_config(source) if source.gguf else _json_config(source)
    built = _building(source, lambda: skeleton(config))
    if warn:
        _warn_of_rounding(source)
    return built


def load_model(model: str | Path | Source) -> PreTrainedModel:
    """The causal language model with its weights, bf16 on the CPU, in eval mode.

    A GGUF's weights are dequantised to bf16 and the result saves like any other model. Warns and raises as
    :func:`load_config_model` does, and UnsupportedModelError for weights that are stored quantised or pickled.
    """
    source = find(model)
    if source.weights is None:
        raise InputError("a config.json has no weights", path=source.name, remedy="pass the checkpoint's directory")
    if source.gguf:
        return _load_gguf(source, source.weights)
    StoredWeights.of(_json_config(source).to_dict(), str(source.config)).require_plain()
    if local := Path(source.weights).is_dir():
        Checkpoint(source.weights).require_masters()
    loaded = _from_pretrained(source, source.weights, use_safetensors=True)
    if not local:
        Checkpoint(source.config.parent).require_masters()  # the hub's files, which are there now
    _warn_of_rounding(source)
    return loaded


def stored_weights(model: str | Path | Source) -> StoredWeights:
    """How MODEL's own weights are stored in its files; those of a GGUF are plain as they are read."""
    source = find(model)
    path = str(source.config)
    return StoredWeights(path) if source.gguf else StoredWeights.of(read_table(source.config), path)


def program_config(model: PreTrainedModel) -> dict[str, Any]:
    """What of a model's config may change its program: neither how it was stored nor by what."""
    return {k: v for k, v in model.config.to_dict().items() if k not in _NO_PROGRAM}


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers' bars off the screen (never those of a download), and its advice on GGUF files, which is for
    weights that stay packed. With its own verbosity at info or below (``TRANSFORMERS_VERBOSITY=info``) they are shown.
    """
    if _SCREEN.get_verbosity() <= logging.INFO:
        yield
        return
    advice, bar = logging.getLogger(_ADVICE), _GGUF_FILES.tqdm
    level, shown, downloads = (
        advice.level,
        _SCREEN.is_progress_bar_enabled(),
        not _DOWNLOADS.are_progress_bars_disabled(),
    )
    try:
        advice.setLevel(logging.ERROR)
        _GGUF_FILES.tqdm = _SCREEN.tqdm  # it takes tqdm's own, which no switch reaches
        _show_bars(False, downloads)
        yield
    finally:
        advice.setLevel(level)
        _GGUF_FILES.tqdm = bar
        _show_bars(shown, downloads)


def _show_bars(wanted: bool, downloads: bool) -> None:
    """Switch transformers' bars, and then those of downloads, which its switch takes along."""
    (_SCREEN.enable_progress_bar if wanted else _SCREEN.disable_progress_bar)()
    (_DOWNLOADS.enable_progress_bars if downloads else _DOWNLOADS.disable_progress_bars)()


def _from_pretrained(source: Source, weights: str, **options: Any) -> PreTrainedModel:
    model, info = _building(source, lambda: _load(weights, options))
    absent = sorted(info["missing_keys"])
    wrong = sorted(info["mismatched_keys"])
    if absent or wrong:  # transformers would have made them up
        what = f"lacks {absent[0]!r}" if absent else f"has {wrong[0][0]!r} of shape {list(wrong[0][1])}"
        raise InputError(
            f"the checkpoint does not fit its config: it {what}, one of {len(absent) + len(wrong)} such weights",
            path=source.name,
            remedy="restore the checkpoint, or correct its config",
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def _load(weights: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    with quietly():
        loaded = _AUTO.from_pretrained(
            weights,
            dtype=torch.bfloat16,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    return loaded[0], loaded[1]


# -------------------------------------------------------------------------------------------- find


def find(model: str | Path | Source) -> Source:
    """What MODEL names, unless that was found already; InputError if it is not there."""
    if isinstance(model, Source):
        return model
    if not str(model):  # else the working directory, where a variable of the shell is not set
        raise InputError("the model's name is empty", remedy=_ACCEPTED)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_directory(str(model), path)
    if path.is_file():
        if path.suffix == ".gguf":
            return Source(str(model), path, str(path.parent), gguf=True)
        if path.suffix == ".json":
            return Source(str(model), path, None)
        raise InputError("is neither a config.json nor a .gguf file", path=str(model), remedy=_ACCEPTED)
    _require_target(path)
    return _on_hub(str(model))


_ACCEPTED = "pass a directory with a config.json, a config.json, a .gguf file or a hub id"


def _in_directory(name: str, path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(name, path / "config.json", str(path))
    _require_target(path / "config.json")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Source(name, ggufs[0], str(path), gguf=True)
    if ggufs:
        raise InputError(f"holds {len(ggufs)} .gguf files", path=name, remedy=f"name one, such as {ggufs[0]}")
    raise InputError("holds neither a config.json nor a .gguf file", path=name, remedy=_ACCEPTED)


def _require_target(path: Path) -> None:
    """InputError for a link that leads nowhere, which looks as if nothing were there."""
    if why := link_without_target(path):
        raise InputError(f"is {why}", path=str(path), remedy="restore what it leads to, or name another file")


def _on_hub(name: str) -> Source:
    missing = InputError("no such file or directory", path=name, remedy=_ACCEPTED)
    if not _HUB_ID.fullmatch(name) or name.endswith((".json", ".gguf")):
        raise missing
    offline = not _hub_reachable()
    try:
        config = cached_file(name, "config.json", local_files_only=offline)
    except OSError as error:
        why = f"and {_HUB_HOST} cannot be reached" if offline else f"and on the hub: {_first_line(error)}"
        raise InputError(f"no such file or directory, {why}", path=name, remedy=_ACCEPTED) from error
    if config is None:
        raise missing
    return Source(name, Path(config), name)


def _hub_reachable() -> bool:
    """Whether to ask at all: without a network, the hub's client would retry for half a minute."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(_HUB_HOST, 443)
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------- config.json


def _json_config(source: Source) -> Any:
    data = read_table(source.config)
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise _unknown_type(source, kind, "auto_map" in data)
    names = data.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise InputError("the config has no architectures", path=str(source.config), remedy=f"add {_suggestion(kind)}")
    # A config.json may name the plugin's, for vLLM: the model is that of its type all the same.
    if not (served := _causal_lms(kind)) or names[0] not in (*served, ARCHITECTURE):
        raise _other_class(source, kind, names[0])
    quantization_table(data, str(source.config))
    config = _building(source, lambda: CONFIG_MAPPING[kind].from_dict(dict(data)))
    _require_shapes(source, config)
    return config


def _warn_of_rounding(source: Source) -> None:
    """RoundingWarning for masters whose config names another dtype than bfloat16, which engines may run in that."""
    if source.gguf or not stored_weights(source).plain:
        return
    data = read_table(source.config)
    dtype = data.get("dtype") or data.get("torch_dtype")
    if isinstance(dtype, str) and dtype != "bfloat16":
        warnings.warn(
            f"{source.config}: the config says {dtype}, and masters are bfloat16: this is the model as "
            "from_pretrained(..., dtype=torch.bfloat16) rounds it; run an engine with --dtype bfloat16, on a "
            "checkpoint saved so",
            RoundingWarning,
            stacklevel=3,
        )


def _unknown_type(source: Source, kind: Any, remote_code: bool) -> UnsupportedModelError | InputError:
    path = str(source.config)
    if not kind:
        return InputError(
            "the config has no model_type and so no architecture", path=path, remedy="add model_type and architectures"
        )
    if remote_code:
        return UnsupportedModelError(
            f"model type {kind!r} needs code that comes with the model, which is never executed",
            path=path, remedy="build the model in Python and pass it to precgraph.compile",
        )  # fmt: skip
    close = difflib.get_close_matches(str(kind), CONFIG_MAPPING.keys(), n=1)
    return UnsupportedModelError(
        f"transformers {transformers.__version__} knows no model type {kind!r}",
        path=path, remedy=f"did you mean {close[0]!r}?" if close else "upgrade transformers",
    )  # fmt: skip


def _other_class(source: Source, kind: str, name: str) -> UnsupportedModelError | InputError:
    """Of a class that is no causal language model of the model type ``kind``."""
    path, served = str(source.config), _causal_lms(kind)
    owner = next((k for k in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in _causal_lms(k)), None)
    if owner is not None:
        return InputError(
            f"model_type is {kind!r}, and architectures names {name}, which is of {owner!r}",
            path=path, remedy="correct the one that is wrong",
        )  # fmt: skip
    return UnsupportedModelError(
        f"{name} is not a causal language model of transformers {transformers.__version__}",
        path=path, remedy=f"use {' or '.join(served)}" if served else f"no model of type {kind!r} is one",
    )  # fmt: skip


def _causal_lms(kind: str) -> tuple[str, ...]:
    """Names of the causal language model classes of a model type."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _suggestion(kind: str) -> str:
    return f'"architectures": ["{(_causal_lms(kind) or ("...",))[0]}"]'


def _require_shapes(source: Source, config: Any) -> None:
    """What transformers builds without complaint but no model can have."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        size = getattr(config, name, 1)
        if size < 1:
            raise InputError(f"{name} is {size}", path=str(source.config), remedy="it must be 1 or more")
    heads, kv_heads = getattr(config, "num_attention_heads", 1), getattr(config, "num_key_value_heads", None) or 1
    if kv_heads < 1 or heads % kv_heads:
        raise InputError(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}",
            path=str(source.config), remedy="correct the config",
        )  # fmt: skip


def _building(source: Source, build: Callable[[], _T]) -> _T:
    """Run a constructor of transformers; whatever it raises on a malformed model becomes one line that names it."""
    try:
        return build()
    except Exception as error:
        if source.gguf:
            _require_whole_gguf(source.config)
        line = _first_line(error) if isinstance(error, OSError | ValueError | RuntimeError) else _all_lines(error)
        raise InputError(
            f"transformers {transformers.__version__} cannot build this model: {line}",
            path=str(source.config), remedy="correct the model's files, or upgrade transformers",
        ) from error  # fmt: skip


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _all_lines(error: Exception) -> str:
    """For errors that are a bare value (KeyError) or spread over lines (the config's validators)."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# -------------------------------------------------------------------------------------------- GGUF


def _gguf_config(source: Source) -> Any:
    """The config that a GGUF's metadata describes; its tensors stay on disk."""
    _require_gguf(source)
    config = _building(
        source,
        lambda: AutoConfig.from_pretrained(source.config.parent, gguf_file=source.config.name, trust_remote_code=False),
    )
    if not _causal_lms(config.model_type):
        raise UnsupportedModelError(
            f"no model of type {config.model_type!r} is a causal language model", path=source.name, remedy=_ACCEPTED
        )
    _require_shapes(source, config)
    return config


def _load_gguf(source: Source, folder: str) -> PreTrainedModel:
    _require_gguf(source)
    with parsed_once():
        model = _from_pretrained(source, folder, gguf_file=source.config.name)
    # The weights are plain bf16 now; without these two lines transformers refuses to save them.
    model.hf_quantizer = None  # type: ignore[assignment]
    model.config.__dict__.pop("quantization_config", None)
    return model


def _require_gguf(source: Source) -> None:
    with source.config.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError("is not a GGUF file", path=str(source.config), remedy=_ACCEPTED)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"reading a GGUF needs {package}, which is not installed",
                path=source.name, remedy="pip install 'precgraph[gguf]'",
            )  # fmt: skip


def _require_whole_gguf(path: Path) -> None:
    """InputError for a file that ends before its tensors do, by the reader that transformers uses too."""
    from gguf import GGUFReader

    try:
        GGUFReader(path)
    except Exception as error:
        raise InputError(
            f"is not a whole GGUF file: {_first_line(error)}", path=str(path), remedy="copy it again"
        ) from error
