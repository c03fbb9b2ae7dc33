"""Compiles and launches this folder's kernels through ``cuda-bindings``, which torch's CUDA builds bring."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precgraph.errors import LoweringError

_SWIZZLED_ROW = 128  # bytes of a row of a tile that TMA lays down in the 128-byte swizzle


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


def tiles(x: Tensor, height: int) -> Any:
    """TMA's description of the bytes ``x [R, C]`` (FP8, unit stride along C) in tiles ``[height, 128]``, swizzled.

    What a tile reads beyond the borders is zero.
    """
    from cuda.bindings import driver

    integer = driver.cuuint64_t, driver.cuuint32_t
    return _call(
        driver.cuTensorMapEncodeTiled,
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        x.data_ptr(),
        [integer[0](x.shape[1]), integer[0](x.shape[0])],
        [integer[0](x.stride(0))],
        [integer[1](_SWIZZLED_ROW), integer[1](height)],
        [integer[1](1), integer[1](1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def launch(function: Any, blocks: int, threads: int, shared_memory: int, arguments: Sequence[Any]) -> None:
    """Run on torch's current stream. ``arguments`` are ctypes values and what :func:`tiles` gives."""
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
