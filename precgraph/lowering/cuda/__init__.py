"""Kernels in CUDA C++, compiled by NVRTC on first use, where neither a library nor Triton is fast enough."""
