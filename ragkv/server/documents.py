"""Endpoints for documents: upload and its job, list, search, delete."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from typing import Annotated, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, File, Form, HTTPException, Query, Response, UploadFile
from pydantic import AliasPath, BaseModel, ConfigDict, Field

from ragkv.answer import Retrieved
from ragkv.errors import DocumentError
from ragkv.index.deletion import Deletion
from ragkv.index.uploads import Status
from ragkv.index.work import IngestReport
from ragkv.retriever.catalog import Catalog, DocumentInfo
from ragkv.retriever.documents import SUFFIXES, document_name, source_file, unsupported
from ragkv.server.json_body import JsonRoute
from ragkv.server.tenants import CurrentTenant
from ragkv.server.wire import Question, check_ready, errors
from ragkv.store.eviction import HINTS, Hint

_MAX_NAME = 500
# Backslashes, controls, ends of lines and changes of direction, halves of characters.
_UNSAFE = re.compile(r"[\\\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Job(BaseModel):
    """An upload that is being indexed, or was."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    status: Status
    created: float = Field(description="Seconds since 1970")
    names: list[str] = Field(description="Names of its files")
    stage: Literal["load", "prefill"] | None = Field(None, validation_alias=AliasPath("progress", "stage"))
    done: int = Field(0, validation_alias=AliasPath("progress", "done"))
    total: int = Field(0, validation_alias=AliasPath("progress", "total"))
    item: str = Field("", validation_alias=AliasPath("progress", "item"))
    rejected: list[str] = Field(description="Records of JSONL files that are left out, and why")
    report: IngestReport | None
    error: str | None = Field(description="Why it failed, or why it waits: then it is tried again")


class JobList(BaseModel):
    jobs: list[Job] = Field(
        description="Newest first. The newest of the finished ones are remembered until the server restarts"
    )


class DocumentList(BaseModel):
    documents: list[DocumentInfo] = Field(description="By name")
    next: str | None = Field(description="The `after` of the next page; null on the last one")


class ChunkResponse(BaseModel):
    ordinal: int
    num_tokens: int
    text: str
    stored: bool = Field(description="Whether its KV is stored; otherwise it is precomputed when it is retrieved")


@dataclass(frozen=True)
class DocumentWithChunks(DocumentInfo):
    chunks: list[ChunkResponse]


@dataclass(frozen=True)
class FileWithRecords:
    """A JSONL file, each of whose records is a document."""

    name: str
    num_documents: int
    documents: list[DocumentInfo]


@dataclass(frozen=True)
class NamedDeletion(Deletion):
    """What was deleted with the documents of a name: a JSONL file's name means all of its records."""

    name: str


class SearchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    query: Question
    top_k: int | None = Field(None, ge=1, le=100, description="Chunks to return; default: the server's")


router = APIRouter(prefix="/v1", route_class=JsonRoute)


@router.post("/documents", status_code=202, responses=errors(400, 408, 413, 422, 429, 503))
async def upload(
    tenant: CurrentTenant,
    response: Response,
    files: Annotated[
        list[UploadFile], File(min_length=1, description=f"{' '.join(SUFFIXES)}; the file name is the document's")
    ],
    hint: Annotated[
        Hint | None,
        Form(description="How its KV is treated when room is needed: " + "; ".join(map(": ".join, HINTS.items()))),
    ] = None,
) -> Job:
    """Index files in the background. A file replaces an earlier upload of the same name; an unchanged one costs
    nothing. All files or none are accepted: the job exists once all of them could be read, and from then on they are
    indexed whatever happens to the server. Only a record of a JSONL file may be left out: `rejected` says why."""
    check_ready(tenant.pipeline)
    names = _names(files)
    with tempfile.TemporaryDirectory(prefix="ragkv-") as folder:
        paths = [Path(folder, f"{i}{Path(name).suffix}") for i, name in enumerate(names)]
        for file, path in zip(files, paths, strict=True):
            with path.open("wb") as target:
                await run_sync(copyfileobj, file.file, target)
        room = tenant.limits.max_text_bytes
        if room is not None:
            room -= await run_sync(lambda: tenant.pipeline.catalog.text_bytes)
        added = await tenant.uploads.add(list(zip(paths, names, strict=True)), hint, room)
    response.headers["Location"] = f"/v1/jobs/{added.id}"
    return Job.model_validate(added)


@router.get("/jobs")
async def jobs(tenant: CurrentTenant) -> JobList:
    """List uploads, waiting and finished."""
    return JobList(jobs=[Job.model_validate(upload) for upload in tenant.uploads.all()])


@router.get("/jobs/{id}", responses=errors(404, 422))
async def job(tenant: CurrentTenant, id: str) -> Job:
    """Return the progress of an upload."""
    found = tenant.uploads.get(id)
    if found is None:
        raise HTTPException(
            404, f"there is no job {id!r}; old ones are forgotten, and all finished ones when the server restarts"
        )
    return Job.model_validate(found)


@router.get("/documents", responses=errors(422))
async def list_documents(
    tenant: CurrentTenant,
    after: Annotated[str, Query(description="The name after which the page begins")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> DocumentList:
    """List indexed documents."""
    infos = await run_sync(tenant.pipeline.catalog.documents, after, limit + 1)
    more = infos[limit - 1].name if len(infos) > limit else None
    return DocumentList(documents=infos[:limit], next=more)


@router.get("/documents/{name:path}", responses=errors(404, 422))
async def get_document(
    tenant: CurrentTenant,
    name: str,
    offset: Annotated[int, Query(ge=0, le=1 << 62, description="Chunks, or records, to skip")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Chunks, or records, to return")] = 100,
) -> DocumentWithChunks | FileWithRecords:
    """Return a document and its chunks, or the documents that a JSONL file's records are."""
    name = document_name(name)
    infos = await run_sync(tenant.pipeline.catalog.document_infos, [name])
    if not infos:
        return await run_sync(_records, tenant.pipeline.catalog, name, offset, limit)
    chunks = await run_sync(tenant.pipeline.indexer.document_chunks, name)
    shown = [
        ChunkResponse(ordinal=chunk.ordinal, num_tokens=len(chunk.token_ids), text=chunk.text, stored=stored)
        for chunk, stored in chunks[offset : offset + limit]
    ]
    return DocumentWithChunks(**vars(infos[0]), chunks=shown)


@router.delete("/documents/{name:path}", responses=errors(404, 409, 422))
async def delete_document(tenant: CurrentTenant, name: str) -> NamedDeletion:
    """Delete a document, its vectors and its KV before returning. An upload of it that isn't indexed yet is
    withdrawn."""
    name = document_name(name)
    withdrawn = await run_sync(tenant.uploads.withdraw, name)
    ids = withdrawn | set(await run_sync(_ids_of, tenant.pipeline.catalog, name))
    if not ids:
        raise _no_document(name)
    deletion = await tenant.pipeline.indexer.delete(ids)
    return NamedDeletion(
        sorted(ids), deletion.num_chunks, deletion.num_shared, deletion.size_bytes, deletion.num_unreached, name
    )


@router.post("/search", responses=errors(400, 408, 422, 429))
async def search(body: SearchRequest, tenant: CurrentTenant) -> Retrieved:
    """Return the chunks that a question would be answered from."""
    with tenant.limits.request():
        sources = await tenant.pipeline.search(body.query, body.top_k or tenant.pipeline.defaults.top_k)
    return Retrieved(sources)


def _names(files: Sequence[UploadFile]) -> list[str]:
    """Return the names of the documents, which are never used as paths. Raises DocumentError for an invalid one."""
    names = [document_name(file.filename or "") for file in files]
    for name in names:
        odd = any(part in ("", ".", "..") for part in name.split("/")) or _UNSAFE.search(name)
        if odd or len(name) > _MAX_NAME or source_file(name) != name:
            raise DocumentError(
                f"{name[:_MAX_NAME]!r} can't be a document's name; use up to {_MAX_NAME} characters, no backslash and "
                "none that controls how text is shown, parts separated by single slashes, none of them . or .. and "
                "without '.jsonl#'"
            )
        if Path(name).suffix.lower() not in SUFFIXES:
            raise unsupported(name)
        if names.count(name) > 1:
            raise DocumentError(f"two files of the upload are named {name!r}; give each its own name")
    return names


def _ids_of(catalog: Catalog, name: str) -> list[str]:
    """Return the ids of the documents that a name means: its own, and those of a JSONL file's records."""
    return [id for id in catalog.document_ids_of(name) if name in (id, source_file(id))]


def _records(catalog: Catalog, name: str, offset: int, limit: int) -> FileWithRecords:
    ids = _ids_of(catalog, name)
    if not ids:
        raise _no_document(name)
    return FileWithRecords(name, len(ids), catalog.document_infos(ids[offset : offset + limit]))


def _no_document(name: str) -> HTTPException:
    return HTTPException(404, f"there is no document {name!r}; GET /v1/documents lists them")
