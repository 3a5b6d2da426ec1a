"""A server over real sockets, with a scripted pipeline."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn

from ragkv import server
from ragkv.answer import Answer, AnswerOptions, Delta, Retrieved, Run, Source, Timings, TokenOrigins, Usage
from ragkv.background import Canary, Idle
from ragkv.config import MAIN, Config
from ragkv.controller.cost_model import Plan
from ragkv.index.deletion import Deletion
from ragkv.index.work import IngestProgress, IngestReport
from ragkv.policies import FULL
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.documents import source_file
from ragkv.server.run import listen
from ragkv.server.tenants import Tenants

SOURCE = Source(document="docs/a.md", title="A [b]", chunk=7, ordinal=2, score=0.5, text="one\n\ntwo\u2028three")
ANSWER = Answer(
    text="Grüße, world",
    sources=[SOURCE],
    policy=FULL,
    usage=Usage(
        prompt_tokens=30, prefix_tokens=5, reused_tokens=20, recomputed_tokens=5, completion_tokens=3, memory_tokens=9
    ),
    timings=Timings(retrieve_ms=1.5, ttft_ms=20.0),
    plan=Plan("fuse", (0, 1), predicted_ms=21.0, prefill_ms=90.0),
    finish_reason="stop",
    fallback="the model's layers all slide",
    hint_refused="too many pins",
)
ORIGINS = TokenOrigins(
    [f" t{i}" for i in range(30)], [Run(0, 5, "prefix", None), Run(5, 25, "disk", 0), Run(25, 30, "computed", None)]
)
SCRIPT = [Retrieved([SOURCE]), Delta("Grüße,\n"), Delta(" world"), ANSWER]


CONFIG = Config(answer={"policy": "query", "budget": 0.2, "top_k": 3, "max_tokens": 40})


class ParagraphIndexer:
    """An indexer of a real catalogue: one chunk for each paragraph, and no KV."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.obstacles: list[Exception] = []  # raised by the next ingests

    async def ingest_documents(self, documents, progress, hint, is_withdrawn):
        report, files = IngestReport(), set()
        if self.obstacles:
            raise self.obstacles.pop(0)
        documents = list(documents)
        for done, document in enumerate(documents):
            progress(IngestProgress("prefill", done, len(documents), document.title))
            await asyncio.sleep(0)
            files.add(source_file(document.id))
            known = self._catalog.document_digest(document.id)
            if known == document.digest or is_withdrawn(document.id):
                report.documents_unchanged += 1
                continue
            chunks = [ChunkText(part, tuple(part.encode())) for part in document.text.split("\n\n")]
            vectors = np.ones((len(chunks), 4), np.float32)
            self._catalog.put_document(document.id, document.title, document.digest, chunks, vectors)
            report.documents_new += known is None
            report.documents_changed += known is not None
        ids = {document.id for document in documents}
        for id in self._catalog.document_ids():
            if source_file(id) in files and id not in ids:
                report.documents_removed += self._catalog.delete_document(id)
        yield report

    async def delete_orphans(self):
        return 0

    async def delete(self, ids):
        num_chunks = sum(len(self._catalog.document_chunks(id)) for id in ids)
        return Deletion([id for id in ids if self._catalog.delete_document(id)], num_chunks, 0, 1000 * num_chunks, 0)

    def document_chunks(self, document_id):
        return [(chunk, True) for chunk in self._catalog.document_chunks(document_id)]


class ScriptedPipeline:
    """A pipeline that plays `script`: it yields events, raises exceptions, and waits for asyncio's events."""

    def __init__(self, folder: Path, script=SCRIPT, tenant: str = MAIN) -> None:
        self.tenant, self.catalog = tenant, Catalog(folder / "catalog.sqlite", scope=tenant)
        self.indexer = ParagraphIndexer(self.catalog)
        self.defaults = CONFIG.answer
        self.canary = Canary(CONFIG.canary, self.defaults.budget, Idle(60), self.score)
        self.play(script)

    remote = None

    def play(self, script=SCRIPT) -> None:
        self.is_ready = True
        self.gauges = {
            "entries": 7,
            "evicted_entries": 2,
            "disk_bytes": 7000,
            "pinned_bytes": 1000,
            "memory_chunks": 3,
            "prefix_bytes": 5000,
        }
        self.counters = {"corrupt_chunks": 1, "restored_chunks": 0, "failed_restores": 0}
        self.script = script
        self.origins = ORIGINS
        self.asked: list[tuple[str, AnswerOptions]] = []
        self.waiting = threading.Event()
        self.cancelled = threading.Event()

    async def answer(self, question, options):
        self.asked.append((question, options))
        cancelled = self.cancelled  # of this test, should the generator outlive it
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waiting.set()
                    await step.wait()
                elif isinstance(step, Answer) and options.explain:
                    yield replace(step, origins=self.origins)
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            cancelled.set()
            raise

    async def score(self, sample):
        pytest.fail("scored")

    async def search(self, question, top_k):
        return [SOURCE] * top_k

    async def close(self):
        self.is_ready = False


class Worker:
    """The store of a worker with a memory, without a model."""

    unsupported, is_ready, counters = None, True, Counter(corrupt_chunks=0)

    def __init__(self, home, memory_bytes):
        self.store = home.open_store(memory_bytes=memory_bytes)

    async def held(self):
        return self.store.held()

    async def hold(self, keys, spared):
        self.store.hold(keys, spared)

    async def release(self, keys):
        return self.store.release(keys)


class OperatedPipeline(ScriptedPipeline):
    """With a workspace."""

    def __init__(self, folder, home, store, config, engine=None, tier=None):
        super().__init__(folder)
        self.workspace = SimpleNamespace(home=home, store=store, engine=engine, idle=Idle(0), config=config, tier=tier)


@contextmanager
def running(
    pipelines: dict[str, ScriptedPipeline], folder: Path, config: Config = CONFIG, wrap=lambda app: app
) -> Iterator[httpx.Client]:
    """Serve `pipelines` by tenant, and yield a client. wrap: returns what is served instead of the app."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        servers: list[uvicorn.Server] = []
        started = threading.Event()

        async def serve() -> None:
            tenants = Tenants(config, pipelines, {name: folder / f"uploads-{name}" for name in pipelines})
            settings = uvicorn.Config(wrap(server.create_app(tenants)), lifespan="off", log_level="critical")
            servers.append(uvicorn.Server(settings))
            tenants.start()
            started.set()
            await listen(servers[0], listener, config.server.max_pause_s)
            await tenants.close()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        started.wait(10)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            # uvicorn closes a connection after an unexpected error, so none is used twice
            with httpx.Client(base_url=url, timeout=10, limits=httpx.Limits(max_keepalive_connections=0)) as client:
                yield client
        finally:
            servers[0].should_exit = True
            thread.join(10)
