"""What `ragkv eval load` measures, against a scripted pipeline behind the real server."""

import asyncio

import aiohttp
import psutil
import pytest
from server_harness import ANSWER, SCRIPT, ScriptedPipeline, running

from ragkv.answer import Delta
from ragkv.config import MAIN
from ragkv.errors import StoreError
from ragkv.evals.workloads import load
from ragkv.evals.workloads.load import Question, Server

MODEL = "smollm2-135m-instruct"
QUESTION = Question("who?", "a chunk. who?", top_k=3)


class Slow(ScriptedPipeline):
    """`script`, with pauses in seconds; a whole number waits until so many questions have come."""

    async def answer(self, question, options):
        self.asked.append((question, options))
        for step in self.script:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, int):
                while len(self.asked) < step:
                    await asyncio.sleep(0.01)
            elif isinstance(step, Exception):
                raise step
            else:
                yield step


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs a measurement against a server that plays a script."""
    monkeypatch.setattr(Server, "_processes", lambda self: [])  # it is this process

    def run(script, measurement):
        pipeline = Slow(tmp_path, script)
        with running({MAIN: pipeline}, tmp_path) as client:
            server = Server("ragkv", str(client.base_url), MODEL, psutil.Process())
            return asyncio.run(measurement(server)), pipeline

    return run


async def ask(server):
    async with aiohttp.ClientSession() as session:
        return await server.ask(session, QUESTION, 7)


def test_the_first_token_is_timed_and_not_what_comes_before(measured):
    timed, pipeline = measured([SCRIPT[0], 0.3, Delta("a"), 0.2, Delta("b"), 0.01, ANSWER], ask)
    assert timed.ttft >= 0.3 and not timed.error
    assert len(timed.arrivals) == 3 and timed.gaps[0][1] >= 0.15  # the second comes 0.2 s after the first was sent
    assert timed.prompt_tokens == ANSWER.usage.prompt_tokens
    ((_, options),) = pipeline.asked
    assert (options.top_k, options.max_tokens) == (3, 7)


def test_a_question_that_fails_is_counted(measured):
    timed, _ = measured([StoreError("no")], ask)
    assert timed.error and load._row([timed]) == {"questions": 1, "failed": 1}


def test_questions_come_as_they_come(measured):
    """Not one after the other: none of the five is answered before the last has come, 0.2 s after the first."""
    (timed, pipeline) = measured(
        [SCRIPT[0], 5, Delta("a"), ANSWER], lambda server: load._as_they_come(server, [QUESTION] * 5, [0.05] * 5)
    )
    assert len(pipeline.asked) == 5 and not any(each.error for each in timed)
    assert max(each.ttft for each in timed) > 0.15  # the first has waited for the others


def test_streams_are_timed_while_questions_are_asked(measured, monkeypatch):
    monkeypatch.setattr(load, "_LEAD_S", 0.3)
    script = [SCRIPT[0], *[0.05, Delta("a")] * 6, ANSWER]

    async def beside(server):
        return await load._during_streams(server, [QUESTION] * 2, [0.2, 0.2], [QUESTION] * 100, num_streams=4)

    (asked, gaps), pipeline = measured(script, beside)
    assert len(asked) == 2 and 4 <= len(pipeline.asked) - 2 < 20  # as many as the questions took
    assert 20 < len(gaps) < 100 and sorted(gaps)[len(gaps) // 2] == pytest.approx(0.05, abs=0.03)
