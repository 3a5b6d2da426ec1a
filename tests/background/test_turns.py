"""Turns of indexing: one at a time, in order, and after answers, but not for ever."""

import asyncio

from ragkv import background
from ragkv.background import Idle, Turns


def test_turns_are_taken_in_the_order_in_which_they_were_asked_for():
    taken = []

    async def take(turns, name, count):
        for _ in range(count):
            async with turns.next():
                taken.append(name)
                await asyncio.sleep(0)

    async def run():
        turns = Turns(Idle())
        await asyncio.gather(take(turns, "a", 4), take(turns, "b", 2), take(turns, "c", 1))

    asyncio.run(run())
    assert "".join(taken) == "abcabaa"


def test_a_turn_waits_for_answers_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(background, "IDLE_S", 0.01)
    monkeypatch.setattr(background, "GIVE_WAY_S", 0.5)

    async def run():
        idle, loop = Idle(), asyncio.get_running_loop()
        turns = Turns(idle)

        async def seconds():
            begin = loop.time()
            async with turns.next():
                return loop.time() - begin

        assert await seconds() < 0.2
        with idle.answering():
            waiting = asyncio.create_task(seconds())
            await asyncio.sleep(0.1)
        assert 0.1 <= await waiting < 0.4
        with idle.answering():
            assert 0.5 <= await seconds() < 2

    asyncio.run(run())
