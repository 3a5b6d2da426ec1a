"""What `ragkv eval stalls` sees: pauses of an event loop, gaps between tokens; and what it sends."""

import asyncio
import json
import math
import time

import httpx
import pytest
from server_harness import ScriptedPipeline, running

from ragkv.config import MAIN, Config
from ragkv.errors import EngineStoppedError, RagKVError
from ragkv.evals.experiment import Progress
from ragkv.evals.parameters import Stalls
from ragkv.evals.serving import Served, served
from ragkv.evals.watched_loop import PAUSES, WatchedLoops, longest_pause_ms
from ragkv.evals.workloads import stalls
from ragkv.server.chat_request import ChatRequest


def test_a_pause_of_the_loop_is_written_with_its_time(tmp_path) -> None:
    async def pausing() -> tuple[float, float]:
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        time.sleep(0.2)
        end = time.monotonic()
        await asyncio.sleep(0.1)
        return begin, end

    with (tmp_path / PAUSES).open("w", buffering=1) as out:
        loop = WatchedLoops(out).new_event_loop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            begin, end = runner.run(pausing())
    assert 195 < longest_pause_ms(tmp_path / PAUSES, begin, end) < 1000
    assert longest_pause_ms(tmp_path / PAUSES, begin - 0.1, begin - 0.05) < 195
    assert longest_pause_ms(tmp_path / PAUSES, end + 1, end + 2) == 0


def test_a_gap_is_between_two_tokens_of_one_answer_and_may_end_after_the_request() -> None:
    tokens = [0.0, 1.0, 1.5, math.nan, 10.0, 14.0]
    assert stalls.longest_gap(tokens, 1.2, 1.3) == 0.5
    assert stalls.longest_gap(tokens, 0.5, 2.0) == 1.0
    assert stalls.longest_gap(tokens, 1.6, 9.0) == 0.0
    assert stalls.longest_gap(tokens, 1.6, 11.0) == 4.0


def test_requests_have_the_size_that_is_asked_and_but_for_two_are_good_ones() -> None:
    refused = []
    for name, body in stalls.requests(5 << 20):
        size = len(json.dumps(body))
        assert size < 8 << 20 and (size > 4 << 20 or name in ("a short question", "a long question")), name
        try:
            ChatRequest.model_validate(body)
        except ValueError:
            refused.append(name)
    assert refused == ["100,000 parts", "10,000 messages of nobody's"]


def test_each_kind_of_request_has_a_row(tmp_path) -> None:
    (tmp_path / PAUSES).touch()
    with running({MAIN: ScriptedPipeline(tmp_path)}, tmp_path) as client:
        url = str(client.base_url)
        rows = asyncio.run(stalls._measure(Served(url, None, tmp_path), Stalls(mib=0.1), Progress()))
    names = [name for name, _ in stalls.requests(1000)]
    assert [row["request"] for row in rows] == ["nothing else", *names]
    statuses = {row["request"]: row["status"] for row in rows if row["status"] != 200}
    assert statuses == {"nothing else": None, "100,000 parts": 422, "10,000 messages of nobody's": 422}
    assert rows[0]["seconds"] >= 3 and all(row["gap_ms"] >= 0 for row in rows)


def test_a_server_whose_engine_stops_has_no_rows(tmp_path) -> None:
    stopped = ScriptedPipeline(tmp_path, [EngineStoppedError("vLLM isn't running")])
    with running({MAIN: stopped}, tmp_path) as client, pytest.raises(RagKVError, match="503.*vLLM isn't running"):
        asyncio.run(stalls._measure(Served(str(client.base_url), None, tmp_path), Stalls(mib=0.1), Progress()))


def test_an_error_has_the_end_of_the_servers_log(tmp_path) -> None:
    with (
        pytest.raises(RagKVError, match="it stopped; the server's log ends with\n.*No module named ragkv.nothing"),
        served(Config(home=tmp_path), "ragkv.nothing") as server,
    ):
        server.process.wait()
        raise RagKVError("it stopped")


def test_what_cannot_be_indexed_is_an_error(tmp_path) -> None:
    async def indexed(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            await stalls.index(client, {"a.txt": "text"})
            await stalls.index(client, {"a.exe": "text"})

    with running({MAIN: ScriptedPipeline(tmp_path)}, tmp_path) as client, pytest.raises(httpx.HTTPStatusError):
        asyncio.run(indexed(str(client.base_url)))
