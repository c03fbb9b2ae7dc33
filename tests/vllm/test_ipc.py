"""CUDA IPC: another process sees the trainer's bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

CHILD = """
import json, sys, torch
from precgraph.runtime.vllm.ipc import opened
from precgraph.runtime.vllm.sync import fingerprint
tensors = opened(json.load(sys.stdin))
print(json.dumps({n: [str(t.dtype), list(t.shape), fingerprint(t)] for n, t in tensors.items()}))
"""


def test_another_process_reads_the_same_bytes() -> None:
    from precgraph.runtime.vllm.ipc import handles
    from precgraph.runtime.vllm.sync import fingerprint

    big = torch.randn(300, 257, device="cuda")
    tensors = {"x": big.bfloat16(), "codes": big.to(torch.float8_e4m3fn), "view": big[7:9], "scalar": big[0, 0]}
    data = json.dumps(handles(tensors))
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, input=data, capture_output=True, text=True, timeout=300, check=True)
    wanted = {n: [str(t.dtype), list(t.shape), fingerprint(t)] for n, t in tensors.items()}
    assert json.loads(done.stdout.splitlines()[-1]) == wanted
