"""A server's weights are updated over HTTP: what docs/vllm.md says of the four calls, the salt and older keys."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precgraph
from precgraph.errors import SyncError
from tests.vllm.conftest import train_step, with_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_serve.py"
PROMPT = [3 + i % 90 for i in range(300)]


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@contextmanager
def server(model: str, actor: Any, log: Path, *arguments: str) -> Iterator[str]:
    """vLLM's server with its development endpoints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = {"architectures": ["PrecGraphForCausalLM"], "precgraph": actor.precgraph.recipe.to_dict()}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1",
        "--port", str(port), "--hf-overrides", json.dumps(overrides), "--dtype", "bfloat16", "--max-model-len", "512",
        "--max-num-batched-tokens", "128", "--max-num-seqs", "8", "--generation-config", "vllm", "--enforce-eager",
        "--kv-cache-memory-bytes", str(1 << 26), "--enable-prompt-tokens-details", *arguments,
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**environment, "VLLM_SERVER_DEV_MODE": "1"}
        )
    try:
        address = f"http://127.0.0.1:{port}"
        runpy.run_path(str(EXAMPLE))["wait_for"](address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_an_update_and_what_ends_the_use_of_older_keys(checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    from precgraph.vllm import save_weights

    model, folder = with_tokenizer(checkpoint("qwen3"))
    actor = precgraph.compile(model, "train")
    with server(folder, actor, tmp_path / "log") as address:

        def ask(**more: Any) -> tuple[int, float]:
            """Tokens whose keys were found, and how far log-probabilities are from the trainer's."""
            body = {"model": folder, "prompt": PROMPT, "max_tokens": 4, "temperature": 1.0, "seed": 1}
            found = post(address, "/v1/completions", body | {"logprobs": 0, "return_token_ids": True} | more)
            (choice,) = found["choices"]
            ids = torch.tensor([PROMPT + choice["token_ids"]])
            with torch.no_grad():
                scores = precgraph.token_logprobs(actor, ids)
            assert isinstance(scores, torch.Tensor)
            wrong = scores[0, len(PROMPT) - 1 :] - torch.tensor(choice["logprobs"]["token_logprobs"])
            return found["usage"]["prompt_tokens_details"]["cached_tokens"], float(wrong.abs().max())

        def call(method: str, *arguments: Any) -> Any:
            body = {"method": f"precgraph_{method}", "args": list(arguments)}
            return post(address, "/collective_rpc", body)["results"][0]["value"]

        assert ask() == (0, 0.0)
        cached, wrong = ask()
        assert cached > 200 and wrong == 0.0
        train_step(actor, 1)
        actor.sync()
        manifest = save_weights(actor, tmp_path / "weights.safetensors")
        call("begin", manifest.to_json())
        call("update_file", str(tmp_path / "weights.safetensors"))
        assert call("finish") == manifest.checksum
        older, wrong = ask()
        assert older == cached and wrong > 0.0, "older keys are used: the docs say so"
        assert ask(cache_salt="v2") == (0, 0.0)
        assert post(address, "/reset_prefix_cache", {}) == {"success": True}
        assert ask() == (0, 0.0)
        assert ask() == (cached, 0.0)


@pytest.mark.parametrize(("index", "external", "heard"), [(0, False, True), (1, False, False), (1, True, True)])
def test_what_an_engine_refuses_whose_reply_is_not_shown(index: int, external: bool, heard: bool) -> None:
    """Of several behind one server the second's: as a reply it would be lost, and the update complete for the first."""
    from precgraph.runtime.vllm.worker import ExactWorker

    parallel = SimpleNamespace(data_parallel_index=index, data_parallel_external_lb=external)
    worker = ExactWorker()
    worker.vllm_config = SimpleNamespace(parallel_config=parallel)
    if heard:
        assert worker.precgraph_update_file("/nowhere")["error"][:2] == ["SyncError", "there is no such file"]
    else:
        with pytest.raises(SyncError, match="^/nowhere: there is no such file; write it with"):
            worker.precgraph_update_file("/nowhere")
    assert worker.precgraph_abort() == {"value": None}


def test_with_the_middleware_neither_older_keys_nor_discarded_weights_are_used(
    checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    """After an update, of which nobody has told the prefix cache, and after level 2 of sleep; and the routes that it
    does not read are refused."""
    from precgraph.vllm import save_weights

    model, folder = with_tokenizer(checkpoint("qwen3"))
    actor = precgraph.compile(model, "train")
    weights = tmp_path / "weights.safetensors"
    middleware = ("--middleware", "precgraph.vllm.SampleFields")
    with server(folder, actor, tmp_path / "log", *middleware) as address:

        def ask(path: str = "/v1/completions", **more: Any) -> tuple[int, Any]:
            body = {"model": folder, "prompt": PROMPT, "max_tokens": 4, "temperature": 1.0, "logprobs": 0}
            try:
                return 200, post(address, path, body | {"return_token_ids": True} | more)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)["error"]["message"]

        def served() -> tuple[int, int]:
            """Version of the weights, and tokens whose keys were found, of an answer with the trainer's bits."""
            status, found = ask()
            (choice,) = found["choices"]
            with torch.no_grad():
                scores = precgraph.token_logprobs(actor, torch.tensor([PROMPT + choice["token_ids"]]))
            assert isinstance(scores, torch.Tensor)
            assert status == 200 and choice["logprobs"]["token_logprobs"] == scores[0, len(PROMPT) - 1 :].tolist()
            return found["precgraph"]["weights_version"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

        def update(*wanted: tuple[int, Any]) -> None:
            """To the actor's weights; before each call, the answer that a request has."""
            manifest = save_weights(actor, weights)
            for method, argument in (("begin", [manifest.to_json()]), ("update_file", [str(weights)]), ("finish", [])):
                assert all(ask() == each for each in wanted)
                post(address, "/collective_rpc", {"method": f"precgraph_{method}", "args": argument})

        assert served() == (1, 0)
        _, cached = served()
        assert cached > 200
        train_step(actor, 1)
        assert actor.sync() == 2
        update()
        assert [served(), served()] == [(2, 0), (2, cached)]
        with torch.no_grad():
            actor.model.norm.weight *= 1.5
        actor.precgraph.store.version = 1
        assert actor.sync() == 2  # of a trainer that has begun anew: other weights under the same version
        update()
        assert served() == (2, 0)
        for path in ("/v1/responses", "/v1/messages", "/v1/chat/completions/batch"):
            status, message = ask(path, temperature=0.005)
            assert status == 400 and "ask /v1/completions or /v1/chat/completions" in message
        incomplete = (503, "the engine's weights are not complete; update them, then ask again")
        post(address, "/sleep?level=2", {})
        assert ask() == incomplete
        post(address, "/wake_up", {})
        assert ask() == ask() == incomplete
        update(incomplete)
        assert served() == (2, 0)
