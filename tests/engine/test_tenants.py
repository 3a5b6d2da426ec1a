"""Uploads and tenants, end to end: the real endpoints, pipelines and engine, in float32."""

import asyncio
from statistics import median

import httpx
import pytest

from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, MAIN, Config
from ragkv.pipeline import Pipeline
from ragkv.server import create_app
from ragkv.server.gate import hash_of
from ragkv.server.tenants import Tenants

pytestmark = pytest.mark.engine

TEA = "Darjeeling tea is picked four times a year. The first flush in March gives a light and floral cup. "
WAX = "Honey bees build hexagonal cells of wax. A colony has one queen; workers forage up to five kilometres. "


def notes(text, count):
    """No two chunks of it are the same."""
    return "\n\n".join(f"Note {i}. {text}" for i in range(count))


KEYS = {name: f"ragkv-{name * 12}" for name in (MAIN, "acme", "zeta", "handbook")}


@pytest.fixture(scope="module")
def home(whole_home):
    return whole_home


@pytest.fixture(scope="module")
def clients(runner, home):
    """Of each tenant of one server; zeta reads the handbook."""
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 1}
    reads = {"zeta": ["handbook"]}
    tenants = {n: {"keys": {"key": hash_of(key)}, "reads": reads.get(n, [])} for n, key in KEYS.items()}
    index = {"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 128, "num_contexts": 2}
    config = Config(home=home, model=model, index=index, tenants=tenants, answer={"controller": False})

    async def open_all():
        main = await Pipeline.open(config)
        pipelines = {MAIN: main, **{name: main.for_tenant(name) for name in KEYS if name != MAIN}}
        served = Tenants(config, pipelines, {name: home / f"uploads-{name}" for name in KEYS})
        served.start()
        transport = httpx.ASGITransport(create_app(served))
        clients = {
            name: httpx.AsyncClient(
                transport=transport,
                base_url="http://localhost",
                timeout=300,
                headers={"Authorization": f"Bearer {key}"},
            )
            for name, key in KEYS.items()
        }
        return main, served, clients

    main, served, clients = runner.run(open_all())
    clients["pipeline"] = main
    yield clients
    runner.run(served.close())
    runner.run(main.close())


async def upload(client, **texts):
    files = [("files", (f"{name}.txt", text.encode())) for name, text in texts.items()]
    response = await client.post("/v1/documents", files=files)
    assert response.status_code == 202, response.text
    while True:
        job = (await client.get(response.headers["location"])).json()
        if job["status"] not in ("waiting", "running"):
            assert job["status"] == "done" and job["report"]["rejected"] == []
            return job["report"]
        await asyncio.sleep(0.1)


async def ask(client, question, policy="query", **options):
    body = {"question": question, "policy": policy, "budget": 0.2, "max_tokens": 4, **options}
    response = await client.post("/v1/answer", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stored(clients):
    return set(clients["pipeline"].workspace.store.chunk_hashes())


def test_what_is_uploaded_is_found_and_what_is_deleted_is_gone(runner, clients, home):
    async def run():
        client, before = clients[MAIN], stored(clients)
        report = await upload(client, tea=notes(TEA, 12), wax=notes(WAX, 12))
        assert report["documents_new"] == 2 and report["chunks_prefilled"] >= 4
        again = await upload(client, tea=notes(TEA, 12))
        assert (again["documents_unchanged"], again["chunks_prefilled"]) == (1, 0)
        answer = await ask(client, "When is Darjeeling tea picked?", top_k=4, explain=True, fresh=True)
        assert answer["sources"][0]["document"] == "tea.txt" and answer["fallback"] is None
        assert answer["usage"]["reused_tokens"] > answer["usage"]["recomputed_tokens"]
        check_strip(answer)
        (shown,) = {chunk["stored"] for chunk in (await client.get("/v1/documents/tea.txt")).json()["chunks"]}
        assert shown is True
        found = (await client.post("/v1/search", json={"query": "Darjeeling tea", "top_k": 2})).json()["sources"]
        assert [source["document"] for source in found] == ["tea.txt"] * 2
        for name in ("tea.txt", "wax.txt"):
            deletion = (await client.delete(f"/v1/documents/{name}")).json()
            assert deletion["num_chunks"] >= 2 and deletion["size_bytes"] > 0
        assert stored(clients) - before <= {clients["pipeline"].workspace.anchor_hash}
        files = [path for path in home.rglob("*") if path.is_file() and not path.is_relative_to(home / "models")]
        assert not [file for file in files if b"Darjeeling" in file.read_bytes()]
        assert (await ask(client, "When is Darjeeling tea picked?"))["sources"] == []

    runner.run(run())


def test_a_document_that_is_deleted_while_it_is_indexed_stays_away(runner, clients):
    async def run():
        client, before = clients[MAIN], stored(clients)
        files = [("files", (f"{name}.txt", notes(TEA, 60).encode())) for name in ("wanted", "unwanted")]
        job = (await client.post("/v1/documents", files=files)).headers["location"]
        while (await client.get(job)).json()["done"] == 0:
            await asyncio.sleep(0.05)
        deletion = await client.delete("/v1/documents/unwanted.txt")
        assert deletion.status_code == 200 and deletion.json()["documents"] == ["unwanted.txt"]
        while (found := (await client.get(job)).json())["status"] != "done":
            assert found["status"] == "running"
            await asyncio.sleep(0.1)
        names = [each["name"] for each in (await client.get("/v1/documents")).json()["documents"]]
        assert names == ["wanted.txt"]
        answer = await ask(client, "When is Darjeeling tea picked?", top_k=3)
        assert {source["document"] for source in answer["sources"]} == {"wanted.txt"} and answer["fallback"] is None
        await client.delete("/v1/documents/wanted.txt")
        assert stored(clients) - before <= {clients["pipeline"].workspace.anchor_hash}

    runner.run(run())


def check_strip(answer):
    """The runs cover the prompt, and say what the usage says."""
    runs, tokens, usage = answer["prompt"]["runs"], answer["prompt"]["tokens"], answer["usage"]
    assert [run["start"] for run in runs] == [0, *(run["end"] for run in runs[:-1])] and runs[-1]["end"] == len(tokens)
    counts = {kind: sum(r["end"] - r["start"] for r in runs if r["kind"] == kind) for kind in {r["kind"] for r in runs}}
    assert sum(counts.get(kind, 0) for kind in ("memory", "disk")) == usage["reused_tokens"]
    assert counts["recomputed"] + counts["computed"] == usage["recomputed_tokens"]
    assert counts["recomputed"] > 0
    assert sum(counts.get(kind, 0) for kind in ("prefix", "stored")) == usage["prefix_tokens"]
    for source in answer["sources"]:
        place = answer["sources"].index(source)
        text = "".join("".join(tokens[r["start"] : r["end"]]) for r in runs if r["source"] == place)
        assert text == source["text"]


def test_tenants_find_neither_documents_nor_kv_of_each_other(runner, clients):
    async def run():
        acme, zeta = clients["acme"], clients["zeta"]
        first, second = await upload(acme, tea=notes(TEA, 12)), await upload(zeta, tea=notes(TEA, 12))
        assert second["chunks_prefilled"] == first["chunks_prefilled"] > 1  # not shared
        both = [await ask(client, "When is tea picked?", top_k=3) for client in (acme, zeta)]
        assert both[0]["answer"] == both[1]["answer"] and both[1]["usage"]["prefix_tokens"] == 0
        theirs = {source["corpus"] for answer in both for source in answer["sources"]}
        assert theirs == {None}
        before = stored(clients)
        await acme.delete("/v1/documents/tea.txt")
        assert len(before - stored(clients)) == first["chunks_prefilled"]
        still = await ask(zeta, "When is tea picked in spring?", top_k=3)
        assert still["fallback"] is None and still["usage"]["reused_tokens"] > 0
        assert (await ask(acme, "When is tea picked?"))["sources"] == []
        await zeta.delete("/v1/documents/tea.txt")

    runner.run(run())


def test_a_hit_of_another_tenant_cannot_be_told_by_its_time(runner, clients):
    """The same prompt: again for oneself it is in vLLM's prefix cache, for another tenant it takes what new ones do."""

    async def run():
        acme, zeta = clients["acme"], clients["zeta"]
        for client in (acme, zeta):
            await upload(client, tea=notes(TEA, 60))
        asked = [(zeta, "us", "new"), (acme, "them", ""), (zeta, "them", "another's"), (acme, "them", "own")]
        times = {kind: [] for _, _, kind in asked}
        for i in range(3):
            for client, whom, kind in asked:
                question = f"When is tea picked in year {i} of {whom}?"
                answer = await ask(client, question, budget=0.5, top_k=12, max_tokens=1)
                times[kind].append(answer["timings"]["ttft_ms"])
                assert (answer["usage"]["prefix_tokens"] > 0) is (kind == "own")
        for policy in ("full", "none"):  # their prefix is shared by different questions
            one, own, another = [await ask(c, "When?", policy, top_k=12, max_tokens=1) for c in (acme, acme, zeta)]
            assert one["usage"]["prefix_tokens"] == another["usage"]["prefix_tokens"] == 0
            assert own["usage"]["prefix_tokens"] > 0
        for client in (acme, zeta):
            await client.delete("/v1/documents/tea.txt")
        return {kind: median(each) for kind, each in times.items()}

    times = runner.run(run())
    assert times["own"] < 0.75 * times["another's"]  # so that it could be told
    assert 0.5 < times["another's"] / times["new"] < 2


def test_a_corpus_can_be_read_by_others(runner, clients):
    async def run():
        handbook, zeta, acme = clients["handbook"], clients["zeta"], clients["acme"]
        await upload(handbook, wax=notes(WAX, 8))
        await upload(zeta, tea=notes(TEA, 8))
        answer = await ask(zeta, "How do bees build cells of wax?", top_k=3)
        corpora = [source["corpus"] for source in answer["sources"]]
        assert corpora[0] == "handbook" and None in corpora
        assert answer["fallback"] is None and answer["usage"]["reused_tokens"] > 0
        assert (await ask(acme, "How do bees build cells of wax?"))["sources"] == []
        assert (await zeta.get("/v1/documents")).json()["documents"][0]["name"] == "tea.txt"
        assert (await zeta.delete("/v1/documents/wax.txt")).status_code == 404
        await handbook.delete("/v1/documents/wax.txt")
        gone = await ask(zeta, "How do bees build cells of wax?", top_k=3)
        assert {source["corpus"] for source in gone["sources"]} == {None}

    runner.run(run())
