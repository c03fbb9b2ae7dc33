"""Level ``weights``: are the codes and scales of an FP8 checkpoint what the training side's rule makes of the masters?

Byte by byte, one tensor in memory for each thread. A weight that differs is explained by :mod:`.explain`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from precgraph.checkpoint import Checkpoint, Fp8Checkpoint, ModelTensors, Selection
from precgraph.checkpoint.fp8 import CODES, SCALE, not_finite, quantize_tiled, require_finite, tiles
from precgraph.errors import CheckError, NonFiniteError
from precgraph.format import Format
from precgraph.verify.explain import Explainer, Weight, as_bytes, changes, tile_matches
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES, rule
from precgraph.weight_files import require_masters

Step = Callable[[str], None]


def check_weights(
    masters: Checkpoint | ModelTensors,
    stored: Fp8Checkpoint,
    selection: Selection,
    *,
    threads: int = 2,
    step: Step = lambda _: None,
) -> Report:
    """Compare ``stored`` with what ``selection``'s format makes of ``masters``; every tensor of both is accounted for.

    ``compared`` counts tensors. Raises CheckError if nothing could be compared, InputError for unreadable files,
    UnsupportedModelError for masters that are codes, NonFiniteError for a master that cannot be quantised.
    """
    return _Check(masters, stored, selection).run(threads, step)


class _Check:
    def __init__(self, masters: Checkpoint | ModelTensors, stored: Fp8Checkpoint, selection: Selection) -> None:
        self.masters, self.stored, self.selection = masters, stored, selection
        r, c = stored.quantization.block
        self.format = replace(selection.format, granularity=f"{r}x{c}")
        shapes = {name: selection.shapes[name] for name in sorted(selection.quantized)}
        self.explainer = Explainer(masters.read, shapes)
        self.problems = {p.name: p for p in stored.problems}

    def run(self, threads: int, step: Step) -> Report:
        require_masters(self.masters.folder, self.masters.entries)
        findings = [*self._global(), *self._inventory()]
        names = [n for n in self.stored if self._master(n) in self.masters and n in self.selection.shapes]
        if not names:
            raise CheckError(
                "the two checkpoints have no tensor in common", path=str(self.stored.folder),
                remedy="name the masters that this checkpoint was made from",
            )  # fmt: skip
        done = 0
        with ThreadPoolExecutor(max(1, threads), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for name, found in zip(names, pool.map(self._tensor, names), strict=True):
                findings += found
                done += 1
                step(f"{done} of {len(names)} tensors, {self.stored.entries[name].shard}")
        return Report(len(names), tuple(findings), unit="tensors")

    def _master(self, name: str) -> str:
        """The master of a stored tensor: of a tied one that only the rollout stores, the tensor that it is tied to."""
        return name if name in self.masters else self.selection.tied.get(name, name)

    # ------------------------------------------------------------------------- without reading weights
    def _global(self) -> list[Finding]:
        wanted = self.selection.format.granularity
        if wanted == self.format.granularity:
            return []
        return [self._differs("", ["granularity"], self.format)]

    def _inventory(self) -> list[Finding]:
        """Names, dtypes, scales and the skip list."""
        found = []
        known = self.selection.shapes.keys()
        for name in sorted(
            (known & self.masters.entries.keys()) - self.stored.entries.keys() - self.selection.tied.keys()
        ):
            found.append(self._finding("missing tensor", name, "stored", "absent", "the rollout's checkpoint lacks it"))
        for name in sorted(self.masters.entries.keys() - known - self.stored.entries.keys()):
            if not self.selection.ignores(name):
                words = "the masters hold it, and neither the model nor the rollout's checkpoint has such a tensor"
                found.append(self._finding("unknown tensor", name, "stored", "absent", words))
        for name in self.stored:
            if name.endswith(SCALE):
                if name in self.problems:
                    found.append(self._problem(name))
            elif name not in known and self.selection.ignores(name):
                continue
            elif name not in known:
                found.append(self._finding("unknown tensor", name, "absent", "stored", "the model has no such tensor"))
            elif self._master(name) not in self.masters:
                found.append(self._finding("missing master", name, "absent", "stored", "the masters lack it"))
            found += self._skip_list(name)
        return found

    def _skip_list(self, name: str) -> list[Finding]:
        """Whether a loader that follows modules_to_not_convert reads this weight as it is stored."""
        module = name.removesuffix(".weight")
        linear = name in self.selection.quantized or self.selection.keeps(module)
        if not linear or name == module:
            return []
        skip = self.stored.quantization.skip
        quantized = self.stored.entries[name].dtype in CODES
        hit = next((s for s in skip if skips(s, module)), None)
        if quantized and hit is not None:
            words = f"stock loaders match {hit!r} with this FP8 weight and read it as plain"
            return [self._finding("skip list", name, "not listed", hit, words)]
        if not quantized and hit is None:
            words = "stock loaders expect FP8 here, since the skip list does not name the layer"
            return [self._finding("skip list", name, "listed", "not listed", words)]
        return []

    # ------------------------------------------------------------------------------------ tensor by tensor
    def _tensor(self, name: str) -> list[Finding]:
        entry, master = self.stored.entries[name], self.masters.entries[self._master(name)]
        wanted = name in self.selection.quantized
        if entry.shape != master.shape:
            return [self._finding("shape", name, str(list(master.shape)), str(list(entry.shape)), "the shapes differ")]
        if wanted != (entry.dtype in CODES):
            plain = str(self.selection.dtypes.get(name, torch.bfloat16)).removeprefix("torch.")
            sides = (str(self.format), entry.dtype) if wanted else (plain, entry.dtype)
            return [self._finding("layer precision", name, *sides, "the layer is stored in another precision")]
        if not wanted:
            return self._plain(name)
        problem = self.problems.get(name)
        if problem is not None:
            scale = self.stored.entries.get(name + SCALE)
            turned = scale is not None and scale.shape == self.stored.scale_shape(entry.shape)[::-1]
            if problem.kind == "scale shape" and turned:
                return self._quantized(name)  # transposed, or transposed and stale
            return [self._problem(name)]
        return self._quantized(name)

    def _plain(self, name: str) -> list[Finding]:
        stored, master = self.stored.read(name), self.masters.read(self._master(name))
        dtype = self.selection.dtypes.get(name, master.dtype)
        if stored.dtype != dtype:
            words = [str(d).removeprefix("torch.") for d in (dtype, stored.dtype)]
            return [self._finding("stored dtype", name, words[0], words[1], "the tensor is stored in another dtype")]
        master = master.to(dtype)
        require_finite(self._master(name), master)  # equal bytes of NaN are no model's either
        if torch.equal(_raw(master), _raw(stored)):
            return []
        if unwritten := self._unwritten(name, stored, master):
            return [unwritten]
        why = f"{int((_raw(master) != _raw(stored)).sum())} of its values are not equal"
        if stored.is_floating_point() and not torch.isfinite(stored).all():
            why += ", and it holds NaN or infinity"
        return [self._finding("other bytes", name, "the master's bytes", "other bytes", why)]

    def _quantized(self, name: str) -> list[Finding]:
        master, codes, scales = self.masters.read(name), as_bytes(self.stored.read(name)), self.stored.scale(name)
        fmt = replace(self.format, dtype=CODES[self.stored.entries[name].dtype])
        found = [] if fmt.dtype == self.format.dtype else [self._differs(name, ["dtype"], fmt)]
        try:
            if _same(master, codes, scales, fmt):
                return found
            own_codes, own_scales = quantize_tiled(master, fmt)
        except NonFiniteError as error:
            raise not_finite(self._master(name), fmt.source) from error
        weight = Weight(name, master, fmt, as_bytes(own_codes), own_scales, codes, scales)
        why = self.explainer.explain(weight)
        if why.format is not None:
            return [*found, self._differs(name, changes(fmt, why.format), why.format)]
        if not weight.same_codes and (unwritten := self._unwritten(name, codes, master)):
            return [*found, unwritten]
        return [*found, self._finding(why.kind, name, "by the rule", why.kind, why.detail)]

    def _unwritten(self, name: str, stored: Tensor, master: Tensor) -> Finding | None:
        """Of two that differ: that one of them is nothing but zeros."""
        if not stored.any():
            words = f"nothing of it is written in {self.stored.entries[name].shard}"
            return self._finding("all zero", name, "values", "zeros", words)
        if not master.any():
            words = f"nothing of the master is written in {self.masters.entries[self._master(name)].shard}"
            return self._finding("all zero", name, "zeros", "values", words)
        return None

    # ------------------------------------------------------------------------------------------ findings
    def _differs(self, name: str, attributes: list[str], found: Format) -> Finding:
        """The bytes are those of another format."""
        train = tuple(str(getattr(self.selection.format, a)) for a in attributes)
        infer = tuple(str(getattr(found, a)) for a in attributes)
        kind = rule(attributes[0])
        return Finding(
            kind.code, _module(name), name, "weight", tuple(attributes), train, infer,
            f"every byte is what {found} makes of the master, and the training side uses {self.selection.format}",
            "export the checkpoint by the trainer's recipe, or train with this rule",
            codes=tuple(rule(a).code for a in attributes),
        )  # fmt: skip

    def _finding(self, kind: str, name: str, train: str, infer: str, message: str) -> Finding:
        entry = RULES[kind]
        return Finding(
            entry.code, _module(name), name, "weight", (kind,), (train,), (infer,), message, entry.remedy
        )  # fmt: skip

    def _problem(self, name: str) -> Finding:
        problem = self.problems[name]
        kind = "scale shape" if problem.kind == "scale dtype" else problem.kind
        return self._finding(kind, name, "codes with their scale", problem.kind, problem.message)


def _same(master: Tensor, codes: Tensor, scales: Tensor, fmt: Format) -> bool:
    """Whether a weight's bytes are what ``fmt`` makes of the master: tile by tile, up to the first difference.

    NonFiniteError: up to there, the master holds what cannot be quantised.
    """
    r, c = fmt.block
    n, k = codes.shape
    if scales.shape != (-(-n // r), -(-k // c)):
        return False
    return all(tile_matches(tile, master, fmt, codes, scales, checked=True) for tile in tiles(n, k, fmt.block))


def skips(entry: str, module: str) -> bool:
    """As transformers matches skip lists: the entry at the start or at the end of the path, ``*`` and ``.*`` being any.

    (It takes entries for regular expressions; one that comes from a file is not run here.)
    """
    return module.endswith(entry) or fnmatch.fnmatchcase(module, entry.replace(".*", "*") + "*")


def _raw(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.dtype.itemsize])


def _module(name: str) -> str:
    return name.removesuffix(SCALE).rpartition(".")[0]


def default_threads() -> int:
    """One a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
