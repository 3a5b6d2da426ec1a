"""What a server does when the engine's processes are killed under it."""

import asyncio
import os
import signal
from contextlib import aclosing, suppress

import httpx
import psutil
import pytest

from ragkv.answer import AnswerOptions, Delta
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, MAIN, Config
from ragkv.errors import EngineStoppedError
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy
from ragkv.server import create_app
from ragkv.server.run import _keep_running
from ragkv.server.tenants import Tenants

pytestmark = pytest.mark.engine


def engine_processes():
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # one that was killed and isn't reaped yet has no command line
            if "VLLM" in " ".join(process.cmdline()):
                found.append(process)
    return found


async def end_at_work(pipeline):
    """What requests end with if the engine is closed before vLLM has noticed that its processes were killed."""

    async def ask(deltas):
        async with aclosing(pipeline.answer("Who wrote note 3?", options)) as events:
            async for event in events:
                deltas.append(event) if isinstance(event, Delta) else None

    options = AnswerOptions(Policy.parse("full"), top_k=2, max_tokens=500)
    heard = [[] for _ in range(4)]
    asking = [asyncio.create_task(ask(deltas)) for deltas in heard]
    while not all(heard):
        assert not any(task.done() for task in asking)
        await asyncio.sleep(0.05)
    for process in engine_processes():
        os.kill(process.pid, signal.SIGKILL)
    await pipeline.workspace.engine.close()
    return await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 60)


def test_a_killed_engine_comes_back_and_nothing_is_lost(runner, home):
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 1}
    index = {"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 128, "num_contexts": 1}
    config = Config(home=home, model=model, index=index, answer={"controller": False})
    bodies = [{"question": f"Who wrote note {i}?", "max_tokens": 60, "stream": i % 2 == 0} for i in range(16)]
    text = "\n\n".join(f"Note {i} was written by person {i} in the year {1900 + i}. " * 6 for i in range(12))

    async def run():
        pipeline = await Pipeline.open(config)
        served = Tenants(config, {MAIN: pipeline}, {MAIN: home / "uploads"})
        served.start()
        keeper = asyncio.create_task(_keep_running(pipeline))
        transport = httpx.ASGITransport(create_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:

            async def upload(name, text=text):
                response = await client.post("/v1/documents", files={"files": (name, text.encode())})
                assert response.status_code == 202
                return response.headers["location"]

            async def done(job):
                for _ in range(1200):
                    if (found := (await client.get(job)).json())["status"] == "done":
                        return found["report"]
                    await asyncio.sleep(0.1)
                pytest.fail(f"not done: {found}")

            await done(await upload("notes.txt"))
            await done(await upload("gone.txt", "Window glass is made by floating it on tin."))
            before = (await client.post("/v1/answer", json={**bodies[1], "fresh": True})).json()
            assert before["usage"]["reused_tokens"] > 0
            asking = [asyncio.create_task(client.post("/v1/answer", json=body)) for body in bodies]
            waiting = await upload("more.txt")
            await asyncio.sleep(0.5)
            for process in engine_processes():
                os.kill(process.pid, signal.SIGKILL)
            answers = await asyncio.gather(*asking)
            assert (await client.get("/readyz")).status_code == 503
            refused = await client.post("/v1/answer", json=bodies[1])
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            await asyncio.sleep(3)  # it is being started again
            assert (await client.delete("/v1/documents/gone.txt")).status_code == 200
            for _ in range(3000):
                if (await client.get("/readyz")).status_code == 200:
                    break
                await asyncio.sleep(0.1)
            after = (await client.post("/v1/answer", json={**bodies[1], "fresh": True})).json()
            report = await done(waiting)
            names = [each["name"] for each in (await client.get("/v1/documents")).json()["documents"]]
            counters = (await client.get("/healthz")).json()["counters"]
        keeper.cancel()
        await served.close()
        ended = await end_at_work(pipeline)
        assert [type(each) for each in ended] == [EngineStoppedError] * 4
        problems = pipeline.workspace.store.admin.verify().problems
        await pipeline.close()
        return before, answers, after, report, names, counters, problems

    before, answers, after, report, names, counters, problems = runner.run(run())
    for answer, body in zip(answers, bodies, strict=True):
        told = "EngineStoppedError" in answer.text
        assert told or "finish_reason" in answer.text, answer.text
        assert answer.status_code == 200 if body["stream"] else answer.status_code == (503 if told else 200)
    assert sum("EngineStoppedError" in answer.text for answer in answers) > 8
    assert after["answer"] == before["answer"] and after["usage"]["reused_tokens"] > 0
    assert report["documents_new"] == 1 and names == ["more.txt", "notes.txt"]
    assert counters["engine_restarts"] == 1 and problems == []
    assert not engine_processes()
