"""HTTP over real sockets with a scripted pipeline: statuses, framing, cancellation, shutdown."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_harness import SCRIPT

from ragkv import server
from ragkv.answer import AnswerOptions
from ragkv.config import Config
from ragkv.errors import ConfigError, ContextTooLongError, RagKVError, StoreError
from ragkv.policies import DESCRIPTIONS, Policy


def sse(body: str) -> list[tuple[str, dict]]:
    assert body.endswith("\n\n")
    events = []
    for frame in body.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


EXPECTED_SOURCE = {
    "document": "docs/a.md",
    "title": "A [b]",
    "chunk": 7,
    "ordinal": 2,
    "score": 0.5,
    "text": "one\n\ntwo\u2028three",
    "corpus": None,
}
EXPECTED_END = {
    "policy": "full",
    "fallback": "the model's layers all slide",
    "hint_refused": "too many pins",
    "plan": {"way": "fuse", "predicted_ms": 21.0, "prefill_ms": 90.0},
    "usage": {
        "prompt_tokens": 30,
        "prefix_tokens": 5,
        "reused_tokens": 20,
        "recomputed_tokens": 5,
        "completion_tokens": 3,
        "memory_tokens": 9,
        "stored_prefix_tokens": 0,
    },
    "timings": {
        "retrieve_ms": 1.5,
        "load_ms": 0,
        "probe_ms": 0,
        "recompute_ms": 0,
        "ttft_ms": 20,
        "total_ms": 0,
    },
    "drift_estimate": None,
    "attempts": 1,
    "finish_reason": "stop",
    "prompt": None,
}


def test_an_answer(client) -> None:
    response = client.post("/v1/answer", json={"question": "who?"})
    assert response.status_code == 200
    assert response.json() == {
        "answer": "Grüße, world",
        "reasoning_content": None,
        "sources": [EXPECTED_SOURCE],
        **EXPECTED_END,
    }


def test_a_streamed_answer(client) -> None:
    response = client.post("/v1/answer", json={"question": "who?", "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert sse(response.text) == [
        ("sources", {"sources": [EXPECTED_SOURCE]}),
        ("delta", {"text": "Grüße,\n"}),
        ("delta", {"text": " world"}),
        ("done", EXPECTED_END),
    ]


def test_events_are_sent_as_they_come(pipeline, client) -> None:
    pipeline.script = [*SCRIPT[:2], asyncio.Event()]
    with client.stream("POST", "/v1/answer", json={"question": "who?", "stream": True}) as response:
        lines = response.iter_lines()
        assert "event: delta" in lines  # found before the end: the pipeline waits


def test_options_come_from_the_request_else_from_the_configuration(pipeline, client) -> None:
    client.post("/v1/answer", json={"question": " a? "})
    client.post("/v1/answer", json={"question": "b", "policy": "none", "budget": 0, "top_k": 9, "max_tokens": 1})
    client.post("/v1/answer", json={"question": "c", "max_drift": 0.25})
    assert pipeline.asked == [
        (" a? ", AnswerOptions(Policy("query", 0.2), top_k=3, max_tokens=40)),
        ("b", AnswerOptions(Policy("none", 0), top_k=9, max_tokens=1)),
        ("c", AnswerOptions(Policy("query", 0.2), top_k=3, max_tokens=40, max_drift=0.25)),
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"question": ""}, "question: "),
        ({"question": " \n\t"}, "question: Value error, is blank"),
        ({"question": "x" * 100_001}, "question: String should have at most 100000 characters"),
        ({"question": None}, "question: "),
        ({"question": 5}, "question: "),
        ({"top_k": 0}, "top_k: "),
        ({"top_k": 101}, "top_k: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"budget": 1.01}, "budget: Input should be less than or equal to 1"),
        ({"max_drift": 0}, "max_drift: Input should be greater than 0"),
        ({"budget": -0.1}, "budget: Input should be greater than or equal to 0"),
        ({"policy": "cachblend"}, "unknown policy 'cachblend'; choose one of " + ", ".join(DESCRIPTIONS)),
        ({"polcy": "none"}, "polcy: Extra inputs are not permitted"),
        ({"budget": 2, "top_k": 0}, "top_k: Input should be greater than or equal to 1; budget: "),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_used_is_named(pipeline, client, fields, named, stream) -> None:
    response = client.post("/v1/answer", json={"question": "who?", "stream": stream, **fields})
    assert response.status_code == 422
    assert response.json()["error"]["message"].startswith(named)
    assert response.json()["error"].keys() == {"type", "message"}
    assert not pipeline.asked


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"question": NaN}', b'{"question": "\\ud800"}'])
def test_a_body_that_is_no_request(client, body: bytes) -> None:
    response = client.post("/v1/answer", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "InvalidRequest"
    assert response.json()["error"]["message"].startswith("body: no JSON object: " if body else "body: ")


def test_a_body_that_is_not_unicode(client) -> None:
    response = client.post("/v1/answer", content=b"\xff", headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "BadRequest")


@pytest.mark.parametrize("body", [b'{"question": "x", "budget": NaN}', b'{"question": "x", "budget": Infinity}'])
def test_a_budget_that_is_no_number(client, body: bytes) -> None:
    response = client.post("/v1/answer", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (
            ContextTooLongError("9000 tokens, 8192 fit", num_tokens=9000, limit=8192),
            413,
            {"type": "ContextTooLongError", "message": "9000 tokens, 8192 fit", "num_tokens": 9000, "limit": 8192},
        ),
        (ConfigError("no such thing"), 422, {"type": "ConfigError", "message": "no such thing"}),
        (StoreError("disk is full"), 500, {"type": "StoreError", "message": "disk is full"}),
        (
            KeyError("secret"),
            500,
            {"type": "InternalServerError", "message": "something went wrong; see the server's log"},
        ),
    ],
)
def test_errors_before_the_first_event_have_a_status(pipeline, client, error, status, body, stream) -> None:
    pipeline.script = [error]
    response = client.post("/v1/answer", json={"question": "who?", "stream": stream})
    assert (response.status_code, response.json()) == (status, {"error": body})


def test_after_a_bug_the_connection_is_closed_and_the_client_is_informed(pipeline, client) -> None:
    for error, connection in ((RagKVError("engine died"), None), (KeyError("secret"), "close")):
        pipeline.script = [error]
        response = client.post("/v1/answer", json={"question": "who?"})
        assert (response.status_code, response.headers.get("connection")) == (500, connection)


def test_an_error_after_the_first_event(pipeline, client) -> None:
    pipeline.script = [*SCRIPT[:2], RagKVError("engine died")]
    assert client.post("/v1/answer", json={"question": "who?"}).status_code == 500
    response = client.post("/v1/answer", json={"question": "who?", "stream": True})
    assert response.status_code == 200
    assert sse(response.text)[-1] == ("error", {"error": {"type": "RagKVError", "message": "engine died"}})


def test_an_unexpected_error_in_a_stream_reveals_nothing(pipeline, client) -> None:
    pipeline.script = [*SCRIPT[:2], KeyError("secret")]
    response = client.post("/v1/answer", json={"question": "who?", "stream": True})
    assert sse(response.text)[-1][0] == "error" and "secret" not in response.text


def test_not_ready(pipeline, client) -> None:
    pipeline.is_ready = False
    for response in (client.post("/v1/answer", json={"question": "who?"}), client.get("/readyz")):
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "ServiceUnavailable"
    assert client.get("/healthz").status_code == 200
    assert not pipeline.asked


def test_ready(client) -> None:
    assert client.get("/readyz").status_code == client.get("/healthz").status_code == 200
    assert client.get("/healthz").json()["counters"]["corrupt_chunks"] == 1


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/healthz", "/readyz", "/v1/models", "/metrics", "/docs"])
def test_head_is_get_without_the_body(client, path) -> None:
    head, got = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"") and got.content
    assert head.headers["content-type"] == got.headers["content-type"]


def test_head_says_what_get_would(pipeline, client) -> None:
    pipeline.is_ready = False
    assert (client.head("/readyz").status_code, client.head("/v1/nothing").status_code) == (503, 404)
    assert client.head("/v1/answer").status_code == 405


def test_unknown_paths_and_methods(client) -> None:
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/nothing").json() == {"error": {"type": "NotFound", "message": "Not Found"}}
    assert client.get("/v1/answer").status_code == 405
    assert client.get("/v1/answer").json()["error"]["type"] == "MethodNotAllowed"
    assert client.get("/v1/answer").headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_events", [0, 2])
def test_a_client_that_disconnects_cancels_the_generation(pipeline, client, num_events: int, stream: bool) -> None:
    pipeline.script = [*SCRIPT[:num_events], asyncio.Event()]
    body = json.dumps({"question": "who?", "stream": stream})
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        kind = "Content-Type: application/json"
        head = f"POST /v1/answer HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        assert pipeline.waiting.wait(5)
        assert not pipeline.cancelled.wait(0.2)
    assert pipeline.cancelled.wait(5)
    assert client.get("/healthz").status_code == 200


def test_many_at_once(pipeline, client) -> None:
    async def ask() -> list[int]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=10) as many:
            posts = [many.post("/v1/answer", json={"question": f"{i}?"}) for i in range(32)]
            return [response.status_code for response in await asyncio.gather(*posts)]

    assert asyncio.run(ask()) == [200] * 32
    assert {question for question, _ in pipeline.asked} == {f"{i}?" for i in range(32)}


def test_the_schema_describes_requests_and_responses(client) -> None:
    schema = client.get("/openapi.json").json()
    operation = schema["paths"]["/v1/answer"]["post"]
    assert operation["responses"].keys() == {"200", "400", "401", "408", "413", "422", "429", "503", "504"}
    assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    for status in ("401", "408", "413", "422", "429", "503", "504"):
        ref = operation["responses"][status]["content"]["application/json"]["schema"]["$ref"]
        assert ref.endswith("/ErrorResponse")
    schemas = schema["components"]["schemas"]
    assert schemas["AnswerRequest"]["additionalProperties"] is False
    policy = schemas["AnswerRequest"]["properties"]["policy"]
    assert all(name in policy["description"] for name in [*DESCRIPTIONS, "+shift"])
    assert all(Policy.parse(name) for name in policy["examples"])
    assert {"Usage", "Timings", "Source", "ErrorBody"} <= schemas.keys()


def test_a_port_in_use_is_an_error_before_the_pipeline_is_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"can't listen on 127.0.0.1:{port}: Address already in use; .*--port"):
            server.serve(Config(server={"port": port}), lambda: pytest.fail("opened"))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=f"can't listen on {host}:8090: .*--host"):
        server.serve(Config(server={"host": host}), lambda: pytest.fail("opened"))


SLOW_SERVER = textwrap.dedent("""
    import asyncio, gc, sys
    from contextlib import asynccontextmanager
    from pathlib import Path
    from ragkv.answer import Answer, Retrieved, Timings, Usage
    from ragkv.background import Canary
    from ragkv.config import MAIN, Config
    from ragkv.background import Idle
    from ragkv.policies import FULL
    from ragkv.server import serve
    from ragkv.server.tenants import Tenants

    class Indexer:
        async def ingest_documents(self, *_):
            yield

    class Slow:
        catalog, indexer = None, Indexer()
        tenant, is_ready, counters, defaults = MAIN, True, {}, Config().answer
        gauges = {}
        canary = Canary(Config().canary, 0.05, Idle(60), None)

        async def answer(self, question, options):
            yield Retrieved([])
            print("answering", flush=True)
            await asyncio.sleep(1)
            yield Answer("late", [], FULL, Usage(1, 0, 1, 0), Timings(), "stop")

        async def close(self):
            await asyncio.sleep(0)
            print("frozen" if gc.get_freeze_count() else "collected", "closed", flush=True)

    @asynccontextmanager
    async def open_tenants():
        try:
            print("opening", flush=True)
            await asyncio.sleep(float(sys.argv[2]))
        finally:
            print("opened", flush=True)
        slow = Slow()
        try:
            yield Tenants(config, {MAIN: slow}, {MAIN: Path(sys.argv[3])})
        finally:
            await slow.close()

    config = Config(server={"port": int(sys.argv[1])})
    serve(config, open_tenants)
""")


@contextmanager
def slow_server(open_s: float, uploads: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SLOW_SERVER, str(port), str(open_s), str(uploads)]
    env = {**os.environ, "PYTHONPATH": str(Path(server.__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:
        try:
            assert process.stdout.readline() == "opening\n"
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_lets_answers_finish_and_closes_the_pipeline(tmp_path, stream) -> None:
    with slow_server(open_s=0, uploads=tmp_path) as (process, url):
        wait_until_ready(url)
        with ThreadPoolExecutor(1) as executor:
            question = {"question": "?", "stream": stream}
            response = executor.submit(httpx.post, f"{url}/v1/answer", json=question, timeout=10)
            while process.stdout.readline() != "answering\n":
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert ('"finish_reason": "stop"' if stream else '"answer":"late"') in response.result().text
        out, err = process.communicate(timeout=10)
        assert out.endswith("frozen closed\n") and "Traceback" not in err
        assert process.returncode == 0


def test_sigterm_while_opening(tmp_path) -> None:
    with slow_server(open_s=60, uploads=tmp_path) as (process, _):
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
        assert (process.returncode, out) == (0, "opened\n"), err


def wait_until_ready(url: str) -> None:
    for _ in range(100):
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.05)
    pytest.fail("the server didn't start")
