"""How the requests of a batch are run: in order, as many as fit, again if the engine ended, and none left behind."""

import asyncio

import pytest

from ragkv.batch.admission import Admission
from ragkv.batch.run import answered
from ragkv.batch.sharing import Item
from ragkv.batch.work import Outcome, Work
from ragkv.errors import ConfigError, EngineStoppedError

OUTCOME = Outcome({"answer": "yes"}, 40, 0, 5)


class Engine:
    """Answers after the requests that run with it were counted."""

    def __init__(self):
        self.begun, self.running, self.most, self.cancelled = [], 0, 0, []

    def work(self, name, *problems):
        left = list(problems)

        async def run():
            self.begun.append(name)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(0.01)
                if left:
                    raise left.pop(0)
                return OUTCOME
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            finally:
                self.running -= 1

        return Work(name, Item((), 40, 10), run=run)


async def collected(works, capacity=10_000):
    return {work.custom_id: outcome async for work, outcome in answered(works, Admission(capacity))}


def test_all_are_answered_in_order_and_some_more_than_fit_wait_in_the_engine():
    engine = Engine()
    names = [str(number) for number in range(20)]
    found = asyncio.run(collected([engine.work(name) for name in names], capacity=120))
    assert found == dict.fromkeys(names, OUTCOME)
    assert (engine.begun, engine.most) == (names, 4)


def test_one_that_is_larger_than_the_memory_runs_alone():
    engine = Engine()
    assert len(asyncio.run(collected([engine.work("a"), engine.work("b")], capacity=1))) == 2
    assert engine.most == 1


def test_an_error_is_one_requests_own():
    engine = Engine()
    error = ConfigError("no")
    found = asyncio.run(collected([engine.work("a", error), engine.work("b")]))
    assert found == {"a": error, "b": OUTCOME}


def test_a_request_whose_engine_ended_runs_again():
    engine = Engine()
    found = asyncio.run(collected([engine.work("a", *[EngineStoppedError("it ended")] * 3), engine.work("b")]))
    assert found == {"a": OUTCOME, "b": OUTCOME}
    assert engine.begun.count("a") == 4


@pytest.mark.parametrize("error", [EngineStoppedError("it ended"), RuntimeError("a fault of ours")])
def test_what_ends_every_time_ends_the_batch_and_leaves_nothing_running(error):
    engine = Engine()
    works = [engine.work("a", *[error] * 9), *(engine.work(str(number), *[]) for number in range(3))]
    with pytest.raises(type(error)):
        asyncio.run(collected(works, capacity=10_000))
    assert engine.running == 0


def test_closing_aborts_what_runs():
    engine = Engine()

    async def first_only():
        answers = answered([engine.work("a"), engine.work("b"), engine.work("c")], Admission(64))
        await anext(answers)
        await answers.aclose()

    asyncio.run(first_only())
    assert engine.running == 0
    assert "c" not in engine.begun
