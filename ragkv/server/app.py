"""The HTTP interface of pipelines: requests in, answers out. Knows nothing of vLLM or retrieval."""

from fastapi import FastAPI, Response, Security
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from ragkv import __version__
from ragkv.server.answers import answers
from ragkv.server.chat import chat
from ragkv.server.documents import documents
from ragkv.server.gate import Gate
from ragkv.server.page import page
from ragkv.server.tenants import Tenants
from ragkv.server.wire import ERRORS, EXCEPTION_HANDLERS, check_ready


class StatusResponse(BaseModel):
    status: str


class HealthResponse(StatusResponse):
    counters: dict[str, int] = Field(
        description="How often KV wasn't reused, by reason, and chunks captured again, since the start"
    )


def create_app(tenants: Tenants) -> FastAPI:
    """The HTTP interface of open pipelines. Closing them stays with the caller."""
    config, main = tenants.config, tenants.main.pipeline
    bearer = HTTPBearer(auto_error=False, description="Where the server has keys. The gate looks at it")
    app = FastAPI(
        title="ragkv", version=__version__, exception_handlers=EXCEPTION_HANDLERS, dependencies=[Security(bearer)]
    )
    app.add_middleware(Gate, holders=config.holders(), max_upload_bytes=round(config.server.max_upload_mib * (1 << 20)))
    app.include_router(answers(tenants))
    app.include_router(chat(tenants))
    app.include_router(documents(tenants))
    app.include_router(page())

    @app.get("/healthz")
    async def healthz() -> HealthResponse:
        """Whether the process is up, and what it counted."""
        return HealthResponse(status="ok", counters=main.counters)

    @app.get("/readyz", responses={503: ERRORS[503]})
    async def readyz() -> StatusResponse:
        """Whether questions can be answered."""
        check_ready(main)
        return StatusResponse(status="ready")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts and times, as Prometheus reads them."""
        return Response(tenants.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return app
