"""What a KV store holds: entries, whole and by key, of every codec, and nothing that was deleted."""

import errno
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from store_samples import NUM_LAYERS, make_key, make_layers

from ragkv.errors import StoreError
from ragkv.store.disk_store import DiskStore


@pytest.fixture
def store(tmp_path):
    with closing(DiskStore(tmp_path / "kv")) as store:
        yield store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reads_back_what_was_put(store, dtype):
    key, layers = make_key(), make_layers(dtype=dtype)
    store.put([(key, layers)])
    with store.snapshot() as snapshot:
        for i, expected in enumerate(layers):
            found = snapshot.get(key, i)
            assert torch.equal(found.k, expected.k) and torch.equal(found.v, expected.v)
            assert found.k.dtype == dtype and found.base_position == 7
        assert snapshot.get(key, NUM_LAYERS) is None


def test_prefetching_changes_nothing(store):
    store.put([(make_key(), make_layers())])
    with store.snapshot() as snapshot:
        for layer in (0, 1, NUM_LAYERS + 5):
            snapshot.prefetch(make_key(), layer)
        snapshot.prefetch(make_key(chunk=9), 0)
        assert torch.equal(snapshot.get(make_key(), 1).k, make_layers()[1].k)


def test_a_key_differs_in_every_part(store):
    key = make_key()
    store.put([(key, make_layers())])
    others = [make_key(chunk=9), make_key(anchor=9), make_key(fingerprint=9), make_key(heads=(2, 4))]
    assert store.contains(key)
    assert not any(store.contains(other) for other in others)
    with store.snapshot() as snapshot:
        assert all(snapshot.get(other, 0) is None for other in others)


def test_put_replaces(store):
    key = make_key()
    store.put([(key, make_layers(seed=1))])
    store.put([(key, make_layers(seed=2, num_tokens=9))])
    with store.snapshot() as snapshot:
        assert torch.equal(snapshot.get(key, 1).k, make_layers(seed=2, num_tokens=9)[1].k)
    assert store.admin.stats().num_records == NUM_LAYERS


def test_a_snapshot_does_not_see_later_writes(store):
    key = make_key()
    store.put([(key, make_layers(seed=1))])
    with store.snapshot() as snapshot:
        assert snapshot.get(key, 1) is not None
        assert snapshot.get(make_key(chunk=5), 1) is None
        store.delete([key.chunk_hash])
        store.put([(make_key(chunk=5), make_layers())])
        assert torch.equal(snapshot.get(key, 0).k, make_layers(seed=1)[0].k)
        assert snapshot.get(make_key(chunk=5), 0) is None
    assert not store.contains(key)


def test_delete_takes_every_model_and_anchor_of_a_chunk_and_nothing_else(store):
    deleted = [make_key(), make_key(anchor=8), make_key(fingerprint=8), make_key(heads=(2, 4))]
    kept = [make_key(chunk=0), make_key(chunk=2), make_key(chunk=(1 << 128) - 1)]
    store.put([(key, make_layers()) for key in deleted + kept])
    assert store.delete([deleted[0].chunk_hash]) == len(deleted)
    assert not any(store.contains(key) for key in deleted)
    assert all(store.contains(key) for key in kept)
    assert list(store.chunk_hashes()) == sorted(key.chunk_hash for key in kept)
    assert store.delete([deleted[0].chunk_hash, "ab" * 16]) == 0


def test_a_failing_put_writes_nothing(store):
    def chunks():
        yield make_key(chunk=1), make_layers()
        raise RuntimeError("the model fell over")

    with pytest.raises(RuntimeError):
        store.put(chunks())
    assert not store.contains(make_key(chunk=1))
    assert store.admin.stats().num_records == 0


def test_verify_passes_and_finds_missing_layers(store):
    store.put([(make_key(chunk=1), make_layers()), (make_key(chunk=2), make_layers())])
    assert store.admin.verify().problems == []
    assert store.admin.verify().num_records == 2 * NUM_LAYERS
    store.put([(make_key(chunk=3), make_layers()[:2])])
    (problem,) = store.admin.verify().problems
    assert make_key(chunk=3).chunk_hash in problem and "2 of 3 layers" in problem


def test_stats(store):
    store.put([(make_key(chunk=1), make_layers()), (make_key(chunk=1, anchor=5), make_layers())])
    stats = store.admin.stats()
    assert (stats.num_chunks, stats.num_records) == (1, 2 * NUM_LAYERS)
    assert stats.size_bytes == 2 * NUM_LAYERS * (128 + 2 * 2 * 5 * 8 * 4)


def test_records_of_several_codecs_lie_side_by_side(tmp_path):
    raw = DiskStore(tmp_path / "kv")
    raw.put([(make_key(chunk=1), make_layers(seed=1, num_tokens=64))])
    raw.close()
    store = DiskStore(tmp_path / "kv", codec="int8")
    store.put([(make_key(chunk=2), make_layers(seed=1, num_tokens=64))])
    with store.snapshot() as snapshot:
        exact, rounded = (snapshot.get(make_key(chunk=i), 2).decoded()[0] for i in (1, 2))
    assert torch.equal(exact, make_layers(seed=1, num_tokens=64)[2].k)
    assert 0 < (exact - rounded).abs().max() < 0.02
    assert store.admin.verify().problems == []
    assert store.admin.stats().size_bytes < 0.75 * 2 * NUM_LAYERS * (128 + 2 * 2 * 64 * 8 * 4)
    store.close()


def test_another_process_sees_the_records_and_a_reopened_store_too(tmp_path):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(), make_layers())])
    code = (
        "import sys; from pathlib import Path; from ragkv.store.disk_store import DiskStore;"
        "print(DiskStore(Path(sys.argv[1])).admin.stats().num_records)"
    )
    seen = subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == str(NUM_LAYERS)
    store.close()
    reopened = DiskStore(tmp_path / "kv")
    assert reopened.contains(make_key())
    reopened.close()


@pytest.mark.parametrize(("folder", "version"), [("segments", 3), ("v6", 6)])
def test_another_format_is_refused_by_name(tmp_path, folder, version):
    (tmp_path / "kv" / folder).mkdir(parents=True)
    with pytest.raises(StoreError, match=rf"format {version}; this release reads format 5.*index again"):
        DiskStore(tmp_path / "kv")
    assert [file.name for file in (tmp_path / "kv").iterdir()] == [folder]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(StoreError, match="Is it a ragkv store"):
        DiskStore(tmp_path / "kv")
    assert (tmp_path / "kv").read_text() == "mine"


def test_no_space_is_a_clear_error_and_loses_nothing(tmp_path, monkeypatch):
    store, allocate = DiskStore(tmp_path / "kv"), os.posix_fallocate

    def nearly_full(descriptor, offset, length):
        if store.entries.size_on_disk() + sum(f.stat().st_size for f in new.iterdir()) + length > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, length)

    new = tmp_path / "kv" / "v5" / "new"

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    store.put([(make_key(chunk=1), make_layers())])
    for _ in range(2):
        with pytest.raises(StoreError, match="MiB free.*No space left.*Free some space"):
            store.put((make_key(chunk=n), make_layers(num_tokens=500)) for n in range(2, 50))
        assert list(store.chunk_hashes()) == [make_key(chunk=1).chunk_hash]
        assert store.admin.verify().problems == [] and not list(new.iterdir())
    store.put([(make_key(chunk=2), make_layers())])
    store.close()


def test_a_snapshot_reads_to_the_end_what_is_deleted_or_replaced(tmp_path):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in (1, 2, 3, 4)])
    with store.snapshot() as snapshot:
        for n in (1, 2, 3):
            snapshot.get(make_key(chunk=n), 0)
        store.delete([make_key(chunk=n).chunk_hash for n in (1, 2, 4)])
        store.put([(make_key(chunk=1), make_layers(seed=1)), (make_key(chunk=2), make_layers(seed=9))])
        for n in (1, 2, 3):
            assert torch.equal(snapshot.get(make_key(chunk=n), 2).k, make_layers(seed=n)[2].k)
        assert snapshot.get(make_key(chunk=4), 2) is None
    with store.snapshot() as snapshot:
        assert torch.equal(snapshot.get(make_key(chunk=2), 2).k, make_layers(seed=9)[2].k)
    store.close()


def test_what_is_deleted_or_replaced_is_in_no_file_any_more(tmp_path):
    store = DiskStore(tmp_path / "kv")
    secret, other = make_layers(seed=7, num_tokens=300), make_layers(seed=8, num_tokens=300)
    store.put([(make_key(chunk=1), secret), (make_key(chunk=2), other), (make_key(chunk=3), secret)])

    def found(layers):
        secret = layers[1].v.numpy().tobytes()[64:128]
        return sum(secret in file.read_bytes() for file in (tmp_path / "kv").rglob("*") if file.is_file())

    assert found(secret) and found(other)
    size = store.admin.stats().file_bytes
    store.delete([make_key(chunk=1).chunk_hash])
    assert found(secret)  # of chunk 3
    store.put([(make_key(chunk=3), make_layers(seed=9, num_tokens=300))])
    assert not found(secret) and found(other)
    assert store.admin.stats().file_bytes < size
    assert store.admin.verify().problems == []
    store.close()


def test_keys_name_their_parts():
    key = make_key()
    assert len(key.layer(0)) == 54
    assert len({key.layer(0), key.layer(1), replace(key, heads=(1, 2)).layer(0)}) == 3
