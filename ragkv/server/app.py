"""The HTTP interface of a pipeline: requests in, answers out. Knows nothing of vLLM or retrieval."""

from fastapi import FastAPI, Response, Security
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from ragkv import __version__
from ragkv.server.answers import answers
from ragkv.server.chat import chat
from ragkv.server.gate import Gate
from ragkv.server.metrics import Observed
from ragkv.server.page import page
from ragkv.server.wire import ERRORS, EXCEPTION_HANDLERS, Pipeline, check_ready


class StatusResponse(BaseModel):
    status: str


class HealthResponse(StatusResponse):
    counters: dict[str, int] = Field(
        description="How often KV wasn't reused, by reason, and chunks captured again, since the start"
    )


def create_app(pipeline: Pipeline) -> FastAPI:
    """The HTTP interface of an open pipeline. Closing it stays with the caller."""
    pipeline = observed = Observed(pipeline)
    bearer = HTTPBearer(auto_error=False, description="Where the server has keys. The gate looks at it")
    app = FastAPI(
        title="ragkv", version=__version__, exception_handlers=EXCEPTION_HANDLERS, dependencies=[Security(bearer)]
    )
    app.add_middleware(Gate, keys=pipeline.config.server.keys)
    app.include_router(answers(pipeline))
    app.include_router(chat(pipeline))
    app.include_router(page())

    @app.get("/healthz")
    async def healthz() -> HealthResponse:
        """Whether the process is up, and what it counted."""
        return HealthResponse(status="ok", counters=pipeline.counters)

    @app.get("/readyz", responses={503: ERRORS[503]})
    async def readyz() -> StatusResponse:
        """Whether questions can be answered."""
        check_ready(pipeline)
        return StatusResponse(status="ready")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts and times, as Prometheus reads them."""
        return Response(observed.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return app
