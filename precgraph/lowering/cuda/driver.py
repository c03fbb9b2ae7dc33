"""Compiles and launches this folder's kernels through ``cuda-bindings``, which torch's CUDA builds bring."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from precgraph.errors import LoweringError

SWIZZLE = 128  # bytes of a row of codes in shared memory, whose 16-byte pieces TMA exchanges


@functools.cache
def kernel(source: str, name: str, device: torch.device, shared_memory: int) -> Any:
    """The function ``name`` of this folder's file ``source``, loaded on ``device`` with that much shared memory.

    LoweringError, with the compiler's words, if it does not compile.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch's context, in which the module is loaded, current
        module = _call(driver.cuModuleLoadData, compile_source(source))
        function = _call(driver.cuModuleGetFunction, module, name.encode())
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, function, limit, shared_memory)
    return function


@functools.cache
def compile_source(source: str) -> bytes:
    """This folder's file ``source`` as machine code for sm_90a. It needs no GPU."""
    from cuda.bindings import nvrtc

    text = (Path(__file__).parent / source).read_bytes()
    program = _call(nvrtc.nvrtcCreateProgram, text, source.encode(), 0, [], [])
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result.value:
        log = b" " * _call(nvrtc.nvrtcGetProgramLogSize, program)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise LoweringError(f"{source} does not compile: {log.decode().strip()}", remedy="use CUDA 12.8 or newer")
    code: bytes = b" " * _call(nvrtc.nvrtcGetCUBINSize, program)
    _call(nvrtc.nvrtcGetCUBIN, program, code)
    return code


@functools.lru_cache(maxsize=4096)
def tensor_map(
    pointer: int, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """TMA's description of a tensor in device memory, its fastest dimension first.

    ``steps`` are the bytes from one index to the next of all dimensions but the first, ``box`` what one load takes.
    Bytes (uint8) are swizzled by 128, fp32 is not; what a box reads beyond the borders is zero. The description holds
    for whatever lies at ``pointer``.
    """
    from cuda.bindings import driver

    codes, swizzle = dtype == torch.uint8, driver.CUtensorMapSwizzle
    types = driver.CUtensorMapDataType
    return _call(
        driver.cuTensorMapEncodeTiled,
        types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if codes else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        len(sizes),
        pointer,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(step) for step in steps],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B if codes else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def launch(function: Any, blocks: int, threads: int, shared_memory: int, arguments: Sequence[Any]) -> None:
    """Run on torch's current stream. ``arguments`` are ctypes values and what :func:`tensor_map` gives."""
    from cuda.bindings import driver

    places = [a.getPtr() if hasattr(a, "getPtr") else ctypes.addressof(a) for a in arguments]
    array = (ctypes.c_void_p * len(places))(*places)
    stream = torch.cuda.current_stream().cuda_stream
    _call(
        driver.cuLaunchKernel, function, blocks, 1, 1, threads, 1, 1, shared_memory, stream, ctypes.addressof(array), 0
    )


def _call(function: Any, *arguments: Any) -> Any:
    """The result of a function of ``cuda-bindings``; LoweringError for an error code."""
    status, *results = function(*arguments)
    if status.value:
        raise LoweringError(f"{function.__name__} failed: {status.name}")
    return results[0] if results else None
