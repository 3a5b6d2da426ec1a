"""The HTTP interface of open pipelines. Knows nothing of vLLM or retrieval."""

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response, Security
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from ragkv import __version__
from ragkv.config import MAIN
from ragkv.operations.running import RunningStore
from ragkv.server import answers, chat, documents, store
from ragkv.server.gate import Gate
from ragkv.server.page import page
from ragkv.server.telemetry import observe_requests
from ragkv.server.tenants import AllTenants, Tenants
from ragkv.server.wire import EXCEPTION_HANDLERS, check_ready, errors


class StatusResponse(BaseModel):
    status: str


class HealthResponse(StatusResponse):
    counters: dict[str, int] = Field(
        description="How often KV wasn't reused, by reason, and chunks precomputed again, since the start"
    )


_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}

router = APIRouter()  # open to everybody
guarded = APIRouter(responses=errors(401))
for each in (answers.router, chat.router, documents.router):
    guarded.include_router(each)


@router.get("/healthz")
async def healthz(tenants: AllTenants) -> HealthResponse:
    """Return whether the process is up, and its counters."""
    return HealthResponse(status="ok", counters=tenants.main.pipeline.counters)


@router.get("/readyz", responses=errors(503))
async def readyz(tenants: AllTenants) -> StatusResponse:
    """Return whether questions can be answered."""
    check_ready(tenants.main.pipeline)
    return StatusResponse(status="ready")


@guarded.get("/metrics", responses={200: _TEXT, **errors(403)})
async def metrics(request: Request, tenants: AllTenants) -> Response:
    """Return the counts and times of all tenants in Prometheus' format. Only for the keys of `server.keys`."""
    if request.scope["tenant"] != MAIN:
        raise HTTPException(403, "the metrics are of all tenants; they need a key of server.keys")
    return Response(tenants.metrics.render(), media_type=CONTENT_TYPE_LATEST)


class HeadAsGet:
    """ASGI middleware that answers HEAD as GET, wherever there is a GET. The HTTP server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


def create_app(tenants: Tenants) -> FastAPI:
    """Return the HTTP interface of open pipelines; the caller closes them."""
    config, holders, operators = tenants.config.server, tenants.config.holders(), tenants.config.operators()
    app = FastAPI(title="ragkv", version=__version__, exception_handlers=EXCEPTION_HANDLERS)
    app.state.tenants = tenants
    max_upload_bytes = round(config.max_upload_mib * (1 << 20))
    app.add_middleware(HeadAsGet)
    app.add_middleware(
        Gate,
        holders=holders,
        operators=operators,
        max_upload_bytes=max_upload_bytes,
        max_pause_s=config.max_pause_s,
    )
    observe_requests(app)
    app.include_router(page())
    app.include_router(router)
    bearer = HTTPBearer(auto_error=False, description="A key of the server; the gate checks it")
    app.include_router(guarded, dependencies=[Security(bearer)] if holders else [])
    if operators:
        app.state.store = RunningStore(tenants.main.pipeline.workspace)
        app.include_router(store.router, dependencies=[Security(bearer)])
    return app
