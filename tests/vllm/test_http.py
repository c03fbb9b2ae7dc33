"""The middleware of vLLM's server, around an application and an engine that are played; no vLLM is needed.

``test_processes.py`` runs the real server with it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from precgraph.runtime.vllm import RECORD
from precgraph.runtime.vllm.http import PATHS, UNREAD, SampleFields

ONE = {"prompt": [5, 6, 7], "max_tokens": 3, "top_p": 0.9}


class Engine:
    """Answers ``precgraph_take`` from ``records``, by the order of requests, and what it serves: the first's version by
    update 5, or None where the weights are not complete."""

    def __init__(self, *records: dict[str, Any], replicas: int = 1, external: bool = False) -> None:
        self.records, self.taken, self.named = list(records), 0, [""]
        self.version, self.complete, self.asked = records[0]["weights"][0][0] if records else 1, True, 0
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=replicas, data_parallel_external_lb=external)
        )

    async def collective_rpc(self, method: str, args: tuple[list[str], ...] = ()) -> list[Any]:
        if method == "precgraph_serving":
            self.asked += 1
            return [{"value": [self.version, 5]}, {"value": [self.version, 5] if self.complete else None}]
        assert method == "precgraph_take" and args == (self.named,)
        found = dict(zip(self.named, self.records[self.taken : self.taken + 1], strict=False))
        self.taken += 1
        return [{"value": {"digest": "abc", "records": found}}]


def ask(
    engine: Engine, request: Any, *, path: str = "/v1/completions", status: int = 200, answer: Any = "made",
    through: Any = SampleFields, root: str = "/root", below: str = "/root",
) -> tuple[int, Any, list[dict[str, Any]]]:  # fmt: skip
    """Status and content that the client gets, and the requests that reached the application.

    ``through`` makes the middleware around it; ``root`` is ``--root-path``, and ``below`` what a proxy left of it.
    """
    made = {"choices": [{"text": "€"}], "usage": {"completion_tokens": 3}} if answer == "made" else answer
    seen: list[dict[str, Any]] = []
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert int(dict(scope["headers"])[b"content-length"]) == len(message["body"])
        seen.append(json.loads(message["body"]) if status == 200 else {})
        engine.named[0] = (seen[-1].get("vllm_xargs") or {}).get(RECORD, "")
        if isinstance(made, Exception):
            raise made
        content = made if isinstance(made, bytes) else json.dumps(made).encode()
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-length", str(len(content)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": content[:5], "more_body": True})
        await send({"type": "http.response.body", "body": content[5:]})

    content = request if isinstance(request, bytes) else json.dumps(request).encode()
    parts: list[dict[str, Any]] = [{"type": "http.request", "body": content}]
    if path in PATHS:
        parts = [{"type": "http.request", "body": content[:4], "more_body": True}, {**parts[0], "body": content[4:]}]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": below + path, "root_path": root,
        "headers": [(b"content-length", str(len(content)).encode())],
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
    }  # fmt: skip
    asyncio.run(through(application)(scope, receive, send))
    start, *rest = sent
    body = b"".join(m["body"] for m in rest)
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    return start["status"], json.loads(body), seen


def test_a_truncated_answer_has_its_kept_mass() -> None:
    """Indices of a JSON or msgpack key; a token drawn beyond the last one, as asynchronous scheduling does, is left."""
    mass = {"0": 0.25, "2": 1 / 3, "1": 0.5, "3": 0.1}
    engine = Engine({"weights": [[7, 5]], "kept_mass": mass})
    status, found, (request,) = ask(engine, ONE | {"vllm_xargs": {"theirs": 1}})
    assert status == 200 and found["choices"] == [{"text": "€", "kept_mass": [0.25, 0.5, 1 / 3]}]
    assert found["precgraph"] == {"digest": "abc", "weights_version": 7}
    named = {"theirs": 1, RECORD: engine.named[0]}
    assert request == ONE | {"vllm_xargs": named, "cache_salt": "7.5"} and len(engine.named[0]) == 16


@pytest.mark.parametrize("root", ["", "/", "/v", "/v1/comp", "/root"])
def test_no_root_path_leads_past_it(root: str) -> None:
    """The route is found as Starlette's ``get_route_path`` finds it."""
    for path in PATHS:
        found = ask(Engine({"weights": [[1, 5]], "kept_mass": {}}), ONE, path=path, root=root, below="")[1]
        assert found["precgraph"]["weights_version"] == 1
    assert ask(Engine(), ONE, path="/v1/responses", root=root, below="")[0] == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_without_truncation_it_is_one(path: str) -> None:
    found = ask(Engine({"weights": [[1, 5]], "kept_mass": {}}), {"messages": []}, path=path)[1]
    assert found["choices"][0]["kept_mass"] == [1.0, 1.0, 1.0] and found["precgraph"]["weights_version"] == 1


def test_each_request_has_a_name_of_its_own() -> None:
    engine = Engine(*[{"weights": [[1, 5]], "kept_mass": {}}] * 2)
    names = [ask(engine, ONE | {"vllm_xargs": {RECORD: "forged"}})[2][0]["vllm_xargs"][RECORD] for _ in range(2)]
    assert len({*names, "forged"}) == 3


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"stream": True}, "stream"), ({"n": 2}, "n"), ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt": [[1], [2]]}, "prompt"), ({"prompt": ["a", "b"]}, "prompt"),
    ],
)  # fmt: skip
def test_answers_without_a_place_are_refused(more: dict[str, Any], name: str) -> None:
    engine = Engine()
    status, found, seen = ask(engine, ONE | more)
    assert (status, found["error"]["param"], found["error"]["type"]) == (400, name, "InputError")
    assert "of one sequence; send a request for each" in found["error"]["message"]
    assert not seen and not engine.taken


@pytest.mark.parametrize("temperature", [1e-9, 0.005, "0.005"])  # the server reads a number in a string too
def test_a_temperature_that_vllm_would_replace_is_refused(temperature: Any) -> None:
    engine = Engine()
    status, found, seen = ask(engine, ONE | {"temperature": temperature})
    assert (status, found["error"]["param"], found["error"]["type"]) == (400, "temperature", "InputError")
    assert (
        f"vLLM takes 0.01 in place of {float(temperature)}; take 0 (greedy), or 0.01 and more"
        in found["error"]["message"]
    )
    assert not seen and not engine.taken


@pytest.mark.parametrize("temperature", [0, 0.0, 0.01, 1, None, "0.7", "hot", [1], 10**400])
def test_other_temperatures_are_the_servers(temperature: Any) -> None:
    assert ask(Engine({"weights": [[1, 5]], "kept_mass": {}}), ONE | {"temperature": temperature})[0] == 200


@pytest.mark.parametrize("prompt", ["text", ["text"], [[5, 6]], [5, 6]])
def test_one_prompt_in_every_spelling(prompt: Any) -> None:
    request = {"prompt": prompt, "stream": False, "n": None, "use_beam_search": False}
    assert ask(Engine({"weights": [[1, 5]], "kept_mass": {}}), request)[0] == 200


def test_weights_that_changed_are_not_served_as_one_version() -> None:
    status, found, _ = ask(Engine({"weights": [[3, 5], [4, 5]], "kept_mass": {}}), ONE)
    assert status == 503 and "changed during the request, versions [3, 4]; ask again" in found["error"]["message"]


def test_two_updates_of_one_version_are_two_weights() -> None:
    """Of a trainer that began anew: the second came in the request's midst, or past another server."""
    for met in ([[3, 5], [3, 6]], [[3, 6]]):
        status, found, _ = ask(Engine({"weights": met, "kept_mass": {}}), ONE)
        assert status == 503 and "changed during the request, versions [3, 3]; ask again" in found["error"]["message"]


def salt_of(version: int, own: dict[str, Any]) -> Any:
    """The salt that the server gets in place of a client's."""
    (request,) = ask(Engine({"weights": [[version, 5]], "kept_mass": {}}), ONE | own)[2]
    return request["cache_salt"]


@pytest.mark.parametrize(("own", "wanted"), [({}, "3.5"), ({"cache_salt": None}, "3.5"), ({"cache_salt": ""}, "")])
def test_keys_of_other_weights_have_another_salt(own: dict[str, Any], wanted: str) -> None:
    """One that vLLM would refuse stays what it is."""
    assert salt_of(3, own) == wanted


def test_a_clients_own_salt_keeps_its_keys_apart_and_may_be_as_long_as_ever() -> None:
    """vLLM takes 128 characters, and not "@", a slash, a backslash or NUL."""
    owns = ["a", "3.5", "€\ud800", "a" * 128, "a" * 127 + "b"]
    salts = [salt_of(version, {"cache_salt": own} if own else {}) for version in (3, 4) for own in (None, *owns)]
    assert len({*salts}) == len(salts)
    assert all(len(salt) <= 128 and not {*salt} & {*"@/\\\0"} for salt in salts)


def test_an_answer_of_another_version_than_its_salt_is_not_served() -> None:
    """An update that passed another server: the prompt may have met keys of older weights. The next asks anew."""
    engine = Engine(*[{"weights": [[v, 5]], "kept_mass": {}} for v in (3, 4, 4)])
    kept = SampleFields(lambda *_: asyncio.sleep(0))

    def served() -> tuple[int, Any, list[dict[str, Any]]]:
        def through(application: Any) -> SampleFields:
            kept._app = application
            return kept

        return ask(engine, ONE, through=through)

    assert served()[0] == 200
    engine.version = 4
    status, found, (request,) = served()
    assert (status, request["cache_salt"]) == (503, "3.5") and "versions [3, 4]; ask again" in found["error"]["message"]
    status, found, (request,) = served()
    assert (status, request["cache_salt"], found["precgraph"]["weights_version"]) == (200, "4.5", 4)


def test_a_missing_record_is_not_taken_for_one() -> None:
    status, found, _ = ask(Engine(), ONE)
    assert status == 503 and found["error"]["message"].startswith("the engine kept no record")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"choices": [{}, {}], "usage": {"completion_tokens": 3}}, "answer has 2 choices"),
        ({"choices": [], "usage": {"completion_tokens": 3}}, "answer has 0 choices"),
        ({"usage": {"completion_tokens": 3}}, "answer has no choices"), ([1], "answer has no choices"),
        ({"choices": [{}]}, "answer has no usage.completion_tokens"),
        ({"choices": [{}], "usage": {"completion_tokens": None}}, "answer has no usage.completion_tokens"),
        ({"choices": [{}], "usage": {"completion_tokens": 4}}, "has no kept mass for token 3 of 4"),
        (b"data: [DONE]", "answer is no JSON"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_an_error_with_its_reason(answer: Any, words: str) -> None:
    engine = Engine({"weights": [[1, 5]], "kept_mass": {"0": 0.5, "1": 0.5, "2": 0.5}})
    status, found, _ = ask(engine, ONE, answer=answer)
    assert (status, found["error"]["code"]) == (502, 502) and words in found["error"]["message"]
    assert engine.taken == 1


@pytest.mark.parametrize(("external", "wanted"), [(False, 400), (True, 200)])
def test_several_engines_behind_a_server(external: bool, wanted: int) -> None:
    engine = Engine({"weights": [[1, 5]], "kept_mass": {}}, replicas=2, external=external)
    status, found, _ = ask(engine, ONE)
    assert status == wanted
    if wanted == 400:
        assert "data_parallel_size = 2 behind one server" in found["error"]["message"]


def test_what_the_server_refuses_passes_and_asks_no_worker() -> None:
    engine = Engine()
    assert ask(engine, ONE, status=401, answer={"error": "Unauthorized"})[:2] == (401, {"error": "Unauthorized"})
    assert engine.taken == 0


@pytest.mark.parametrize("content", [b"{'a'", b"[1]", b'{"vllm_xargs": 3}', b"[" * 100_000])
def test_what_is_no_request_is_the_servers_to_refuse(content: bytes) -> None:
    assert ask(Engine(), content, status=400, answer={"error": "bad"})[:2] == (400, {"error": "bad"})


def test_other_routes_pass() -> None:
    assert ask(Engine(), {"a": 1}, path="/tokenize")[1:] == (
        {"choices": [{"text": "€"}], "usage": {"completion_tokens": 3}}, [{"a": 1}],
    )  # fmt: skip


def test_a_request_that_breaks_off_leaves_no_record() -> None:
    engine = Engine({"weights": [[1, 5]], "kept_mass": {"0": 0.5}})
    with pytest.raises(RuntimeError, match="broke off"):
        ask(engine, ONE, answer=RuntimeError("broke off"))
    assert engine.taken == 1


def test_a_client_that_has_gone_gets_no_answer() -> None:
    assert ask(Engine({"weights": [[1, 5]], "kept_mass": {"0": 0.5}}), ONE, answer=None)[:2] == (200, None)


@pytest.mark.parametrize("path", sorted(UNREAD))
def test_a_route_that_generates_and_is_not_read_is_refused(path: str) -> None:
    engine = Engine()
    status, found, seen = ask(engine, {"temperature": 0.005}, path=path)
    assert (status, found["error"]["type"], seen, engine.taken) == (400, "InputError", [], 0)
    assert (
        path in found["error"]["message"] and "ask /v1/completions or /v1/chat/completions" in found["error"]["message"]
    )


@pytest.mark.vllm
def test_every_route_of_vllm_that_generates_is_known() -> None:
    """Of the packages that hold them; a route that a later vLLM adds there is missing here."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    top = Path(spec.origin).parent / "entrypoints"
    sources = [file for folder in ("openai", "anthropic", "cohere", "generate", "scale_out", "serve/sagemaker")
               for file in (top / folder).rglob("api_router.py")]  # fmt: skip
    found = {route for file in sources for route in re.findall(r'\.post\(\s*"([^"]+)"', file.read_text())}
    none = {
        r for r in found if r.endswith(("/render", "/derender", "/cancel", "/count_tokens", "abort_requests", "/ping"))
    }
    assert {*PATHS, "/v1/responses", "/v1/messages", "/invocations"} <= found
    assert found - none <= {*PATHS, *UNREAD}


def test_weights_that_are_not_complete_end_no_engine() -> None:
    """And a worker is asked once after a call that may have changed them, not by each request."""
    engine, kept = Engine(*[{"weights": [[1, 5]], "kept_mass": {}}] * 9), SampleFields(lambda *_: asyncio.sleep(0))

    def through(application: Any) -> SampleFields:
        kept._app = application
        return kept

    def served() -> tuple[int, int]:
        return ask(engine, ONE, through=through)[0], engine.asked

    assert [served(), served()] == [(200, 1), (200, 1)]
    engine.complete = False
    ask(engine, {}, path="/sleep", through=through)
    assert [served(), served()] == [(503, 2), (503, 3)]
    status, found, seen = ask(engine, ONE, through=through)
    assert (status, seen, found["error"]["type"]) == (503, [], "StaleWeightsError")
    assert "the engine's weights are not complete; update them, then ask again" in found["error"]["message"]
    engine.complete = True  # no call has passed, as with an update by another server of the same engine
    assert [served(), served()] == [(200, 5), (200, 5)]
    with pytest.raises(RuntimeError, match="broke off"):
        ask(engine, {}, path="/collective_rpc", answer=RuntimeError("broke off"), through=through)
    assert [served(), served()] == [(200, 6), (200, 6)]


def test_a_request_in_the_midst_of_a_call_asks_and_so_does_one_after_it() -> None:
    engine = Engine(*[{"weights": [[1, 5]], "kept_mass": {}}] * 3)

    async def sleeps(scope: Any, receive: Any, send: Any) -> None:
        assert [await served(), await served()] == [200, 200] and engine.asked == 2
        engine.complete = False

    async def completes(scope: Any, receive: Any, send: Any) -> None:
        engine.named[0] = json.loads((await receive())["body"])["vllm_xargs"][RECORD]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        made = {"choices": [{}], "usage": {"completion_tokens": 1}}
        await send({"type": "http.response.body", "body": json.dumps(made).encode()})

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await (sleeps if scope["path"] == "/sleep" else completes)(scope, receive, send)

    middleware = SampleFields(application)

    async def served(path: str = "/v1/completions") -> int:
        sent: list[Any] = [{"status": 0}]

        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(ONE).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "headers": [],
            "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
        }  # fmt: skip
        await middleware(scope, receive, send)
        return int(sent[min(1, len(sent) - 1)]["status"])

    async def all_of_it() -> list[int]:
        return [await served(), await served("/sleep"), await served()]

    assert asyncio.run(all_of_it()) == [200, 0, 503] and engine.asked == 3
