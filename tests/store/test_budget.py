"""The budget of the disk: obeyed, and spent on what is used."""

import random

import pytest
from store_samples import NUM_LAYERS, make_key, make_layers

from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import entry_bytes

CHUNK_BYTES = entry_bytes([128 + 2 * 2 * 100 * 8 * 4] * NUM_LAYERS)
LAYERS = make_layers(num_tokens=100)


def open_store(tmp_path, num_chunks=4, **options):
    return DiskStore(tmp_path / "kv", disk_bytes=num_chunks * CHUNK_BYTES, **options)


def held(store):
    return {int(chunk, 16) for chunk in store.chunk_hashes()}


def put(store, *chunks):
    store.put([(make_key(chunk=n), LAYERS) for n in chunks])


def used_bytes(store):
    return store.entries.size_on_disk()


@pytest.mark.parametrize("eviction", ["gdsf", "lru", "lfu", "lfuda"])
def test_records_never_take_more_than_the_budget(tmp_path, eviction):
    store, rng = open_store(tmp_path, eviction=eviction), random.Random(0)
    for n in range(40):
        size = rng.choice([20, 100, 150])
        store.put([(make_key(chunk=n), make_layers(num_tokens=size)) for n in range(n, n + rng.choice([1, 2]))])
        store.touch([make_key(chunk=rng.randrange(n + 1))])
        assert used_bytes(store) <= 4 * CHUNK_BYTES
        assert n in held(store)
    assert len(set(store.chunk_hashes(evicted=True)) - set(store.chunk_hashes())) > 20
    assert store.admin.verify().problems == []
    store.close()


def test_what_is_used_stays(tmp_path):
    store = open_store(tmp_path)
    put(store, 1, 2, 3, 4)
    store.touch([make_key(chunk=n) for n in (1, 2, 4, 1, 2, 4)])
    put(store, 5)
    assert held(store) == {1, 2, 4, 5}
    put(store, 6)
    assert held(store) == {1, 2, 4, 6}
    gauges = store.admin.gauges()
    assert (gauges["entries"], gauges["evicted_entries"]) == (4, 2)
    assert gauges["disk_bytes"] == store.entries.size_on_disk()
    store.close()


def test_what_was_evicted_comes_back_with_its_history(tmp_path):
    store = open_store(tmp_path, eviction="lfu")
    put(store, 1, 2, 3, 4)
    store.touch([make_key(chunk=n) for n in (1, 1, 1, 2, 2, 3, 3, 4, 4)])
    put(store, 5)
    assert held(store) == {1, 5, 3, 4}
    assert "2".zfill(32) in store.chunk_hashes(evicted=True)
    store.touch([make_key(chunk=2)] * 3)
    store.close()
    store = open_store(tmp_path, eviction="lfu")
    put(store, 2)
    put(store, 6)
    assert {1, 2, 6} < held(store)
    store.close()


def test_hints(tmp_path):
    store = open_store(tmp_path)
    put(store, 1, 2, 3, 4)
    store.hint([make_key(chunk=1).chunk_hash], "pin")
    store.hint([make_key(chunk=2).chunk_hash], "session")
    store.touch([make_key(chunk=n) for n in (3, 4, 4, 4)])
    store.hint([make_key(chunk=4).chunk_hash], "ephemeral")
    put(store, 5)
    assert held(store) == {1, 2, 3, 5}
    put(store, 6, 7)
    assert held(store) == {1, 2, 6, 7}
    store.hint([make_key(chunk=2).chunk_hash], None)
    put(store, 8, 9)
    assert 1 in held(store) and 2 not in held(store)
    store.close()


def test_a_session_ends(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    put(store, 1)
    store.hint([make_key(chunk=1).chunk_hash], "session")
    monkeypatch.setattr("ragkv.store.usage.SESSION_S", -1.0)
    put(store, 2, 3, 4, 5)
    assert held(store) == {2, 3, 4, 5}
    store.close()


def test_what_finds_no_room_is_left_out(tmp_path):
    store = open_store(tmp_path, num_chunks=2)
    put(store, 1)
    store.hint([make_key(chunk=1).chunk_hash], "pin")
    put(store, 2, 3)
    assert held(store) == {1, 2}
    store.put([(make_key(chunk=9), make_layers(num_tokens=1000))])
    assert 1 in held(store) and 9 not in held(store)
    assert {int(chunk, 16) for chunk in store.chunk_hashes(evicted=True)} == {1, 2, 3, 9}  # as if they had been evicted
    assert store.admin.verify().problems == []
    store.close()


def test_small_records_stay_longer_for_their_size(tmp_path):
    raw = open_store(tmp_path)
    put(raw, 1, 2)
    raw.close()
    store = DiskStore(tmp_path / "kv", codec="int8", disk_bytes=3 * CHUNK_BYTES + 3 * 4096)
    put(store, 3, 4, 5, 6)
    assert {3, 4, 5, 6} <= held(store) and len(held(store)) == 5
    store.close()


def test_a_deleted_chunk_leaves_no_history(tmp_path):
    store = open_store(tmp_path)
    put(store, 1)
    store.delete([make_key(chunk=1).chunk_hash])
    assert list(store.chunk_hashes(evicted=True)) == []
    store.close()


def test_a_smaller_budget_is_obeyed_from_the_next_write_on(tmp_path):
    store = open_store(tmp_path, num_chunks=8)
    put(store, *range(8))
    store.close()
    store = open_store(tmp_path, num_chunks=3)
    assert len(held(store)) == 8
    put(store, 9)
    assert used_bytes(store) <= 3 * CHUNK_BYTES and 9 in held(store)
    store.close()
