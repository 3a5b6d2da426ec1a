"""How commands end that have started vLLM: without a word of what went on inside."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

import ragkv
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL

pytestmark = pytest.mark.engine
START_S, END_S = 400, 180


@pytest.fixture(scope="module")
def home(whole_home):
    return whole_home


@pytest.fixture(scope="module")
def environment(home):
    settings = {"MODEL__MAX_MODEL_LEN": 1024, "MODEL__KV_CACHE_GIB": 1, "ANSWER__CONTROLLER": "false"}
    names = {"HOME": home, "MODEL__NAME": EMBEDDED_MODEL, "INDEX__EMBEDDER": EMBEDDED_EMBEDDER, **settings}
    own = {f"RAGKV_{name}": str(value) for name, value in {"INDEX__NUM_CONTEXTS": 1, **names}.items()}
    return {**os.environ, **own, "PYTHONPATH": str(Path(ragkv.__file__).parents[1])}


@contextmanager
def running(environment, *arguments):
    """A command in a process group of its own, as a terminal starts it."""
    command = [sys.executable, "-c", "from ragkv.cli import main; main()", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def check_silence(text):
    assert not any(word in text for word in ("Traceback", "Exception ignored", "leaked", "Error")), text


def shared_by(process):
    """The memory that a command's processes share."""
    files = set()
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            files |= {Path(each.path) for each in child.memory_maps() if each.path.startswith("/dev/shm/psm_")}
    return files


@pytest.mark.long
def test_a_command_ends_with_its_engine(environment, home, tmp_path):
    (tmp_path / "tea.md").write_text("# Tea\n\nDarjeeling is picked four times a year.\n")
    with running(environment, "index", tmp_path) as process:
        out, err = process.communicate(timeout=START_S)
    assert (process.returncode, out) == (0, "Documents: 1 new. Chunks prefilled: 1.\n"), err
    check_silence(err + (home / "vllm.log").read_text())


@pytest.mark.long
def test_indexing_is_stopped_in_the_middle(environment, home, tmp_path):
    (tmp_path / "long.txt").write_text("".join(f"The cat number {i} sat on the mat. " for i in range(50_000)))
    known = set(home.rglob("*.kv"))
    with running(environment, "index", tmp_path) as process:
        end = time.monotonic() + START_S
        while len(set(home.rglob("*.kv")) - known) < 3:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=END_S)
    check_silence(err)
    assert process.returncode == 130


@pytest.mark.long
def test_an_answer_is_stopped_in_the_middle(environment):
    with running(environment, "ask", "When is tea picked?") as process:
        assert process.stdout.read(1)  # the answer comes as it is decoded
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=END_S)
    check_silence(err)
    assert process.returncode in (0, 130)  # 0: it was short


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_server_is_stopped_in_the_middle_of_an_answer(environment, unused_port, signum):
    """SIGINT as Ctrl-C in a terminal sends it: to all processes."""
    with running(environment, "serve", "--port", unused_port) as process:
        url = f"http://127.0.0.1:{unused_port}"
        wait_until_ready(url)
        body = {"question": "When is tea picked?", "stream": True, "max_tokens": 500}
        with httpx.stream("POST", f"{url}/v1/answer", json=body, timeout=END_S) as response:
            assert any("delta" in line for line in response.iter_lines())
            stop = os.killpg if signum == signal.SIGINT else os.kill
            stop(process.pid, signum)
            rest = response.read().decode() if not response.is_stream_consumed else ""
        assert "Internal" not in rest
        _, err = process.communicate(timeout=END_S)
    check_silence(err)
    assert process.returncode in (0, 130, 143)


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_server_is_stopped_while_the_model_loads(environment, unused_port, signum):
    with running(environment, "serve", "--port", unused_port) as process:
        end = time.monotonic() + START_S
        while not (files := shared_by(process)):  # with it vLLM's processes talk to each other, and load
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.1)
        (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
        _, err = process.communicate(timeout=END_S)
    check_silence(err)
    assert process.returncode == 128 + signum
    assert not any(file.exists() for file in files)


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def wait_until_ready(url):
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail("it doesn't start")
