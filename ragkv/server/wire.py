"""Shared by all endpoints: options and parts of answers, streams, and errors."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ragkv.answer import HAND_OVERS, Answer, AnswerEvent, AnswerOptions, HandOver, Sampling
from ragkv.config import AnswerConfig
from ragkv.engine.task import KEEPS
from ragkv.errors import (
    BusyError,
    ConfigError,
    ContextTooLongError,
    DeadlineError,
    DocumentError,
    EngineStoppedError,
    OverloadedError,
    QuotaError,
    RagKVError,
    RemoteError,
    UnknownDocumentError,
)
from ragkv.policies import DESCRIPTIONS, SHIFT_DESCRIPTION, Policy
from ragkv.retriever.documents import is_visible
from ragkv.store.eviction import HINTS, Hint

if TYPE_CHECKING:
    from ragkv.pipeline import Pipeline

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status; no client is left to read it
STATUSES: dict[type[RagKVError], int] = {  # any other: 500
    BusyError: 409,
    ConfigError: 422,
    ContextTooLongError: 413,
    DeadlineError: 504,
    DocumentError: 422,
    EngineStoppedError: 503,
    OverloadedError: 429,
    QuotaError: 413,
    RemoteError: 503,
    UnknownDocumentError: 404,
}
T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
Frame = dict[str, str]  # of a server-sent event: its data, and its event's name if it has one
ToFrames = Callable[[AnswerEvent | Exception], Iterable[Frame]]

AppStatus.enable_automatic_graceful_drain = False  # else SIGTERM ends streams at once; uvicorn lets them finish


def _not_blank(text: str) -> str:
    if not is_visible(text):
        raise ValueError("is blank")
    return text


Question = Annotated[str, Field(min_length=1, max_length=100_000), AfterValidator(_not_blank)]


class Choices(BaseModel):
    """Options of one question; they default to the server's configuration."""

    model_config = ConfigDict(extra="forbid", strict=True)

    top_k: int | None = Field(None, ge=1, le=100, description="Chunks to retrieve")
    policy: str | None = Field(
        None,
        description="; ".join(f"`{name}`: {text}" for name, text in DESCRIPTIONS.items())
        + f"; `+shift`, {SHIFT_DESCRIPTION}",
        examples=[*DESCRIPTIONS, "query+shift"],
    )
    budget: float | None = Field(None, ge=0, le=1, description="Share of the cached tokens to recompute")
    hint: Hint | None = Field(
        None,
        description="How the KV of the retrieved chunks is treated from now on when room is needed: "
        + "; ".join(f"`{name}`: {text}" for name, text in HINTS.items()),
    )
    prefix: Literal["auto", "session", "shared", "once"] | None = Field(
        None,
        description="What of the request is kept as an exact prefix for later ones, also after a restart: `auto`: what "
        "has come back before; " + "; ".join(f"`{name}`: {text}" for name, text in KEEPS.items()),
    )
    explain: bool = Field(False, description="Report where each prompt token's KV came from")
    fresh: bool = Field(False, description="Use no KV of earlier requests: times are those of a first request")
    hand_over: HandOver | None = Field(
        None,
        description="Of one question, asked of two servers on the same documents (`ragkv front`): "
        + "; ".join(f"`{name}`: {text}" for name, text in HAND_OVERS.items()),
    )
    timeout_s: float | None = Field(
        None, ge=0.1, le=86_400, description="Longest time for the whole answer, in seconds"
    )
    max_drift: float | None = Field(
        None, gt=0, description="Begin the answer again, more exactly, while its estimated drift is above this, in nats"
    )

    def options(
        self, defaults: AnswerConfig, max_tokens: int | None, sampling: Sampling | None = None
    ) -> AnswerOptions:
        """Return the options with the defaults filled in. Raises ConfigError for an unknown policy."""
        policy = Policy.of(self.policy or defaults.policy, defaults.budget if self.budget is None else self.budget)
        return AnswerOptions(
            policy,
            self.top_k or defaults.top_k,
            max_tokens or defaults.max_tokens,
            fresh=self.fresh,
            hint=self.hint,
            sampling=sampling or Sampling.of(defaults),
            explain=self.explain,
            timeout_s=self.timeout_s or defaults.timeout_s,
            max_drift=None if self.hand_over else self.max_drift or defaults.max_drift,
            keep=None if (keep := self.prefix or defaults.prefix) == "auto" else keep,
            hand_over=self.hand_over,
        )


class ErrorBody(BaseModel):
    type: str
    message: str
    num_tokens: int | None = Field(None, description="ContextTooLongError: the question's length in tokens")
    limit: int | None = Field(None, description="ContextTooLongError: the longest that fits")


class ErrorResponse(BaseModel):
    error: ErrorBody


_DESCRIPTIONS = {
    400: "The body can't be read",
    401: "A key is missing or unknown",
    403: "The key is a tenant's",
    404: "It doesn't exist, or no longer",
    408: "The body stopped coming, or came too slowly",
    409: "The home is being changed by another process",
    413: "The request is too large, or the question doesn't fit into the model's context",
    422: "Something in the request can't be used",
    429: "Too many requests in progress, waiting or in this minute; Retry-After says when to try again",
    503: "The engine is not running",
    504: "The answer took longer than timeout_s",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of error responses for an endpoint's schema."""
    return {status: {"model": ErrorResponse, "description": _DESCRIPTIONS[status]} for status in statuses}


ANSWER_ERRORS = errors(400, 401, 408, 413, 422, 429, 503, 504)
_EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": {**_EVENT, "required": ["data"]}}}}


def check_ready(pipeline: "Pipeline") -> None:
    if not pipeline.is_ready:
        message = "the engine is not running; if it has ended it is being started again, see the server's log"
        raise HTTPException(503, message, {"Retry-After": "10"})


async def respond(
    request: Request,
    events: AsyncGenerator[AnswerEvent, None],
    to_frames: ToFrames | None,
    to_body: Callable[[Answer], Body],
) -> Response | Body:
    """Answer `request` with the last event's `to_body`, or with a stream: `to_frames` of each event and of an error.

    The first event is awaited before any status is sent, so that an error until then gets its own status.
    """
    first = await unless_disconnected(request, anext(events))
    if first is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if to_frames is not None:
        return _stream(first, events, to_frames)
    last = await unless_disconnected(request, _last_of(events))
    return to_body(last) if last else Response(status_code=CLIENT_CLOSED_REQUEST)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`; cancel it and return None if the client disconnects first."""
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


async def _last_of(events: AsyncGenerator[AnswerEvent, None]) -> Answer:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                return event
    raise RuntimeError("the pipeline ended without an answer")


def _stream(first: AnswerEvent, events: AsyncGenerator[AnswerEvent, None], to_frames: ToFrames) -> EventSourceResponse:
    async def body() -> AsyncIterator[Frame]:
        async with aclosing(events):
            try:
                for frame in to_frames(first):
                    yield frame
                async for event in events:
                    for frame in to_frames(event):
                        yield frame
            except Exception as error:  # the status is sent: only the stream can still report it
                if not isinstance(error, RagKVError):
                    logger.exception("an answer broke off")
                for frame in to_frames(error):
                    yield frame

    return EventSourceResponse(body(), headers={"Cache-Control": "no-cache"}, sep="\n", ping=0)


def as_json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


def error_of(error: Exception) -> dict[str, Any]:
    """Return the body that reports `error`; an error that isn't a RagKVError is only in the log."""
    if isinstance(error, ContextTooLongError):
        return error_body(type(error).__name__, str(error), num_tokens=error.num_tokens, limit=error.limit)
    if isinstance(error, RagKVError):
        return error_body(type(error).__name__, str(error))
    return error_body("InternalServerError", "something went wrong; see the server's log")


def error_body(kind: str, message: str, **data: int) -> dict[str, Any]:
    return ErrorResponse(error=ErrorBody(type=kind, message=message, **data)).model_dump(exclude_none=True)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": f"{error.retry_after_s:.0f}"} if isinstance(error, OverloadedError) else {}
    if not isinstance(error, RagKVError):  # Starlette raises it again, and then uvicorn closes the connection
        headers["Connection"] = "close"
    return JSONResponse(error_of(error), status, headers)


async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    kind, headers = HTTPStatus(error.status_code).phrase.replace(" ", ""), dict(error.headers or {})
    if error.status_code == 405:  # Starlette names the methods of only one of the path's routes
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
    return JSONResponse(error_body(kind, error.detail), error.status_code, headers)


async def _on_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
    return JSONResponse(error_body("InvalidRequest", "; ".join(map(_problem, error.errors()))), 422)


def _problem(detail: dict[str, Any]) -> str:
    if detail["type"] == "json_invalid":
        return f"body: {detail['ctx']['error']}"
    return f"{'.'.join(map(str, detail['loc'][1:])) or 'body'}: {detail['msg']}"


EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    HTTPException: _on_http_error,
    RequestValidationError: _on_invalid_request,
    RagKVError: _on_error,
    Exception: _on_error,
}
