"""Endpoints for operators: the KV of all tenants' documents. Only for the keys of `server.operator_keys` (`gate`)."""

import logging
from collections.abc import Awaitable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from ragkv.errors import ConfigError
from ragkv.operations.changes import OTHER_MODELS, Clearing, Demotion, Pinning, Recoding, Warming
from ragkv.operations.health import Health
from ragkv.operations.lookup import DocumentKV
from ragkv.operations.running import RunningStore
from ragkv.operations.selection import Selection
from ragkv.server.gate import OPERATORS_BELOW
from ragkv.server.json_body import JsonRoute
from ragkv.server.wire import errors
from ragkv.store.codecs import CODECS

logger = logging.getLogger(__name__)

_MOST_NAMES = 1000
T = TypeVar("T")


class Documents(BaseModel):
    """Which documents are meant: those of a tenant by name, all of a tenant's, or `all` of the home's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    documents: list[str] = Field(
        [], max_length=_MOST_NAMES, description="Names: of documents, of JSONL files, of folders with what is in them"
    )
    tenant: str | None = Field(None, description="Whose documents; with `documents` the default is main")
    all: bool = Field(False, description="All tenants' documents")

    def selection(self) -> Selection:
        """Raises ConfigError unless it is one of the three."""
        if self.all == bool(self.documents or self.tenant is not None):
            raise ConfigError("say which documents: names as 'documents', a 'tenant', or 'all': true alone")
        return Selection(tuple(self.documents), self.tenant)


class ToWarm(Documents):
    tier: Literal["memory", "page_cache"] = Field(
        "memory", description="Where to: the worker's memory, or the system's"
    )


class ToRecode(Documents):
    codec: str = Field(description=f"One of {', '.join(CODECS)}, with which it gets smaller")
    timeout_s: float = Field(30.0, gt=0, le=3600, description="After how long to return; what is left: call it again")


class ToClear(Documents):
    model: str | None = Field(
        None, description=f"Instead of documents: the first characters of a model's fingerprint, or `{OTHER_MODELS}`"
    )
    dry_run: bool = Field(False, description="Only say what would be cleared")
    local: bool = Field(False, description="Only on this machine: `store.remote` keeps it, and it is fetched again")


class DocumentKVList(BaseModel):
    documents: list[DocumentKV] = Field(description="By tenant and name")
    next: str | None = Field(description="The `after` of the next page; null on the last one")


async def _store(request: Request) -> RunningStore:
    store: RunningStore = request.app.state.store
    return store


async def _operator(request: Request) -> str:
    return str(request.scope["operator"])  # as the gate found out


Store = Annotated[RunningStore, Depends(_store)]
Operator = Annotated[str, Depends(_operator)]
router = APIRouter(prefix=OPERATORS_BELOW.rstrip("/"), route_class=JsonRoute, responses=errors(401, 403))
_CHANGE = errors(400, 404, 408, 422, 503)


@router.get("/documents", responses=errors(404, 422))
async def look_up(
    store: Store,
    tenant: Annotated[str | None, Query(description="Whose documents; default: all, with `name` main's")] = None,
    name: Annotated[list[str] | None, Query(description="Only these documents", max_length=_MOST_NAMES)] = None,
    after: Annotated[str, Query(description="The `next` of the page before")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> DocumentKVList:
    """Return where documents' KV is, and how it is used. `memory` is null while no worker runs."""
    found, more = await store.lookup(Selection(tuple(name or ()), tenant), after, limit)
    return DocumentKVList(documents=found, next=more)


@router.post("/pin", responses=_CHANGE)
async def pin(store: Store, operator: Operator, body: Documents) -> Pinning:
    """Never evict these documents' KV. Refused with 422 if `store.disk_gib` can't hold all that is pinned then."""
    return await _logged(operator, "pin", body, store.pin(body.selection()))


@router.post("/unpin", responses=_CHANGE)
async def unpin(store: Store, operator: Operator, body: Documents) -> Pinning:
    """Let these documents' KV be evicted again, but for what other pinned documents share (`kept` names them)."""
    return await _logged(operator, "unpin", body, store.unpin(body.selection()))


@router.post("/warm", responses=_CHANGE)
async def warm(store: Store, operator: Operator, body: ToWarm) -> Warming:
    """Bring documents' KV near before they are asked about, between answers."""
    work = store.warm if body.tier == "memory" else store.warm_page_cache
    return await _logged(operator, "warm", body, work(body.selection()))


@router.post("/demote", responses=_CHANGE)
async def demote(store: Store, operator: Operator, body: Documents) -> Demotion:
    """Drop documents' KV from the worker's memory and from the page cache; on disk it stays."""
    return await _logged(operator, "demote", body, store.demote(body.selection()))


@router.post("/recode", responses=_CHANGE)
async def recode(store: Store, operator: Operator, body: ToRecode) -> Recoding:
    """Encode documents' KV with a smaller codec, with `all` also KV of no document. Call it until `num_left` is 0."""
    selection = body.selection()
    work = store.recode(None if body.all else selection, body.codec, body.timeout_s)
    return await _logged(operator, "recode", body, work)


@router.post("/clear", responses=_CHANGE)
async def clear(store: Store, operator: Operator, body: ToClear) -> Clearing:
    """Delete KV, of documents, of a model, or with `all` of everything. Documents stay indexed, and their KV is made
    again once it is missed; `DELETE /v1/documents/{name}` deletes documents. With `store.remote` it is deleted
    there too, unless `local`; `num_unreached` says of how many chunks it couldn't be, then that is tried again."""
    if body.model is None:
        selection = body.selection()
        work = store.clear(None if body.all else selection, dry_run=body.dry_run, local=body.local)
    elif body.all or body.documents or body.tenant is not None:
        raise ConfigError(
            f"a model's KV is cleared for all documents; leave out the others beside 'model': {body.model!r}"
        )
    else:
        work = store.clear_model(body.model, dry_run=body.dry_run, local=body.local)
    return await _logged(operator, "clear", body, work)


@router.get("/health", responses={503: {"model": Health, "description": "`problems` says why it isn't well"}})
async def health(store: Store, response: Response) -> Health:
    """Return whether KV can be read and stored; with `warnings` alone the status is 200."""
    found = await store.health()
    response.status_code = 200 if found.is_well else 503
    return found


async def _logged(operator: str, verb: str, body: BaseModel, work: Awaitable[T]) -> T:
    """Return the result of work that changes something, and log who asked for it, whatever becomes of it."""
    asked: dict[str, Any] = body.model_dump(exclude_defaults=True)
    try:
        result = await work
    except BaseException as error:
        problem = (str(error) or type(error).__name__).partition("\n")[0]
        logger.warning("operator %s: %s %s: %s", operator, verb, asked, problem)
        raise
    logger.info("operator %s: %s %s: %s", operator, verb, asked, result)
    return result
