"""The HTTP interface of pipelines: requests in, answers out. Knows nothing of vLLM or retrieval."""

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response, Security
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from ragkv import __version__
from ragkv.config import MAIN
from ragkv.server.answers import answers
from ragkv.server.chat import chat
from ragkv.server.documents import documents
from ragkv.server.gate import Gate
from ragkv.server.page import page
from ragkv.server.telemetry import Telemetry
from ragkv.server.tenants import Tenants
from ragkv.server.wire import ERRORS, EXCEPTION_HANDLERS, ErrorResponse, check_ready


class StatusResponse(BaseModel):
    status: str


class HealthResponse(StatusResponse):
    counters: dict[str, int] = Field(
        description="How often KV wasn't reused, by reason, and chunks precomputed again, since the start"
    )


def create_app(tenants: Tenants) -> FastAPI:
    """The HTTP interface of open pipelines. Closing them stays with the caller."""
    config, main = tenants.config, tenants.main.pipeline
    holders = config.holders()
    app = FastAPI(title="ragkv", version=__version__, exception_handlers=EXCEPTION_HANDLERS)
    max_upload_bytes = round(config.server.max_upload_mib * (1 << 20))
    app.add_middleware(Gate, holders=holders, max_upload_bytes=max_upload_bytes, max_pause_s=config.server.max_pause_s)
    app.add_middleware(Telemetry)
    bearer = HTTPBearer(auto_error=False, description="A key of the server's. The gate looks at it")
    guarded = APIRouter(dependencies=[Security(bearer)] if holders else [], responses={401: ERRORS[401]})
    for router in (answers(tenants), chat(tenants), documents(tenants)):
        guarded.include_router(router)
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

    plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    others = {"model": ErrorResponse, "description": "The key is a tenant's"}

    @guarded.get("/metrics", responses={200: plain, 403: others})
    async def metrics(request: Request) -> Response:
        """Counts and times of all tenants, as Prometheus reads them. For the keys of `server.keys` alone."""
        if request.scope["tenant"] != MAIN:
            raise HTTPException(403, "the metrics are of all tenants; they need a key of server.keys")
        return Response(tenants.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(guarded)
    return app
