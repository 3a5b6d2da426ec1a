"""What operators do beside a real worker: its memory is looked up, warmed and emptied; answers stay what they are."""

import asyncio

import httpx
import pytest
from engine_harness import NUM_LAYERS

from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, MAIN, Config
from ragkv.pipeline import Pipeline
from ragkv.server import create_app
from ragkv.server.gate import hash_of
from ragkv.server.tenants import Tenants

pytestmark = pytest.mark.engine

KEY = "ragkv-of-the-operator"
TEXTS = {
    "tea": "Darjeeling tea is picked four times a year. The first flush in March gives a light and floral cup. ",
    "wax": "Honey bees build hexagonal cells of wax. A colony has one queen; workers forage up to five kilometres. ",
    "pot": "A potter centres clay on the wheel. Glaze is fired at thirteen hundred degrees in a kiln of brick. ",
}
QUESTION = "When is Darjeeling tea picked?"


@pytest.fixture(scope="module")
def client(runner, home):
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 1}
    index = {"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 128, "num_contexts": 2}
    server = {"operator_keys": {"olga": hash_of(KEY)}}
    store = {"memory_gib": 0.04 * NUM_LAYERS / 30, "codec": "raw"}  # of two documents, three have no room
    config = Config(home=home, model=model, index=index, server=server, store=store, answer={"controller": False})

    async def open_all():
        pipeline = await Pipeline.open(config)
        served = Tenants(config, {MAIN: pipeline}, {MAIN: home / "uploads"})
        served.start()
        transport = httpx.ASGITransport(create_app(served))
        headers = {"Authorization": f"Bearer {KEY}"}
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300, headers=headers)
        files = [
            ("files", (f"{name}.txt", "\n\n".join(f"Note {i}. {text}" for i in range(10)).encode()))
            for name, text in TEXTS.items()
        ]
        job = (await client.post("/v1/documents", files=files)).headers["location"]
        while (await client.get(job)).json()["status"] != "done":
            await asyncio.sleep(0.1)
        return pipeline, served, client

    pipeline, served, client = runner.run(open_all())
    client.pipeline = pipeline
    yield client
    runner.run(served.close())
    runner.run(pipeline.close())


async def ask(client, **options):
    body = {
        "question": QUESTION,
        "policy": "query",
        "budget": 0.2,
        "max_tokens": 4,
        "top_k": 2,
        "fresh": True,
        **options,
    }
    response = await client.post("/v1/answer", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def from_memory(client, answer):
    """How many tokens of chunks were in memory; the anchor, which is no document's, always is."""
    return answer["usage"]["memory_tokens"] - len(client.pipeline.workspace.layout.anchor)


async def done(client, verb, **body):
    response = await client.post(f"/v1/store/{verb}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def tiers(client, name="tea.txt"):
    (found,) = (await client.get("/v1/store/documents", params={"name": name})).json()["documents"]
    return found["tiers"]


def test_what_answers_use_is_in_memory_until_it_is_demoted(runner, client):
    async def run():
        first = await ask(client)
        held = (await tiers(client))["memory"]
        assert held["num_chunks"] > 0 and from_memory(client, await ask(client)) > 0
        demoted = await done(client, "demote", all=True)
        assert demoted["memory_bytes"] >= held["size_bytes"]
        after = await tiers(client)
        assert after["memory"] == {"num_chunks": 0, "size_bytes": 0} and after["disk"]["num_chunks"] > 0
        again = await ask(client)
        assert (again["answer"], again["fallback"], from_memory(client, again)) == (first["answer"], None, 0)

    runner.run(run())


def test_what_is_warmed_is_in_memory_for_the_first_question(runner, client):
    async def run():
        await done(client, "demote", all=True)
        cold = await ask(client)
        await done(client, "demote", all=True)
        warmed = await done(client, "warm", documents=["tea.txt"])
        found = await tiers(client)
        assert warmed["num_left_out"] == 0 and found["memory"]["num_chunks"] == found["disk"]["num_chunks"]
        assert client.pipeline.workspace.engine.in_memory  # what the controller plans with
        answer = await ask(client)
        assert answer["answer"] == cold["answer"] and from_memory(client, cold) == 0
        assert from_memory(client, answer) > 0.5 * answer["usage"]["reused_tokens"]

    runner.run(run())


def test_what_has_no_room_is_told_and_what_is_pinned_stays(runner, client):
    async def run():
        await done(client, "demote", all=True)
        await done(client, "pin", documents=["wax.txt"])
        await done(client, "warm", documents=["wax.txt"])
        before = (await tiers(client, "wax.txt"))["memory"]
        warmed = await done(client, "warm", documents=["tea.txt", "pot.txt"])
        assert warmed["num_left_out"] > 0 and warmed["num_entries"] > 0 and warmed["left_out_bytes"] > 0
        assert (await tiers(client, "wax.txt"))["memory"] == before
        await done(client, "unpin", documents=["wax.txt"])
        assert (await done(client, "warm", documents=["tea.txt"]))["num_left_out"] == 0

    runner.run(run())


def test_answers_beside_moves_are_what_they_were(runner, client):
    async def run():
        expected = (await ask(client))["answer"]
        asking = [asyncio.create_task(ask(client)) for _ in range(6)]
        for _ in range(4):
            await done(client, "demote", all=True)
            await done(client, "warm", all=True)
        answers = await asyncio.gather(*asking)
        assert {(each["answer"], each["fallback"]) for each in answers} == {(expected, None)}

    runner.run(run())


def test_what_was_encoded_anew_is_used_at_once(runner, client):
    async def run():
        await ask(client)
        recoded = await done(client, "recode", documents=["pot.txt", "tea.txt"], codec="int8")
        assert recoded["num_recoded"] > 0 and recoded["bytes_after"] < 0.3 * recoded["bytes_before"]
        answer = await ask(client)
        assert answer["fallback"] is None and from_memory(client, answer) == 0  # what was in memory is outdated
        assert answer["usage"]["reused_tokens"] > 0 and from_memory(client, await ask(client)) > 0

    runner.run(run())


def test_what_is_cleared_is_made_again_once_it_is_missed(runner, client):
    async def run():
        await ask(client)
        before = await tiers(client)
        await done(client, "pin", documents=["tea.txt"])
        cleared = await done(client, "clear", documents=["tea.txt"])
        assert cleared["num_chunks"] == before["disk"]["num_chunks"]
        empty = {"num_chunks": 0, "size_bytes": 0}
        found = await tiers(client)
        assert found["memory"] == found["disk"] == empty
        assert (await ask(client))["fallback"] is not None
        while (await tiers(client))["disk"]["num_chunks"] < 2:  # those that the question asked for
            await asyncio.sleep(0.2)
        while (answer := await ask(client))["fallback"] is not None:
            await asyncio.sleep(0.5)
        assert answer["usage"]["reused_tokens"] > 0
        (document,) = (await client.get("/v1/store/documents", params={"name": "tea.txt"})).json()["documents"]
        assert document["hints"] == {"pin": document["tiers"]["disk"]["num_chunks"]}

    runner.run(asyncio.wait_for(run(), 120))
