"""One address before two servers, over real sockets: whoever fails, the client gets one whole answer."""

import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from openai import OpenAI
from server_harness import ANSWER, SCRIPT, SOURCE, ScriptedPipeline, running

from ragkv.answer import Delta, Reasoning, Retrieved
from ragkv.config import Config
from ragkv.errors import ConfigError, EngineStoppedError
from ragkv.server.front import Front, create_front, serve_front

GONE = EngineStoppedError("vLLM's processes ended during this request; ask again in a minute")
ASKED = {"question": "Why?", "stream": True}


def breaking(*events):
    """A script whose engine ends after these events."""
    return [*events, GONE]


@contextmanager
def fronted(tmp_path, prefill=SCRIPT, decode=SCRIPT, patience_s=5.0, at=()):
    """Yield a client of the front, and the pipelines of the two sides. at: where sides are that are none of these."""
    with ExitStack() as stack:
        pipelines, addresses = {}, dict(at)
        for name, script in (("prefill", prefill), ("decode", decode)):
            folder = tmp_path / name
            folder.mkdir()
            pipelines[name] = ScriptedPipeline(folder, script)
            url = str(stack.enter_context(running({"main": pipelines[name]}, folder)).base_url)
            addresses.setdefault(name, url.rstrip("/"))
        front = Front(addresses["prefill"], addresses["decode"], patience_s)
        wrap = lambda app: create_front(front)  # noqa: E731
        client = stack.enter_context(running({"main": pipelines["decode"]}, tmp_path, wrap=wrap))
        yield client, pipelines


NOBODY, NOBODY_EITHER = "http://127.0.0.1:1", "http://127.0.0.1:2"


@contextmanager
def dying(said):
    """A server that begins each answer with these bytes and is killed: its connection ends in the middle."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(head + f"{len(said):x}\r\n".encode() + said + b"\r\n" if said else b"")

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def frames_of(response):
    assert response.status_code == 200, response.text
    frames = []
    for block in response.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        frames.append((lines.get("event", ""), json.loads(lines["data"]) if lines["data"] != "[DONE]" else None))
    return frames


def text_of(frames):
    return "".join(data["text"] for name, data in frames if name == "delta")


def test_the_prefill_side_is_asked_first_and_the_decode_side_answers(tmp_path):
    with fronted(tmp_path) as (client, sides):
        answer = client.post("/v1/answer", json={"question": "Why?", "max_tokens": 7, "policy": "none"})
        assert answer.json()["answer"] == ANSWER.text
        ((question, options),) = sides["prefill"].asked
        assert question == "Why?" and options.hand_over == "give"
        assert options.policy.name == "none"
        ((_, options),) = sides["decode"].asked
        assert options.hand_over == "take" and options.max_tokens == 7


def test_a_stream_passes_as_it_is(tmp_path):
    with fronted(tmp_path) as (client, sides):
        frames = frames_of(client.post("/v1/answer", json=ASKED))
        assert [name for name, _ in frames] == ["sources", "delta", "delta", "done"]
        assert text_of(frames) == ANSWER.text.replace(", ", ",\n ")
        assert len(sides["prefill"].asked) == len(sides["decode"].asked) == 1


def test_openais_client_sees_one_completion(tmp_path):
    broken = breaking(Retrieved([SOURCE]), Delta("Grüße,"))
    with fronted(tmp_path, decode=broken) as (client, sides):
        openai = OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
        chunks = list(
            openai.chat.completions.create(
                model="smollm2-135m-instruct", messages=[{"role": "user", "content": "Why?"}], stream=True, max_tokens=9
            )
        )
        assert len({chunk.id for chunk in chunks}) == 1
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Grüße,\n world"
        assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
        assert [options.hand_over for _, options in sides["prefill"].asked] == ["give", "take"]


@pytest.mark.parametrize("num_events", [0, 1, 2, 3])
def test_a_stream_that_breaks_off_is_continued_by_the_other_side(tmp_path, num_events):
    script = [Retrieved([SOURCE]), Reasoning("Hm."), Delta("Grü"), Delta("ße,\n world"), ANSWER]
    with fronted(tmp_path, prefill=script, decode=breaking(*script[:num_events])) as (client, _):
        frames = frames_of(client.post("/v1/answer", json=ASKED))
        names = [name for name, _ in frames]
        assert names.count("sources") == names.count("done") == 1 and "error" not in names
        assert text_of(frames) == "Grüße,\n world"
        assert "".join(data["text"] for name, data in frames if name == "reasoning") == "Hm."


def test_a_killed_server_in_the_middle_of_a_word(tmp_path):
    said = b'event: sources\ndata: {"sources": []}\n\nevent: delta\ndata: {"text": "Gr'
    said = said.replace(b'"Gr', '"Grü"}\n\nevent: delta\ndata: {"te'.encode())
    with (
        dying(said) as address,
        fronted(tmp_path, patience_s=0, at={"decode": address}) as (client, sides),
    ):
        frames = frames_of(client.post("/v1/answer", json=ASKED))
        assert text_of(frames) == "Grüße,\n world"
        assert [name for name, _ in frames].count("sources") == 1
        assert not sides["decode"].asked


def test_an_answer_that_goes_on_otherwise_is_an_error_and_not_a_mixture(tmp_path):
    broken = breaking(Retrieved([SOURCE]), Delta("Guten "))
    with fronted(tmp_path, decode=broken, patience_s=0) as (client, _):
        frames = frames_of(client.post("/v1/answer", json=ASKED))
        assert frames[-1][0] == "error" and "begins otherwise" in frames[-1][1]["error"]["message"]
        assert text_of(frames) == "Guten "


def test_without_the_prefill_side_the_other_computes_all(tmp_path):
    with fronted(tmp_path, at={"prefill": NOBODY}) as (client, sides):
        assert client.post("/v1/answer", json={"question": "Why?"}).json()["answer"] == ANSWER.text
        ((_, options),) = sides["decode"].asked
        assert options.hand_over is None


def test_without_the_decode_side_the_other_answers(tmp_path):
    with fronted(tmp_path, at={"decode": NOBODY}) as (client, sides):
        assert client.post("/v1/answer", json={"question": "Why?"}).json()["answer"] == ANSWER.text
        assert [options.hand_over for _, options in sides["prefill"].asked] == ["give", "take"]
        assert client.get("/healthz").json()["status"] == "ok"


def test_a_side_that_is_starting_again_is_waited_for(tmp_path):
    with fronted(tmp_path, at={"prefill": NOBODY}) as (client, sides):
        sides["decode"].is_ready = False
        threading.Timer(1.0, lambda: setattr(sides["decode"], "is_ready", True)).start()
        assert client.post("/v1/answer", json={"question": "Why?"}).json()["answer"] == ANSWER.text


def test_nobody_answers(tmp_path):
    addresses = {"prefill": NOBODY, "decode": NOBODY_EITHER}
    with fronted(tmp_path, patience_s=0, at=addresses) as (client, _):
        for asked in ({"question": "Why?"}, ASKED):
            response = client.post("/v1/answer", json=asked)
            assert response.status_code == 503 and addresses["decode"] in response.json()["error"]["message"]
            assert response.headers["Retry-After"] == "10"


def test_errors_of_a_request_are_the_servers_own(tmp_path):
    with fronted(tmp_path) as (client, _):
        for asked in ({"question": ""}, {"question": "Why?", "polcy": "none"}, {"question": "", "stream": True}, [1]):
            through, own = client.post("/v1/answer", json=asked), 422
            assert through.status_code == own and through.json()["error"]["type"] == "InvalidRequest"
        assert client.post("/v1/answer", content=b"{").status_code == 422
        assert client.get("/v1/nothing").status_code == 404


def test_sampled_answers_get_a_seed_that_both_sides_use(tmp_path):
    broken = breaking(Retrieved([SOURCE]), Delta("Grüße,"))
    body = {"messages": [{"role": "user", "content": "Why?"}], "temperature": 0.8, "stream": True}
    with fronted(tmp_path, decode=broken) as (client, sides):
        frames_of(client.post("/v1/chat/completions", json=body))
        seeds = {options.sampling.seed for side in sides.values() for _, options in side.asked}
        assert len(seeds) == 1 and None not in seeds


def test_an_upload_isnt_sent_twice(tmp_path):
    """It may have been taken where the connection ended before the answer."""
    with dying(b"") as address, fronted(tmp_path, at={"decode": address}) as (client, sides):
        response = client.post("/v1/documents", files={"files": ("a.md", b"text")})
        assert response.status_code == 503
        assert sides["prefill"].catalog.document_ids() == []


@pytest.mark.parametrize("address", [None, "", "localhost:8091", "ftp://127.0.0.1"])
def test_addresses_that_cant_be_used(address):
    config = Config(front={"prefill": "http://127.0.0.1:8091", "decode": address})
    with pytest.raises(ConfigError, match=r"front\.decode is .* RAGKV_FRONT__DECODE"):
        serve_front(config)


def test_finished_answers_keep_their_figures(tmp_path):
    told = replace(ANSWER, fallback=None)
    with fronted(tmp_path, decode=[Retrieved([SOURCE]), told]) as (client, _):
        (_, done) = frames_of(client.post("/v1/answer", json=ASKED))[-1]
        assert done["usage"]["prompt_tokens"] == 30
