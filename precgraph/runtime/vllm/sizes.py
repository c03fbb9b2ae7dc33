"""The numbers of rows that a program runs at on the GPU: DeepGEMM compiles a kernel for each tile of a weight's shape,
and each size of a CUDA graph is captured.

A step is padded to the next size of a fixed list, every one of which is warmed up before the first request. Rows do
not depend on each other, so padding changes no bit.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from precgraph.runtime.sizes import next_size

LARGEST = 2048  # above it an H200 needs more time for a step of an 8B model than the host for launching it


@dataclass(frozen=True, slots=True)
class Sizes:
    """Row counts in rising order; none means that nothing is padded."""

    steps: tuple[int, ...] = ()

    def fit(self, count: int) -> int:
        """The smallest size that holds ``count`` rows; ``count`` itself above the largest."""
        at = bisect_left(self.steps, count)
        return self.steps[at] if at < len(self.steps) else count

    def padded(self, x: Tensor) -> Tensor:
        """``x`` with zeros appended along its first dimension."""
        missing = self.fit(x.shape[0]) - x.shape[0]
        return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)) if missing else x


def captured_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """The sizes at which steps are captured, in rising order: vLLM's own for decoding, and above them four an octave.

    vLLM has none above 512, for its compiled prefill needs few launches; a prompt that joins makes larger steps.
    """
    decoding, largest = min(2 * max_num_seqs, 512), min(LARGEST, max_num_batched_tokens)
    sizes = {s for s in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if s <= decoding}
    sizes |= {n << octave for octave in range(2, 9) for n in (4, 5, 6, 7) if n << octave > decoding}
    return sorted(s for s in {*sizes, largest} if s <= largest)


def sizes_of(vllm_config: Any) -> Sizes:
    """The sizes at which vLLM captures graphs, and above them those of the trainer's calls, up to the largest step."""
    captured = list(vllm_config.compilation_config.cudagraph_capture_sizes or [])
    scheduler = vllm_config.scheduler_config
    largest = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    above: list[int] = []
    while (size := next_size(max([0, *captured, *above]) + 1)) < largest:
        above.append(size)
    return Sizes(tuple(sorted({*captured, *above, largest})))
