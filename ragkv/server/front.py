"""One address before two servers: the one computes the KV of each prompt, the other loads it and decodes.

So no stream waits for another request's prefill. Each answer is first asked of the prefill side, which returns once the
prompt's KV is stored where both find it, and then of the decode side (`ragkv.answer.HAND_OVERS`). A side that can't be
reached, or breaks off, costs speed: the other one, a whole server too, answers instead, and what a client has received
of a stream isn't sent again.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ragkv.answer import HandOver
from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.server.gate import MAX_BODY_BYTES
from ragkv.server.run import bind, listen
from ragkv.server.telemetry import log_as
from ragkv.server.wire import CLIENT_CLOSED_REQUEST, as_json, error_body, unless_disconnected

logger = logging.getLogger(__name__)

ANSWER, CHAT = "/v1/answer", "/v1/chat/completions"
_GONE = "EngineStoppedError"  # the type of a stream's error after which another server may go on
_UNREADY = 503
_PAUSE_S = 0.5  # between two rounds of tries
_CONNECT_S = 3.0
_PER_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "content-length"}


class BrokenOffError(Exception):
    """A server couldn't be reached, isn't ready, or broke off."""


@dataclass
class Frame:
    """A server-sent event. name: empty where the stream has none."""

    name: str
    data: str

    def encode(self) -> bytes:
        return (f"event: {self.name}\n" * bool(self.name) + f"data: {self.data}\n\n").encode()


@dataclass
class Delivered:
    """What a client has received of a stream, so that another one can go on with it.

    opened: whether it has the frame with the sources. texts: its answer, and its reasoning. head: the fields by which
    OpenAI's clients know a completion.
    """

    opened: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)


class Resumed:
    """The frames of a stream that takes the place of one that broke off, without what was delivered of it.

    `take` returns what of a frame is to be sent. Raises BrokenOffError for a text that doesn't begin as the delivered
    one: there is nothing that the client could make of both.
    """

    def __init__(self, delivered: Delivered) -> None:
        self._delivered, self._left = delivered, dict(delivered.texts)

    def take(self, frame: Frame) -> Frame | None:
        if frame.name in ("delta", "reasoning"):
            return self._take_text(frame, frame.name, json.loads(frame.data), ("text",))
        if frame.name == "sources":
            return self._take_opening(frame)
        if frame.name or frame.data == "[DONE]":
            return frame
        return self._take_chunk(frame)

    def _take_chunk(self, frame: Frame) -> Frame | None:
        body = json.loads(frame.data)
        known = self._delivered.head = self._delivered.head or {name: body.get(name) for name in ("id", "created")}
        body |= known if "id" in body else {}
        frame = Frame("", as_json(body))
        delta = (body.get("choices") or [{}])[0].get("delta") or {}
        if "role" in delta:
            return self._take_opening(frame)
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                return self._take_text(frame, name, body, ("choices", 0, "delta", name))
        return frame

    def _take_opening(self, frame: Frame) -> Frame | None:
        was_opened, self._delivered.opened = self._delivered.opened, True
        return None if was_opened else frame

    def _take_text(self, frame: Frame, channel: str, body: Any, path: tuple[str | int, ...]) -> Frame | None:
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        text, left = holder[path[-1]], self._left.get(channel, "")
        num_known = min(len(text), len(left))
        if text[:num_known] != left[:num_known]:
            raise BrokenOffError("the answer broke off, and another server's begins otherwise; ask again")
        self._left[channel], new = left[num_known:], text[num_known:]
        if not new:
            return None
        self._delivered.texts[channel] = self._delivered.texts.get(channel, "") + new
        holder[path[-1]] = new
        return Frame(frame.name, as_json(body))


class Front:
    """prefill, decode: the addresses of the servers. patience_s: how long to look for one that answers."""

    def __init__(self, prefill: str, decode: str, patience_s: float) -> None:
        self._prefill, self._sides, self._patience_s = prefill, (decode, prefill), patience_s
        # None is used twice: a server that has been started again doesn't know those of before.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_S), limits=limits)

    async def close(self) -> None:
        await self._client.aclose()

    async def handle(self, request: Request) -> Response:
        """Answer by the servers."""
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if body is None:
            problem = f"a body may have {MAX_BODY_BYTES >> 20} MiB here; send documents to one of the servers itself"
            return JSONResponse(error_body("ContentTooLarge", problem), 413)
        url = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in _PER_HOP}
        asked = _asked(request, body)
        if asked is None:
            return await self._pass_on(request.method, url, headers, body)
        if await self._prefill_first(url, headers, asked):
            asked = _handing_over(url, asked, "take")
        if asked.get("stream"):
            return await self._stream(url, headers, asked)
        work = self._pass_on("POST", url, headers, json.dumps(asked).encode())
        return await unless_disconnected(request, work) or Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _prefill_first(self, url: str, headers: Mapping[str, str], asked: dict[str, Any]) -> bool:
        """Have the prompt's KV computed and stored. Returns whether it is; if not, the decode side computes it."""
        wanted = _handing_over(url, asked, "give")
        wanted["stream"] = False
        wanted.pop("stream_options", None)
        try:
            answer = await self._client.post(self._prefill + url, headers=headers, json=wanted)
            if answer.status_code == _UNREADY:
                logger.warning("the prefill side isn't ready; the decode side computes the prompt")
            return answer.is_success
        except httpx.HTTPError as error:
            logger.warning("the prefill side can't be reached; the decode side computes the prompt: %s", _why(error))
            return False

    async def _pass_on(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Pass a request on, to the decode side if that can be reached."""
        async for side in self._rounds():
            try:
                answer = await self._client.request(method, side + url, headers=headers, content=body)
            except httpx.HTTPError as error:
                logger.warning("%s can't be reached: %s", side, _why(error))
                if (
                    method == "POST"
                    and not url.startswith((ANSWER, CHAT))
                    and not isinstance(error, httpx.ConnectError)
                ):
                    break  # it may have been carried out
                continue
            if answer.status_code != _UNREADY or not url.startswith((ANSWER, CHAT)):
                return Response(answer.content, answer.status_code, _headers(answer))
        return self._nobody()

    async def _stream(self, url: str, headers: Mapping[str, str], asked: dict[str, Any]) -> Response:
        delivered = Delivered()
        frames = self._frames(url, headers, asked, delivered)
        first = await anext(frames)
        if isinstance(first, Response):
            return first

        async def body() -> AsyncIterator[bytes]:
            async with aclosing(frames):
                yield first.encode()
                async for frame in frames:
                    assert isinstance(frame, Frame)  # a status was sent
                    yield frame.encode()

        return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _frames(
        self, url: str, headers: Mapping[str, str], asked: dict[str, Any], delivered: Delivered
    ) -> AsyncGenerator[Frame | Response, None]:
        """Yield the frames of an answer, or a response that is none; from another server where one breaks off."""
        problem = "no server answers; ask again in a minute"
        try:
            async for side in self._rounds():
                try:
                    resumed = Resumed(delivered)
                    async with self._client.stream("POST", side + url, headers=headers, json=asked) as answer:
                        if answer.status_code == _UNREADY:
                            continue
                        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                            content = await answer.aread()
                            if delivered.opened:
                                raise BrokenOffError(content.decode(errors="replace")[:500])
                            yield Response(content, answer.status_code, _headers(answer))
                            return
                        async for frame in _parsed(answer):
                            if _is_gone(frame):
                                break
                            if (new := resumed.take(frame)) is not None:
                                yield new
                            if frame.name in ("done", "error") or frame.data == "[DONE]":
                                return
                    logger.warning("%s broke off an answer", side)
                except httpx.HTTPError as error:
                    logger.warning("%s broke off an answer: %s", side, _why(error))
        except BrokenOffError as error:
            problem = str(error)
        if not delivered.opened:
            yield self._nobody()
            return
        data = as_json(error_body(_GONE, problem))
        yield Frame("error" if url.startswith(ANSWER) else "", data)
        if not url.startswith(ANSWER):
            yield Frame("", "[DONE]")

    async def _rounds(self) -> AsyncGenerator[str, None]:
        """Yield the decode side, then the other, again and again as long as it is worth it."""
        end = time.monotonic() + self._patience_s
        while True:
            for side in self._sides:
                yield side
            if time.monotonic() >= end:
                return
            await asyncio.sleep(_PAUSE_S)

    def _nobody(self) -> Response:
        problem = f"neither {' nor '.join(self._sides)} answers; ask again in a minute"
        return JSONResponse(error_body("ServiceUnavailable", problem), _UNREADY, {"Retry-After": "10"})


async def _body(request: Request) -> bytes | None:
    """Return a request's body; None if it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
    return b"".join(parts)


def _asked(request: Request, body: bytes) -> dict[str, Any] | None:
    """Return what is asked of the answering endpoints, None for any other request, and for what they will refuse."""
    if request.method != "POST" or request.url.path not in (ANSWER, CHAT):
        return None
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    if not isinstance(asked, dict) or not isinstance(asked.get("ragkv", {}), dict):
        return None
    if asked.get("temperature") and asked.get("seed") is None:
        asked["seed"] = secrets.randbelow(1 << 31)  # so that another server draws the same tokens
    return asked


def _handing_over(url: str, asked: dict[str, Any], way: HandOver) -> dict[str, Any]:
    """Return what is asked, with the option."""
    if url.startswith(ANSWER):
        return {**asked, "hand_over": way}
    return {**asked, "ragkv": {**asked.get("ragkv", {}), "hand_over": way}}


async def _parsed(answer: httpx.Response) -> AsyncIterator[Frame]:
    """Yield a stream's whole events, as `ragkv serve` writes them: of lines that end with a line feed."""
    left = b""
    async for part in answer.aiter_bytes():
        *blocks, left = (left + part).split(b"\n\n")
        for block in blocks:
            lines = [line.partition(": ") for line in block.decode().split("\n")]
            named = {kind: value for kind, _, value in lines}
            if "data" in named:
                yield Frame(named.get("event", ""), named["data"])


def _is_gone(frame: Frame) -> bool:
    return f'"{_GONE}"' in frame.data and json.loads(frame.data).get("error", {}).get("type") == _GONE


def _headers(answer: httpx.Response) -> dict[str, str]:
    dropped = {*_PER_HOP, "content-encoding"}
    return {name: value for name, value in answer.headers.items() if name not in dropped}


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def create_front(front: Front) -> Starlette:
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", front.handle, methods=methods)])


def serve_front(config: Config) -> None:
    """Answer at the server's address by `front.prefill` and `front.decode`, until SIGTERM or SIGINT.

    Raises ConfigError for an address that can't be used.
    """
    sides = {"prefill": config.front.prefill, "decode": config.front.decode}
    for name, address in sides.items():
        if not address or httpx.URL(address).scheme not in ("http", "https"):
            raise ConfigError(
                f"front.{name} is {address!r}; set it (--{name}, RAGKV_FRONT__{name.upper()}) to the address of a "
                "`ragkv serve`, as http://127.0.0.1:8091"
            )
    log_as(config.server.log)
    with bind(config.server, has_keys=bool(config.holders())) as listener:
        asyncio.run(_serve(config, listener))


async def _serve(config: Config, listener: Any) -> None:
    assert config.front.prefill is not None and config.front.decode is not None
    front = Front(config.front.prefill.rstrip("/"), config.front.decode.rstrip("/"), config.front.patience_s)
    settings = uvicorn.Config(create_front(front), lifespan="off", log_config=None, access_log=False)
    host, port = listener.getsockname()[:2]
    logging.getLogger("uvicorn.error").info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    try:
        await listen(uvicorn.Server(settings), listener, config.server.max_pause_s)
    finally:
        await front.close()
