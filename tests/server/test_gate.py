"""Keys, origins and sizes of requests, over real sockets."""

import hashlib
import re
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import asynccontextmanager
from http.client import HTTPResponse
from select import select

import pytest
from server_harness import CONFIG, ScriptedPipeline, running
from typer.testing import CliRunner

from ragkv import server
from ragkv.cli import app
from ragkv.config import MAIN, Config, ServerConfig
from ragkv.errors import ConfigError
from ragkv.server.gate import MAX_BODY_BYTES, OPEN, hash_of, is_loopback
from ragkv.settings import load_config

QUESTION = {"question": "who?"}
KEYS = {name: f"ragkv-{name * 12}" for name in ("ann", "bob")}


@pytest.fixture
def pipeline(tmp_path):
    return ScriptedPipeline(tmp_path)


@pytest.fixture
def guarded(pipeline, tmp_path):
    hashes = {name: hash_of(key) for name, key in KEYS.items()}
    config = CONFIG.model_copy(update={"server": ServerConfig(keys=hashes)})
    with running({MAIN: pipeline}, tmp_path, config) as client:
        yield client


@pytest.mark.parametrize("key", KEYS.values())
def test_a_request_with_a_key_is_answered(guarded, key) -> None:
    assert guarded.post("/v1/answer", json=QUESTION, headers={"Authorization": f"bearer  {key}"}).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ragkv-",
        f"Bearer {KEYS['ann']}x",
        f"Bearer {KEYS['ann'][:-1]}",
        f"Bearer {hash_of(KEYS['ann'])}",
        f"Basic {KEYS['ann']}",
        f"Bearer {KEYS['ann']}, Bearer {KEYS['bob']}",
        KEYS["ann"],
    ],
)
@pytest.mark.parametrize("path", ["/v1/answer", "/v1/models", "/v1/chat/completions", "/metrics", "/nothing"])
def test_requests_without_a_key_are_refused(pipeline, guarded, authorization, path) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    response = guarded.post(path, content=b"\xff{", headers=headers)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "Unauthorized"
    assert not pipeline.asked


def test_probes_need_no_key(guarded) -> None:
    assert all(guarded.get(path).status_code == 200 for path in OPEN)
    scheme = guarded.get("/openapi.json").json()["components"]["securitySchemes"]["HTTPBearer"]
    assert scheme["scheme"] == "bearer"


def test_without_keys_every_request_is_answered(client) -> None:
    assert client.post("/v1/answer", json=QUESTION, headers={"Authorization": "Bearer x"}).status_code == 200


def chunks(num_bytes):
    yield b'{"question": "'
    for _ in range(num_bytes >> 16):
        yield b"x" * (1 << 16)
    yield b'"}'


@pytest.mark.parametrize("path", ["/v1/answer", "/v1/chat/completions"])
def test_a_body_that_is_too_large_is_refused_while_it_is_sent(pipeline, client, path) -> None:
    response = client.post(path, content=b"x" * (MAX_BODY_BYTES + 1))
    assert (response.status_code, response.json()["error"]["type"]) == (413, "ContentTooLarge")
    response = client.post(path, content=chunks(MAX_BODY_BYTES + (1 << 20)))  # chunked: of unknown length
    assert response.status_code == 413 and str(MAX_BODY_BYTES) in response.json()["error"]["message"]
    assert not pipeline.asked
    assert client.post("/v1/answer", json=QUESTION).status_code == 200


def test_a_client_that_is_refused_early_can_finish_sending_and_reads_the_refusal(client) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    head = f"POST /v1/answer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert select([connection], [], [], 60)[0]  # the refusal has arrived, and isn't read yet
        connection.sendall(body)
        response = HTTPResponse(connection)
        response.begin()
        assert response.status == 413 and str(MAX_BODY_BYTES).encode() in response.read()
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")  # no rest of the body is in the way
        response = HTTPResponse(connection)
        response.begin()
        assert response.status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_only_this_machine_is_served(host) -> None:
    with pytest.raises(ConfigError, match=r"no key is asked for; make one with `ragkv key NAME`"):
        server.serve(Config(server={"host": host, "port": 1}), lambda: pytest.fail("opened"))


def test_with_keys_other_machines_are_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    @asynccontextmanager
    async def opened():
        raise InterruptedError
        yield

    keys = {"ann": "a" * 64}
    for settings in ({"server": {"keys": keys}}, {"tenants": {"acme": {"keys": keys}}}):
        config = Config(**{"server": {}, **settings})
        address = config.server.model_copy(update={"host": "0.0.0.0", "port": port})
        with pytest.raises(InterruptedError):  # it got as far as opening the pipeline
            server.serve(config.model_copy(update={"server": address}), opened)


def test_an_operators_key_is_made_for_its_own_setting() -> None:
    result = CliRunner().invoke(app, ["key", "--operator", "olga"])
    assert "[server.operator_keys]" in result.stderr and "RAGKV_SERVER__OPERATOR_KEYS='" in result.stderr


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%lo", False)],
)
def test_loopback(address, expected) -> None:
    assert is_loopback(address) is expected


def test_a_key_is_made_and_its_hash_fits_the_settings() -> None:
    result = CliRunner().invoke(app, ["key", "ann"])
    assert result.exit_code == 0
    key = result.stdout.strip()
    (digest, _) = re.findall(r'"([0-9a-f]{64})"', result.stderr)
    assert digest == hashlib.sha256(key.encode()).hexdigest() and key not in result.stderr
    assert Config(server={"keys": {"ann": digest}}).server.keys == {"ann": digest}
    assert key != CliRunner().invoke(app, ["key", "ann"]).stdout.strip()


def test_several_keys_come_with_settings_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["key", "ann", 'b "b"'])
    hashes = dict(zip(["ann", 'b "b"'], map(hash_of, result.stdout.split()), strict=True))
    section = result.stderr[result.stderr.index("[server.keys]") : result.stderr.index("\n\nor ")]
    assert tomllib.loads(section)["server"]["keys"] == hashes
    (value,) = re.findall("RAGKV_SERVER__KEYS='(.*)'", result.stderr)
    monkeypatch.setenv("RAGKV_SERVER__KEYS", value)
    assert load_config().server.keys == hashes


def test_the_command_refuses_to_listen_beyond_this_machine(tmp_path) -> None:
    command = [sys.executable, "-m", "ragkv", "serve", "--host", "0.0.0.0", "--home", str(tmp_path)]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "ragkv key NAME" in done.stderr, done.stderr
    assert time.monotonic() - begin < 100 and "starting vLLM" not in done.stderr


OURS = "http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"Origin": OURS}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": OURS, "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://rag.example", "Sec-Fetch-Site": "same-origin"}, 200),  # through a proxy
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({"Host": "evil.example:8090", "Origin": "http://evil.example:8090"}, 403),  # DNS rebinding
        ({"Host": "127.0.0.1.evil.example"}, 403),
    ],
)
def test_cross_site_requests_can_neither_ask_nor_upload(module_pipeline, headers, expected) -> None:
    pipeline, client = module_pipeline
    pipeline.play()
    headers = {name: value.format(port=client.base_url.port) for name, value in headers.items()}
    assert client.post("/v1/answer", json=QUESTION, headers=headers).status_code == expected
    upload = client.post("/v1/documents", files={"files": ("a.txt", b"text")}, headers=headers)
    assert upload.status_code == (202 if expected == 200 else 403)
    assert len(pipeline.asked) == (expected == 200)


def test_with_keys_a_server_may_have_any_name(guarded) -> None:
    headers = {"Host": "rag.example", "Authorization": f"Bearer {KEYS['ann']}"}
    assert guarded.get("/v1/models", headers=headers).status_code == 200
