"""`/metrics` after requests of each outcome, as Prometheus' own parser reads it."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from server_harness import ANSWER, SCRIPT

from ragkv.background import Drift
from ragkv.config import MAIN, StoreConfig
from ragkv.errors import ContextTooLongError, StoreError
from ragkv.policies import Policy
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV
from ragkv.store.tier import open_tier

QUESTION = {"question": "who?"}


@pytest.fixture
def pipeline(own_pipeline):
    return own_pipeline


@pytest.fixture
def client(own_client):
    """A client of a new server, whose counts are 0."""
    return own_client


def samples(client):
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(response.text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_an_answer_is_counted_and_timed_whoever_asks(client) -> None:
    client.post("/v1/answer", json=QUESTION)
    client.post("/v1/answer", json={**QUESTION, "stream": True})
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "who?"}]})
    found = samples(client)
    assert found["ragkv_requests_total", "answered", MAIN] == 3 and found["ragkv_requests_in_progress",] == 0
    assert found["ragkv_ttft_seconds_count", "full"] == 3
    assert found["ragkv_ttft_seconds_sum", "full"] == pytest.approx(0.06)
    assert found["ragkv_inter_token_seconds_count",] == 3  # two pieces each
    assert found["ragkv_stage_seconds_sum", "retrieve"] == pytest.approx(0.0045)
    tokens = [found["ragkv_prompt_tokens_total", source] for source in ("prefix", "reused", "recomputed")]
    assert tokens == [15, 60, 15] and found["ragkv_memory_tokens_total",] == 27
    assert found["ragkv_completion_tokens_total",] == 9
    assert found["ragkv_fallbacks_total", ANSWER.fallback] == 3
    assert found["ragkv_plans_total", "fuse"] == 3
    assert found["ragkv_plan_ttft_ratio_sum", "fuse"] == pytest.approx(3 * 20 / 21)
    assert found["ragkv_kv_events_total", "corrupt_chunks"] == 1
    assert found["process_resident_memory_bytes",] > 1e7
    names = ("entries", "evicted_entries", "disk_bytes", "pinned_bytes", "memory_chunks", "prefix_bytes")
    assert [found[f"ragkv_store_{name}",] for name in names] == [7, 2, 7000, 1000, 3, 5000]
    assert found["ragkv_store_waiting_uploads",] == 0
    assert found["ragkv_ready",] == 1 and found["ragkv_budget", MAIN] == 0.2


def test_a_store_that_cannot_be_counted_hides_nothing_else(pipeline, client) -> None:
    class Broken:
        def __get__(self, *_):
            raise StoreError("no space")

    type(pipeline).gauges, before = Broken(), pipeline.__dict__.pop("gauges")
    try:
        found = samples(client)
    finally:
        del type(pipeline).gauges
        pipeline.gauges = before
    assert found["ragkv_ready",] == 1 and not any(name[0].startswith("ragkv_store_") for name in found)


def test_the_bucket_is_counted(pipeline, client, tmp_path) -> None:
    assert not any(name[0].startswith("ragkv_remote_") for name in samples(client))
    (tmp_path / "bucket").mkdir()
    with closing(DiskStore(tmp_path / "kv")) as store:
        pipeline.remote = open_tier(store, StoreConfig(remote=(tmp_path / "bucket").as_uri()))
        try:
            key = ChunkKey("1" * 32, "2" * 32, "3" * 32, heads=(0, 2))
            store.put([(key, [LayerKV(torch.ones(2, 5, 8), torch.ones(2, 5, 8), base_position=0)])])
            assert pipeline.remote.send() == 0
            store.delete_keys([key])
            absent = ChunkKey("4" * 32, "2" * 32, "3" * 32, heads=(0, 2))
            assert asyncio.run(pipeline.remote.fetch([key, absent])) == 1
            size = store.entries.size(key)
            store.delete([key.chunk_hash])
            pipeline.remote.remote.breaker.failed("gone")
            found = samples(client)
        finally:
            pipeline.remote.close()
            pipeline.remote = None
    for direction in ("read", "sent"):
        assert found["ragkv_remote_entries_total", direction] == 1
        assert found["ragkv_remote_bytes_total", direction] == size
    misses = [found["ragkv_remote_misses_total", reason] for reason in ("absent", "late", "outage", "damaged")]
    assert misses == [1, 0, 0, 0]
    assert (found["ragkv_remote_up",], found["ragkv_remote_pending_deletions",]) == (0, 1)


def test_drift_is_counted(pipeline, client) -> None:
    pipeline.canary.on_drift(Drift(0.25, 0.75, 8, 0.125))
    found = samples(client)
    assert found["ragkv_canary_kl_sum",] == 0.25
    assert found["ragkv_canary_estimated_kl_sum",] == 0.125
    assert (found["ragkv_canary_tokens_total",], found["ragkv_canary_agreeing_tokens_total",]) == (8, 6)


def test_ready(pipeline, client) -> None:
    assert samples(client)["ragkv_ready",] == 1
    pipeline.is_ready = False
    assert samples(client)["ragkv_ready",] == 0


def test_labels_stay_few_whatever_clients_choose(pipeline, client) -> None:
    for i in range(5):
        policy, reason = Policy.parse(f"query+shift:0.{i}"), f"no usable KV for {i} of 6 chunks"
        pipeline.script = [*SCRIPT[:-1], replace(ANSWER, policy=policy, fallback=reason)]
        pipeline.counters = {f"full_prefill: no space for {n} bytes": 2 for n in range(i + 1)}
        client.post("/v1/answer", json=QUESTION)
    found = samples(client)
    assert found["ragkv_ttft_seconds_count", "query+shift"] == 5
    assert found["ragkv_fallbacks_total", "no usable KV for N of N chunks"] == 5
    assert found["ragkv_kv_events_total", "full_prefill: no space for N bytes"] == 10


def test_outcomes(pipeline, client) -> None:
    for failure in (ContextTooLongError("too long", 9, 5), StoreError("no space"), RuntimeError("a bug")):
        pipeline.script = [*SCRIPT[:2], failure]
        client.post("/v1/answer", json={**QUESTION, "stream": True})
    pipeline.script = [*SCRIPT[:2], asyncio.Event()]
    with client.stream("POST", "/v1/answer", json={**QUESTION, "stream": True}) as response:
        lines = response.iter_lines()  # kept: the connection ends with it
        assert "event: delta" in lines
        assert samples(client)["ragkv_requests_in_progress",] == 1
    assert pipeline.cancelled.wait(5)
    found = samples(client)
    outcomes = {labels[0]: value for (name, *labels), value in found.items() if name == "ragkv_requests_total"}
    assert outcomes == {"refused": 1, "failed": 2, "cancelled": 1}
    assert found["ragkv_requests_in_progress",] == 0
