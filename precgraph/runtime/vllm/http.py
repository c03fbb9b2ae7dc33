"""Over HTTP what a :class:`precgraph.vllm.Sample` has and the OpenAI protocol lacks: middleware for vLLM's server.

``--middleware precgraph.vllm.SampleFields``. vLLM's workers keep the kept mass of a request under a name that the
request carries (``vllm_xargs``); the middleware gives each request a name, and asks for its record before the answer
goes out. vLLM finds keys in its prefix cache by their tokens and the request's ``cache_salt``: the middleware puts into
it which weights are served, so that keys of older ones are found no more.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

from precgraph.errors import InputError, PrecGraphError, StaleWeightsError, UnsupportedModelError
from precgraph.runtime.vllm import RECORD
from precgraph.runtime.vllm.replies import kept_masses, value_of
from precgraph.runtime.vllm.temperature import require_served

PATHS = ("/v1/completions", "/v1/chat/completions")
# The other routes by which vLLM 0.26 to 0.32 generate. Each words requests and answers in its own way, and would take
# what the two above refuse.
UNREAD = frozenset(
    {
        "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/cohere/v2/chat", "/inference/v1/generate",
        "/generative_scoring", "/v1/systemone", "/invocations",
    }
)  # fmt: skip

Message = MutableMapping[str, Any]
Headers = Sequence[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Served(NamedTuple):
    """An engine's weights after so many ``calls``: their version, and the number of the update that brought them."""

    calls: int
    version: int
    update: int


class SampleFields:
    """ASGI middleware: completions get ``choices[0].kept_mass``, a number a token, and ``precgraph`` with the program's
    ``digest`` and the ``weights_version``.

    It refuses (status 400) other routes that generate, what the answer has no place for, several sequences a request
    and streams, and temperatures in whose place vLLM takes another; (503) requests while the weights are not complete,
    of which a step would end the engine, and an answer of any version but that of its salt; (502) one of another form.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._calls = 0  # begun or ended that may have changed the weights, or whether they are complete
        self._served: Served | None = None  # as a worker last said it

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = _route(scope)
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif path in PATHS:
            await self._answer(scope, receive, send)
        elif path in UNREAD:
            await _refuse(
                send, 400, InputError(f"{path} has no place for the kept mass", remedy=f"ask {' or '.join(PATHS)}")
            )
        else:  # it may let the engine sleep, wake it, or install weights; a request may come in its midst
            self._calls += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._calls += 1

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        content = await _body(receive)
        request = _parsed(content)
        if request is None:  # the server says what is wrong with it
            await self._app(scope, _replayed(content, receive), send)
            return
        engine = scope["app"].state.engine_client
        try:
            _require_one_answer(request)
            _require_temperature(request)
            _require_one_engine(engine.vllm_config.parallel_config)
            served = await self._serving(engine)
        except StaleWeightsError as error:
            await _refuse(send, 503, error)
            return
        except PrecGraphError as error:
            await _refuse(send, 400, error)
            return
        name = secrets.token_hex(8)
        content = _named(request, name, served)
        answer, taken = _Answer(), None
        try:
            sized = {**scope, "headers": _sized(scope["headers"], content)}
            await self._app(sized, _replayed(content, receive), answer.collect)
        finally:
            if not 400 <= answer.status < 500:  # it was let in; also if it broke off its record is not left behind
                replies = await engine.collective_rpc("precgraph_take", args=([name],))
                taken = value_of(replies[0])
        if taken is None or answer.status != 200:
            await answer.send(send)
            return
        try:
            _add(answer, taken["digest"], taken["records"].get(name), served)
        except (StaleWeightsError, UnsupportedModelError) as error:
            self._served = None  # what changed them may have passed another server of this engine
            await _refuse(send, 503, error)
            return
        except PrecGraphError as error:
            await _refuse(send, 502, error)
            return
        await answer.send(send)

    async def _serving(self, engine: Any) -> Served:
        """What is served; StaleWeightsError unless it is complete. A worker answers between two steps: it is asked only
        where a call has passed since it last was."""
        calls = self._calls
        if self._served is None or self._served.calls != calls:
            found = [value_of(reply) for reply in await engine.collective_rpc("precgraph_serving")]
            if None in found:
                raise StaleWeightsError("the engine's weights are not complete", remedy="update them, then ask again")
            self._served = Served(calls, *found[0])
        return self._served


def _route(scope: Message) -> str:
    """The path below ``--root-path``, where whole parts of it are that: the server takes /v1/completions under "/"."""
    path: str = scope.get("path", "")
    below = path.removeprefix(scope.get("root_path", ""))
    return below if below.startswith("/") else path


class _Answer:
    """The server's answer, held back."""

    def __init__(self, status: int = 0, headers: Headers = (), content: bytes = b"") -> None:
        self.status, self.headers, self.content = status, headers, content

    async def collect(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
        elif message["type"] == "http.response.body":
            self.content += message.get("body", b"")

    async def send(self, send: Send) -> None:
        headers = _sized(self.headers, self.content)
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.content})


def _add(answer: _Answer, digest: str, record: dict[str, Any] | None, served: Served) -> None:
    """Put the record into the answer. StaleWeightsError unless all its tokens are of these weights, as cached keys are;
    PrecGraphError for an answer that is none to one completion."""
    try:
        body = json.loads(answer.content)
    except ValueError:
        raise _of_another_form("is no JSON") from None
    if body is None:  # the client has gone, and the server has made no answer
        return
    if record is None:
        raise UnsupportedModelError("the engine kept no record of the request", remedy="serve one engine a server")
    own, met = [served.version, served.update], record["weights"]
    if met != [own]:
        versions = [version for version, _ in sorted([own, *(w for w in met if w != own)])]
        raise StaleWeightsError(
            f"the weights changed during the request, versions {versions}",
            remedy="ask again; finish or abort all requests before an update",
        )
    choice, count = _completion(body)
    choice["kept_mass"] = kept_masses(record["kept_mass"], count)
    body["precgraph"] = {"digest": digest, "weights_version": served.version}
    answer.content = json.dumps(body).encode()


def _completion(body: Any) -> tuple[dict[str, Any], int]:
    """The only choice of an answer, and how many tokens were sampled."""
    choices, usage = (body.get(key) for key in ("choices", "usage")) if isinstance(body, dict) else (None, None)
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _of_another_form(f"has {len(choices)} choices" if isinstance(choices, list) else "has no choices")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if type(count) is not int:
        raise _of_another_form("has no usage.completion_tokens")
    return choices[0], count


def _of_another_form(what: str) -> PrecGraphError:
    return PrecGraphError(
        f"the server's answer {what}: its kept mass has no place",
        remedy="put the middleware right before vLLM's server",
    )


def _named(request: dict[str, Any], name: str, served: Served) -> bytes:
    """The request with a name for its record, and with a salt that requests have of no other weights."""
    salt, weights = request.get("cache_salt"), f"{served.version}.{served.update}"
    if salt is None:
        salt = weights
    elif isinstance(salt, str) and salt:  # else the server says what is wrong with it
        own = hashlib.sha256(json.dumps(salt).encode()).hexdigest()  # of any length: the server takes 128 characters
        salt = f"{weights}:{own}"
    named = {**(request.get("vllm_xargs") or {}), RECORD: name}
    return json.dumps(request | {"vllm_xargs": named, "cache_salt": salt}).encode()


def _require_one_answer(request: dict[str, Any]) -> None:
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    refused = {
        "stream": bool(request.get("stream")),
        "n": (request.get("n") or 1) != 1,
        "use_beam_search": bool(request.get("use_beam_search")),
        "prompt": several,
    }
    for name, given in refused.items():
        if given:
            raise InputError(
                "an answer with its kept mass is whole, and of one sequence", path=name,
                remedy="send a request for each, without stream: the prefix cache shares their blocks",
            )  # fmt: skip


def _require_temperature(request: dict[str, Any]) -> None:
    try:
        temperature = float(request.get("temperature") or 0)
    except (TypeError, ValueError, OverflowError):  # the server says what is wrong with it
        return
    require_served(temperature)


def _require_one_engine(parallel: Any) -> None:
    """A server shows the answer of the first of its engines only."""
    if parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb:
        raise UnsupportedModelError(
            f"data_parallel_size = {parallel.data_parallel_size} behind one server: only the first engine's records "
            "can be asked for",
            remedy="start a server for each engine, or pass --data-parallel-external-lb",
        )


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("vllm_xargs") or {}, dict) else None


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):  # a client that has gone sends none either
            return b"".join(parts)


def _replayed(content: bytes, receive: Receive) -> Receive:
    """``content`` first, then what ``receive`` still gets: that the client has gone."""
    left = [content]

    async def replay() -> Message:
        return {"type": "http.request", "body": left.pop()} if left else await receive()

    return replay


def _sized(headers: Headers, content: bytes) -> Headers:
    """The headers of a message, with the length of this content."""
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(len(content)).encode())]


async def _refuse(send: Send, status: int, error: PrecGraphError) -> None:
    """An error as vLLM's server words it."""
    said = {"message": str(error), "type": type(error).__name__, "param": error.path, "code": status}
    answer = _Answer(status, [(b"content-type", b"application/json")], json.dumps({"error": said}).encode())
    await answer.send(send)
