"""Which preempted requests' KV the scheduler's side has held, and what it loads when they come back."""

from types import SimpleNamespace

import pytest

from ragkv.engine.preemption import Pace, Preempted, PrefillTime
from ragkv.engine.scheduler import SchedulerSide, StepReports
from ragkv.engine.task import (
    PrefixUse,
    Report,
    StageReport,
    TokenReport,
    report_to_params,
    resumed_from_params,
    to_params,
)

BLOCK, BLOCK_BYTES, KEY = 16, 1000, "the engine's"


def step(new=(), cached=(), resumed=(), preempted=()):
    """vLLM's next step. new, cached: (request, its new blocks, tokens that it has, tokens that are computed now)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=each.request_id, block_ids=(blocks,), num_computed_tokens=num_computed)
            for each, blocks, num_computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[each.request_id for each, *_ in cached],
            resumed_req_ids={each.request_id for each in resumed},
            new_block_ids=[(blocks,) if blocks else None for _, blocks, *_ in cached],
            num_computed_tokens=[num_computed for *_, num_computed, _ in cached],
        ),
        num_scheduled_tokens={each.request_id: num for each, _, _, num in (*new, *cached)},
        preempted_req_ids={each.request_id for each in preempted},
    )


def request(id, num_tokens, prefill_ms=None):
    return SimpleNamespace(
        request_id=id,
        kv_transfer_params=to_params(None, PrefixUse(prefill_ms=prefill_ms), KEY),
        block_hashes=[],
        prompt_token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
    )


class Engine:
    """A scheduler's side, and a worker that holds what it is told to."""

    def __init__(self, way="load", blocks=100):
        self.side = SchedulerSide(None, Preempted(way, blocks * BLOCK_BYTES + 1, BLOCK, BLOCK_BYTES, KEY), key=KEY)
        self.side.keep(StepReports({}, holds=True))

    def step(self, **what):
        self.side.follow(step(**what))
        return self.side.take_work(0, 0)

    def decode(self, asked, blocks, num_tokens):
        """Schedule a new request, and answer it until it has so many tokens."""
        assert self.side.match(asked, 0) == (0, False)
        num_first = -(-asked.num_tokens // BLOCK)
        self.step(new=[(asked, blocks[:num_first], 0, asked.num_tokens)])
        more = iter(blocks[num_first:])
        while asked.num_tokens < num_tokens:
            asked.num_tokens += 1
            if asked.num_tokens < num_tokens:
                needs_block = asked.num_tokens % BLOCK == 1
                self.step(cached=[(asked, [next(more)] if needs_block else None, asked.num_tokens - 1, 1)])

    def load(self, asked, num_known, blocks):
        """The request comes back. Returns the job."""
        num_external, is_async = self.side.match(asked, num_known)
        assert is_async == bool(num_external)
        if not num_external:
            return None
        self.side.start(asked, blocks, num_external)
        (job,) = self.step().jobs
        return job

    def loaded(self, job, copy_ms=1.0):
        found = Report(tokens=TokenReport(exact=job.held - job.num_prefix), stages=StageReport(load_ms=copy_ms))
        self.side.keep(StepReports({job.request_id: found}))


def test_all_that_was_computed_is_held_and_loaded():
    engine, asked = Engine(), request("a", 40)
    engine.decode(asked, [5, 9, 7, 3], 52)
    work = engine.step(preempted=[asked])
    (hold,) = work.holds
    assert (hold.request_id, hold.block_ids, hold.num_tokens) == ("a", [5, 9, 7, 3], 51)
    assert not work.dropped and not engine.step().holds
    job = engine.load(asked, 16, [5, 30, 31, 32])
    assert (job.held, job.num_prefix, job.task, job.stored) == (51, 16, None, ())
    engine.loaded(job)
    assert engine.step(cached=[(asked, [5, 30, 31, 32], 51, 1)], resumed=[asked]).dropped == {"a"}
    asked.num_tokens = 53
    (hold,) = engine.step(preempted=[asked]).holds  # once more
    assert (hold.block_ids, hold.num_tokens) == ([5, 30, 31, 32], 52)
    assert engine.load(asked, 0, [1, 2, 3, 4]).num_prefix == 0
    assert resumed_from_params(engine.side.finish("a")) == 35
    work = engine.step()
    assert work.dropped == work.aborted == {"a"}


def test_a_request_in_the_midst_of_its_prompt():
    engine, asked = Engine(), request("a", 100)
    engine.side.match(asked, 0)
    engine.step(new=[(asked, [1, 2], 0, 30)])
    (hold,) = engine.step(preempted=[asked]).holds
    assert (hold.block_ids, hold.num_tokens) == ([1, 2], 30)
    assert engine.load(asked, 32, []) is None  # the prefix cache has more
    assert engine.step(new=[(asked, [1, 2, 3], 32, 68)]).dropped == {"a"}
    assert engine.load(request("b", 100), 0, []) is None


def test_a_copy_that_is_missing_is_asked_for_once():
    engine, asked = Engine(), request("a", 40)
    engine.decode(asked, [5, 9, 7], 42)
    engine.step(preempted=[asked])
    assert engine.load(asked, 0, [1, 2, 3]) is not None
    engine.side.keep(StepReports({"a": Report(problem="gone", failed=True)}))
    assert engine.load(asked, 0, [1, 2, 3]) is None
    assert engine.side.finish("a") == report_to_params(Report(problem="gone", failed=True))


def test_only_so_much_is_held():
    engine = Engine(blocks=5)
    asked = [request(id, 40) for id in "abc"]
    for i, each in enumerate(asked):
        engine.decode(each, [3 * i, 3 * i + 1, 3 * i + 2], 41)
    assert len(engine.step(preempted=asked[:2]).holds) == 1
    engine.side.finish("a")
    engine.side.finish("b")
    assert len(engine.step(preempted=asked[2:]).holds) == 1


def test_nothing_is_held_unless_the_worker_can():
    engine, asked = Engine(), request("a", 40)
    engine.side._preempted.worker_holds = False
    engine.decode(asked, [5, 9, 7], 42)
    assert not engine.step(preempted=[asked]).holds
    engine.side = SchedulerSide()
    assert engine.load(asked, 0, [5, 9, 7]) is None


@pytest.mark.parametrize(
    ("way", "copy_ms", "is_held"), [("auto", 1.0, True), ("auto", 9.0, False), ("load", 9.0, True)]
)
def test_what_takes_longer_than_prefill_is_computed(way, copy_ms, is_held, monkeypatch):
    engine, asked = Engine(way), request("a", 40, prefill_ms=100.0)  # 4 ms for 40 tokens
    engine.decode(asked, [5, 9, 7], 41)
    assert engine.step(preempted=[asked]).holds  # nobody knows
    engine.loaded(engine.load(asked, 0, [5, 9, 7]), copy_ms)
    other = request("b", 40, prefill_ms=100.0)
    engine.decode(other, [1, 2, 3], 41)
    assert bool(engine.step(preempted=[other]).holds) == is_held
    monkeypatch.setattr(Pace, "is_old", True)
    third = request("c", 40, prefill_ms=100.0)
    engine.decode(third, [1, 2, 3], 41)
    assert engine.step(preempted=[third]).holds


def test_prefill_is_timed_by_the_steps_it_is_in(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    found, asked = PrefillTime(), request("a", 600)
    requests = {"a": asked}

    def at(seconds, scheduled, computed):
        now[0] = seconds
        found.step(scheduled, computed, requests)

    at(1.0, {"b": 1}, {"b": 50})
    at(2.0, {"a": 400, "b": 1}, {"a": 400, "b": 51})
    at(3.0, {"a": 200, "b": 1}, {"a": 600, "b": 52})
    at(3.5, {"a": 1, "b": 1}, {"a": 601, "b": 53})  # scheduled before the first token is known
    assert not found.pace.ms
    asked.num_tokens = 601
    at(4.0, {"a": 1}, {"a": 602})
    assert found.pace.ms == pytest.approx(2000 / 0.602)
    at(5.0, {"c": 300}, {"c": 300})  # of which nothing is known
    del requests["a"]
    at(6.0, {"a": 300}, {"a": 300})
    assert found.pace.ms == pytest.approx(2000 / 0.602)
