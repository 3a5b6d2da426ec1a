"""A server over real sockets, of a pipeline that is scripted."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from ragkv import server
from ragkv.answer import Answer, AnswerOptions, Delta, Retrieved, Source, Timings, Usage
from ragkv.config import Config
from ragkv.controller import Plan

SOURCE = Source(document_id="docs/a.md", title="A [b]", chunk_id=7, ordinal=2, score=0.5, text="one\n\ntwo\u2028three")
ANSWER = Answer(
    text="Grüße, world",
    sources=[SOURCE],
    policy="full",
    usage=Usage(
        prompt_tokens=30, prefix_tokens=5, reused_tokens=20, recomputed_tokens=5, completion_tokens=3, memory_tokens=9
    ),
    timings=Timings(retrieve_ms=1.5, ttft_ms=20.0),
    plan=Plan("fuse", (0, 1), predicted_ms=21.0, prefill_ms=90.0),
    finish_reason="stop",
    fallback="the model's layers all slide",
)
SCRIPT = [Retrieved([SOURCE]), Delta("Grüße,\n"), Delta(" world"), ANSWER]


class ScriptedPipeline:
    """Plays `script`: events are yielded, exceptions raised, events of asyncio waited for."""

    def __init__(self, script=SCRIPT) -> None:
        self.config = Config(answer={"policy": "query", "budget": 0.2, "top_k": 3, "max_tokens": 40})
        self.is_ready = True
        self.counters = {"corrupt_chunks": 1}
        self.script = script
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
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            cancelled.set()
            raise

    async def close(self):
        self.is_ready = False


@contextmanager
def running(pipeline: ScriptedPipeline, create_app=server.create_app) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = uvicorn.Config(create_app(pipeline), lifespan="off", log_level="critical")
        http = uvicorn.Server(settings)
        thread = threading.Thread(target=http.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            # uvicorn closes a connection behind an unexpected error, so none is used twice
            with httpx.Client(base_url=url, timeout=10, limits=httpx.Limits(max_keepalive_connections=0)) as client:
                yield client
        finally:
            http.should_exit = True
            thread.join(10)
