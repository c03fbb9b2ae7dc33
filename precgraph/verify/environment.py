"""Level env: what differs between two machines, and whether that can change a bit.

A record (:func:`precgraph.environment.record`) is plain data; here two are compared. What can change bits is a table
with its source, so that a difference that cannot is a note and one that nobody knows is never called harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precgraph import strict_json
from precgraph.errors import InputError
from precgraph.verify.report import Finding, Report
from precgraph.verify.rules import RULES

KIND = "precgraph environment"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that can change bits: how, where that is read, and its default where it has one."""

    effect: str
    source: str
    default: str | None = None


_VLLM, _TE = "vllm/envs.py (0.32)", "TransformerEngine docs/envvars (2)"
_TORCH, _CUBLAS = "torch 2.13, aten/src/ATen/Context.cpp", "cuBLAS documentation, reproducibility"
_CPU = "torch 2.13, aten/src/ATen/native/DispatchStub.cpp"
VARIABLES: dict[str, Variable] = {
    # vLLM
    "VLLM_USE_DEEP_GEMM": Variable("which FP8 GEMM, and with it the rule of its scales", _VLLM, "1"),
    "VLLM_MOE_USE_DEEP_GEMM": Variable("which grouped FP8 GEMM", _VLLM, "1"),
    "VLLM_USE_DEEP_GEMM_E8M0": Variable("power-of-two scales, and weights that are quantised twice", _VLLM, "1"),
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": Variable("which block FP8 GEMM", _VLLM, "1"),
    "VLLM_DISABLED_KERNELS": Variable("which kernels may be picked", _VLLM, ""),
    "VLLM_BATCH_INVARIANT": Variable("kernels whose sums do not depend on the batch", _VLLM, "0"),
    "VLLM_USE_V2_MODEL_RUNNER": Variable("which log-softmax makes the log-probabilities, but in our plugin", _VLLM),
    "VLLM_USE_FLASHINFER_SAMPLER": Variable("how tokens are drawn under top-k and top-p", _VLLM),
    "VLLM_ATTENTION_BACKEND": Variable("which attention kernel", "vllm/envs.py (up to 0.12; now attention_config)"),
    "VLLM_FLASH_ATTN_VERSION": Variable("which FlashAttention", "vllm/envs.py (up to 0.12; now attention_config)"),
    "VLLM_FLOAT32_MATMUL_PRECISION": Variable("TF32 in fp32 products", _VLLM, "highest"),
    "VLLM_MARLIN_USE_ATOMIC_ADD": Variable("sums in no fixed order", _VLLM, "0"),
    "VLLM_MARLIN_INPUT_DTYPE": Variable("what activations are rounded to", _VLLM),
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK": Variable("which kernel routes to experts", _VLLM, "1"),
    "VLLM_CPU_ATTN_SPLIT_KV": Variable("how attention sums over keys on a CPU", _VLLM, "1"),
    "VLLM_ALLREDUCE_USE_SYMM_MEM": Variable("order of sums across cards", _VLLM),
    "VLLM_ALLREDUCE_USE_FLASHINFER": Variable("order of sums across cards", _VLLM),
    # SGLang
    "SGLANG_ENABLE_JIT_DEEPGEMM": Variable("which FP8 GEMM", "sglang/srt/environ.py"),
    "SGL_ENABLE_JIT_DEEPGEMM": Variable("which FP8 GEMM", "sglang/srt (older name)"),
    # TransformerEngine
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": Variable("fp32 scales instead of powers of two", _TE, "0"),
    "NVTE_FP8_BLOCK_AMAX_EPSILON": Variable("the floor of a block's maximum", _TE),
    "NVTE_FLASH_ATTN": Variable("which attention kernel", _TE, "1"),
    "NVTE_FUSED_ATTN": Variable("which attention kernel", _TE, "1"),
    "NVTE_UNFUSED_ATTN": Variable("which attention kernel", _TE, "1"),
    "NVTE_FUSED_ATTN_BACKEND": Variable("which attention kernel", _TE),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": Variable("sums in no fixed order", _TE, "1"),
    "NVTE_NORM_FWD_USE_CUDNN": Variable("which norm kernel", _TE, "0"),
    # torch, cuBLAS, Triton
    "NVIDIA_TF32_OVERRIDE": Variable("TF32 in fp32 products, behind torch's back", "cuBLAS documentation, TF32"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": Variable("TF32 in fp32 products", _TORCH, "0"),
    "CUBLAS_WORKSPACE_CONFIG": Variable("which cuBLAS algorithm, and whether runs repeat", _CUBLAS),
    "CUBLASLT_WORKSPACE_SIZE": Variable("which cuBLASLt algorithm", "torch 2.13, aten/src/ATen/cuda/CUDABlas.cpp"),
    "TORCH_BLAS_PREFER_CUBLASLT": Variable("which GEMM library", _TORCH),
    "DISABLE_ADDMM_CUDA_LT": Variable("which GEMM library", "torch 2.13, aten/src/ATen/native/cuda/Blas.cpp"),
    "PYTORCH_TUNABLEOP_ENABLED": Variable("GEMMs picked by timing", "torch 2.13, cuda/tunable/README.md", "0"),
    "TORCHINDUCTOR_MAX_AUTOTUNE": Variable("kernels picked by timing", "torch/_inductor/config.py", "0"),
    "TRITON_INTERPRET": Variable("an interpreter that casts otherwise", "Triton documentation, debugging", "0"),
    "DG_JIT_USE_NVRTC": Variable("which compiler makes DeepGEMM's kernels", "DeepGEMM README", "0"),
    "FLASH_ATTENTION_DETERMINISTIC": Variable("order of sums in attention's backward", "flash_attn (ROCm) README"),
    # CPU
    "ATEN_CPU_CAPABILITY": Variable("which vector kernels: another length, another order of sums", _CPU),
    "ONEDNN_MAX_CPU_ISA": Variable("which GEMM kernels", "oneDNN documentation, CPU dispatcher control"),
    "DNNL_MAX_CPU_ISA": Variable("which GEMM kernels", "oneDNN documentation, CPU dispatcher control"),
    "ONEDNN_DEFAULT_FPMATH_MODE": Variable("fp32 products in bf16", "oneDNN documentation, fpmath mode", "STRICT"),
    "DNNL_DEFAULT_FPMATH_MODE": Variable("fp32 products in bf16", "oneDNN documentation, fpmath mode", "STRICT"),
    "MKL_CBWR": Variable("which code paths MKL may take", "oneMKL documentation, numerical reproducibility"),
    "OMP_NUM_THREADS": Variable("how torch's own sums and products are divided", "torch documentation, CPU threading"),
    "MKL_NUM_THREADS": Variable("how MKL's products are divided", "oneMKL documentation, threading"),
    # several cards
    "NCCL_ALGO": Variable("order of sums across cards", "NCCL documentation, environment variables"),
    "NCCL_PROTO": Variable("order of sums across cards", "NCCL documentation, environment variables"),
    "NCCL_NVLS_ENABLE": Variable("sums made in the switch", "NCCL documentation, environment variables"),
}
"""The variables that are recorded, and no others: none of them is a secret."""

# Packages that run no arithmetic of a policy.
_HARMLESS = {"python", "networkx", "gguf", "accelerate", "driver"}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def read(path: str | Path) -> dict[str, Any]:
    """A record from a file; InputError if it is none."""
    data = strict_json.read(Path(path))
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError("is no record of a machine", path=str(path), remedy="write one with precgraph env -o FILE")
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"is a record of schema {data.get('schema')!r}, and this version reads {SCHEMA}", path=str(path),
            remedy="write both with one version of precgraph",
        )  # fmt: skip
    for table in ("versions", "variables", "cpu", "flags", "digests"):
        if not isinstance(data.get(table), dict):
            raise InputError(f"has no table {table!r}", path=str(path), remedy="write it again")
    if not isinstance(data.get("cards"), list) or not all(isinstance(card, dict) for card in data["cards"]):
        raise InputError("has no list of cards", path=str(path), remedy="write it again")
    if not isinstance(data["versions"].get("torch"), str):  # an empty record would differ from nothing
        raise InputError("does not name torch's version", path=str(path), remedy="write it again")
    return data


def compare_environments(train: Mapping[str, Any], infer: Mapping[str, Any]) -> Report:
    """Two records: violations can change bits, notes cannot; ``not_proved`` is what one side does not say."""
    violations: list[Finding] = []
    notes: list[Finding] = []
    unknown: list[Finding] = []
    compared = 0
    for kind, name, a, b in _pairs(train, infer):
        compared += 1
        if a == b:
            continue
        if (a is None or b is None) and kind in ("digest", "cpu"):
            unknown.append(_finding("not recorded", kind, name, a, b, "one side does not say"))
            continue
        finding, harmless = _judge(kind, name, a, b)
        (notes if harmless else violations).append(finding)
    return Report(compared, tuple(violations), tuple(notes), unit="facts", not_proved=tuple(unknown))


def _pairs(train: Mapping[str, Any], infer: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    for kind, table in (("digest", "digests"), ("version", "versions"), ("variable", "variables"), ("flag", "flags")):
        for name in dict.fromkeys((*train[table], *infer[table])):
            yield kind, name, train[table].get(name), infer[table].get(name)
    yield "card", "cards", train["cards"] or None, infer["cards"] or None
    for name in dict.fromkeys((*train["cpu"], *infer["cpu"])):
        yield "cpu", name, train["cpu"].get(name), infer["cpu"].get(name)


def _judge(kind: str, name: str, a: Any, b: Any) -> tuple[Finding, bool]:
    """The finding of a pair that differs, and whether it changes no bit."""
    if kind == "version":
        if name in _HARMLESS:
            return _finding("no influence", kind, name, a, b, "runs no arithmetic of a policy"), True
        if a is None or b is None:
            return _finding("no influence", kind, name, a, b, "on one machine only: nothing to compare it with"), True
        return _finding("version", kind, name, a, b, "kernels, casts and model code change between versions"), False
    if kind == "variable":
        known = VARIABLES.get(name)
        if known is None:
            return _finding("variable", kind, name, a, b, "not in the table of variables, so it may change bits"), False
        words = f"{known.effect} ({known.source})"
        if _effective(a, known) == _effective(b, known):
            return _finding("no influence", kind, name, a, b, f"set to its default on one side: {words}"), True
        return _finding("variable", kind, name, a, b, words), False
    if kind == "card":
        return _cards(a, b)
    if kind == "cpu":
        if name == "threads":
            words = "torch's own kernels divide sums and products among threads; precgraph's exact kernels do not"
            return _finding("cpu", kind, name, a, b, words), False
        if name == "model":
            return _finding("no influence", kind, name, a, b, "kernels go by what a CPU can do, see capability"), True
        return _finding("cpu", kind, name, a, b, "vector kernels of another length sum in another order"), False
    if kind == "digest":
        return _finding("digest", kind, name, a, b, "the digest covers operators, formats, rules and kernels"), False
    return _finding("flag", kind, name, a, b, "a switch of the process that changes fp32 results"), False


def _cards(a: Any, b: Any) -> tuple[Finding, bool]:
    """Cards of one kind are one card, however many there are."""
    kinds = [sorted({f"{c.get('name')}, compute capability {c.get('capability')}" for c in cards or []}) or ["none"]
             for cards in (a, b)]  # fmt: skip
    if kinds[0] == kinds[1]:
        counts = f"{len(a)}", f"{len(b)}"
        words = "the number of cards matters where tensors are divided among them"
        return _finding("no influence", "card", "number of cards", *counts, words), True
    words = "kernels are chosen and tiled by card; only row-invariant exact kernels may agree"
    return _finding("card", "card", "cards", "; ".join(kinds[0]), "; ".join(kinds[1]), words), False


def _effective(value: Any, known: Variable) -> str | None:
    """What a value means: unset is the default, and true is 1."""
    text = known.default if value is None else str(value)
    if text is None:
        return None
    lower = text.strip().lower()
    return "1" if lower in _TRUE else "0" if lower in _FALSE else lower


def _finding(kind: str, op: str, name: str, a: Any, b: Any, words: str) -> Finding:
    rule = RULES[kind]
    values = ["not set" if v is None and op == "variable" else "none" if v is None else str(v) for v in (a, b)]
    remedy = f"{rule.remedy}: {words}"  # whoever reads only what to do should know why
    return Finding(rule.code, "machine", "", op, (name,), (values[0],), (values[1],), words, remedy)
