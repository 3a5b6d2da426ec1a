"""What a request's timeline says, and that it looks at the system's memory without changing it."""

import time
from contextlib import closing

import pytest
import torch

from ragkv.evals.workloads.timeline import Residency, Timeline, _draw
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV


def make_timeline():
    """Two layers of 100 bytes: the first is waited for, the second arrives while the first is computed."""
    return Timeline(
        first_token=1.0,
        sizes=[100, 100],
        loads=[("probe_ms", 0, 0.0, 0.3), ("probe_ms", 1, 0.6, 0.7), ("recompute_ms", 0, 0.8, 0.8)],
        times=[0.0, 0.2, 0.3, 0.5, 0.9],
        resident=[[0, 0], [60, 0], [100, 0], [100, 100], [100, 100]],
    )


def test_what_a_timeline_says():
    row = make_timeline().row()
    assert (row["ttft_ms"], row["waited_ms"], row["disk_ms"], row["overlap_ms"]) == pytest.approx((1000, 400, 500, 200))
    assert row["ahead"] == 0.5  # nothing of layer 0, all of layer 1


def test_it_is_drawn(tmp_path):
    file = tmp_path / "new" / "timeline.png"
    _draw({"memory": make_timeline(), "disk": make_timeline()}, "a title", file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_residency_is_seen_and_not_changed(tmp_path):
    keys = [ChunkKey(f"{n:032x}", "0" * 32, "1" * 32, (0, 2)) for n in range(3)]
    layers = [LayerKV(torch.randn(2, 100 * (1 + i), 64), torch.randn(2, 100 * (1 + i), 64), 0) for i in range(3)]
    with closing(DiskStore(tmp_path)) as store:
        store.put([(key, layers) for key in keys])
        residency = Residency(store, keys, num_layers=3)
        assert residency.resident() == residency.sizes
        for _ in range(100):  # what is being read just now can't be dropped
            store.admin.drop_cached(keys)
            if residency.resident() == [0, 0, 0]:
                break
            time.sleep(0.02)
        else:
            pytest.skip("this file system keeps its files in memory")
        assert residency.resident() == residency.resident() == [0, 0, 0]
        with store.snapshot() as snapshot:
            snapshot.get(keys[1], 2)
        assert residency.resident()[2] >= residency.sizes[2] // 3  # the system may have read on
