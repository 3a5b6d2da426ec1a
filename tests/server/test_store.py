"""The endpoints for operators, over real sockets, on a real home and store, without a worker."""

import logging
from contextlib import closing

import pytest
from operator_home import DOCUMENTS, ENTRY_BYTES, OTHER_MODEL, hash_of, key_of, make_home
from server_harness import CONFIG, OperatedPipeline, Worker, running

from ragkv.config import MAIN, Config, ServerConfig, StoreConfig
from ragkv.errors import ConfigError
from ragkv.server.gate import hash_of as hash_of_key
from ragkv.store.tier import open_tier

KEYS = {name: f"ragkv-{name * 12}" for name in ("ann", "olga")}
BEES, TEA = "/papers/bees.md", "/papers/tea.md"
CHANGES = ("pin", "unpin", "warm", "demote", "recode", "clear")


def bearer(name):
    return {"Authorization": f"Bearer {KEYS[name]}"}


@pytest.fixture
def home(tmp_path):
    return make_home(tmp_path / "home")


@pytest.fixture
def store(home):
    with closing(home.open_store()) as store:
        yield store


@pytest.fixture
def serve(tmp_path, home, store):
    def serving(budget=20, worker=None, memory=0, tier=None, **server):
        settings = ServerConfig(**{"operator_keys": {"olga": hash_of_key(KEYS["olga"])}, **server})
        sizes = {"disk_gib": budget * ENTRY_BYTES / (1 << 30), "memory_gib": memory * ENTRY_BYTES / (1 << 30)}
        options = CONFIG.store.model_copy(update=sizes)
        config = CONFIG.model_copy(update={"server": settings, "store": options})
        return running({MAIN: OperatedPipeline(tmp_path, home, store, config, worker, tier)}, tmp_path, config)

    return serving


@pytest.fixture
def client(serve):
    with serve() as client:
        client.headers.update(bearer("olga"))
        yield client


def message(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def done(client, verb, **body):
    response = client.post(f"/v1/store/{verb}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("keys", [{}, {"ann": hash_of_key(KEYS["ann"])}])
def test_without_operator_keys_there_are_no_such_calls(serve, keys) -> None:
    with serve(operator_keys={}, keys=keys) as client:
        for path in ("documents", "health"):
            assert client.get(f"/v1/store/{path}", headers=bearer("ann")).status_code == 404
        for verb in CHANGES:
            response = client.post(f"/v1/store/{verb}", json={"all": True}, headers=bearer("ann"))
            assert response.status_code == 404
        assert not [path for path in client.get("/openapi.json").json()["paths"] if path.startswith("/v1/store")]


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer ragkv-", f"Bearer {KEYS['olga']}x", KEYS["olga"]])
@pytest.mark.parametrize("keys", [{}, {"ann": hash_of_key(KEYS["ann"])}])
def test_nobody_else_operates(serve, store, authorization, keys) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    with serve(keys=keys) as client:
        for verb in (*CHANGES, "documents", "health", "nothing"):
            response = client.post(f"/v1/store/{verb}", content=b"\xff{", headers=headers)
            assert "need one of server.operator_keys" in message(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
    assert len(store.keys()) == 10


def test_a_tenants_key_operates_nothing_and_an_operators_key_asks_nothing(serve, store) -> None:
    with serve(keys={"ann": hash_of_key(KEYS["ann"])}) as client:
        for verb in CHANGES:
            refused = client.post(f"/v1/store/{verb}", json={"all": True}, headers=bearer("ann"))
            assert "the key is a tenant's" in message(refused, 403)
        assert client.get("/v1/store/documents", headers=bearer("ann")).status_code == 403
        assert client.post("/v1/answer", json={"question": "who?"}, headers=bearer("olga")).status_code == 401
        assert client.get("/metrics", headers=bearer("olga")).status_code == 401
        assert client.delete("/v1/documents/a.md", headers=bearer("olga")).status_code == 401
        assert client.get("/v1/store/health", headers=bearer("olga")).status_code == 200
    assert len(store.keys()) == 10


def test_other_sites_pages_operate_nothing(client, store) -> None:
    response = client.post("/v1/store/clear", json={"all": True}, headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 403 and len(store.keys()) == 10


def test_a_key_is_an_operators_or_a_tenants() -> None:
    key = {"olga": "a" * 64}
    for config in (
        Config(server={"keys": key, "operator_keys": key}),
        Config(server={"operator_keys": key}, tenants={"acme": {"keys": key}}),
    ):
        with pytest.raises(ConfigError, match="olga's operator key is also a key of the tenant"):
            config.operators()


def test_documents_are_looked_up_page_by_page(client) -> None:
    found, after = [], ""
    while after is not None:
        page = client.get("/v1/store/documents", params={"limit": 2, "after": after}).json()
        assert len(page["documents"]) <= 2
        found += [(each["tenant"], each["name"]) for each in page["documents"]]
        after = page["next"]
    assert found == [(tenant, name) for tenant in sorted(DOCUMENTS) for name in sorted(DOCUMENTS[tenant])]
    (bees,) = client.get("/v1/store/documents", params={"name": BEES}).json()["documents"]
    assert bees["tiers"]["disk"] == {"num_chunks": 2, "size_bytes": 3 * ENTRY_BYTES}
    assert (bees["tiers"]["memory"], bees["tiers"]["remote"], bees["codecs"]) == (None, None, {"raw": 3})
    acme = client.get("/v1/store/documents", params={"tenant": "acme"}).json()["documents"]
    assert [each["name"] for each in acme] == ["x.md"]


def test_documents_and_tenants_that_there_are_not(client) -> None:
    assert "no document 'bee.md'" in message(client.get("/v1/store/documents", params={"name": "bee.md"}), 404)
    assert "main, acme" in message(client.get("/v1/store/documents", params={"tenant": "zeta"}), 404)
    assert "can't be a tenant's name" in message(client.get("/v1/store/documents", params={"tenant": "../x"}), 422)
    for verb in CHANGES:
        more = {"codec": "int8"} if verb == "recode" else {"tier": "page_cache"} if verb == "warm" else {}
        response = client.post(f"/v1/store/{verb}", json={"documents": [TEA, "bee.md"], **more})
        assert "no document 'bee.md'" in message(response, 404)


@pytest.mark.parametrize("verb", CHANGES)
@pytest.mark.parametrize(
    "body", [{}, {"all": False}, {"all": True, "tenant": "acme"}, {"all": True, "documents": [TEA]}, {"documents": []}]
)
def test_who_says_not_which_documents_changes_nothing(client, store, verb, body) -> None:
    body = {**body, "codec": "int8"} if verb == "recode" else body
    assert "say which documents" in message(client.post(f"/v1/store/{verb}", json=body), 422)
    assert len(store.keys()) == 10


@pytest.mark.parametrize(
    ("verb", "body", "expected"),
    [
        ("pin", {"documents": "x"}, "documents: Input should be a valid list"),
        ("pin", {"document": [TEA]}, "document: Extra inputs are not permitted"),
        ("pin", {"all": "yes"}, "all: Input should be a valid boolean"),
        ("pin", {"documents": [""]}, "no document ''"),
        ("warm", {"all": True, "tier": "gpu"}, "tier: Input should be 'memory' or 'page_cache'"),
        ("recode", {"all": True}, "codec: Field required"),
        ("recode", {"all": True, "codec": "zip"}, "unknown codec 'zip'; choose one of"),
        ("recode", {"all": True, "codec": "raw"}, "nothing can be encoded as 'raw' again"),
        ("recode", {"all": True, "codec": "int8", "timeout_s": 0}, "timeout_s: Input should be greater than 0"),
        ("clear", {"model": "cccc"}, "'cccc' means 0 models"),
        ("clear", {"model": "other", "all": True}, "leave out the others"),
    ],
)
def test_bad_input_is_named(client, store, verb, body, expected) -> None:
    response = client.post(f"/v1/store/{verb}", json=body)
    assert 400 <= response.status_code < 500 and expected in response.json()["error"]["message"]
    assert len(store.keys()) == 10 and store.admin.codecs() == {"raw": 20}


def test_pin_and_unpin(serve) -> None:
    with serve(budget=3) as client:
        client.headers.update(bearer("olga"))
        pinned = done(client, "pin", documents=[TEA])
        assert (pinned["num_chunks"], pinned["pinned_bytes"]) == (2, 3 * ENTRY_BYTES) and pinned["disk_bytes"]
        assert "store.disk_gib" in message(client.post("/v1/store/pin", json={"documents": [BEES]}), 422)
        assert client.get("/v1/store/documents", params={"name": TEA}).json()["documents"][0]["hints"] == {"pin": 2}
        assert done(client, "unpin", tenant="main")["pinned_bytes"] == ENTRY_BYTES  # the anchor's


def test_warm_and_demote_without_a_worker(client) -> None:
    assert "vLLM isn't running" in message(client.post("/v1/store/warm", json={"documents": [TEA]}), 503)
    warmed = done(client, "warm", documents=[TEA], tier="page_cache")
    assert (warmed["tier"], warmed["num_entries"], warmed["size_bytes"]) == ("page_cache", 2, 2 * ENTRY_BYTES)
    demoted = done(client, "demote", documents=[TEA])
    assert demoted["memory_bytes"] is None and demoted["page_cache_bytes"] in (0, 2 * ENTRY_BYTES)


def test_warm_and_demote_a_workers_memory(serve, home, store) -> None:
    worker = Worker(home, 2 * ENTRY_BYTES)
    store.touch([key_of("flush")])
    store._usage.flush()
    with serve(worker=worker, memory=2) as client, closing(worker.store):
        client.headers.update(bearer("olga"))
        warmed = done(client, "warm", documents=[TEA, "all.jsonl"])
        assert (warmed["tier"], warmed["num_entries"], warmed["num_left_out"]) == ("memory", 2, 2)
        assert (warmed["size_bytes"], warmed["left_out_bytes"]) == (2 * ENTRY_BYTES, 2 * ENTRY_BYTES)
        (tea,) = client.get("/v1/store/documents", params={"name": TEA}).json()["documents"]
        assert key_of("flush") in worker.store.held()  # the most used first
        assert 1 <= tea["tiers"]["memory"]["num_chunks"] <= 2
        assert done(client, "demote", all=True)["memory_bytes"] > 0 and worker.store.held() == {}
        assert done(client, "warm", documents=[TEA])["num_left_out"] == 0
        done(client, "clear", documents=[TEA])
        assert set(worker.store.held()) == {key_of("shared")}
        worker.counters = {"corrupt_chunks": 2}
        found = client.get("/v1/store/health").json()
        assert found["damaged"] == 2 and "2 entries were damaged" in found["warnings"][0]


@pytest.mark.parametrize("why", ["the model's layers all slide", None])
def test_a_worker_without_memory_is_not_warmed(serve, home, why) -> None:
    worker = Worker(home, 0)
    worker.unsupported = why
    with serve(worker=worker) as client, closing(worker.store):
        client.headers.update(bearer("olga"))
        text = message(client.post("/v1/store/warm", json={"documents": [TEA]}), 422)
        assert text.startswith("no KV is kept in memory") and (why or "store.memory_gib is 0") in text


def test_recode_until_nothing_is_left(client, store) -> None:
    part = done(client, "recode", all=True, codec="int8", timeout_s=1e-9)
    assert (part["num_left"], part["num_recoded"]) == (10, 0)
    part = done(client, "recode", documents=[TEA], codec="int8")
    assert (part["num_left"], part["num_recoded"]) == (0, 2) and part["bytes_after"] < part["bytes_before"]
    rest = done(client, "recode", all=True, codec="int8")
    assert (rest["num_recoded"], rest["num_joined"], rest["num_same"], rest["num_left"]) == (6, 1, 2, 0)
    assert store.admin.codecs() == {"int8": 18} and store.admin.verify().problems == []


def test_clear(client, store) -> None:
    dry = done(client, "clear", documents=["all.jsonl"], dry_run=True)
    assert (dry["num_documents"], dry["num_chunks"], dry["dry_run"]) == (2, 2, True) and len(store.keys()) == 10
    assert done(client, "clear", documents=["all.jsonl"])["size_bytes"] == 2 * ENTRY_BYTES
    assert not store.contains(key_of("one"))
    assert done(client, "clear", model=OTHER_MODEL[:8])["num_chunks"] == 1
    assert done(client, "clear", tenant="acme")["num_chunks"] == 2
    (acme,) = client.get("/v1/store/documents", params={"tenant": "acme"}).json()["documents"]
    assert (acme["num_chunks"], acme["tiers"]["disk"]["num_chunks"]) == (2, 0)
    assert done(client, "clear", all=True)["num_chunks"] == 4 and store.keys() == []


def test_clear_reaches_the_bucket_unless_it_is_told_not_to(serve, store, tmp_path, monkeypatch) -> None:
    (tmp_path / "bucket").mkdir()
    remote = StoreConfig(remote=(tmp_path / "bucket").as_uri())
    with closing(open_tier(store, remote)) as tier, serve(tier=tier) as client:
        client.headers.update(bearer("olga"))
        tier.send()
        assert done(client, "clear", documents=[TEA], local=True)["remote"] is None
        assert done(client, "clear", model="other", local=True)["remote"] is None
        assert len(list(tier.remote.sizes())) == 10
        cleared = done(client, "clear", documents=[TEA, "all.jsonl"])
        assert (cleared["remote"], cleared["num_unreached"]) == (remote.remote, 0)
        assert len(list(tier.remote.sizes())) == 7
        monkeypatch.setattr(tier.remote, "sizes", lambda: tier.remote.breaker.check())
        tier.remote.breaker.failed("the bucket is away")
        text = message(client.post("/v1/store/clear", json={"model": "other"}), 503)
        assert "the bucket is away. Nothing was cleared" in text
        assert done(client, "clear", tenant="acme")["num_unreached"] == 2


def test_health_has_the_status_of_the_store(client, store, monkeypatch) -> None:
    response = client.get("/v1/store/health")
    assert response.status_code == 200
    found = response.json()
    assert found["readable"] and found["writable"] and found["problems"] == []
    assert (found["used_bytes"], found["pinned_bytes"]) == (10 * ENTRY_BYTES, ENTRY_BYTES)
    assert client.head("/v1/store/health").status_code == 200
    (store.path / "v5" / "new").rename(store.path / "gone")
    response = client.get("/v1/store/health")
    assert response.status_code == 503 and "can't write to the KV store" in response.json()["problems"][0]
    (store.path / "gone").rename(store.path / "v5" / "new")
    assert client.get("/v1/store/health").status_code == 200


def test_a_store_that_hangs_is_not_well_and_takes_one_thread(client, store, monkeypatch) -> None:
    monkeypatch.setattr("ragkv.operations.running._HEALTH_S", 0.2)
    attempts = []
    with store._usage.writing():  # as by another process, for long
        monkeypatch.setattr(
            store.control, "try_writing", lambda run=store.control.try_writing: (attempts.append(1), run())
        )
        for _ in range(3):
            response = client.get("/v1/store/health")
            assert response.status_code == 503 and "didn't answer in 0.2 s" in response.json()["problems"][0]
        assert client.get("/healthz").status_code == 200
    assert len(attempts) == 1


def test_changes_are_logged_with_who_asked(client, caplog) -> None:
    with caplog.at_level(logging.INFO, "ragkv.server.store"):
        done(client, "clear", documents=[TEA])
        client.post("/v1/store/pin", json={"documents": ["none"]})
        client.get("/v1/store/documents")
    first, second = [record.getMessage() for record in caplog.records if record.name == "ragkv.server.store"]
    assert (
        first.startswith(f"operator olga: clear {{'documents': ['{TEA}']}}: Clearing(") and hash_of("wax") not in first
    )
    assert second.startswith("operator olga: pin {'documents': ['none']}: no document 'none'")
    assert not [each for each in (first, second) if KEYS["olga"] in each]
