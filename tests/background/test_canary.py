"""What the canary makes of drifts: real log-probabilities, chosen here."""

import asyncio

import numpy as np
import pytest

from ragkv import background
from ragkv.background import WINDOW, Canary, Idle, Sample, drift_of
from ragkv.config import CanaryConfig
from ragkv.engine.task import FuseTask
from ragkv.errors import ModelError
from ragkv.policies import Policy

LIMIT = CanaryConfig().max_kl


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "IDLE_S", 0.0001)


def rows(*odds):
    """Log-probabilities of two tokens at each position, from the odds of the first."""
    p = np.array(odds, np.float32)
    return np.log(np.stack([p, 1 - p], 1))


def test_drift():
    same = drift_of(rows(0.9, 0.2), rows(0.9, 0.2))
    assert (same.kl, same.agreement, same.num_tokens) == (0, 1, 2)
    drift = drift_of(rows(0.5, 0.9), rows(0.25, 0.1))
    expected = (0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75) + 0.9 * np.log(9) + 0.1 * np.log(1 / 9)) / 2
    assert drift.kl == pytest.approx(expected, rel=1e-5) and (drift.agreement, drift.estimate) == (0, None)
    estimate = drift_of(rows(0.9), rows(0.5), rows(0.25)).estimate
    assert estimate == pytest.approx(0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75), rel=1e-5)


def sample(budget=0.05):
    return Sample([1, 2, 3], FuseTask((), Policy("query", budget)), [4])


def watch(samples, score, **config):
    async def play():
        resting = Idle(60)
        watcher = Canary(CanaryConfig(**{"share": 1, **config}), 0.05, resting, score)
        drifts = []
        watcher.on_drift = drifts.append
        for each in samples:
            watcher.offer(each)
            if watcher._task:
                await asyncio.wait_for(watcher._task, 5)
        await watcher.close()
        return watcher, drifts

    return asyncio.run(play())


async def far(sample):
    return rows(0.99), rows(0.01), None


async def near(sample):
    return rows(0.6), rows(0.5), None


def test_the_budget_rises_while_answers_drift_and_says_so(caplog):
    watcher, drifts = watch([sample()] * (WINDOW - 1), far)
    assert watcher.budget is None and len(drifts) == WINDOW - 1 and drifts[0].kl > LIMIT
    watcher, _ = watch([sample()] * (WINDOW + 1), far)
    assert watcher.budget == 0.1 and "0.1 of the cached tokens are recomputed instead of 0.05" in caplog.text
    budgets = [0.05, 0.1, 0.2, 0.4, 0.4]
    watcher, _ = watch([sample(budget) for budget in budgets for _ in range(WINDOW)], far)
    assert watcher.budget == CanaryConfig().max_budget == 0.4


def test_it_stays_where_answers_are_near_or_of_another_budget():
    assert watch([sample()] * 3 * WINDOW, near)[0].budget is None
    assert watch([sample(0.3)] * 3 * WINDOW, far)[0].budget is None


def test_a_share_of_the_answers_is_looked_at():
    samples = [sample()] * 2000
    assert not watch(samples, far, share=0)[1]
    assert not watch([Sample([1], sample().task, [])], far)[1]
    assert 120 < len(watch(samples, near, share=0.1)[1]) < 280  # six standard deviations about 200


def test_nothing_is_looked_at_while_somebody_waits():
    async def play():
        resting = Idle(60)
        drifts = []
        watcher = Canary(CanaryConfig(share=1), 0.05, resting, far)
        watcher.on_drift = drifts.append
        with resting.answering():
            for _ in range(100):
                watcher.offer(sample())
            await asyncio.sleep(0.1)
            assert not drifts
        await asyncio.wait_for(watcher._task, 5)
        assert len(drifts) == background._MAX_WAITING
        await watcher.close()

    asyncio.run(play())


@pytest.mark.parametrize("error", [ModelError("no log-probabilities"), RuntimeError("the engine died")])
def test_a_failure_costs_nothing_but_the_sample(error, caplog):
    errors = [error]

    async def once(sample):
        if errors:
            raise errors.pop()
        return await near(sample)

    assert len(watch([sample()] * 2, once)[1]) == 1
    assert str(error) in caplog.text
