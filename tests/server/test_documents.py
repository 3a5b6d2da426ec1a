"""Documents over HTTP, with a real catalogue and real uploads on disk, without a model."""

import asyncio
import io
import time
import unicodedata
from urllib.parse import quote

import httpx
import openpyxl
import pytest
from server_harness import CONFIG, ScriptedPipeline, running

from ragkv.config import MAIN, Config
from ragkv.errors import BusyError, StoreError
from ragkv.server.gate import hash_of


@pytest.fixture
def pipeline(own_pipeline):
    return own_pipeline


@pytest.fixture
def client(own_client):
    """A client of a server with an empty catalogue."""
    return own_client


def upload(client, *files, **fields):
    return client.post("/v1/documents", files=[("files", file) for file in files], data=fields)


def finished(client, response):
    """Wait for an upload's job to end, and return it."""
    assert response.status_code == 202, response.text
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    for _ in range(200):
        job = client.get(response.headers["location"]).json()
        if job["status"] in ("done", "failed"):
            return job
        time.sleep(0.05)
    pytest.fail(f"not finished: {job}")


def names(client, **query):
    return [document["name"] for document in client.get("/v1/documents", params=query).json()["documents"]]


def test_a_document_comes_stays_changes_and_goes(client) -> None:
    job = finished(client, upload(client, ("notes/tea.md", b"# Tea\n\nDrink it.\n\nHot.")))
    assert job["status"] == "done" and job["names"] == ["notes/tea.md"] and job["error"] is None
    assert job["report"]["documents_new"] == 1 and job["report"]["rejected"] == []
    shown = client.get("/v1/documents/notes/tea.md").json()
    assert (shown["name"], shown["title"], shown["num_chunks"]) == ("notes/tea.md", "Tea", 3)
    assert [chunk["text"] for chunk in shown["chunks"]] == ["# Tea", "Drink it.", "Hot."]
    assert shown["chunks"][1] == {"ordinal": 1, "num_tokens": 9, "text": "Drink it.", "stored": True}
    window = client.get("/v1/documents/notes/tea.md", params={"offset": 1, "limit": 1}).json()["chunks"]
    assert [chunk["ordinal"] for chunk in window] == [1]
    again = finished(client, upload(client, ("notes/tea.md", b"# Tea\n\nDrink it.\n\nHot.")))
    assert again["report"]["documents_unchanged"] == 1
    changed = finished(client, upload(client, ("notes/tea.md", b"# Tea\n\nCold."), hint="pin"))
    assert changed["report"]["documents_changed"] == 1
    assert client.get("/v1/documents").json()["documents"] == [
        {"name": "notes/tea.md", "title": "Tea", "num_chunks": 2, "num_tokens": 10}
    ]
    deletion = client.delete("/v1/documents/notes/tea.md").json()
    assert deletion["documents"] == ["notes/tea.md"]
    assert deletion["num_chunks"] == 2 and deletion["size_bytes"] == 2000
    assert names(client) == []
    for response in (client.delete("/v1/documents/notes/tea.md"), client.get("/v1/documents/notes/tea.md")):
        assert response.status_code == 404 and "no document 'notes/tea.md'" in response.json()["error"]["message"]
    assert [each["id"] for each in client.get("/v1/jobs").json()["jobs"]] == [changed["id"], again["id"], job["id"]]


def test_records_of_a_jsonl_file(client) -> None:
    lines = b'{"id": "a", "text": "one"}\n{"id": "b#2", "text": "two"}\n{"text": "three"}\n'
    assert finished(client, upload(client, ("all.jsonl", lines)))["report"]["documents_new"] == 3
    assert names(client) == ["all.jsonl#3", "all.jsonl#a", "all.jsonl#b#2"]
    file = client.get("/v1/documents/all.jsonl").json()
    assert (file["name"], file["num_documents"]) == ("all.jsonl", 3)
    assert [each["name"] for each in file["documents"]] == ["all.jsonl#3", "all.jsonl#a", "all.jsonl#b#2"]
    assert file["documents"][1] == {"name": "all.jsonl#a", "title": "all.jsonl#a", "num_chunks": 1, "num_tokens": 3}
    page = client.get("/v1/documents/all.jsonl", params={"offset": 1, "limit": 1}).json()
    assert (page["num_documents"], [each["name"] for each in page["documents"]]) == (3, ["all.jsonl#a"])
    assert client.get("/v1/documents/all.jsonl%23a").json()["chunks"][0]["text"] == "one"
    assert client.delete("/v1/documents/all.jsonl%23b%232").json()["documents"] == ["all.jsonl#b#2"]
    report = finished(client, upload(client, ("all.jsonl", b'{"id": "a", "text": "one"}\n')))["report"]
    assert (report["documents_unchanged"], report["documents_removed"]) == (1, 1)
    assert client.delete("/v1/documents/all.jsonl").json()["documents"] == ["all.jsonl#a"]
    assert client.get("/v1/documents/all.jsonl").status_code == 404


def test_pages_of_the_list(client) -> None:
    finished(client, upload(client, *((f"{i}.txt", b"text") for i in range(5))))
    assert names(client, limit=2) == ["0.txt", "1.txt"]
    page = client.get("/v1/documents", params={"limit": 2, "after": "1.txt"}).json()
    assert [each["name"] for each in page["documents"]] == ["2.txt", "3.txt"] and page["next"] == "3.txt"
    last = client.get("/v1/documents", params={"limit": 2, "after": page["next"]}).json()
    assert [each["name"] for each in last["documents"]] == ["4.txt"] and last["next"] is None


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd.txt",
        "/etc/a.txt",
        "a//b.txt",
        "./a.txt",
        "a/..",
        "a.jsonl#1.md",
        "a\\b.txt",
        "txt.\u202eexe.txt",
        "a\u2028b.txt",
        "x" * 600 + ".txt",
    ],
)
def test_names_that_could_be_taken_for_something_else(client, name) -> None:
    response = upload(client, (name, b"text"))
    assert response.status_code == 422 and "can't be a document's name" in response.json()["error"]["message"]
    assert client.get("/v1/jobs").json() == {"jobs": []}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.exe", b"MZ", "is of a kind that can't be read; supported: .txt"),
        ("a.txt", b"\xff\xfe\x00", "it isn't UTF-16"),
        ("a.txt", b"a\x00", "it holds binary data"),
        ("a.txt", "\u200b\u200d\ufeff".encode(), "it's empty"),
        ("a.docx", b"\xd0\xcf\x11\xe0" + "EncryptedPackage".encode("utf-16-le"), "it is encrypted"),
        ("a.txt", b"caf\xe9", "it isn't UTF-8"),
        ("a.md", b"  \n", "it's empty"),
        ("a.pdf", b"%PDF-1.7 junk", "the PDF is damaged"),
        ("a.jsonl", b'\n{"txt": 1}\n{"text": " "}\n', "line 2: it has no"),
        ("a.jsonl", b"[" * 100_000, "it isn't JSON"),
        ("a.jsonl", b"1\n" * 100_000, "line 1: "),
    ],
)
def test_junk_is_refused_and_nothing_is_taken(client, name, content, message) -> None:
    response = upload(client, ("good.txt", b"text"), (name, content))
    assert response.status_code == 422, response.text
    assert message in response.json()["error"]["message"] and len(response.text) < 5000
    assert client.get("/v1/jobs").json() == {"jobs": []} and names(client) == []


def test_a_bad_record_costs_itself_only(client) -> None:
    lines = b'{"id": null, "text": "a"}\n{"id": null, "text": "a"}\n{"id": 3, "text": ""}\n{"text": "b"\n'
    response = upload(client, ("all.jsonl", lines), ("b.txt", b"text"))
    job = finished(client, response)
    assert names(client) == ["all.jsonl#1", "all.jsonl#2", "b.txt"] and job["report"]["documents_new"] == 3
    for each in (response.json(), job):
        assert ["line 3" in each["rejected"][0], "line 4" in each["rejected"][1]] == [True, True]
    many = finished(client, upload(client, ("many.jsonl", b'{"text": "a"}\n' + b"{}\n" * 5000)))
    assert len(many["rejected"]) == 101 and many["rejected"][-1] == "and 4900 more"
    assert finished(client, upload(client, ("b.txt", b"text")))["rejected"] == []


@pytest.mark.parametrize(
    "name",
    [
        "Rapport\u00a0annuel.txt",
        "Screenshot 2024-03-01 at 12.19.12\u202fAM.txt",
        "می\u200cخواهم.txt",
        "क्\u200dष/👩\u200d🚀❤\ufe0f.txt",
        "\u200eWhatsApp \u3000日本.txt",
        "Re\u0301sume\u0301.txt",
        "\ufb01le \U0001fae9.txt",
    ],
)
def test_names_as_people_have_them(client, name) -> None:
    nfc, nfd = unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)
    assert finished(client, upload(client, (nfd, b"text")))["names"] == [nfc]
    assert finished(client, upload(client, (nfc, b"text")))["report"]["documents_unchanged"] == 1
    assert names(client) == [nfc]
    for form in {nfc, nfd}:
        assert client.get(f"/v1/documents/{quote(form)}").json()["name"] == nfc
        assert client.delete(f"/v1/documents/{quote(form)}").json()["documents"] == [nfc]
        finished(client, upload(client, (nfc, b"text")))
    twice = upload(client, (nfc, b"text"), (nfd, b"text"))
    assert twice.status_code == 422 and "two files" in twice.json()["error"]["message"]


def test_a_file_that_swells_when_it_is_read(client) -> None:
    book = openpyxl.Workbook()
    book.active["A1"] = book.active["XFD1048576"] = 1  # all between them takes more memory than there is
    with io.BytesIO() as file:
        book.save(file)
        content = file.getvalue()
    response = upload(client, ("good.txt", b"text"), ("bomb.xlsx", content))
    assert response.status_code == 422 and "'bomb.xlsx': reading it takes more" in response.json()["error"]["message"]
    assert client.get("/v1/jobs").json() == {"jobs": []}
    finished(client, upload(client, ("good.txt", b"text")))


@pytest.mark.parametrize(
    "request_",
    [
        {"data": {"hint": "pin"}},
        {"files": [("files", ("a.txt", b"text"))], "data": {"hint": "forever"}},
        {"data": {"files": "no file"}},
        {"content": b"--x\r\njunk", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": b"{}", "headers": {"Content-Type": "application/json"}},
        {"files": [("files", (f"{i}.txt", b"text")) for i in range(1100)]},
    ],
)
def test_requests_that_are_no_upload(client, request_) -> None:
    response = client.post("/v1/documents", **request_)
    assert response.status_code in (400, 422) and response.json()["error"]["message"]
    assert client.get("/v1/jobs").json() == {"jobs": []}


def test_two_files_of_one_name(client) -> None:
    response = upload(client, ("a.txt", b"one"), ("a.txt", b"two"))
    assert response.status_code == 422 and "two files" in response.json()["error"]["message"]


def test_an_upload_waits_while_the_home_is_busy(pipeline, client) -> None:
    pipeline.indexer.obstacles = [BusyError("another `ragkv` is changing it")]
    response = upload(client, ("a.txt", b"text"))
    for _ in range(100):
        job = client.get(response.headers["location"]).json()
        if job["error"]:
            break
        time.sleep(0.02)
    assert job["status"] == "waiting" and "another `ragkv`" in job["error"]
    assert finished(client, response)["error"] is None
    assert names(client) == ["a.txt"]


def test_an_accepted_upload_is_indexed_after_a_restart(pipeline, tmp_path) -> None:
    pipeline.indexer.obstacles = [StoreError("no space"), RuntimeError("a bug")]
    with running({MAIN: pipeline}, tmp_path) as client:
        waiting = upload(client, ("a.txt", b"text")).json()["id"]
        time.sleep(0.3)
        assert client.get(f"/v1/jobs/{waiting}").json()["error"] == "no space"
    with running({MAIN: pipeline}, tmp_path) as client:
        time.sleep(0.3)
        job = client.get(f"/v1/jobs/{waiting}").json()
        assert job["status"] == "failed" and "a bug" not in job["error"]
        assert client.get("/v1/jobs/none").status_code == 404
    with running({MAIN: pipeline}, tmp_path) as client:
        for _ in range(100):
            if names(client):
                break
            time.sleep(0.05)
        assert names(client) == ["a.txt"]
    assert list((tmp_path / f"uploads-{MAIN}").iterdir()) == []


def test_a_document_that_is_not_indexed_yet_can_be_deleted(pipeline, client, tmp_path) -> None:
    pipeline.indexer.obstacles = [StoreError("no space")]
    upload(client, ("a.txt", b"secret"), ("b.txt", b"other"))
    assert client.delete("/v1/documents/a.txt").json()["documents"] == ["a.txt"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert client.delete("/v1/documents/a.txt").status_code == 404
    assert client.delete("/v1/documents/b.txt").status_code == 200


def test_too_many_uploads_wait(pipeline, client, monkeypatch) -> None:
    monkeypatch.setattr("ragkv.index.uploads.MAX_WAITING", 2)
    pipeline.indexer.obstacles = [StoreError("no space")] * 2
    assert [upload(client, (f"{i}.txt", b"text")).status_code for i in range(2)] == [202, 202]
    response = upload(client, ("c.txt", b"text"))
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 0


def test_a_large_upload(pipeline, tmp_path) -> None:
    config = CONFIG.model_copy(update={"server": CONFIG.server.model_copy(update={"max_upload_mib": 9})})
    with running({MAIN: pipeline}, tmp_path, config) as client:
        text = b"word " * (8 << 20 >> 2)
        assert upload(client, ("large.txt", text)).status_code == 413
        finished(client, upload(client, ("large.txt", text[: 8 << 20])))


def test_search(client) -> None:
    sources = client.post("/v1/search", json={"query": "who?", "top_k": 2}).json()["sources"]
    assert [source["document"] for source in sources] == ["docs/a.md"] * 2
    assert len(client.post("/v1/search", json={"query": "who?"}).json()["sources"]) == 3
    for body in ({"query": " "}, {"query": "\u200b\u200d"}, {"query": ""}, {}, {"query": "x", "top_k": 0}):
        assert client.post("/v1/search", json=body).status_code == 422


def test_many_uploads_at_once(client) -> None:
    async def send() -> list[int]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            posts = [many.post("/v1/documents", files={"files": (f"{i}.txt", b"text")}) for i in range(12)]
            return [response.status_code for response in await asyncio.gather(*posts)]

    assert asyncio.run(send()) == [202] * 12
    for _ in range(100):
        if all(job["status"] == "done" for job in client.get("/v1/jobs").json()["jobs"]):
            break
        time.sleep(0.05)
    assert names(client) == sorted(f"{i}.txt" for i in range(12))


KEYS = {name: f"ragkv-{name * 12}" for name in (MAIN, "acme", "zeta")}


@pytest.fixture
def tenants(tmp_path):
    """A client for each of three tenants of one server."""
    limits = {"acme": {"requests_per_minute": 2, "documents_mib": 0.001}, "zeta": {"concurrent_requests": 1}}
    tenants = {name: {"keys": {"ann": hash_of(key)}, **limits.get(name, {})} for name, key in KEYS.items()}
    pipelines = {name: ScriptedPipeline(tmp_path / name, tenant=name) for name in KEYS}
    with running(pipelines, tmp_path, Config(tenants=tenants)) as client:
        for name, key in KEYS.items():
            pipelines[name].client = httpx.Client(
                base_url=client.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=10
            )
        yield pipelines
        for pipeline in pipelines.values():
            pipeline.client.close()


def test_each_tenant_has_documents_of_its_own(tenants) -> None:
    acme, zeta = tenants["acme"].client, tenants["zeta"].client
    job = finished(acme, upload(acme, ("a.txt", b"text")))
    assert names(acme) == ["a.txt"] and names(zeta) == names(tenants[MAIN].client) == []
    for response in (zeta.get("/v1/documents/a.txt"), zeta.delete("/v1/documents/a.txt")):
        assert response.status_code == 404
    assert zeta.get(f"/v1/jobs/{job['id']}").status_code == 404 and zeta.get("/v1/jobs").json() == {"jobs": []}
    zeta.post("/v1/answer", json={"question": "who?"})
    assert len(tenants["zeta"].asked) == 1 and not tenants["acme"].asked


def test_metrics_of_all_tenants_are_refused_to_tenants(tenants) -> None:
    assert "ragkv_requests_total" in tenants[MAIN].client.get("/metrics").text
    for name in ("acme", "zeta"):
        response = tenants[name].client.get("/metrics")
        assert response.status_code == 403 and "server.keys" in response.json()["error"]["message"]


def test_limits_of_a_tenant(tenants) -> None:
    acme, zeta = tenants["acme"].client, tenants["zeta"].client
    assert acme.post("/v1/answer", json={"question": "?"}).status_code == 200
    assert acme.post("/v1/search", json={"query": "?"}).status_code == 200
    for stream in (False, True):
        response = acme.post("/v1/answer", json={"question": "?", "stream": stream})
        assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 60
        assert "2 requests a minute" in response.json()["error"]["message"]
    tenants["zeta"].play([asyncio.Event()])
    with pytest.raises(httpx.ReadTimeout):
        zeta.post("/v1/answer", json={"question": "?"}, timeout=0.5)
    assert tenants["zeta"].cancelled.wait(5)
    tenants["zeta"].play()
    assert zeta.post("/v1/answer", json={"question": "?"}).status_code == 200
    finished(acme, upload(acme, ("a.txt", b"x" * 700)))
    response = upload(acme, ("b.txt", b"x" * 700))
    assert response.status_code == 413 and response.json()["error"]["type"] == "QuotaError"
    assert names(acme) == ["a.txt"]
    finished(zeta, upload(zeta, ("b.txt", b"x" * 7000)))
