"""Triton's interpreter with a GPU's arithmetic, so that a kernel gives in it, from CPU tensors, a GPU's bits.

Triton's own interpreter truncates fp32 to bf16, computes with the codes of bf16 values as with integers, rounds FP8
without carries, makes Python's numbers of loop variables, and knows no PTX, no libdevice and no Gluon. What stands
here in their place rounds as the hardware does, which ``test_interpreter.py`` measures, and errs where the hardware
may. Besides, a load, store or atomic addition outside the tensors of a launch is an error, and so is every result that
a kernel leaves unwritten: torch fills it with NaN.

What stays out of reach: the GPU's exp, log, erf and sqrt (these are torch's here, as in the references: on a CPU not
even its sqrt is rounded to nearest); the order in which a tensor core sums; loads after a kernel has made a pointer of
an address; and all that is no number: layouts, races, launch options. Its private names are those of one Triton
(:func:`~tests.gpu.device.require_pinned_triton`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import ASTTransformer, FunctionRewriter, InterpreterBuilder, TensorHandle, _get_np_dtype

from tests.gpu.interpreter_gluon import Array, gluon_in_triton

Function = Callable[[torch.Tensor], torch.Tensor]

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
"""What numpy has no type for: tiles of these are codes."""


def install() -> None:
    """Once, before a kernel is imported."""
    np.seterr(all="ignore")  # infinities and NaN are what some tests are about
    torch.use_deterministic_algorithms(True)  # fills torch.empty
    interpreter.interpreter_builder.__class__ = Builder
    interpreter.kernel_loop = _loop
    FunctionRewriter.ast_transformer = Rewriter()
    interpreter._implicit_cvt = _noting(interpreter._implicit_cvt)
    _speak_once()
    libdevice.exp, libdevice.log = _elementwise(torch.exp), _elementwise(torch.log)
    gluon.jit, gluon.language = triton.jit, gluon_in_triton(gluon.language)

    from precgraph.lowering.triton import primitives

    primitives.erf = _elementwise(torch.erf)
    primitives.gdc_wait = primitives.gdc_launch_dependents = lambda: None  # no kernel runs beside another
    require = primitives._require_device
    primitives._require_device = lambda device: None if device.type == "cpu" else require(device)


def _speak_once() -> None:
    """Make the language the interpreter's for good, where it else becomes that with each call of a device function."""
    patch, scope = interpreter._patch_lang, SimpleNamespace(restore=lambda: None)
    for module in (tl, tl.core):
        patch(SimpleNamespace(__globals__={"tl": module}))
    interpreter._patch_lang = lambda fn: scope


# ------------------------------------------------------------------------------------------ numbers


def decode(codes: Array, dtype: tl.dtype) -> Array:
    """The values of a tile, fp32 of narrow types."""
    if dtype not in NARROW:
        return codes
    return torch.from_numpy(np.ascontiguousarray(codes)).view(NARROW[dtype]).float().numpy()


def encode(values: Array, dtype: tl.dtype) -> Array:
    """Values rounded to nearest even, as a tile of ``dtype``; FP8 saturates, as Triton's casts do on Hopper."""
    if dtype not in NARROW:
        return values.astype(_get_np_dtype(dtype), copy=False)
    narrow, wide = NARROW[dtype], torch.from_numpy(np.ascontiguousarray(values)).float()
    if narrow.itemsize == 1:
        wide = wide.clamp(-torch.finfo(narrow).max, torch.finfo(narrow).max)
    return wide.to(narrow).view(torch.uint8 if narrow.itemsize == 1 else torch.uint16).numpy()


def _by_torch(function: Function, x: Array) -> Array:
    return function(torch.from_numpy(np.ascontiguousarray(x))).numpy()


class Builder(InterpreterBuilder):
    """The interpreter's operations, but for those that are not the hardware's."""

    loads_anywhere = False

    def set_grid_dim(self, *sizes: int) -> None:
        """The last step before the programs of a launch."""
        super().set_grid_dim(*sizes)
        self.loads_anywhere = False
        _memory[:], _arguments[:] = _arguments, []

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source in NARROW or target in NARROW:
            return TensorHandle(encode(decode(src.data, source), target), target)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        assert rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        return self.cast_impl(src, dst_type)

    def unary_op(self, arg: TensorHandle, op: Callable[[Array], Array]) -> TensorHandle:
        dtype = arg.dtype.scalar
        return TensorHandle(encode(op(decode(arg.data, dtype)), dtype), dtype)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[[Array, Array], Array]) -> TensorHandle:
        dtype = lhs.dtype.scalar
        if dtype in NARROW:
            made = op(decode(lhs.data, dtype), decode(rhs.data, dtype))
        else:
            made = super().binary_op(lhs, rhs, op).data
        truth = made.dtype == np.bool_  # which the interpreter gives the type of what was compared
        return TensorHandle(made if truth else encode(made, dtype), tl.int1 if truth else dtype)

    def create_fdiv(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        if lhs.dtype.scalar == tl.float32:
            raise NotImplementedError("a GPU approximates the `/` of fp32, as no exact kernel may: tl.div_rn is exact")
        return super().create_fdiv(lhs, rhs)

    def create_sqrt(self, arg: TensorHandle) -> TensorHandle:
        raise NotImplementedError("a GPU approximates tl.sqrt, as no exact kernel may: tl.sqrt_rn is exact")

    def create_precise_sqrt(self, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(_by_torch(torch.sqrt, arg.data), arg.dtype.scalar)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any) -> TensorHandle:
        assert {a.dtype.scalar, b.dtype.scalar} <= NARROW.keys(), "what a tensor core makes of fp32 is not known here"
        # In fp64, where sums of such products hardly round: the order in which BLAS adds depends on a row's place.
        left, right = (decode(x.data, x.dtype.scalar).astype(np.float64) for x in (a, b))
        return TensorHandle(encode(np.matmul(left, right) + d.data, d.dtype.scalar), d.dtype.scalar)

    def create_masked_load(self, ptrs: TensorHandle, mask: TensorHandle, *more: Any) -> TensorHandle:
        if not self.loads_anywhere:
            self.require_inside(ptrs.data, mask.data, _get_np_dtype(ptrs.get_element_ty()).itemsize)
        return super().create_masked_load(ptrs, mask, *more)

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *more: Any) -> None:
        self.require_inside(ptrs.data, mask.data, _get_np_dtype(ptrs.get_element_ty()).itemsize)
        super().create_masked_store(ptrs, value, mask, *more)

    def create_atomic_rmw(
        self, op: Any, ptr: TensorHandle, value: TensorHandle, mask: TensorHandle, *more: Any
    ) -> TensorHandle:
        self.require_inside(ptr.data, mask.data, value.data.itemsize)
        return super().create_atomic_rmw(op, ptr, value, mask, *more)

    def require_inside(self, ptrs: Array, mask: Array, size: int) -> None:
        """An operation touches one tensor of the launch, from its first value to its last."""
        touched = ptrs[np.broadcast_to(mask, ptrs.shape)]
        if touched.size:
            start, end = int(touched.min()), int(touched.max()) + size
            if not any(first <= start and end <= last for first, last in _memory):
                raise IndexError(f"program {self.grid_idx} touches memory outside the tensors of its launch")

    def create_int_to_ptr(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        """Of an address that a kernel reads, nobody knows the tensor.

        So this switches the alarm off, of all loads in the rest of the launch, those of its tensors too. Stores and
        atomic additions still have to be inside.
        """
        self.loads_anywhere = True
        return self.create_bitcast(src, dst_type)

    def create_inline_asm(
        self, asm: str, constraints: str, values: list[TensorHandle], types: list[tl.dtype], is_pure: bool, pack: int
    ) -> SimpleNamespace:
        if asm not in PTX:
            raise NotImplementedError(f"tests/gpu/interpreter.py does not say what this PTX computes: {asm}")
        made = PTX[asm](*(v.data for v in values)).view(_get_np_dtype(types[0]))
        return SimpleNamespace(get_result=lambda i: TensorHandle(made, types[i].scalar))


_memory: list[tuple[int, int]] = []  # first and last byte of each tensor of the launch that runs
_arguments: list[tuple[int, int]] = []  # of the launch that is prepared


def _noting(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The conversion of a launch's arguments, which keeps in mind where the tensors are."""

    def converted(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and arg.numel():
            last = sum((n - 1) * step for n, step in zip(arg.shape, arg.stride(), strict=True))
            _arguments.append((arg.data_ptr(), arg.data_ptr() + (last + 1) * arg.itemsize))
        return convert(arg)

    return converted


# ------------------------------------------------------------------------------------------ PTX


def _flushed(x: Array) -> Array:
    """Subnormal fp32 as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def rough_reciprocal(toward: float) -> Callable[[Array], Array]:
    """``rcp.approx.ftz.f32``, which is documented to err by one unit at most: the fp32 next to ``1 / x`` on one side.

    With one exception: below the reciprocal of a mantissa of all ones, a refinement meets a tie and stays wrong. That
    the hardware gives the value above there, the tests on a GPU show, which take every mantissa.
    """

    def rough(x: Array) -> Array:
        x = _flushed(x)
        nearest, exact = np.float32(1) / x, 1 / x.astype(np.float64)  # of an fp32 enough to tell on which side it is
        beyond = (nearest > exact) if toward > 0 else (nearest < exact)
        kept = beyond | ~np.isfinite(nearest) | (nearest == 0) | (x.view(np.int32) & 0x7FFFFF == 0x7FFFFF)
        return _flushed(np.where(kept, nearest, np.nextafter(nearest, np.float32(toward))))

    return rough


def _packed(dtype: tl.dtype, word: type[np.unsignedinteger[Any]]) -> Callable[..., Array]:
    """Codes of several values in one word, the first one lowest."""
    return lambda *x: np.stack([encode(v, dtype) for v in x], -1).view(word)[..., 0]


def _four_codes(name: str) -> str:
    cast = f"cvt.rn.satfinite.{name}x2.f32 "
    return "{ .reg .b16 lo, hi; " + cast + "lo, $2, $1; " + cast + "hi, $4, $3; mov.b32 $0, {lo, hi}; }"


def _larger_halves(*words: Array) -> Array:
    return np.maximum(*(np.ascontiguousarray(w).view(np.uint16) for w in words)).view(np.int32)


def _store(at: Array, value: Array, inside: Array) -> Array:
    ptrs, mask = at.view(np.uint64), inside != 0
    interpreter.interpreter_builder.require_inside(ptrs, mask, value.itemsize)
    interpreter._interpreter.store(ptrs, value, mask)
    return np.zeros(at.shape, np.int32)


RECIPROCAL = "rcp.approx.ftz.f32 $0, $1;"

# Word for word, so that no instruction changes unseen.
PTX: dict[str, Callable[..., Array]] = {
    RECIPROCAL: rough_reciprocal(-np.inf),
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": lambda x: decode(x, tl.bfloat16),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda x: encode(x, tl.bfloat16),
    "mul.rn.bf16x2 $0, $1, $2;": lambda x, y: encode(decode(x, tl.bfloat16) * decode(y, tl.bfloat16), tl.bfloat16),
    "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;": _packed(tl.float8e4nv, np.uint16),
    "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;": _packed(tl.float8e5, np.uint16),
    _four_codes("e4m3"): _packed(tl.float8e4nv, np.uint32),
    _four_codes("e5m2"): _packed(tl.float8e5, np.uint32),
    "max.u16x2 $0, $1, $2;": _larger_halves,
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }": _store,
}


# ------------------------------------------------------------------------------------------ the language


def _elementwise(function: Function) -> Callable[[tl.tensor], tl.tensor]:
    return lambda x: tl.tensor(TensorHandle(_by_torch(function, x.handle.data), x.dtype), x.type)


def _loop(*bounds: Any, num_stages: int | None = None) -> Iterator[tl.tensor]:
    """Numbers of the kernel, as wide as the bounds."""
    wide = any(isinstance(b, tl.tensor) and b.dtype == tl.int64 for b in bounds)
    dtype = tl.int64 if wide else tl.int32
    for i in range(*(b.handle.data.item() if isinstance(b, tl.tensor) else int(b) for b in bounds)):
        yield tl.tensor(TensorHandle(np.array([i], _get_np_dtype(dtype)), dtype), dtype)


class Rewriter(ASTTransformer):
    """Triton's changes to a function's source, and loops as the compiler has them."""

    def visit_For(self, node: ast.For) -> ast.AST:  # noqa: N802 - the base class names it
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) in ("range", "tl.range"):
            node.iter.func = ast.Name("kernel_loop", ast.Load())
        return node
