"""The numbers of rows that a program runs at on the GPU: DeepGEMM compiles a kernel for each tile of a weight's shape.

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


def sizes_of(vllm_config: Any) -> Sizes:
    """The sizes at which vLLM captures graphs, and above them those of the trainer's calls, up to the largest step."""
    captured = list(vllm_config.compilation_config.cudagraph_capture_sizes or [])
    scheduler = vllm_config.scheduler_config
    largest = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    above: list[int] = []
    while (size := next_size(max([0, *captured, *above]) + 1)) < largest:
        above.append(size)
    return Sizes(tuple(sorted({*captured, *above, largest})))
