"""The HTTP endpoint: requests in, answers or server-sent events out, errors as statuses.

Knows nothing of vLLM or retrieval: whatever streams answer events can be served.
"""

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.exceptions import HTTPException

from ragkv import __version__
from ragkv.answer import Answer, AnswerEvent, AnswerOptions, Delta, Retrieved, Source, Timings, Usage
from ragkv.config import AnswerConfig, Config, ServerConfig
from ragkv.errors import ConfigError, ContextTooLongError, RagKVError
from ragkv.policies import DESCRIPTIONS, FULL, SHIFT, Policy
from ragkv.store.eviction import HINTS, Hint

logger = logging.getLogger(__name__)

GRACE_S = 30  # how long a server that is told to stop lets answers in progress finish
CLIENT_CLOSED_REQUEST = 499  # nginx's status for it; nobody is there to read it
STATUSES: dict[type[RagKVError], int] = {ContextTooLongError: 413, ConfigError: 422}  # any other: 500
T = TypeVar("T")


class Pipeline(Protocol):
    """What is served. `answer` is closed, which cancels the generation, when the client goes away."""

    @property
    def config(self) -> Config: ...

    @property
    def is_ready(self) -> bool: ...

    def answer(self, question: str, options: AnswerOptions) -> AsyncGenerator[AnswerEvent, None]: ...

    @property
    def counters(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


class AnswerRequest(BaseModel):
    """What isn't given comes from the server's configuration."""

    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=1, max_length=100_000)
    top_k: int | None = Field(None, ge=1, le=100, description="Chunks to retrieve")
    policy: str | None = Field(
        None,
        description="; ".join(f"`{name}`: {text}" for name, text in DESCRIPTIONS.items())
        + f"; `+shift`: {SHIFT}; `+full`: {FULL}",
        examples=[*DESCRIPTIONS, "query+shift"],
    )
    budget: float | None = Field(None, ge=0, le=1, description="Share of the cached tokens to recompute")
    max_tokens: int | None = Field(None, ge=1, description="Longest answer in tokens")
    hint: Hint | None = Field(
        None,
        description="How the KV of the chunks found is treated from now on when room is needed: "
        + "; ".join(f"`{name}`: {text}" for name, text in HINTS.items()),
    )
    stream: bool = Field(False, description="Answer with server-sent events: `sources`, `delta`…, `done`, or `error`")

    @field_validator("question")
    @classmethod
    def _not_blank(cls, question: str) -> str:
        if not question.strip():
            raise ValueError("is blank")
        return question

    def options(self, defaults: AnswerConfig) -> AnswerOptions:
        """Raises ConfigError for an unknown policy."""
        policy = Policy.of(self.policy or defaults.policy, defaults.budget if self.budget is None else self.budget)
        max_tokens = self.max_tokens or defaults.max_tokens
        return AnswerOptions(policy, self.top_k or defaults.top_k, max_tokens, hint=self.hint)


class SourceResponse(BaseModel):
    document: str
    title: str
    chunk: int
    ordinal: int = Field(description="The chunk's place in its document, from 0")
    score: float = Field(description="Inner product of the embeddings")
    text: str

    @classmethod
    def of(cls, source: Source) -> "SourceResponse":
        fields = asdict(source)
        return cls(document=fields.pop("document_id"), chunk=fields.pop("chunk_id"), **fields)


class PlanResponse(BaseModel):
    way: str = Field(description="`fuse`, `fuse warm` (chunks on disk are computed) or `prefill` (by vLLM alone)")
    predicted_ms: float = Field(description="The time to first token that was expected of it")
    prefill_ms: float = Field(description="The same of a full prefill")


class AnswerResponse(BaseModel):
    answer: str
    sources: list[SourceResponse] = Field(description="In the order of the prompt")
    policy: str = Field(description="What was really used")
    fallback: str | None = Field(description="What kept KV from being reused, if anything")
    usage: Usage
    timings: Timings
    plan: PlanResponse | None = Field(description="What the controller chose; null if it wasn't asked")
    finish_reason: str

    @classmethod
    def of(cls, answer: Answer) -> "AnswerResponse":
        return cls(
            answer=answer.text,
            sources=[SourceResponse.of(source) for source in answer.sources],
            policy=answer.policy,
            fallback=answer.fallback,
            usage=answer.usage,
            timings=answer.timings,
            plan=PlanResponse.model_validate(answer.plan, from_attributes=True) if answer.plan else None,
            finish_reason=answer.finish_reason,
        )


class ErrorBody(BaseModel):
    type: str
    message: str
    num_tokens: int | None = Field(None, description="ContextTooLongError: the question's length in tokens")
    limit: int | None = Field(None, description="ContextTooLongError: the longest that fits")


class ErrorResponse(BaseModel):
    error: ErrorBody


class StatusResponse(BaseModel):
    status: str


class HealthResponse(StatusResponse):
    counters: dict[str, int] = Field(
        description="How often KV wasn't reused, by reason, and chunks captured again, since the start"
    )


def create_app(pipeline: Pipeline) -> FastAPI:
    """The HTTP interface of an open pipeline. Closing it stays with the caller."""
    app = FastAPI(title="ragkv", version=__version__, exception_handlers=_EXCEPTION_HANDLERS)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": description}
        for status, description in {
            413: "The question doesn't fit into the model's context",
            422: "Something in the request can't be used",
            503: "The engine is not running",
        }.items()
    }
    stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}

    @app.post("/v1/answer", response_model=AnswerResponse, responses={200: stream, **errors})
    async def answer(body: AnswerRequest, request: Request) -> Response | AnswerResponse:
        """Answer a question from the indexed documents."""
        options = body.options(pipeline.config.answer)
        _check_ready(pipeline)
        events = pipeline.answer(body.question, options)
        # The first event is awaited before any status is sent, so that what is known by then gets its own.
        first = await _unless_disconnected(request, anext(events))
        if first is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(_sse(first, events), media_type="text/event-stream", headers=headers)
        last = await _unless_disconnected(request, _last(events))
        return AnswerResponse.of(last) if last else Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.get("/healthz")
    async def healthz() -> HealthResponse:
        """Whether the process is up, and what it counted."""
        return HealthResponse(status="ok", counters=pipeline.counters)

    @app.get("/readyz", responses={503: errors[503]})
    async def readyz() -> StatusResponse:
        """Whether questions can be answered."""
        _check_ready(pipeline)
        return StatusResponse(status="ready")

    return app


def _check_ready(pipeline: Pipeline) -> None:
    if not pipeline.is_ready:
        raise HTTPException(503, "the engine is not running; see the server's log")


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; None, and `work` is cancelled, if the client goes away first."""
    answer = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answer, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        disconnected.cancel()
        await asyncio.gather(answer, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _last(events: AsyncGenerator[AnswerEvent, None]) -> Answer:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                return event
    raise RuntimeError("the pipeline ended without an answer")


async def _sse(first: AnswerEvent, events: AsyncGenerator[AnswerEvent, None]) -> AsyncIterator[str]:
    async with aclosing(events):
        yield _frame(first)
        try:
            async for event in events:
                yield _frame(event)
        except Exception as error:  # the status is out: all that is left is to say so in the stream
            if not isinstance(error, RagKVError):
                logger.exception("an answer broke off")
            yield _sse_event("error", _error(error))


def _frame(event: AnswerEvent) -> str:
    if isinstance(event, Retrieved):
        return _sse_event("sources", {"sources": [SourceResponse.of(source).model_dump() for source in event.sources]})
    if isinstance(event, Delta):
        return _sse_event("delta", {"text": event.text})
    return _sse_event("done", AnswerResponse.of(event).model_dump(exclude={"answer", "sources"}))


def _sse_event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def _error(error: Exception) -> dict[str, Any]:
    """The body that reports `error`. What isn't a RagKVError stays in the log."""
    if isinstance(error, ContextTooLongError):
        return _error_body(type(error).__name__, str(error), num_tokens=error.num_tokens, limit=error.limit)
    if isinstance(error, RagKVError):
        return _error_body(type(error).__name__, str(error))
    return _error_body("InternalServerError", "something went wrong; see the server's log")


def _error_body(kind: str, message: str, **data: int) -> dict[str, Any]:
    return ErrorResponse(error=ErrorBody(type=kind, message=message, **data)).model_dump(exclude_none=True)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    return JSONResponse(_error(error), status)


async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    kind = HTTPStatus(error.status_code).phrase.replace(" ", "")
    return JSONResponse(_error_body(kind, error.detail), error.status_code, error.headers)


async def _on_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
    problems = [f"{'.'.join(map(str, detail['loc'][1:])) or 'body'}: {detail['msg']}" for detail in error.errors()]
    return JSONResponse(_error_body("InvalidRequest", "; ".join(problems)), 422)


_EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    HTTPException: _on_http_error,
    RequestValidationError: _on_invalid_request,
    RagKVError: _on_error,
    Exception: _on_error,
}


def serve(config: ServerConfig, open_pipeline: Callable[[], Awaitable[Pipeline]]) -> None:
    """Open the pipeline and answer requests until SIGTERM or SIGINT; answers in progress get `GRACE_S` to finish.

    Raises ConfigError, before anything is loaded, where the address can't be used.
    """
    with _bind(config) as listener:
        # Also while the model loads: leave through every `finally`, so that no engine process is left behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        asyncio.run(_serve(listener, open_pipeline))


def _bind(config: ServerConfig) -> socket.socket:
    where = f"{config.host}:{config.port}"
    remedy = "choose another with --host and --port (RAGKV_SERVER__HOST, RAGKV_SERVER__PORT)"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't listen on {where}: {error.strerror}; {remedy}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {where}: {error.strerror}; {remedy}") from error
    return listener


async def _serve(listener: socket.socket, open_pipeline: Callable[[], Awaitable[Pipeline]]) -> None:
    pipeline = await open_pipeline()
    try:
        settings = uvicorn.Config(create_app(pipeline), lifespan="off", timeout_graceful_shutdown=GRACE_S)
        host, port = listener.getsockname()[:2]
        logging.getLogger("uvicorn.error").info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        await uvicorn.Server(settings).serve(sockets=[listener])
    finally:
        await pipeline.close()
