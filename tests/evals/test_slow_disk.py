"""A disk that is slower than this one, by a clock of the test's own."""

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from ragkv.evals import slow_disk
from ragkv.evals.slow_disk import Throttle, slowed
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(slow_disk, "time", clock)
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


def test_a_slowed_store_reads_the_same_and_later(clock, tmp_path):
    key, missing = (ChunkKey(f"{chunk:032x}", f"{2:032x}", f"{3:032x}", heads=(0, 2)) for chunk in (1, 9))
    layers = [LayerKV(torch.ones(2, 5, 8), torch.full((2, 5, 8), float(i)), base_position=0) for i in range(2)]
    with closing(DiskStore(tmp_path)) as store:
        store.put([(key, layers)])
        mib_s = store.admin.locate(key, 0)[2] / MIB  # a second for each layer
        with slowed(DiskStore.snapshot, mib_s)(store) as snapshot:
            for layer in (0, 1, 2):
                snapshot.prefetch(key, layer)
            snapshot.prefetch(missing, 0)
            assert clock.now == pytest.approx(100.0)
            for i, layer in enumerate(layers):
                assert torch.equal(snapshot.get(key, i).v, layer.v)
                assert clock.now == pytest.approx(101.0 + i)
            assert snapshot.get(key, 2) is None and snapshot.get(missing, 0) is None
    assert clock.now == pytest.approx(102.0)
