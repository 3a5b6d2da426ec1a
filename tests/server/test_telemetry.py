"""Ids, log lines and spans of requests, over real sockets."""

import asyncio
import io
import json
import logging
import sys
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server_harness import SCRIPT

from ragkv.errors import StoreError
from ragkv.server import telemetry

QUESTION = {"question": "who?"}
REQUEST_ID = "ragkv.request_id"


@pytest.fixture
def lines(monkeypatch):
    """A function that waits for a number of JSON log lines of this test, and returns them."""
    root, written = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(sys, "stderr", written)
    telemetry.log_as("json")

    def mine():
        logged = map(json.loads, written.getvalue().splitlines())
        return [line for line in logged if line["request_id"].startswith("mine")]  # not of the test before

    def read(count):
        until(lambda: len(mine()) >= count)  # a line comes after the answer is sent
        return mine()

    return read


def until(what):
    for _ in range(200):
        if what():
            return
        time.sleep(0.01)
    pytest.fail("it didn't happen in time")


@pytest.fixture(scope="module")
def exporter():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)  # once in a process
    return exporter


@pytest.fixture
def spans(exporter):
    """The spans of one request by name, once it has ended."""

    def read(request_id):
        def ids():
            finished = exporter.get_finished_spans()
            return {each.context.trace_id for each in finished if each.attributes.get(REQUEST_ID) == request_id}

        until(ids)
        return {span.name: span for span in exporter.get_finished_spans() if span.context.trace_id in ids()}

    return read


def test_an_answer_has_the_id_of_its_request(client) -> None:
    assert client.get("/healthz", headers={"X-Request-Id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
    made = {
        client.get("/healthz", headers={"X-Request-Id": odd}).headers["x-request-id"] for odd in ("", "a b", "x" * 200)
    }
    assert len(made) == 3 and all(len(id) == 32 for id in made)
    assert client.get("/nothing").headers["x-request-id"]
    assert client.post("/v1/answer", content=b"{").headers["x-request-id"]


def test_all_log_lines_of_a_request_have_its_id(pipeline, client, lines) -> None:
    client.post("/v1/answer", json=QUESTION, headers={"X-Request-Id": "mine-first"})
    pipeline.play([*SCRIPT[:2], RuntimeError("a bug")])
    client.post("/v1/answer", json={**QUESTION, "stream": True}, headers={"X-Request-Id": "mine-second"})
    client.get("/healthz", headers={"X-Request-Id": "mine-quiet"})
    client.get("/v1/documents/a%0Ab", headers={"X-Request-Id": "mine-odd"})
    first, broke, second, odd = lines(4)
    assert first["request_id"] == "mine-first" and first["message"].startswith("POST '/v1/answer' 200 in ")
    assert (first["method"], first["path"], first["status"], first["tenant"]) == ("POST", "/v1/answer", 200, "main")
    assert first["levelname"] == "INFO" and 0 <= first["took_ms"] < 5000
    assert broke["request_id"] == second["request_id"] == "mine-second" and "a bug" in broke["exc_info"]
    assert odd["path"] == "/v1/documents/a\nb" and "\n" not in odd["message"]


def test_a_bug_is_logged_with_its_status(pipeline, client, lines) -> None:
    pipeline.play([RuntimeError("a bug")])
    response = client.post("/v1/answer", json=QUESTION, headers={"X-Request-Id": "mine"})
    assert response.status_code == 500
    assert 500 in [line.get("status") for line in lines(1)]


def test_a_client_that_disconnects_is_logged_too(pipeline, client, lines) -> None:
    pipeline.play([*SCRIPT[:2], asyncio.Event()])
    with client.stream(
        "POST", "/v1/answer", json={**QUESTION, "stream": True}, headers={"X-Request-Id": "mine"}
    ) as response:
        lines_of = response.iter_lines()
        assert "event: delta" in lines_of
    assert pipeline.cancelled.wait(5)
    client.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert [each["path"] for each in lines(2)] == ["/v1/answer", "/v1/models"]


def test_spans_of_an_answer(client, spans) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.post("/v1/answer", json=QUESTION, headers={"traceparent": parent, "X-Request-Id": "abc"})
    found = spans("abc")
    request, answer = found["POST /v1/answer"], found["answer"]
    assert f"{request.context.trace_id:x}" == "af7651916cd43dd8448eb211c80319c"
    assert f"{request.parent.span_id:x}" == "b7ad6b7169203331"
    assert request.attributes["http.response.status_code"] == 200 and request.attributes[REQUEST_ID] == "abc"
    assert answer.parent.span_id == request.context.span_id
    assert answer.attributes["ragkv.reused_tokens"] == 20 and answer.attributes["ragkv.fallback"]
    for name, took_ms in {"retrieve": 1.5, "prefill": 20, "decode": 0}.items():
        assert found[name].parent.span_id == answer.context.span_id
        assert (found[name].end_time - found[name].start_time) / 1e6 == pytest.approx(took_ms, abs=1e-3)
    assert found["prefill"].start_time == found["retrieve"].end_time


def test_a_failure_is_marked(pipeline, client, spans) -> None:
    pipeline.play([StoreError("no space")])
    client.post("/v1/answer", json=QUESTION, headers={"X-Request-Id": "fails"})
    found = spans("fails")
    assert not found["POST /v1/answer"].status.is_ok and "answer" not in found


def test_traces_go_where_the_environment_says(monkeypatch) -> None:
    providers = []
    monkeypatch.setattr(telemetry.trace, "set_tracer_provider", providers.append)
    telemetry.export_traces()
    assert not providers
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    telemetry.export_traces()
    (provider,) = providers
    assert provider.resource.attributes["service.name"] == "ragkv"
    provider.shutdown()
