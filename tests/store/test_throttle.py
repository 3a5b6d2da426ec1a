"""A disk that is slower than this one, by a clock of the test's own."""

from types import SimpleNamespace

import pytest

from ragkv.store import throttle
from ragkv.store.throttle import Throttle

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(throttle, "time", clock)
    return clock


def test_what_nobody_asked_for_before_is_waited_for(clock):
    slow = Throttle(2.0)
    slow.wait("a", MIB)
    slow.wait("b", MIB)
    assert clock.now == pytest.approx(101.0)


def test_it_reads_on_while_others_compute(clock):
    slow = Throttle(2.0)
    slow.ask("a", MIB)
    slow.ask("b", MIB)
    slow.ask("a", MIB)  # is being read
    clock.sleep(0.75)
    slow.wait("a", MIB)
    assert clock.now == pytest.approx(100.75)
    slow.wait("b", MIB)
    assert clock.now == pytest.approx(101.0)


def test_an_idle_disk_saves_nothing_up(clock):
    slow = Throttle(1.0)
    clock.sleep(60)
    slow.wait("a", MIB)
    assert clock.now == pytest.approx(161.0)
