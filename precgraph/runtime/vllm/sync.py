"""Weight updates on the wire: what a trainer sends, and how a rollout takes it or refuses it.

A :class:`Manifest` says what a complete update is: the weights' version, the digest of the program that they belong
to, and name, dtype, shape and fingerprint of every tensor. A :class:`Receiver` is told the manifest (``begin``), given
sources of tensors in any number of parts (``update``) and installs them only when all are there and right
(``finish``): until then nothing of what is served has been touched. FP8 bytes and scales travel as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from precgraph.errors import DigestError, InputError, SyncError
from precgraph.runtime.compiled import Compiled
from precgraph.runtime.vllm.weights import wire

PROTOCOL = 2
HEADER = "precgraph"  # the key of a file's metadata that holds its manifest
_CHUNK = 1 << 24  # bytes that are copied at a time
_BLOCK = 1 << 21  # 64-bit words that a fingerprint takes at a time: part of its formula
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio, odd, as a signed word


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an update: dtype (torch name), shape, and :func:`fingerprint` of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete update of the weights consists of."""

    version: int
    digest: str
    tensors: Mapping[str, Entry]

    @property
    def checksum(self) -> str:
        """sha256 over names, dtypes, shapes and fingerprints: equal weights have equal checksums."""
        return checksum(self.tensors)

    def to_json(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL, "version": self.version, "digest": self.digest, "checksum": self.checksum,
            "tensors": {
                name: {"dtype": e.dtype, "shape": list(e.shape), "fingerprint": e.fingerprint}
                for name, e in self.tensors.items()
            },
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Inverse of :meth:`to_json`; SyncError if it is malformed, of another protocol, or disagrees with itself."""
        try:
            if _taken(data, "protocol", int) != PROTOCOL:
                raise SyncError(
                    f"the update speaks protocol {data['protocol']}, this precgraph speaks {PROTOCOL}",
                    remedy="install the same precgraph on both sides",
                )
            tensors = {
                name: Entry(_taken(e, "dtype", str), tuple(_taken(e, "shape", list)), _taken(e, "fingerprint", int))
                for name, e in _taken(data, "tensors", dict).items()
            }
            manifest = cls(_taken(data, "version", int), _taken(data, "digest", str), tensors)
            stated = _taken(data, "checksum", str)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SyncError(f"the update's manifest is malformed: {error!r}", remedy="write it again") from None
        if stated != manifest.checksum:
            raise SyncError("the update's manifest disagrees with its own checksum", remedy="write it again")
        return manifest


def _taken(table: Any, key: str, kind: type) -> Any:
    """``table[key]``; ValueError if it is of another kind (``true`` is no number here) or a negative number."""
    value: Any = table[key]
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{key} is {value!r:.40}")
    return value


def describe(tensors: Mapping[str, Tensor], version: int, digest: str) -> Manifest:
    """The manifest of an update that consists of ``tensors``."""
    return Manifest(version, digest, entries(tensors))


def entries(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    sums = _fingerprints(tensors)
    return {
        name: Entry(str(t.dtype).removeprefix("torch."), tuple(t.shape), sums[name])
        for name, t in sorted(tensors.items())
    }  # fmt: skip


def _fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The fingerprint of each tensor, with one wait a device."""
    found: dict[str, int] = {}
    for device in {t.device for t in tensors.values()}:
        own = {name: t for name, t in tensors.items() if t.device == device}
        copied = [name for name, t in own.items() if not _is_words(t)]  # one at a time: they take memory
        groups = [[name for name, t in own.items() if _is_words(t)], *([name] for name in copied)]
        sums = [_weighted_sums([_words(own[name]) for name in group], device) for group in groups if group]
        found |= zip((name for group in groups for name in group), torch.cat(sums).tolist(), strict=True)
    return {name: value % (1 << 64) for name, value in found.items()}


def checksum(tensors: Mapping[str, Entry]) -> str:
    rows = [[name, e.dtype, list(e.shape), e.fingerprint] for name, e in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def fingerprint(x: Tensor) -> int:
    """A 64-bit sum of the tensor's bytes, weighted by their place; the same on every device, quick on all.

    The bytes, as little-endian words of 64 bits after zero padding, in blocks ``c`` of 2**21 words ``w_j``, give ``sum
    key(c) * key(j) * mix(w_j)`` modulo 2**64, where ``mix(x) = x ^ (x >> 29)`` brings the upper bits down, and ``key(n)
    = mix(mix((n + 1) * K) * K) | 1``, K = 0x9E3779B97F4A7C15, has no pattern that data could have too. Another word
    in one place is noticed for certain; truncation, bit errors in many places and exchanged words or blocks, but for
    a chance far below one in 10**9. It is no defence against malice.
    """
    return _fingerprints({"": x})[""]


def _is_words(x: Tensor) -> bool:
    """Whether the tensor's own memory is words of 64 bits: no strides, and neither size nor place within a word.

    Of a policy's tensors, norms and biases of odd widths and weights with padded columns are not.
    """
    return x.is_contiguous() and not (x.nbytes % 8 or x.storage_offset() * x.itemsize % 8)


def _words(x: Tensor) -> Tensor:
    """The bytes as int64 ``[N]``: the tensor's own memory if :func:`_is_words`, else a copy of it."""
    raw = x.detach().contiguous().flatten().view(torch.uint8)
    if raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64) if raw.numel() else raw.new_empty(0, dtype=torch.int64)


def _weighted_sums(words: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of each of ``words`` as a signed word, ``[len(words)]`` on their device."""
    if device.type != "cuda":
        return torch.stack([_weighted_sum(w) for w in words])
    from precgraph.lowering.triton.fingerprint import weighted_sums

    with torch.cuda.device(device):
        return weighted_sums(words, _BLOCK, _GOLDEN)


def _weighted_sum(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    blocks = words.split(_BLOCK) if words.numel() else ()
    keys = _keys(min(_BLOCK, words.numel()), words.device)
    for key, block in zip(_keys(len(blocks), words.device), blocks, strict=True):
        total += key * _mixed(block).mul_(keys[: block.numel()]).sum()
    return total


def _keys(count: int, device: torch.device) -> Tensor:
    """``key(0)``, ..., ``key(count - 1)``."""
    spread = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_GOLDEN)
    return _mixed(_mixed(spread).mul_(_GOLDEN)).bitwise_or_(1)


def _mixed(words: Tensor) -> Tensor:
    """``x ^ (x >> 29)`` of words without sign."""
    return (words >> 29).bitwise_and_((1 << 35) - 1).bitwise_xor_(words)


# --------------------------------------------------------------------------------------- the trainer's side


def policy(model: Any) -> tuple[Manifest, dict[str, Tensor]]:
    """The update that brings a rollout to a compiled model's weights; StaleWeightsError before ``actor.sync()``,
    and for a model whose parameters were replaced."""
    compiled = compiled_of(model)
    compiled.require_current()
    tensors = wire(compiled.store, compiled.runner.program)
    return describe(tensors, compiled.store.version, compiled.digest), tensors


def compiled_of(model: Any) -> Compiled:
    """What ``precgraph.compile`` left on a model; InputError for any other object."""
    compiled = getattr(model, "precgraph", None)
    if not isinstance(compiled, Compiled) or not compiled.graph.causal_lm:
        raise InputError("not a compiled causal language model", remedy="pass what precgraph.compile(model) returned")
    return compiled


def save_weights(model: Any, path: str | Path) -> Manifest:
    """Write the policy of a compiled model to one safetensors file, whole or not at all; returns its manifest.
    InputError for a path at which no file can be, SyncError if the writing fails."""
    target = file_path(path)
    if not os.path.isdir(target.parent):
        raise InputError("there is no such directory", path=str(target.parent), remedy="create it, then save")
    manifest, tensors = policy(model)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, partial, metadata={"format": "pt", HEADER: json.dumps(manifest.to_json())})
        os.replace(partial, target)
    except (SafetensorError, OSError) as error:  # a full disk is one or the other
        raise SyncError(
            f"cannot be written: {error}", path=str(path), remedy="make room, or save where you may write"
        ) from error
    finally:
        with suppress(OSError):  # or it would hide the error above
            partial.unlink()
    return manifest


def file_path(path: Any) -> Path:
    """``path``, made absolute; InputError if it is none, or that of something other than a file."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"{path!r:.40} is not the path of a file", remedy="pass one as text or as a Path")
    if os.path.exists(name) and not os.path.isfile(name):  # to read a pipe, or to replace a device, would do harm
        what = "a directory" if os.path.isdir(name) else "no regular file"
        raise InputError(f"is {what}", path=name, remedy="name a file of weights")
    return Path(name).absolute()


def paths_of(source: Any) -> list[Path]:
    """The files that ``source`` names, one path or several; InputError for anything else."""
    each = [source] if isinstance(source, str | os.PathLike) else source
    if not isinstance(each, Sequence) or isinstance(each, bytes) or not each:
        what = "an empty list" if isinstance(each, Sequence) and not each else f"a {type(source).__name__}"
        raise InputError(
            f"the source of a sync is {what}",
            remedy="pass a compiled model, or the path, or a list of the paths, of files that save_weights wrote",
        )
    return [file_path(p) for p in each]


# --------------------------------------------------------------------------------------- the rollout's side


def read_manifest(path: str | Path) -> Manifest | None:
    """The manifest in a file's header, if there is one; SyncError for a broken file, InputError for what is none."""
    file_path(path)
    with _readable(path), safe_open(str(path), framework="pt", device="cpu") as file:
        header = (file.metadata() or {}).get(HEADER)
    if not header:
        return None
    try:
        return Manifest.from_json(json.loads(header))
    except json.JSONDecodeError as error:
        raise SyncError(f"the file's manifest is malformed: {error}", path=str(path), remedy="write it again") from None
    except SyncError as error:
        raise SyncError(error.message, path=str(path), remedy=error.remedy) from None


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """A file's tensors, in memory of their own; errors as of :func:`read_manifest`.

    safetensors maps what it opens. Of the file itself, a map would change after it was checked if somebody wrote to
    the file, and end the process (SIGBUS) if somebody truncated it; a copy without a name is out of reach.
    """
    file_path(path)
    with _readable(path), open(path, "rb") as file, open(os.memfd_create("weights"), "wb", buffering=0) as copy:
        shutil.copyfileobj(file, copy, _CHUNK)
        with safe_open(f"/proc/self/fd/{copy.fileno()}", framework="pt", device="cpu") as held:
            return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """What opening and reading a file of weights raises, as SyncError."""
    try:
        yield
    except FileNotFoundError:
        raise SyncError(
            "there is no such file", path=str(path), remedy="write it with precgraph.vllm.save_weights"
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise SyncError(f"the file is truncated or damaged: {error}", path=str(path), remedy="write it again") from None


class Receiver:
    """One update at a time for the program of ``digest`` whose own tensors have the dtypes and shapes ``wanted``."""

    def __init__(self, digest: str, wanted: Mapping[str, Tensor]) -> None:
        self.digest = digest
        self.wanted = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in wanted.items()}
        self.manifest: Manifest | None = None
        self.staged: dict[str, Tensor] = {}

    def begin(self, manifest: Manifest, serving: int) -> None:
        """Start an update, dropping one that was not finished; refuses another program's and an older version's."""
        self.abort()
        if manifest.digest != self.digest:
            raise DigestError(
                f"the update is for program {manifest.digest[:12]}, this engine runs {self.digest[:12]}",
                remedy="use one recipe, one precgraph and one torch on both sides",
            )
        if manifest.version < serving:
            raise SyncError(
                f"the update has version {manifest.version}, version {serving} is being served",
                remedy="send what the trainer has now, or start a new engine to go back",
            )
        self._require_shapes(manifest)
        self.manifest = manifest

    def _require_shapes(self, manifest: Manifest) -> None:
        extra = sorted(manifest.tensors.keys() - self.wanted.keys())
        missing = sorted(self.wanted.keys() - manifest.tensors.keys())
        if extra or missing:
            what = (
                f"has {len(extra)} tensors that the program does not read" if extra else f"lacks {len(missing)} tensors"
            )
            raise SyncError(
                f"the update {what}", path=(extra or missing)[0], remedy="send the policy of the same model"
            )
        for name, entry in manifest.tensors.items():
            if (entry.dtype, entry.shape) != self.wanted[name]:
                dtype, shape = self.wanted[name]
                raise SyncError(
                    f"the update brings {entry.dtype}{list(entry.shape)}, the program reads {dtype}{list(shape)}",
                    path=name, remedy="send the policy of the same model and recipe",
                )  # fmt: skip

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a part; each tensor must be what the manifest says, down to its bytes."""
        if self.manifest is None:
            raise SyncError("no update has begun", remedy="call begin first")
        for name in tensors:
            if name not in self.manifest.tensors:
                raise SyncError(
                    "the part holds a tensor that its manifest does not name", path=name, remedy="send it again"
                )
        found = entries(tensors)
        for name in tensors:
            if found[name] != self.manifest.tensors[name]:
                raise SyncError("the tensor is not the one that the manifest names", path=name, remedy="send it again")
        self.staged.update(tensors)

    def finish(self) -> tuple[Manifest, dict[str, Tensor]]:
        """The complete update, to be installed; SyncError, naming one, if tensors are missing."""
        if self.manifest is None:
            raise SyncError("no update has begun", remedy="call begin first")
        missing = sorted(self.manifest.tensors.keys() - self.staged.keys())
        if missing:
            count = len(self.manifest.tensors)
            raise SyncError(
                f"{len(missing)} of {count} tensors did not arrive", path=missing[0], remedy="send the update again"
            )
        return self.manifest, self.staged

    def abort(self) -> None:
        """Forget an update that was not finished; what is served stays."""
        self.manifest, self.staged = None, {}
