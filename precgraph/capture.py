"""Captured values in a file: of a program of ours, or of modules of any engine.

The file is safetensors. ``input_ids`` int64 ``[T]`` are the tokens of one sequence. In another engine's capture every
other tensor is the output ``[T, features]`` of the module that it is named after (``model.layers.3.mlp``), in the dtype
in which the engine passes it on. In ours a tensor is the value of a node: ``NAME``, or ``NAME.codes`` and
``NAME.scales`` of a quantised one, or ``NAME.0``, ``NAME.1`` of one that has parts; the metadata's entry
``precgraph`` is JSON: the graph, what made it, and hashes of parameters and of quantised weights, which are not stored.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from precgraph.errors import InputError, PrecGraphError
from precgraph.format import Format
from precgraph.graph import PrecisionGraph
from precgraph.quantizer import QTensor
from precgraph.strict_json import sound
from precgraph.verify.modules import module_outputs
from precgraph.verify.values import Fingerprint, fingerprint

SCHEMA = 1
IDS = "input_ids"
_KEY = "precgraph"
_TABLES: dict[str, type] = {"about": object, "quantized": dict, "parts": int, "weights": str, "parameters": str}
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
    torch.int32: "I32", torch.bool: "BOOL", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


class CaptureWriter:
    """Writes a program's values as they come, so that none of them has to be kept: data first, the header at the end.

    ``about`` says what made them (model, recipe, environment). Use as a context manager; a file whose writing broke
    off is removed. InputError if ``path`` cannot be written, at any time.
    """

    def __init__(self, path: str | Path, graph: PrecisionGraph, ids: Tensor, about: Mapping[str, Any]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            # A device or pipe would be replaced by a file at the end, which breaks it for everybody.
            raise InputError("cannot be written: is no regular file", path=str(path), remedy="name a .safetensors file")
        self._part, self._whole = (self.path.with_name(self.path.name + end) for end in (".part", ".whole"))
        with self._writing():
            self._data = self._part.open("w+b")
        self._entries: dict[str, Any] = {}
        self._about: dict[str, Any] = {
            "schema": SCHEMA, "about": dict(about), "graph": graph.to_json(), "digest": graph.digest(),
            "quantized": {}, "parts": {}, "weights": {}, "parameters": {},
        }  # fmt: skip
        self._refreshed = {r.name for r in graph.records() if r.precision.phase == "refresh"}
        self._store(IDS, ids.to(torch.int64))

    def __enter__(self) -> CaptureWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._finish()
        finally:
            for left in (self._part, self._whole):
                left.unlink(missing_ok=True)
            with suppress(OSError):  # it flushes, which a full disk refuses once more
                self._data.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot be written: {error.strerror or error}", path=str(self.path),
                remedy="make room, or name a file elsewhere",
            ) from error  # fmt: skip

    def parameters(self, hashes: Mapping[str, Fingerprint]) -> None:
        """Hashes of the parameters, by path."""
        self._about["parameters"] = {path: h.sha256 for path, h in hashes.items()}

    def add(self, name: str, value: Any) -> None:
        """The value of a node; of a quantised weight, which is large and follows from its master, only the hash."""
        if name in self._refreshed:
            self._about["weights"][name] = fingerprint(value).sha256
        elif isinstance(value, tuple | list):
            self._about["parts"][name] = len(value)
            for place, part in enumerate(value):
                if isinstance(part, Tensor):
                    self._store(f"{name}.{place}", part)
        elif isinstance(value, QTensor):
            self._about["quantized"][name] = {"shape": list(value.shape), "format": value.format.to_dict()}
            self._store(f"{name}.codes", value.codes)
            self._store(f"{name}.scales", value.scales)
        elif isinstance(value, Tensor):
            self._store(name, value)

    def _store(self, name: str, value: Tensor) -> None:
        raw = value.detach().cpu().contiguous()
        start = self._data.tell()
        with self._writing():
            self._data.write(raw.flatten().view(torch.uint8).numpy().data)
        offsets = [start, self._data.tell()]
        self._entries[name] = {"dtype": _DTYPES[raw.dtype], "shape": list(raw.shape), "data_offsets": offsets}

    def _finish(self) -> None:
        meta = {"format": "pt", _KEY: json.dumps(self._about)}
        header = json.dumps({"__metadata__": meta, **self._entries}).encode()
        header += b" " * (-len(header) % 8)
        self._data.seek(0)
        with self._whole.open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            shutil.copyfileobj(self._data, out)
        os.replace(self._whole, self.path)


class Capture:
    """A capture, opened: values are read when they are asked for. ``graph`` is None for another engine's.

    InputError: no such file, not safetensors, no ``input_ids``, or metadata that does not fit.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._file: Any
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except OSError as error:
            raise InputError(f"cannot be read: {error}", path=self.path) from None
        except SafetensorError as error:
            raise InputError(f"is not a whole safetensors file: {error}", path=self.path) from None
        self.names = set(self._file.keys())
        if IDS not in self.names:
            raise InputError(
                f"has no tensor {IDS!r}, so nobody knows on which tokens it was made", path=self.path,
                remedy=f"store the token ids of the sequence as int64 {IDS}",
            )  # fmt: skip
        ids = self._read(IDS)
        self.ids = ids.squeeze(0) if ids.dim() == 2 and ids.shape[0] == 1 else ids
        if self.ids.dim() != 1 or self.ids.dtype not in (torch.int64, torch.int32) or len(self.ids) == 0:
            raise InputError(
                f"{IDS} must be int64 [tokens] of one sequence, not {str(ids.dtype).removeprefix('torch.')}"
                f"{list(ids.shape)}", path=self.path,
            )  # fmt: skip
        self._about = self._metadata()
        self.graph = self._graph()

    def _metadata(self) -> dict[str, Any]:
        text = (self._file.metadata() or {}).get(_KEY)
        if text is None:
            return {}
        try:
            data = sound(json.loads, text)
        except ValueError:
            data = None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError("has metadata of another version", path=self.path, remedy="capture it again")
        for table, kind in _TABLES.items():
            entries = data.get(table, {})
            if not isinstance(entries, dict) or not all(isinstance(v, kind) for v in entries.values()):
                raise InputError(
                    f"has metadata whose {table!r} cannot be read", path=self.path, remedy="capture it again"
                )
        return data

    def _graph(self) -> PrecisionGraph | None:
        if not self._about:
            return None
        try:
            return PrecisionGraph.from_json(self._about["graph"])
        except (PrecGraphError, KeyError, TypeError) as error:
            raise InputError(f"has a graph that cannot be read: {error}", path=self.path) from None

    @property
    def about(self) -> dict[str, Any]:
        """What made it, and the digest of the program."""
        return {**self._about.get("about", {}), "digest": self._about.get("digest")}

    @property
    def parameters(self) -> dict[str, Fingerprint]:
        """Hashes of the parameters, by path."""
        return {path: Fingerprint(h) for path, h in self._about.get("parameters", {}).items()}

    def __contains__(self, name: str) -> bool:
        known = (self._about.get(table, {}) for table in ("weights", "quantized", "parts"))
        return name in self.names or any(name in table for table in known)

    def value(self, name: str) -> Any:
        """The value of a node, or the output of a module."""
        if name in self._about.get("weights", {}):
            return Fingerprint(self._about["weights"][name])
        if name in self._about.get("parts", {}):
            places = range(self._about["parts"][name])
            return tuple(self._read(f"{name}.{k}") if f"{name}.{k}" in self.names else None for k in places)
        if name in self._about.get("quantized", {}):
            known = self._about["quantized"][name]
            codes, scales = self._read(f"{name}.codes"), self._read(f"{name}.scales")
            return QTensor(codes, scales, torch.Size(known["shape"]), Format.from_dict(known["format"]))
        return self._read(name)

    def modules(self) -> dict[str, str]:
        """What to ask :meth:`value` for, by module path; for another engine's capture, names in their natural order."""
        if self.graph is not None:
            return {module: node for module, node in module_outputs(self.graph).items() if node in self}
        return {name: name for name in sorted(self.names - {IDS}, key=_natural)}

    def _read(self, name: str) -> Tensor:
        try:
            found: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"{name!r} cannot be read: {error}", path=self.path) from None
        return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    """``layers.2`` before ``layers.10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
