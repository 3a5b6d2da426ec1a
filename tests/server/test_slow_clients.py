"""Clients that stall, over raw sockets: all waits for them have an end, and other clients aren't affected."""

import asyncio
import os
import socket
import tempfile
import time
from contextlib import ExitStack

import pytest
from server_harness import ANSWER, CONFIG, SOURCE, running

from ragkv.answer import Delta, Retrieved
from ragkv.config import MAIN

PAUSE_S = 0.5
HOST = b"Host: localhost\r\n"
ASK = b"POST /v1/answer HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
UPLOAD = (
    b"POST /v1/documents HTTP/1.1\r\n"
    + HOST
    + b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 9000000\r\n\r\n"
    + b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
)
QUESTION = b'{"question": "who?"}'


@pytest.fixture
def client(own_pipeline, tmp_path):
    config = CONFIG.model_copy(update={"server": CONFIG.server.model_copy(update={"max_pause_s": PAUSE_S})})
    with running({MAIN: own_pipeline}, tmp_path, config) as client:
        yield client


def connected(client, data=b""):
    connection = socket.create_connection(("127.0.0.1", client.base_url.port), timeout=10)
    connection.sendall(data)
    return connection


def received(connection, piece):
    """Return what the server sends until it closes, to a client that keeps sending `piece`."""
    connection.settimeout(0.05)
    said, begin = b"", time.monotonic()
    while time.monotonic() - begin < 10:
        try:
            connection.sendall(piece)
            if not (more := connection.recv(1 << 16)):
                return said
            said += more
        except TimeoutError:
            continue
        except ConnectionError:
            return said
    pytest.fail(f"still open after {said}")


@pytest.mark.parametrize(
    ("head", "piece", "status"),
    [
        (b"", b"", None),
        (b"GET /", b"a", None),
        (b"GET /healthz HTTP/1.1\r\n" + HOST, b"A: b\r\n", None),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\nGET /", b"a", 200),  # a next request, begun and never ended
        (b"POST /nothing HTTP/1.1\r\n" + HOST + b"Content-Length: 9000\r\n\r\n", b" ", 404),
        (ASK + b"Content-Length: 9000000000\r\n\r\n", b" " * 1000, 413),  # continues although it was refused
        (ASK + b"Content-Length: 9000\r\n\r\n", b"", 408),
        (ASK + b"Content-Length: 9000\r\n\r\n", b" ", 408),
        (ASK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 408),
        (UPLOAD, b"", 408),
        (UPLOAD + b"x" * 3_000_000, b"x", 408),
    ],
)
def test_a_request_that_never_ends(client, own_pipeline, head, piece, status) -> None:
    with connected(client, head) as connection:
        said = received(connection, piece)
    assert said.split(b" ")[1:2] == ([] if status is None else [str(status).encode()])
    if status == 408:
        assert b'"type":"RequestTimeout"' in said and b"\r\nconnection: close\r\n" in said
    assert not own_pipeline.asked


def test_nothing_is_left_of_a_broken_upload(client, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def spooled():
        opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return [path for path in opened if path.startswith(str(tmp_path / "tmp"))]

    with connected(client, UPLOAD + b"x" * 3_000_000) as connection:
        time.sleep(PAUSE_S / 2)
        assert spooled()
        assert b" 408 " in received(connection, b"")
    assert not spooled() and not list((tmp_path / "tmp").iterdir())
    assert not list(tmp_path.glob("uploads-*/*")) and client.get("/v1/jobs").json() == {"jobs": []}


def test_a_slow_link_is_waited_for(client, own_pipeline) -> None:
    padding = b" " * 9000
    with connected(client, ASK + b"Content-Length: %d\r\n\r\n" % (len(padding) + len(QUESTION))) as connection:
        for start in range(0, len(padding), 1000):
            connection.sendall(padding[start : start + 1000])
            time.sleep(PAUSE_S / 3)
        connection.sendall(QUESTION)
        assert b" 200 OK" in connection.recv(1 << 16)


def test_an_answer_may_take_longer_than_a_client_may_pause(client, own_pipeline, monkeypatch) -> None:
    async def answer(question, options):
        yield Retrieved([SOURCE])
        await asyncio.sleep(3 * PAUSE_S)
        yield ANSWER

    monkeypatch.setattr(own_pipeline, "answer", answer)
    assert client.post("/v1/answer", json={"question": "who?"}).json()["answer"] == ANSWER.text


def test_a_stream_that_nobody_reads_is_held_back_and_ended(client, own_pipeline, monkeypatch) -> None:
    num_bytes, ended = 0, []

    async def answer(question, options):
        nonlocal num_bytes
        try:
            yield Retrieved([SOURCE])
            while True:
                await asyncio.sleep(0)
                num_bytes += 1 << 16
                yield Delta("x" * (1 << 16))
        finally:
            ended.append(time.monotonic())

    monkeypatch.setattr(own_pipeline, "answer", answer)
    body = b'{"question": "who?", "stream": true}'
    with connected(client, ASK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as connection:
        for _ in range(100):
            if ended:
                break
            time.sleep(0.1)
        assert ended and num_bytes < 64 << 20  # what the system's buffers hold
        assert client.post("/v1/search", json={"query": "who?"}).status_code == 200
        connection.settimeout(5)
        with pytest.raises(ConnectionError):
            while connection.recv(1 << 20):
                pass


def test_many_of_them_do_not_affect_other_clients(client) -> None:
    heads = (ASK, ASK + b"Content-Length: 9000\r\n\r\n", UPLOAD, UPLOAD + b"x" * 10_000)
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(client, heads[i % len(heads)])) for i in range(200)]
        assert client.get("/healthz").status_code == 200
        assert client.post("/v1/answer", json={"question": "who?"}).status_code == 200
        said = [received(connection, b"") for connection in slow]
    assert [b" 408 " in each for each in said] == [head is not ASK for head in heads] * 50


def test_the_bytes_held_for_them_are_bounded(client, monkeypatch) -> None:
    monkeypatch.setattr("ragkv.server.gate.MAX_HELD_BYTES", 1_000_000)
    head = ASK + b"Content-Length: 900000\r\n\r\n"
    with connected(client, head + b" " * 800_000) as first:
        time.sleep(PAUSE_S / 5)
        assert client.get("/healthz").status_code == 200
        with connected(client, head + b" " * 800_000) as second:
            second.settimeout(5)
            said = second.recv(1 << 16)
        assert b" 429 " in said and b"\r\nretry-after: 1\r\n" in said
        assert b" 408 " in received(first, b"")
    for _ in range(3):  # nothing of it is held any more, and one alone may be larger
        body = QUESTION + b" " * 1_500_000
        assert client.post("/v1/answer", content=body, headers={"Content-Type": "application/json"}).status_code == 200
