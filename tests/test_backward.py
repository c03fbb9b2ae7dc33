"""The FP8 backward against an independent float64 model of the same quantised computation.

The model below quantises by the formula, in numpy and ml_dtypes, and multiplies in float64. What runs may differ from
it by fp32 accumulation and one rounding to bf16; a quantiser in another place, of another tensor or along another axis
would differ by about 2^-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import precgraph
from precgraph import Format, Recipe, ops
from precgraph.graph import PrecisionGraph
from precgraph.lowering.program import Block, Step
from precgraph.lowering.reference import elementwise, gemm
from precgraph.lowering.reference.reductions import ordered_sum
from precgraph.quantizer import QTensor
from tests.families import VOCABULARY, causal_lm

FP32, BF16 = 2.0**-24, 2.0**-8  # largest relative error of one rounding
Array = np.ndarray[Any, np.dtype[np.float64]]


# -------------------------------------------------------------------------------------- the float64 model


def f64(x: Tensor) -> Array:
    out: Array = x.detach().double().numpy()
    return out.reshape(-1, out.shape[-1])


def quantised(x: Array, rows: int, cols: int) -> Array:
    """Values of ``x [M, K]`` after E4M3 with one scale a block: amax / 448 in fp32, round to nearest even."""
    (m, k), out = x.shape, np.zeros_like(x)
    for i in range(0, m, rows):
        for j in range(0, k, cols):
            block = x[i : i + rows, j : j + cols].astype(np.float32)
            scale = np.maximum(np.abs(block).max(), np.float32(1e-12)) / np.float32(448)
            codes = np.clip(block / scale, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            out[i : i + rows, j : j + cols] = codes.astype(np.float64) * np.float64(scale)
    return out


def assert_sum(found: Tensor, terms: Sequence[tuple[Array, Array]], what: str) -> None:
    """``found`` is ``Σ left @ right`` up to fp32 accumulation and one rounding to bf16.

    A group of 64 or more terms is summed exactly and rounded once (1 rounding), scaled (2) and added (one a group): at
    most G + 3 roundings touch any term, each of at most 2^-24 of the sum of the terms' magnitudes.
    """
    exact = sum(left @ right for left, right in terms)
    size = sum(np.abs(left) @ np.abs(right) for left, right in terms)
    groups = sum(-(-left.shape[1] // 64) for left, _ in terms)
    bound = 1.01 * (BF16 * np.abs(exact) + (groups + 3) * FP32 * size)
    error = np.abs(f64(found) - exact)
    assert (error <= bound).all(), f"{what}: {(error / np.maximum(bound, 1e-300)).max()} of the bound"


def random(*shape: int, seed: int, spread: float = 3.0) -> Tensor:
    """bf16 values over several binades, so that blocks have scales of their own."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.exp(spread * torch.rand(*shape[:-1], 1, generator=g))
    return (torch.randn(*shape, generator=g) * wide).bfloat16()


class Projections(nn.Module):
    """Linears of one input: fused into one DGrad."""

    def __init__(self, features: int, widths: Sequence[int], biases: Sequence[bool]) -> None:
        super().__init__()
        names = [f"part{i}_proj" for i in range(len(widths))]
        for name, width, bias in zip(names, widths, biases, strict=True):
            self.add_module(name, nn.Linear(features, width, bias=bias))
        self.names = names

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.get_submodule(name)(x) for name in self.names)


def projections(features: int, widths: Sequence[int], biases: Sequence[bool]) -> Any:
    module = Projections(features, widths, biases).bfloat16()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=i) * 0.05)
    return precgraph.compile(module, "train", example_inputs=(random(1, 8, features, seed=0),))


@pytest.mark.parametrize("count", [1, 100, 256, 301])
@pytest.mark.parametrize(
    ("features", "widths", "biases"),
    [
        (200, (136, 72, 40), (True, False, True)),  # nothing a multiple of 128
        (128, (256, 128), (False, False)),
        (320, (192,), (True,)),
    ],
)
def test_linears(count: int, features: int, widths: tuple[int, ...], biases: tuple[bool, ...]) -> None:
    """y, dX, dW and db of fused and single linears, with tokens, inputs and outputs off the block size."""
    module = projections(features, widths, biases)
    x = random(1, count, features, seed=20).requires_grad_()
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dys = [random(1, count, n, seed=30 + i) for i, n in enumerate(widths)]
    torch.autograd.backward(outputs, dys)

    linears = [module.get_submodule(name) for name in module.names]
    along_k, along_tokens = quantised(f64(x), 1, 128), quantised(f64(x), 128, 1)
    weights = [quantised(f64(linear.weight), 128, 128) for linear in linears]
    for linear, y, dy, weight in zip(linears, outputs, dys, weights, strict=True):
        if linear.bias is None:
            assert_sum(y, [(along_k, weight.T)], "y")
        else:
            assert_biased(y, along_k @ weight.T, np.abs(along_k) @ np.abs(weight.T), f64(linear.bias)[0])
            total = f64(dy).sum(0)
            bound = BF16 * np.abs(total) + count * FP32 * np.abs(f64(dy)).sum(0)
            assert (np.abs(f64(linear.bias.grad)[0] - total) <= 1.01 * bound).all()
        assert_sum(linear.weight.grad, [(quantised(f64(dy), 128, 1).T, along_tokens)], "dW")
    assert x.grad is not None
    terms = [(quantised(f64(dy), 1, 128), w) for dy, w in zip(dys, weights, strict=True)]
    assert_sum(x.grad, terms, "dX")


def assert_biased(y: Tensor, exact: Array, size: Array, bias: Array) -> None:
    """``bf16(bf16(acc) + bias)``: two roundings, of the product and of the sum."""
    bound = BF16 * np.abs(exact) + BF16 * (np.abs(exact + bias) + BF16 * np.abs(exact)) + 8 * FP32 * size
    assert (np.abs(f64(y) - (exact + bias)) <= 1.01 * bound).all()


def test_the_bound_would_notice_another_quantiser() -> None:
    """Along the wrong axis, of the wrong tensor, or none: far outside."""
    x, dy, weight = f64(random(200, 256, seed=1)), f64(random(200, 128, seed=2)), f64(random(128, 256, seed=3))
    right = torch.from_numpy(quantised(dy, 1, 128) @ quantised(weight, 128, 128)).bfloat16()
    assert_sum(right, [(quantised(dy, 1, 128), quantised(weight, 128, 128))], "dX")
    for left, other in (
        (quantised(dy, 128, 1), quantised(weight, 128, 128)),
        (dy, quantised(weight, 128, 128)),
        (quantised(dy, 1, 128), weight),
        (quantised(quantised(dy, 1, 128), 128, 1), quantised(weight, 128, 128)),
    ):
        with pytest.raises(AssertionError):
            assert_sum(right, [(left, other)], "dX")
    assert x.shape == (200, 256)


def test_a_fused_sibling_without_a_gradient() -> None:
    """The group's DGrad comes from the others, not from nobody."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            gate: Tensor = self.gate_proj(x)
            return gate.detach() * self.up_proj(x)

    torch.manual_seed(1)
    module = Gate().bfloat16()
    compiled = precgraph.compile(module, "train", example_inputs=(random(1, 8, 64, seed=0),))
    x = random(1, 30, 64, seed=1).requires_grad_()
    y = compiled(x)
    y.backward(torch.ones_like(y))
    gate = (
        torch.from_numpy(quantised(f64(x), 1, 128) @ quantised(f64(module.gate_proj.weight), 128, 128).T)
    ).bfloat16()
    assert x.grad is not None and module.gate_proj.weight.grad is None
    assert_sum(x.grad, [(quantised(f64(gate), 1, 128), quantised(f64(module.up_proj.weight), 128, 128))], "dX")


# --------------------------------------------------------------------------------- where the quantisers are

Row = tuple[str, str, str, tuple[str, ...]]

ACT, GRAD, TOKENS, WEIGHT = "e4m3 1x128", "e4m3 1x128", "e4m3 128x1", "e4m3 128x128"


def quantise(module: str, fmt: str, source: str) -> Row:
    return ("quantize", module, fmt, (source,))


def linear(module: str, x: str, bias: bool = False) -> Row:
    return (
        "linear",
        module,
        "bf16",
        (f"{x}:{ACT}", f"quantize@{module}:{WEIGHT}", *([f"parameter@{module}:bf16"] * bias)),
    )


def wgrad(module: str, x: str) -> Row:
    return ("linear_wgrad", module, "bf16", (f"quantize@{module}:{TOKENS}", f"quantize@{x}:{TOKENS}"))


def dgrad(first: str, *others: str) -> Row:
    members = (first, *others)
    left, right = ([f"quantize@{m}:{f}" for m in members] for f in (GRAD, WEIGHT))
    return ("linear_dgrad", first, "bf16", (*left, *right))


def layer_zero(graph: PrecisionGraph, *phases: str) -> list[Row]:
    """Operator, module, format and operands (producer, its module, its format) of the nodes that compute something."""
    records, rows = {r.name: r for r in graph.records()}, []
    short = {name: r.precision.module.partition("layers.0.")[2] or r.precision.module for name, r in records.items()}
    for r in records.values():
        if r.precision.segment != "model.layers.0" or r.precision.phase not in phases:
            continue
        if r.op in ("getitem", "accumulate_grad", "parameter"):
            continue
        operands = (f"{records[p].op}@{short[p]}:{records[p].precision.format}" for _, p in r.operands)
        rows.append((r.op, short[r.name], str(r.precision.format), tuple(operands)))
    return rows


def test_quantisers_of_the_forward() -> None:
    rows = layer_zero(precgraph.compile(causal_lm("qwen2"), "train").precgraph.graph, "forward", "refresh")
    attention, mlp = "self_attn", "mlp"
    wanted = [
        *(quantise(f"{attention}.{p}_proj", WEIGHT, f"parameter@{attention}.{p}_proj:bf16") for p in "qkvo"),
        *(quantise(f"{mlp}.{p}_proj", WEIGHT, f"parameter@{mlp}.{p}_proj:bf16") for p in ("gate", "up", "down")),
        quantise("input_layernorm", ACT, "rms_norm@input_layernorm:bf16"),
        *(linear(f"{attention}.{p}_proj", "quantize@input_layernorm", bias=True) for p in "qkv"),
        quantise(attention, ACT, f"getitem@{attention}:bf16"),
        linear(f"{attention}.o_proj", f"quantize@{attention}"),
        quantise("post_attention_layernorm", ACT, "rms_norm@post_attention_layernorm:bf16"),
        *(linear(f"{mlp}.{p}_proj", "quantize@post_attention_layernorm") for p in ("gate", "up")),
        quantise(mlp, ACT, f"gated@{mlp}:bf16"),
        linear(f"{mlp}.down_proj", f"quantize@{mlp}"),
    ]
    found = [r for r in rows if r[0] in ("quantize", "linear")]
    assert sorted(found) == sorted(wanted)
    others = {(r[0], r[2]) for r in rows} - {(r[0], r[2]) for r in found}
    assert all(fmt == "bf16" for op, fmt in others if op not in ("attention",)), others


def test_quantisers_of_the_backward() -> None:
    """All nodes of one layer's backward that compute something, by hand; the order is that of their dependencies."""
    rows = layer_zero(precgraph.compile(causal_lm("qwen2"), "train").precgraph.graph, "backward")
    a, m, after, before = "self_attn", "mlp", "post_attention_layernorm", "input_layernorm"
    arriving = "add@model.layers.1.input_layernorm:bf16"
    wanted: list[Row] = [
        *(quantise(f"{m}.down_proj", f, arriving) for f in (GRAD, TOKENS)),
        dgrad(f"{m}.down_proj"),
        # Each activation once more, from bf16, along tokens; what makes it is repeated, too.
        ("gated", m, "bf16", (f"linear@{m}.gate_proj:bf16", f"linear@{m}.up_proj:bf16")),
        quantise(m, TOKENS, f"gated@{m}:bf16"),
        wgrad(f"{m}.down_proj", m),
        ("gated_backward", m, "bf16",
         (f"linear_dgrad@{m}.down_proj:bf16", f"linear@{m}.gate_proj:bf16", f"linear@{m}.up_proj:bf16")),
        *(quantise(f"{m}.{p}_proj", f, f"getitem@{m}:bf16") for p in ("gate", "up") for f in (GRAD, TOKENS)),
        dgrad(f"{m}.gate_proj", f"{m}.up_proj"),
        ("rms_norm", after, "bf16", ("add@model.layers.0:bf16", f"parameter@{after}:bf16")),
        quantise(after, TOKENS, f"rms_norm@{after}:bf16"),
        *(wgrad(f"{m}.{p}_proj", after) for p in ("gate", "up")),
        ("rms_norm_backward", after, "bf16",
         (f"linear_dgrad@{m}.gate_proj:bf16", "add@model.layers.0:bf16", f"parameter@{after}:bf16")),
        ("add", after, "bf16", (arriving, f"getitem@{after}:bf16")),
        *(quantise(f"{a}.o_proj", f, f"add@{after}:bf16") for f in (GRAD, TOKENS)),
        dgrad(f"{a}.o_proj"),
        quantise(a, TOKENS, f"getitem@{a}:bf16"),
        wgrad(f"{a}.o_proj", a),
        ("attention_backward", a, "bf16",
         (f"linear_dgrad@{a}.o_proj:bf16", f"rope@{a}:bf16", f"rope@{a}:bf16", f"split_heads@{a}:bf16",
          f"getitem@{a}:bf16", f"getitem@{a}:fp32")),
        *[("rope_backward", a, "bf16",
           (f"getitem@{a}:bf16", "getitem@model.rotary_emb:bf16", "getitem@model.rotary_emb:bf16"))] * 2,
        *[("merge_heads", a, "bf16", (f"rope_backward@{a}:bf16",))] * 2,
        ("merge_heads", a, "bf16", (f"getitem@{a}:bf16",)),
        *(quantise(f"{a}.{p}_proj", f, f"merge_heads@{a}:bf16") for p in "qkv" for f in (GRAD, TOKENS)),
        *(("bias_grad", f"{a}.{p}_proj", "bf16", (f"merge_heads@{a}:bf16",)) for p in "qkv"),
        dgrad(f"{a}.q_proj", f"{a}.k_proj", f"{a}.v_proj"),
        ("rms_norm", before, "bf16", ("embedding@model.embed_tokens:bf16", f"parameter@{before}:bf16")),
        quantise(before, TOKENS, f"rms_norm@{before}:bf16"),
        *(wgrad(f"{a}.{p}_proj", before) for p in "qkv"),
        ("rms_norm_backward", before, "bf16",
         (f"linear_dgrad@{a}.q_proj:bf16", "embedding@model.embed_tokens:bf16", f"parameter@{before}:bf16")),
        ("add", before, "bf16", (f"add@{after}:bf16", f"getitem@{before}:bf16")),
    ]  # fmt: skip
    assert sorted(rows) == sorted(wanted)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Step, tuple[Any, ...], Any]]]:
    """Every step that runs, with its arguments and its result."""
    log: list[tuple[Step, tuple[Any, ...], Any]] = []
    run_block = Block.run

    def record(step: Step) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = step.run(*args, **kwargs)
            log.append((step, args, result))
            return result

        return run

    def run(self: Block, values: Any, *, checked: bool = False, observe: Any = None) -> tuple[Any, ...]:
        steps = tuple(replace(step, run=record(step)) for step in self.steps)
        return run_block(Block(self.inputs, self.outputs, steps), values, checked=checked, observe=observe)

    monkeypatch.setattr(Block, "run", run)
    return log


def test_what_runs_is_what_the_graph_says(executed: list[tuple[Step, tuple[Any, ...], Any]]) -> None:
    """Operands of the executed GEMMs are codes and scales of the graph's formats, and every node ran exactly once."""
    actor = precgraph.compile(causal_lm("qwen3"), "train")
    ids = torch.arange(140)[None]
    actor(ids, labels=ids).loss.backward()

    def formats(*operands: Any) -> list[str]:
        return [str((o if isinstance(o, QTensor) else o.quantized).format) for o in operands]

    seen = dict.fromkeys(("fp8_linear", "fp8_dgrad", "fp8_wgrad"), 0)
    for step, args, result in executed:
        name = getattr(step.run, "__name__", "")
        if name == "fp8_linear":
            assert formats(args[0], args[1]) == [ACT, WEIGHT]
        elif name == "fp8_dgrad":
            assert formats(*args[0]) == [GRAD] * len(args[0]) and formats(*args[1]) == [WEIGHT] * len(args[1])
        elif name == "fp8_wgrad":
            assert formats(*args) == [TOKENS, TOKENS]
            assert args[0].codes.dtype == args[1].codes.dtype == torch.float8_e4m3fn
        if name in seen:
            seen[name] += 1
            assert result.dtype == torch.bfloat16
    assert seen == {"fp8_linear": 14, "fp8_dgrad": 8, "fp8_wgrad": 14}, "7, 4 (two of them fused) and 7 a layer"
    graph = actor.precgraph.graph
    nodes = [n.name for n in graph if n.op == "call_function" and n.meta["precision"].phase != "refresh"]
    ran = [step.name for step, _, _ in executed]
    assert sorted(ran) == sorted(n for n in nodes if not n.startswith("accumulate_grad"))


def test_frozen_parameters_are_neither_saved_for_nor_computed(
    executed: list[tuple[Step, tuple[Any, ...], Any]],
) -> None:
    def run(*frozen: str) -> tuple[int, int, int]:
        """WGrads, their activations quantised along tokens, and nodes of the backward that ran in layer 0."""
        model = causal_lm("qwen2")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(f in name for f in frozen))
        actor = precgraph.compile(model, "train")
        executed.clear()
        ids = torch.arange(20)[None]
        actor(ids, labels=ids).loss.backward()
        phase = {n.name: n.meta["precision"].phase for n in actor.precgraph.graph}
        operands = {n.args[1].name for n in actor.precgraph.graph if n.target is ops.linear_wgrad}
        layer = [s for s, _, _ in executed if "layers.0" in s.module]
        made = [s for s, _, r in executed if s.name in operands and isinstance(r, QTensor) and str(r.format) == TOKENS]
        wgrads = [s for s in layer if s.run is gemm.fp8_wgrad]
        return len(wgrads), sum("layers.0" in s.module for s in made), sum(phase[s.name] == "backward" for s in layer)

    full = run()
    assert full[:2] == (7, 4)
    assert run("layers.0.self_attn.q_proj")[:2] == (6, 4), "k and v still need the shared input"
    attention = ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj")
    assert run(*attention)[:2] == (4, 3)
    assert run("embed_tokens", "layers.0.") == (0, 0, 0), "below the last trainable parameter there is no backward"
    below = run("layers.0.")
    assert below[:2] == (0, 0) and 0 < below[2] < full[2], "gradients pass through to the embedding"


# ------------------------------------------------------------------------------------ around the GEMMs


def reference(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Gradients by float64 autograd."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = function(*wide)
    return list(torch.autograd.grad(out, wide, dy.double()))


@pytest.mark.parametrize("width", [64, 576, 1300])
def test_rms_norm_backward(width: int) -> None:
    """``g = bf16(dy·w)`` rounds twice (dy·w, and dx at the end); x̂ is rounded once for dw."""
    x, dy, weight = random(1, 40, width, seed=1), random(1, 40, width, seed=2), random(1, width, seed=3)[0]
    eps = 1e-5
    dx, dw = elementwise.rms_norm_backward(dy, x, weight, eps)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

    wanted_dx, wanted_dw = reference(norm, dy, x, weight)
    r = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    hat, g = (x.double() * r).abs(), (dy.double() * weight.double()).abs()
    terms = r * (g + hat * (g * hat).mean(-1, keepdim=True))
    assert ((dx.double() - wanted_dx).abs() <= BF16 * wanted_dx.abs() * 1.01 + (BF16 + 40 * FP32) * terms).all()
    size = (dy.double().abs() * hat).sum((0, 1))
    assert ((dw.double() - wanted_dw).abs() <= BF16 * wanted_dw.abs() * 1.01 + (BF16 + 60 * FP32) * size).all()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_gated_backward(name: str) -> None:
    """dgate: dy·up and the result are rounded; dup: the activation and the result. fp32 slopes err by under 2^-19."""
    gate, up, dy = (random(1, 30, 257, seed=s, spread=1.0) for s in (1, 2, 3))

    def exact(gate: Tensor, up: Tensor) -> Tensor:
        tanh = {"approximate": "tanh"} if name == "gelu_tanh" else {}
        return getattr(torch.nn.functional, name.removesuffix("_tanh"))(gate, **tanh) * up

    wanted = reference(exact, dy, gate, up)
    size = (dy.double() * up.double()).abs(), (dy.double() * gate.double()).abs()
    for grad, want, scale in zip(elementwise.gated_backward(dy, gate, up, name), wanted, size, strict=True):
        assert ((grad.double() - want).abs() <= 2.02 * BF16 * want.abs() + 2**-19 * scale).all()
    alone = elementwise.activate_backward(dy, gate, name)
    (want,) = reference(lambda g: exact(g, torch.ones_like(g)), dy, gate)
    assert ((alone.double() - want).abs() <= 1.01 * BF16 * want.abs() + 2**-19 * dy.double().abs()).all()


def test_rope_backward() -> None:
    """Two rounded products and a rounded sum, in bf16 as upstream; in fp32 one rounding."""
    positions, frequencies = torch.arange(50)[None], 10000.0 ** (-torch.arange(0, 16) / 16)
    cos, sin = ops.rope_table(positions, frequencies, 1.0, torch.bfloat16)
    dy = random(1, 50, 3, 32, seed=5)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.double().unsqueeze(2) + torch.cat((-second, first), -1) * sin.double().unsqueeze(2)

    (wanted,) = reference(rotate, dy, dy)
    size = dy.double().abs() + dy.double().abs().roll(16, -1)
    assert (
        (ops.rope_backward(dy, cos, sin).double() - wanted).abs() <= BF16 * (1.01 * wanted.abs() + 2.02 * size)
    ).all()
    wide = elementwise.wide_rope_backward(dy, cos, sin)
    assert ((wide.double() - wanted).abs() <= 1.01 * BF16 * wanted.abs() + 4 * FP32 * size).all()


def test_plain_gemms() -> None:
    """lm_head's gradients: bf16 operands, fp32 sums, one rounding."""
    dy, x, weight = random(1, 70, 300, seed=1), random(1, 70, 96, seed=2), random(300, 96, seed=3)
    for found, left, right in (
        (gemm.plain_dgrad([dy], [gemm.Float32Weight.create(weight, None)]), f64(dy), f64(weight)),
        (gemm.plain_wgrad(dy, x), f64(dy).T, f64(x)),
        (gemm.bias_grad(dy)[None], np.ones((1, 70)), f64(dy)),
    ):
        exact, size = left @ right, np.abs(left) @ np.abs(right)
        assert (np.abs(f64(found) - exact) <= 1.01 * BF16 * np.abs(exact) + left.shape[1] * FP32 * size).all()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 511, 512, 513, 1024, 1300])
def test_ordered_sum(width: int) -> None:
    """The rule ``pieces512``, by a loop over single fp32 additions."""
    x = random(4, width, seed=width).float() * 1.1
    for row, found in zip(x.numpy(), ordered_sum(x).numpy(), strict=True):
        piece = 1
        while piece < min(width, 512):
            piece *= 2
        padded = np.zeros(-(-width // piece) * piece, np.float32)
        padded[:width] = row
        total = padded[:piece].copy()
        for start in range(piece, len(padded), piece):
            for i in range(piece):
                total[i] = np.float32(total[i] + padded[start + i])
        while len(total) > 1:
            half = len(total) // 2
            total = np.array([np.float32(total[i] + total[i + half]) for i in range(half)], np.float32)
        assert found[0] == total[0]


# ------------------------------------------------------------------------------------------ micro-batches


def test_micro_batches_cut_at_multiples_of_128_tokens() -> None:
    """WGrad's groups are counted over packed tokens: an aligned cut moves only additions, another one whole groups."""

    def weight_gradients(batches: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Of the summed loss of all sequences, each batch packed into one row; sequences are the same in any split."""
        actor = precgraph.compile(causal_lm("llama"), "train")
        total: dict[str, Tensor] = {}
        done = 0
        for lengths in batches:
            rows = [ids[done + sum(lengths[:i]) :][:n] for i, n in enumerate(lengths)]
            done += sum(lengths)
            positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
            actor.zero_grad()
            precgraph.token_logprobs(actor, torch.cat(rows)[None], position_ids=positions).sum().backward()
            for name, parameter in actor.named_parameters():
                if "proj" in name:
                    assert parameter.grad is not None
                    total[name] = total.get(name, torch.zeros_like(parameter, dtype=torch.float64)) + parameter.grad
        return total

    ids = torch.randint(0, VOCABULARY, (256,), generator=torch.Generator().manual_seed(8))

    def difference(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
        one, two = weight_gradients(a), weight_gradients(b)
        return max(float((one[n] - two[n]).norm() / one[n].norm()) for n in one)

    assert difference([(128, 128)], [(128,), (128,)]) < 2**-8, "roundings of the parts' sums to bf16"
    assert 2**-7 < difference([(100, 156)], [(100,), (156,)]) < 2**-4, "groups of other tokens: the quantiser's error"


# ----------------------------------------------------------------------------------------- other formats


def recipe(**formats: tuple[str, str] | None) -> Recipe:
    made = {k: Format(dtype=f"float8_{f[0]}", granularity=f[1]) if f else None for k, f in formats.items()}
    return replace(Recipe.jet_rl(), linear=replace(Recipe.jet_rl().linear, **made))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formats", "where"),
    [
        ({"activation": ("e4m3fn", "128x128")}, "linear making"),  # a row's scale would depend on other rows
        ({"activation": ("e5m2", "1x128")}, "linear making"),  # no exact sum, so none that is the same in any batch
        ({"weight": ("e4m3fn", "1x128")}, "linear_dgrad making"),
        ({"grad_output": ("e4m3fn", "1x64")}, "linear_dgrad making"),
        ({"grad_output": None}, "linear_dgrad making"),
        ({"wgrad_activation": ("e4m3fn", "64x1")}, "linear_wgrad making"),
    ],
)
def test_formats_that_no_kernel_multiplies_are_refused(formats: dict[str, tuple[str, str] | None], where: str) -> None:
    with pytest.raises(precgraph.LoweringError, match=rf"model\.layers\.\d\.\S+_proj: no kernel .* {where}"):
        precgraph.compile(causal_lm("qwen2"), "train", recipe(**formats))


def test_gradient_formats_do_not_touch_the_forward() -> None:
    actor = precgraph.compile(causal_lm("qwen2"), "train")
    other = recipe(grad_output=("e5m2", "1x128"), wgrad_grad_output=("e5m2", "128x1"))
    wide = precgraph.compile(actor, "train", other)
    ids = torch.arange(30)[None]
    assert torch.equal(wide(ids).logits, actor(ids).logits)
    assert wide.precgraph.graph.digest() == actor.precgraph.graph.digest()
    weight = actor.model.layers[0].mlp.up_proj.weight
    one, two = (torch.autograd.grad(m(ids, labels=ids).loss, weight)[0].float() for m in (actor, wide))
    # E5M2 has one mantissa bit less than E4M3: errors of 2^-3 a value at most, less in a sum.
    assert 0 < float((one - two).norm() / one.norm()) < 2**-3


@pytest.mark.parametrize(
    "formats",
    [
        {"activation": ("e4m3fn", "1x64"), "weight": ("e4m3fn", "64x64"), "grad_output": ("e4m3fn", "1x64")},
        {"wgrad_activation": ("e4m3fn", "128x128")},
    ],
)
def test_other_blocks(formats: dict[str, tuple[str, str] | None]) -> None:
    """Smaller groups, and WGrad's activations in square blocks, against the same float64 model."""
    module = nn.Linear(200, 136, bias=False).bfloat16()
    x, dy = random(1, 150, 200, seed=1).requires_grad_(), random(1, 150, 136, seed=2)
    compiled = precgraph.compile(module, "train", recipe(**formats), example_inputs=(x.detach(),))
    compiled(x).backward(dy)
    assert x.grad is not None and module.weight.grad is not None
    group = 64 if "activation" in formats else 128
    weight = quantised(f64(module.weight), group, group)
    assert_sum(x.grad, [(quantised(f64(dy), 1, group), weight)], "dX")
    columns = 128 if "wgrad_activation" in formats else 1
    assert_sum(module.weight.grad, [(quantised(f64(dy), 128, 1).T, quantised(f64(x), 128, columns))], "dW")
