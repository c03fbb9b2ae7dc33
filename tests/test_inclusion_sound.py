"""What a check must not pass over: differences behind suppressed ones, values of buffers, versions of kernels."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import precgraph
from precgraph.checking import lowered
from precgraph.format import Format
from precgraph.graph import PrecisionGraph, annotate, op_name, tensor
from precgraph.lowering import lower as lowering
from precgraph.recipe import Recipe
from precgraph.trace import trace
from precgraph.verify import Report, check_inclusion
from tests.surgery import find, pair, program, set_dtype, swap

JET = Recipe.jet_rl()
CPU = torch.device("cpu")


def findings(report: Report) -> set[tuple[str, str]]:
    return {(f.op, a) for f in report.violations for a in f.attributes}


# ------------------------------------------------------------------------------ suppressed differences


def test_kernels_changed_behind_formats_that_nothing_explains() -> None:
    """The getitems between the RoPE table and the rotations get another dtype; every rotation another kernel."""
    train, infer = pair("llama")
    for node in infer:
        if op_name(node) == "getitem":
            node.meta["tensor"] = replace(tensor(node), dtype="float32")
            annotate(node, format=Format.plain("float32"))
        elif op_name(node) == "rope":
            annotate(node, numerics="somebody.else/1")
    report = check_inclusion(train, infer)
    assert not report.ok
    assert ("getitem", "dtype") in findings(report)


@pytest.mark.parametrize(("attribute", "value"), [("numerics", "else/1"), ("role", "planted"), ("compute", "float64")])
def test_any_difference_of_a_getitem_alone(attribute: str, value: str) -> None:
    train, infer = pair("llama")
    node = next(n for n in infer if n.target is operator.getitem)
    annotate(node, **{attribute: value})
    (finding,) = check_inclusion(train, infer).violations
    assert (finding.node, finding.attributes) == (node.name, (attribute,))


def test_a_getitem_that_differs_otherwise_than_its_source() -> None:
    train, infer = pair("llama")
    item = next(n for n in infer if n.target is operator.getitem)
    annotate(item.args[0], format=Format.plain("float32"))  # type: ignore[arg-type]
    node = next(n for n in infer if n.target is operator.getitem)
    annotate(node, format=Format.plain("float16"))
    named = {f.node for f in check_inclusion(train, infer).violations}
    assert {node.name, item.args[0].name} <= named  # type: ignore[union-attr]


def test_a_dtype_that_only_seems_to_follow_an_exchanged_operand() -> None:
    """Operands of an addition that were exchanged are not the operands of the same place."""
    train, infer = pair("llama")
    module = "model.layers.1"
    for graph in (train, infer):  # one operand of the addition is fp32 on both sides
        left = find(graph, "add", module).args[0]
        assert isinstance(left, torch.fx.Node)
        left.meta["tensor"] = replace(tensor(left), dtype="float32")
    swap(infer, "add", module)
    set_dtype(infer, "add", module, "float32")
    annotate(find(infer, "add", module), compute=None)
    report = check_inclusion(train, infer)
    assert ("add", "dtype") in findings(report)


# ---------------------------------------------------------------------------- buffers and constants


def llama(theta: float = 1e4, device: str = "cpu") -> nn.Module:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval()


def graphs(ours: nn.Module, theirs: nn.Module, *inputs: Tensor) -> tuple[PrecisionGraph, PrecisionGraph]:
    """The training program of one model and the rollout program of another, both for the CPU."""
    sides = ((ours, "train"), (theirs, "infer"))
    one, other = (lowered(trace(m, inputs or None), mode, JET, "auto", CPU) for m, mode in sides)
    return one, other


def test_rope_theta() -> None:
    train, infer = graphs(llama(1e4), llama(1e6))
    report = check_inclusion(train, infer)
    (finding,) = report.violations
    assert finding.code == "PG303 buffer values"
    assert (finding.op, finding.attributes) == ("parameter", ("content",))
    assert finding.inherited > 0
    assert train.digest() != infer.digest()
    assert check_inclusion(train, PrecisionGraph.from_json(infer.to_json())).violations == report.violations


def test_a_model_without_weights_is_the_real_one(exported_anew: None) -> None:
    for sides in ((llama(), llama(device="meta")), (llama(device="meta"), llama()), (llama(), llama())):
        train, infer = graphs(*sides)
        report = check_inclusion(train, infer)
        assert report.ok
        assert report.not_proved == ()
        assert train.digest() == infer.digest()
    assert not check_inclusion(*graphs(llama(1e4, "meta"), llama(1e6, "meta"))).ok


class _Affine(nn.Module):
    """A linear, a constant tensor, a buffer, and one that checkpoints hold."""

    def __init__(self, constant: float, buffer: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.constant = torch.tensor(constant, dtype=torch.bfloat16)
        self.register_buffer("shift", torch.full((64,), buffer, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("learnt", torch.ones(64, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.constant + self.shift + self.learnt
        return y


@pytest.mark.parametrize(("values", "count"), [((1.0, 2.0), 0), ((3.0, 2.0), 1), ((1.0, 3.0), 1), ((3.0, 3.0), 2)])
def test_values_of_a_plain_module(values: tuple[float, float], count: int) -> None:
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    train, infer = graphs(_Affine(1.0, 2.0), _Affine(*values), x)
    report = check_inclusion(train, infer)
    assert [f.attributes for f in report.violations] == [("content",)] * count
    assert (train.digest() == infer.digest()) == (count == 0)


def test_a_buffer_of_the_checkpoint_is_a_weight() -> None:
    """Its values are no part of the program, its dtype is."""
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    ours, other, wide = _Affine(1.0, 2.0), _Affine(1.0, 2.0), _Affine(1.0, 2.0)
    other.learnt = other.learnt * 3
    train, infer = graphs(ours, other, x)
    assert check_inclusion(train, infer).ok and train.digest() == infer.digest()
    wide.learnt = wide.learnt.float()
    assert ours.learnt.dtype != wide.learnt.dtype
    train, infer = graphs(ours, wide, x)
    assert not check_inclusion(train, infer).ok and train.digest() != infer.digest()


def test_values_that_are_not_there_are_not_proved() -> None:
    model = _Affine(1.0, 2.0).to("meta")
    model.constant = model.constant.to("meta")
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device="meta")
    report = check_inclusion(*graphs(model, model, x))
    assert report.ok
    assert {f.code for f in report.not_proved} == {"PG907 buffer values unknown"}
    one = trace(model, (x,))  # two programs of one model read the same buffers
    assert check_inclusion(*(lowered(one, mode, JET, "auto", CPU) for mode in ("train", "infer"))).not_proved == ()


# ------------------------------------------------------------------------------- device and versions


def test_a_model_without_values_is_lowered_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.empty(1, device="meta")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert lowering.target(tensors).type == "cuda"
    assert lowering.backend_name("auto", lowering.target(tensors)) == "deep_gemm"
    assert lowering.target([torch.empty(1)]).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lowering.target(tensors) == CPU
    assert lowering.backend_name("auto", CPU) == "reference"
    assert lowering.backend_name("triton", CPU) == "triton"


def test_the_digest_has_the_versions_of_the_forwards_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    train, infer = pair("llama")
    assert train.libraries == infer.libraries == (f"precgraph {precgraph.__version__}", f"torch {torch.__version__}")
    assert program("llama", "train").libraries == ()
    assert train.digest() == infer.digest() == PrecisionGraph.from_json(train.to_json()).digest()

    def versioned(library: str, *ops: str) -> list[PrecisionGraph]:
        def select(*args: Any) -> Any:
            kernel = choose(*args)
            return replace(kernel, library=library) if kernel.op in ops else kernel

        monkeypatch.setattr(lowering, "select", select)
        built = [program("llama", mode) for mode in ("train", "infer")]
        return [lowering.lower(g, "reference", torch.device("meta")) for g in built]

    choose = lowering.select
    backward = {op_name(n) for n in train if n.op == "call_function"} - {op_name(n) for n in infer}
    same = versioned("gradients 2", *backward)
    assert {g.digest() for g in same} == {train.digest()}
    new, newer = versioned("gemms 1", "linear"), versioned("gemms 2", "linear")
    assert new[0].libraries[0] == "gemms 1"
    assert new[0].digest() == new[1].digest()
    assert newer[0].digest() == newer[1].digest()
    assert len({train.digest(), new[0].digest(), newer[0].digest()}) == 3
