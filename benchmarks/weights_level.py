"""Throughput of ``precgraph check --level weights``: MB of FP8 checkpoint a second, and of all bytes read.

Masters are bf16, so three bytes are read for each byte of codes. Files are in the page cache: what is measured is the
arithmetic. Target: 500 MB of checkpoint a second on two cores. On a machine that has other work the wall clock says
little, so the rate a second of CPU time is given too: times the cores, that is what an idle machine reaches.

Memory is what the process allocates beyond what it had: files are mapped, and their pages the system's to drop. It is
a few tensors for each thread, whatever the size and number of files.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common.results import Result, append
from precgraph.checkpoint import BlockFp8, Checkpoint, Fp8Checkpoint, Selection, quantize_tiled
from precgraph.format import Format
from precgraph.verify.weights import check_weights, default_threads

TARGET = 500.0  # MB of checkpoint a second
SHAPES = {"4096x4096": (4096, 4096, 8), "4096x14336": (4096, 14336, 3)}  # rows, columns, weights
FILES = 2  # of each checkpoint
REPEATS = 3


def checkpoints(folder: Path, n: int, k: int, count: int) -> tuple[Checkpoint, Fp8Checkpoint, Selection]:
    """Masters and what the default rule makes of them, on disk."""
    fmt = Format(dtype="float8_e4m3fn", granularity="128x128")
    masters = {f"layers.{i}.weight": torch.randn(n, k).to(torch.bfloat16) for i in range(count)}
    stored = {}
    for name, master in masters.items():
        stored[name], stored[f"{name}_scale_inv"] = quantize_tiled(master, fmt)
    for part, tensors in (("masters", masters), ("fp8", stored)):
        (folder / part).mkdir()
        table = {key: f"model-{int(key.split('.')[1]) % FILES}.safetensors" for key in tensors}
        for file in set(table.values()):
            save_file({k: t for k, t in tensors.items() if table[k] == file}, folder / part / file)
        (folder / part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        config = {"quantization_config": BlockFp8().to_dict()} if part == "fp8" else {}
        (folder / part / "config.json").write_text(json.dumps(config))
    selection = Selection(fmt, frozenset(masters), {}, {}, dict.fromkeys(masters, (n, k)), {})
    return Checkpoint(folder / "masters"), Fp8Checkpoint(folder / "fp8"), selection


class Peak:
    """The most that this process has allocated inside the block, in bytes beyond what it had (Linux)."""

    def __enter__(self) -> Peak:
        self.start, self.bytes, self.running = _allocated(), 0, True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()

    def _watch(self) -> None:
        while self.running:
            self.bytes = max(self.bytes, _allocated() - self.start)
            time.sleep(0.002)


def _allocated() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) << 10


def seconds(masters: Checkpoint, stored: Fp8Checkpoint, selection: Selection, threads: int) -> tuple[float, float]:
    """Wall and CPU seconds, each the best of a few runs."""
    wall, cpu = [], []
    for _ in range(REPEATS):
        start, used = time.perf_counter(), time.process_time()
        report = check_weights(masters, stored, selection, threads=threads)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
        assert report.ok
    return min(wall), min(cpu)


def main() -> None:
    results = []
    load = os.getloadavg()[0]
    print(f"load before the run: {load:.1f} on {default_threads()} cores")
    for name, (n, k, count) in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            masters, stored, selection = checkpoints(Path(folder), n, k, count)
            for threads in sorted({1, default_threads()}):
                with Peak() as peak:
                    took, cpu = seconds(masters, stored, selection, threads)
                each = stored.nbytes / cpu / 1e6
                speed, read = stored.nbytes / took / 1e6, (stored.nbytes + masters.nbytes) / took / 1e6
                shape = f"{count} x {name}, {threads} threads"
                verdict = "" if threads == 1 else f"  ({'reaches' if speed >= TARGET else 'misses'} {TARGET:.0f})"
                print(f"{shape}: {speed:.0f} MB/s of checkpoint, {read:.0f} MB/s read, {each:.0f} MB a CPU s{verdict}")
                print(f"{shape}: {peak.bytes / 1e6:.0f} MB allocated, of {stored.nbytes / 1e6:.0f} MB of checkpoint")
                results.append(Result(shape, "allocated at most", peak.bytes / 1e6, "MB"))
                results += [Result(shape, "checkpoint", speed, "MB/s"), Result(shape, "read", read, "MB/s")]
                results.append(Result(shape, "checkpoint a CPU second", each, "MB/s"))
    append("weights_level", results)


if __name__ == "__main__":
    main()
