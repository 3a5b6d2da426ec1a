"""Scripted endpoints for documents and jobs: the steps of a job, refusals, names of every kind."""

import time
from collections import deque

from fastapi import APIRouter, FastAPI, UploadFile
from fastapi.responses import JSONResponse

from ragkv.server.gate import Gate
from ragkv.server.wire import error_body

REPORT = {
    **dict.fromkeys(("documents_new", "documents_changed", "documents_unchanged", "documents_removed"), 0),
    **dict.fromkeys(("chunks_prefilled", "chunks_deleted"), 0),
}


class ScriptedApi:
    """Documents of one chunk for each file. A job advances by one step each time it is read."""

    def __init__(self) -> None:
        self.documents: dict[str, str] = {}
        self.jobs: dict[str, deque] = {}
        self.refusals: deque = deque()  # (status, message, headers) for the next uploads or deletions
        self.most_at_once = self.uploading = 0

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post("/v1/documents", status_code=202)
        async def upload(files: list[UploadFile]):
            if self.refusals:
                return refusal(*self.refusals.popleft())
            (file,) = files
            content = await file.read()
            if b"\0" in content:
                return refusal(422, f"{file.filename} can't be read: it is binary")
            return self._new_job(file.filename, content.decode())

        @router.get("/v1/jobs")
        async def jobs():
            return {"jobs": [steps[0] for steps in reversed(self.jobs.values())]}

        @router.get("/v1/jobs/{job}")
        async def job(job: str):
            steps = self.jobs[job]
            if len(steps) > 1:
                steps.popleft()
            if steps[0]["status"] == "done":
                self.documents |= steps[0]["text"]
                self.uploading -= 1
            return {**steps[0], "text": None}

        @router.get("/v1/documents")
        async def documents(limit: int = 100, after: str = ""):
            names = sorted(name for name in self.documents if name > after)
            more = names[limit - 1] if len(names) > limit else None
            return {"documents": [self._document(name) for name in names[:limit]], "next": more}

        @router.get("/v1/documents/{name:path}")
        async def document(name: str):
            text = self.documents[name]
            chunk = {"ordinal": 0, "num_tokens": len(text.split()), "text": text, "stored": True}
            return {**self._document(name), "chunks": [chunk]}

        @router.delete("/v1/documents/{name:path}")
        async def delete(name: str):
            if self.refusals:
                return refusal(*self.refusals.popleft())
            del self.documents[name]
            return {"name": name, "num_chunks": 1, "num_shared": 0, "size_bytes": 3 << 20}

        return router

    def _document(self, name: str) -> dict:
        text = self.documents[name]
        return {
            "name": name,
            "title": text.split("\n")[0].lstrip("# "),
            "num_chunks": 1,
            "num_tokens": len(text.split()),
        }

    def _new_job(self, name: str, text: str) -> dict:
        job = {"id": str(len(self.jobs)), "created": time.time(), "names": [name], "stage": None, "item": name}
        job |= {"done": 0, "total": 0, "report": None, "error": None, "text": {name: text}}
        report = {**REPORT, "documents_new": 1, "chunks_prefilled": 1}
        steps = (
            {"status": "waiting"},
            {"status": "running", "stage": "load", "total": 1},
            {"status": "running", "stage": "prefill", "total": 4, "done": 3},
            {"status": "done", "report": report},
        )
        self.jobs[job["id"]] = deque({**job, **step} for step in steps)
        self.uploading += 1
        self.most_at_once = max(self.most_at_once, self.uploading)
        return job | steps[0]


def refusal(status: int, message: str, headers: dict | None = None) -> JSONResponse:
    return JSONResponse(error_body("Refused", message), status, headers)


def holders_of(app):
    (gate,) = [each for each in app.user_middleware if each.cls is Gate]
    return gate.kwargs["holders"]


def app_with(api: ScriptedApi):
    """Return a `wrap` for `running`: the app with the scripted endpoints in place of its own."""
    scripted = FastAPI()
    scripted.include_router(api.router())

    def wrap(app):
        async def served(scope, receive, send) -> None:
            path = scope.get("path", "")
            if path.startswith(("/v1/documents", "/v1/jobs")):
                await Gate(scripted, holders_of(app), {}, 1 << 20, 60)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return served

    return wrap
