"""Memory that is read into: used again, and never for two things at once."""

import os
from contextlib import closing

import pytest
import torch
from store_samples import NUM_LAYERS, make_key, make_layers

from ragkv.store import memory
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import ALIGNMENT
from ragkv.store.memory import Staging, take_memory
from ragkv.store.record import CorruptRecordError


def address(part):
    return torch.frombuffer(part, dtype=torch.uint8).data_ptr()


def test_what_is_taken_at_the_same_time_doesnt_overlap(monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK_BYTES", 3 * ALIGNMENT)
    staging = Staging()
    for _ in range(3):
        parts = [staging.take(size) for size in (1, ALIGNMENT, 1 + ALIGNMENT, 5 * ALIGNMENT, 2)]
        for i, part in enumerate(parts):
            part[:] = bytes([i]) * len(part)
        assert all(set(part) == {i} for i, part in enumerate(parts))
        assert all(address(part) % ALIGNMENT == 0 for part in parts)
        staging.reuse()


def test_memory_is_used_again_and_what_is_more_than_is_kept_given_back(monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK_BYTES", ALIGNMENT)
    monkeypatch.setattr(memory, "_KEPT_BYTES", 2 * ALIGNMENT)
    taken = []
    monkeypatch.setattr(memory, "take_memory", lambda size: taken.append(size) or take_memory(size))
    staging = Staging()
    for _ in range(2):
        for _ in range(5):
            staging.take(ALIGNMENT)
        staging.reuse()
    assert len(taken) == 5
    staging.shrink()
    for _ in range(5):
        staging.take(ALIGNMENT)
    assert len(taken) == 8


def test_without_huge_pages_it_works_as_well(monkeypatch):
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 9999)
    part = take_memory(1 << 20)
    part[:] = b"7" * len(part)
    assert set(part) == {ord("7")}


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_layer_stays_until_the_next_is_asked_for_and_snapshots_dont_share(tmp_path, codec):
    with closing(DiskStore(tmp_path, codec)) as store:
        store.put([(make_key(n), make_layers(n, num_tokens=300)) for n in range(6)])

        def layer_of(snapshot, layer):
            return [snapshot.get(make_key(n), layer) for n in range(6)]

        def values(found):
            return [part.clone() for kv in found for part in kv.decoded()]

        def alone(n, layer):
            with store.snapshot() as snapshot:
                return values([snapshot.get(make_key(n), layer)])

        expected = [[part for n in range(6) for part in alone(n, layer)] for layer in range(NUM_LAYERS)]
        with store.snapshot() as one, store.snapshot() as other:
            for layer in range(NUM_LAYERS):
                found, others = layer_of(one, layer), layer_of(other, NUM_LAYERS - 1 - layer)
                assert all(map(torch.equal, values(found), expected[layer]))
                assert all(map(torch.equal, values(others), expected[NUM_LAYERS - 1 - layer]))


def test_what_was_read_doesnt_change_with_the_file(tmp_path):
    with closing(DiskStore(tmp_path)) as store:
        key, layers = make_key(), make_layers(num_tokens=300)
        store.put([(key, layers)])
        with store.snapshot() as snapshot:
            found = snapshot.get(key, 1)
            file, _, _ = store.admin.locate(key, 1)
            os.truncate(file, 0)
            store.delete([key.chunk_hash])
            assert torch.equal(found.k, layers[1].k) and torch.equal(found.v, layers[1].v)
            assert not file.exists()
            with pytest.raises(CorruptRecordError):
                snapshot.get(key, 2)
