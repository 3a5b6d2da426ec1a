"""Turns of indexing: one at a time, in order, and after answers, but not for ever."""

import asyncio
import math

import pytest

from ragkv import background
from ragkv.background import AnswerBegunError, Idle, Turns


def test_turns_are_taken_in_the_order_in_which_they_were_asked_for():
    taken = []

    async def take(turns, name, count):
        for _ in range(count):
            async with turns.next(math.inf):
                taken.append(name)
                await asyncio.sleep(0)

    async def run():
        turns = Turns(Idle(60))
        await asyncio.gather(take(turns, "a", 4), take(turns, "b", 2), take(turns, "c", 1))

    asyncio.run(run())
    assert "".join(taken) == "abcabaa"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(background, "IDLE_S", 0.01)


def test_a_turn_waits_for_answers_but_not_for_ever(quick):
    async def run():
        idle, loop = Idle(60), asyncio.get_running_loop()
        turns = Turns(idle)

        async def taken(seconds):
            begin = loop.time()
            async with turns.next(begin + seconds) as is_quiet:
                return is_quiet, loop.time() - begin

        is_quiet, waited_s = await taken(10)
        assert is_quiet and waited_s < 0.2
        with idle.answering():
            waiting = asyncio.create_task(taken(10))
            await asyncio.sleep(0.1)
        is_quiet, waited_s = await waiting
        assert is_quiet and 0.1 <= waited_s < 2
        with idle.answering():
            is_quiet, waited_s = await taken(0.3)
        assert not is_quiet and 0.3 <= waited_s < 2

    asyncio.run(run())


def test_who_waits_for_an_idle_moment_keeps_no_other_from_its_turn(quick):
    async def run():
        idle, loop = Idle(60), asyncio.get_running_loop()
        turns = Turns(idle)

        async def take(seconds):
            async with turns.next(loop.time() + seconds):
                pass

        with idle.answering():
            patient = asyncio.create_task(take(60))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(take(0.1), 10)
            assert not patient.done()
        await asyncio.wait_for(patient, 10)

    asyncio.run(run())


def test_who_has_waited_for_an_idle_moment_and_then_for_another_waits_anew(quick):
    async def run():
        idle = Idle(60)
        turns = Turns(idle)

        async def take():
            async with turns.next(math.inf) as is_quiet:
                return is_quiet, idle.is_quiet

        async with turns.lock:
            waiting = asyncio.create_task(take())
            await asyncio.sleep(0.1)
            answering = idle.answering()
            answering.__enter__()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        answering.__exit__(None, None, None)
        assert await asyncio.wait_for(waiting, 10) == (True, True)

    asyncio.run(run())


def test_work_is_broken_off_by_a_request_only(quick):
    ended = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append(seconds)

    async def fail():
        raise ValueError("a fault")

    async def run():
        idle = Idle(60)
        assert await idle.unless_answering(work(0.01)) == "done"
        with pytest.raises(ValueError, match="a fault"):
            await idle.unless_answering(fail())
        breaking = asyncio.create_task(idle.unless_answering(work(60)))
        await asyncio.sleep(0.05)
        with idle.answering(), pytest.raises(AnswerBegunError):
            await breaking
        assert ended == [0.01, 60]
        cancelled = asyncio.create_task(idle.unless_answering(work(61)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert ended[2:] == [61]

    asyncio.run(run())
