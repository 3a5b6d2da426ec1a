"""One contract for every KV store."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from ragkv.errors import StoreError
from ragkv.store.codecs import INT8
from ragkv.store.lmdb_store import LmdbStore
from ragkv.store.memory_store import MemoryStore
from ragkv.store.record import ChunkKey, LayerKV

NUM_LAYERS = 3


def make_key(chunk=1, anchor=2, fingerprint=3, heads=(0, 2)):
    return ChunkKey(*(f"{value:032x}" for value in (chunk, anchor, fingerprint)), heads=heads)


def make_layers(seed=0, num_tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_tokens, 8)
    return [
        LayerKV(
            torch.randn(shape, generator=generator).to(dtype),
            torch.randn(shape, generator=generator).to(dtype),
            base_position=7,
        )
        for _ in range(NUM_LAYERS)
    ]


@pytest.fixture(params=[MemoryStore, LmdbStore])
def store(request, tmp_path):
    store = request.param() if request.param is MemoryStore else LmdbStore(tmp_path / "kv")
    yield store
    store.close()


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
    assert store.stats().num_records == NUM_LAYERS


def test_a_snapshot_does_not_see_later_writes(store):
    key = make_key()
    store.put([(key, make_layers(seed=1))])
    with store.snapshot() as snapshot:
        store.delete([key.chunk_hash])
        store.put([(make_key(chunk=5), make_layers())])
        assert torch.equal(snapshot.get(key, 0).k, make_layers(seed=1)[0].k)
        assert snapshot.get(make_key(chunk=5), 0) is None
    assert not store.contains(key)


def test_delete_takes_every_model_and_anchor_of_a_chunk_and_nothing_else(store):
    gone = [make_key(), make_key(anchor=8), make_key(fingerprint=8), make_key(heads=(2, 4))]
    kept = [make_key(chunk=0), make_key(chunk=2), make_key(chunk=(1 << 128) - 1)]
    store.put([(key, make_layers()) for key in gone + kept])
    assert store.delete([gone[0].chunk_hash]) == NUM_LAYERS * len(gone)
    assert not any(store.contains(key) for key in gone)
    assert all(store.contains(key) for key in kept)
    assert list(store.chunk_hashes()) == sorted(key.chunk_hash for key in kept)
    assert store.delete([gone[0].chunk_hash, "ab" * 16]) == 0


def test_a_failing_put_writes_nothing(store):
    def chunks():
        yield make_key(chunk=1), make_layers()
        raise RuntimeError("the model fell over")

    with pytest.raises(RuntimeError):
        store.put(chunks())
    assert not store.contains(make_key(chunk=1))
    assert store.stats().num_records == 0


def test_verify_passes_and_finds_missing_layers(store):
    store.put([(make_key(chunk=1), make_layers()), (make_key(chunk=2), make_layers())])
    assert store.verify().problems == []
    assert store.verify().num_records == 2 * NUM_LAYERS
    store.put([(make_key(chunk=3), make_layers()[:2])])
    (problem,) = store.verify().problems
    assert make_key(chunk=3).chunk_hash in problem and "2 of 3 layers" in problem


def test_stats(store):
    store.put([(make_key(chunk=1), make_layers()), (make_key(chunk=1, anchor=5), make_layers())])
    stats = store.stats()
    assert (stats.num_chunks, stats.num_records) == (1, 2 * NUM_LAYERS)
    assert stats.size_bytes == 2 * NUM_LAYERS * (64 + 2 * 2 * 5 * 8 * 4)


# What only the store on disk has to hold.


def test_records_of_several_codecs_lie_side_by_side(tmp_path):
    raw = LmdbStore(tmp_path / "kv")
    raw.put([(make_key(chunk=1), make_layers(seed=1, num_tokens=64))])
    raw.close()
    store = LmdbStore(tmp_path / "kv", codec=INT8)
    store.put([(make_key(chunk=2), make_layers(seed=1, num_tokens=64))])
    with store.snapshot() as snapshot:
        exact, rounded = (snapshot.get(make_key(chunk=i), 2).k for i in (1, 2))
    assert torch.equal(exact, make_layers(seed=1, num_tokens=64)[2].k)
    assert 0 < (exact - rounded).abs().max() < 0.02
    assert store.verify().problems == []
    assert store.stats().size_bytes < 0.75 * 2 * NUM_LAYERS * (64 + 2 * 2 * 64 * 8 * 4)
    store.close()


def test_another_process_sees_the_records_and_a_reopened_store_too(tmp_path):
    store = LmdbStore(tmp_path / "kv")
    store.put([(make_key(), make_layers())])
    code = (
        "import sys; from pathlib import Path; from ragkv.store.lmdb_store import LmdbStore;"
        "print(LmdbStore(Path(sys.argv[1])).stats().num_records)"
    )
    seen = subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == str(NUM_LAYERS)
    store.close()
    reopened = LmdbStore(tmp_path / "kv")
    assert reopened.contains(make_key())
    reopened.close()


def test_another_format_is_refused_by_name(tmp_path, monkeypatch):
    LmdbStore(tmp_path / "kv").close()
    monkeypatch.setattr("ragkv.store.lmdb_store.FORMAT_VERSION", 3)
    with pytest.raises(StoreError, match=r"format 2; this release reads format\s+3"):
        LmdbStore(tmp_path / "kv")


def test_something_else_in_the_folder_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "data.mdb").write_bytes(b"not lmdb at all" * 1000)
    with pytest.raises(StoreError, match="Is it a ragkv store"):
        LmdbStore(tmp_path / "kv")


def test_no_space_is_a_clear_error_and_loses_nothing(tmp_path):
    store = LmdbStore(tmp_path / "kv", map_bytes=256 << 10)
    store.put([(make_key(chunk=1), make_layers())])
    with pytest.raises(StoreError, match="MiB free.*Free some space"):
        store.put((make_key(chunk=n), make_layers(num_tokens=500)) for n in range(2, 50))
    assert list(store.chunk_hashes()) == [make_key(chunk=1).chunk_hash]
    assert store.verify().problems == []
    store.close()


def test_a_killed_writer_leaves_a_store_that_verifies(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from test_contract import *;"
        "store = LmdbStore(Path(sys.argv[1])); print('open', flush=True)\n"
        "for n in range(10**9): store.put([(make_key(chunk=n), make_layers(num_tokens=200))])"
    )
    for _ in range(3):
        command = [sys.executable, "-c", code, tmp_path / "kv", os.path.dirname(__file__)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    store = LmdbStore(tmp_path / "kv")
    assert store.stats().num_records > 0
    assert store.verify().problems == []
    store.close()


def test_keys_name_their_parts():
    key = make_key()
    assert len(key.layer(0)) == 54
    assert len({key.layer(0), key.layer(1), replace(key, heads=(1, 2)).layer(0)}) == 3
