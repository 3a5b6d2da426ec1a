"""Lost KV is precomputed again, when nobody waits, and never at the cost of an answer."""

import asyncio

import pytest

from ragkv import background
from ragkv.background import Idle, KVRestorer
from ragkv.errors import StoreError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "IDLE_S", 0.02)


def run(play, precompute):
    async def played():
        precomputed, idle = [], Idle(60)

        async def record(chunk_hash):
            precomputed.append(chunk_hash)
            return await precompute(chunk_hash)

        lost = KVRestorer(record, idle)
        await play(lost, precomputed, idle)
        await lost.close()
        return lost, precomputed

    return asyncio.run(played())


async def succeed(chunk_hash):
    return chunk_hash != "gone"


def test_each_lost_chunk_is_captured_once():
    async def play(lost, precomputed, idle):
        lost.add(["a", "b"])
        lost.add(["b", "gone"])
        await asyncio.sleep(0.2)
        lost.add(["a"])
        await asyncio.sleep(0.2)

    lost, precomputed = run(play, succeed)
    assert precomputed == ["a", "b", "gone", "a"]
    assert (lost.num_restored, lost.num_failed) == (3, 0)


def test_nothing_is_captured_while_somebody_waits():
    async def play(lost, precomputed, idle):
        with idle.answering(), idle.answering():
            lost.add(["a"])
            await asyncio.sleep(0.1)
            assert precomputed == []
        await asyncio.sleep(0.2)

    assert run(play, succeed)[1] == ["a"]


def test_a_request_breaks_a_restoration_off_and_it_is_tried_again():
    async def last(chunk_hash):
        await asyncio.sleep(0.3)
        return True

    async def play(lost, precomputed, idle):
        lost.add(["a"])
        await asyncio.sleep(0.1)
        with idle.answering():
            await asyncio.sleep(0.4)
            assert precomputed == ["a"] and lost.num_restored == 0
        await asyncio.sleep(0.6)

    lost, precomputed = run(play, last)
    assert precomputed == ["a", "a"] and lost.num_restored == 1


def test_requests_without_a_pause_put_it_off_only_so_long():
    async def play(lost, precomputed, idle):
        idle.patience_s = 0.2
        with idle.answering():
            lost.add(["a", "b"])
            await asyncio.sleep(0.3)
            assert precomputed == ["a"]
            await asyncio.sleep(0.2)
        assert precomputed == ["a", "b"]

    assert run(play, succeed)[0].num_restored == 2


@pytest.mark.parametrize("error", [StoreError("the disk is full"), RuntimeError("the engine died")])
def test_after_a_failure_it_rests_and_then_goes_on(monkeypatch, error, caplog):
    monkeypatch.setattr(background, "PAUSE_S", 0.2)
    errors = [error]

    async def fail_once(chunk_hash):
        if errors:
            raise errors.pop()
        return True

    async def play(lost, precomputed, idle):
        lost.add(["a", "b"])
        await asyncio.sleep(0.1)
        lost.add(["a"])  # not within the pause
        await asyncio.sleep(0.2)
        assert precomputed == ["a"]
        lost.add(["b"])
        await asyncio.sleep(0.1)

    lost, precomputed = run(play, fail_once)
    assert precomputed == ["a", "b"]
    assert (lost.num_restored, lost.num_failed) == (1, 1)
    assert str(error) in caplog.text


def test_closing_ends_a_capture():
    async def last_for_ever(chunk_hash):
        await asyncio.sleep(3600)
        return True

    async def play(lost, precomputed, idle):
        lost.add(["a"])
        await asyncio.sleep(0.1)

    lost, precomputed = run(play, last_for_ever)
    assert precomputed == ["a"] and lost.num_restored == 0
