"""Prefill here, decode there: two servers with an engine each behind one address, on one home, or on two that share a
bucket; float32."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]

TEXT = "\n\n".join(f"Note {i} was written by person {i} in the year {1900 + i}. " * 6 for i in range(12))
BLOCK = 128  # vLLM's, on CPU, of which a bucket has whole ones only
TAIL = 32  # on the disk what is stored ends at a multiple of so many tokens
QUESTION = "Who wrote note 7, and in which year?"


def free_ports(number):
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in taken]


@contextmanager
def started(arguments, environment, log):
    with log.open("ab") as output:
        command = [sys.executable, "-m", "ragkv", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            yield process
        finally:
            end(process, signal.SIGTERM)


def end(process, number):
    """End a server with its engine."""
    found = (
        [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        if process.poll() is None
        else []
    )
    for each in found if number == signal.SIGKILL else found[:1]:
        each.send_signal(number)
    process.wait(60)


def wait_for(client):
    for _ in range(1200):
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise TimeoutError(str(client.base_url))


def ask(client, **options):
    asked = {"question": QUESTION, "max_tokens": 60, "top_k": 8, "policy": "none", **options}
    response = client.post("/v1/answer", json=asked)
    assert response.status_code == 200, response.text
    return response.json()


def read(client, at_first_text=lambda: None, **options):
    """Return what a stream says, and its last event."""
    asked = {"question": QUESTION, "max_tokens": 60, "top_k": 8, "policy": "none", "stream": True, **options}
    text, name, last = "", "", None
    with client.stream("POST", "/v1/answer", json=asked) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            kind, _, value = line.partition(": ")
            name = value if kind == "event" else name
            if kind == "data":
                last = name, json.loads(value)
                if name == "delta":
                    text += last[1]["text"]
                    at_first_text()
                    at_first_text = lambda: None  # noqa: E731
    return text, last


def environment_of(home, smollm, **settings):
    home.mkdir()
    (home / "models").symlink_to(smollm.parent)
    settings |= {
        "HOME": str(home),
        "MODEL__DTYPE": "float32",
        "MODEL__MAX_MODEL_LEN": "2048",
        "MODEL__KV_CACHE_GIB": "0.5",
        "INDEX__CHUNK_TOKENS": "96",
        "INDEX__NUM_CONTEXTS": "1",
        "SERVER__LOG": "json",
    }
    return os.environ | {f"RAGKV_{name}": value for name, value in settings.items()}


@pytest.fixture
def one_home(smollm, tmp_path):
    """The settings of the side that prefills, and of the one that decodes."""
    return [environment_of(tmp_path / "home", smollm, ANSWER__CONTROLLER="false")] * 2


@pytest.fixture
def two_homes(smollm, tmp_path, bucket):
    """As of two machines. How long KV from the bucket is waited for is a matter of the measured time of prefill."""
    shared = {"STORE__REMOTE": bucket.url, "STORE__REMOTE_PREFIXES": "true", "STORE__REMOTE_TIMEOUT_S": "20"}
    return [environment_of(tmp_path / side, smollm, **shared) for side in ("here", "there")]


@pytest.mark.parametrize(("homes", "stored_to"), [("one_home", TAIL), ("two_homes", BLOCK)])
def test_prefill_here_and_decode_there(request, tmp_path, homes, stored_to):
    environments, log = request.getfixturevalue(homes), tmp_path / "log"
    (tmp_path / "notes.md").write_text(TEXT)
    index = [sys.executable, "-m", "ragkv", "index", str(tmp_path / "notes.md")]
    for environment in {each["RAGKV_HOME"]: each for each in environments}.values():
        with log.open("ab") as output:
            subprocess.run(index, env=environment, stdout=output, stderr=output, check=True)
        if (profile := tmp_path / "here" / "profile.json").exists():  # the same machine
            shutil.copy(profile, tmp_path / "there")
    here, there, front = free_ports(3)
    sides_of = dict(zip((here, there), environments, strict=True))
    with ExitStack() as stack:
        clients = {}
        for port in (here, there, front):
            url = f"http://127.0.0.1:{port}"
            clients[port] = stack.enter_context(httpx.Client(base_url=url, timeout=300))

        def serve(port):
            return stack.enter_context(started(["serve", "--port", str(port)], sides_of[port], log))

        prefilling, decoding = serve(here), serve(there)
        sides = ["--prefill", f"http://127.0.0.1:{here}", "--decode", f"http://127.0.0.1:{there}"]
        stack.enter_context(started(["front", *sides, "--port", str(front)], environments[0], log))
        for port in (here, there, front):
            wait_for(clients[port])

        expected = ask(clients[there], fresh=True)
        found = ask(clients[front])
        assert found["answer"] == expected["answer"] and len(found["answer"]) > 60
        num_tokens = found["usage"]["prompt_tokens"]
        stored = (num_tokens - 1) // stored_to * stored_to
        assert found["usage"]["stored_prefix_tokens"] == stored > 256
        again = ask(clients[there], policy="full", fresh=True)  # exactly, too
        exact = ask(clients[front], policy="full")
        assert exact["answer"] == again["answer"] and exact["usage"]["stored_prefix_tokens"] == stored

        # The decode side is killed in the middle of a word: the prefill side goes on with it.
        whole, (name, _) = read(clients[front], lambda: end(decoding, signal.SIGKILL), top_k=7)
        assert name == "done" and whole == ask(clients[here], top_k=7, fresh=True)["answer"]
        assert ask(clients[front], top_k=6)["answer"] == ask(clients[here], top_k=6, fresh=True)["answer"]

        # It comes back, and the prefill side is killed, which costs the answers nothing either.
        decoding = serve(there)
        wait_for(clients[there])
        text, _ = read(clients[front], lambda: end(prefilling, signal.SIGKILL), top_k=5)
        assert text == ask(clients[there], top_k=5, fresh=True)["answer"]
        assert ask(clients[front], top_k=4)["answer"] == ask(clients[there], top_k=4, fresh=True)["answer"]
