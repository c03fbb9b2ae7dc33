"""Triton kernels around the GEMMs, for Hopper (compute capability 9.0) or newer.

Importing this package needs triton; nothing else in precgraph imports it before a Triton kernel is asked for. One
module a kernel family, device functions in :mod:`~precgraph.lowering.triton.primitives`, sums in
:mod:`~precgraph.lowering.triton.reductions`, device functions of tiles that are quantised along tokens in
:mod:`~precgraph.lowering.triton.gluon_tiles`, buffers in :mod:`~precgraph.lowering.triton.layouts`. Launch parameters
depend on the shapes of weights, never on the number of tokens.
"""

import importlib.util

from precgraph.errors import LoweringError
from precgraph.lowering.registry import TAKE_REFERENCE

if importlib.util.find_spec("triton") is None:
    raise LoweringError(
        "the Triton kernels need the package triton, which is not installed",
        remedy="on a GPU, pip install 'precgraph[triton]' or a CUDA build of torch, which brings it; elsewhere "
        f"{TAKE_REFERENCE}",
    )
