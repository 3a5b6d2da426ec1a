"""One contract for every KV store."""

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from store_samples import NUM_LAYERS, make_key, make_layers

from ragkv.errors import StoreError
from ragkv.store.memory_store import MemoryStore
from ragkv.store.record import CorruptRecordError
from ragkv.store.segment_store import SegmentStore


@pytest.fixture(params=[MemoryStore, SegmentStore])
def store(request, tmp_path):
    store = request.param() if request.param is MemoryStore else request.param(tmp_path / "kv")
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
        found = snapshot.get(key, 0)
        assert found is None or torch.equal(found.k, make_layers(seed=1)[0].k)
        assert snapshot.get(make_key(chunk=5), 0) is None
    assert not store.contains(key)


def test_delete_takes_every_model_and_anchor_of_a_chunk_and_nothing_else(store):
    deleted = [make_key(), make_key(anchor=8), make_key(fingerprint=8), make_key(heads=(2, 4))]
    kept = [make_key(chunk=0), make_key(chunk=2), make_key(chunk=(1 << 128) - 1)]
    store.put([(key, make_layers()) for key in deleted + kept])
    assert store.delete([deleted[0].chunk_hash]) == NUM_LAYERS * len(deleted)
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


# What only the store on disk has to hold.

CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_samples import *
from ragkv.store.segment_store import SegmentStore
"""


def test_records_of_several_codecs_lie_side_by_side(tmp_path):
    raw = SegmentStore(tmp_path / "kv")
    raw.put([(make_key(chunk=1), make_layers(seed=1, num_tokens=64))])
    raw.close()
    store = SegmentStore(tmp_path / "kv", codec="int8")
    store.put([(make_key(chunk=2), make_layers(seed=1, num_tokens=64))])
    with store.snapshot() as snapshot:
        exact, rounded = (snapshot.get(make_key(chunk=i), 2).decoded()[0] for i in (1, 2))
    assert torch.equal(exact, make_layers(seed=1, num_tokens=64)[2].k)
    assert 0 < (exact - rounded).abs().max() < 0.02
    assert store.admin.verify().problems == []
    assert store.admin.stats().size_bytes < 0.75 * 2 * NUM_LAYERS * (128 + 2 * 2 * 64 * 8 * 4)
    store.close()


def test_another_process_sees_the_records_and_a_reopened_store_too(tmp_path):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(), make_layers())])
    code = (
        "import sys; from pathlib import Path; from ragkv.store.segment_store import SegmentStore;"
        "print(SegmentStore(Path(sys.argv[1])).admin.stats().num_records)"
    )
    seen = subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == str(NUM_LAYERS)
    store.close()
    reopened = SegmentStore(tmp_path / "kv")
    assert reopened.contains(make_key())
    reopened.close()


def test_another_format_is_refused_by_name(tmp_path, monkeypatch):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(), make_layers())])
    store.close()
    with closing(sqlite3.connect(tmp_path / "kv" / "index.db")) as index:
        index.execute("alter table chunk add column more text")
    whole = (tmp_path / "kv" / "index.db").read_bytes()
    monkeypatch.setattr("ragkv.store.opening.FORMAT_VERSION", 4)
    with pytest.raises(StoreError, match=r"format 3; this release reads format\s+4"):
        SegmentStore(tmp_path / "kv")
    assert (tmp_path / "kv" / "index.db").read_bytes() == whole


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(StoreError, match="Is it a ragkv store"):
        SegmentStore(tmp_path / "kv")
    assert (tmp_path / "kv").read_text() == "mine"


def test_no_space_is_a_clear_error_and_loses_nothing(tmp_path, monkeypatch):
    store, allocate = SegmentStore(tmp_path / "kv"), os.posix_fallocate

    def nearly_full(descriptor, offset, length):
        if offset + length > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    store.put([(make_key(chunk=1), make_layers())])
    for _ in range(2):
        with pytest.raises(StoreError, match="MiB free.*No space left.*Free some space"):
            store.put((make_key(chunk=n), make_layers(num_tokens=500)) for n in range(2, 50))
        assert list(store.chunk_hashes()) == [make_key(chunk=1).chunk_hash]
        assert store.admin.verify().problems == []
    store.put([(make_key(chunk=2), make_layers())])
    store.close()


def test_a_snapshot_tells_what_was_lost_while_it_was_read(tmp_path):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in (1, 2, 3, 4)])
    with store.snapshot() as snapshot:
        for n in (1, 2, 3):
            snapshot.get(make_key(chunk=n), 0)
        assert snapshot.deleted() == []
        location = store.admin.locate(make_key(chunk=2), 0)
        store.delete([make_key(chunk=n).chunk_hash for n in (1, 2, 4)])
        store.put([(make_key(chunk=1), make_layers(seed=1)), (make_key(chunk=2), make_layers(seed=9))])
        assert location == store.admin.locate(make_key(chunk=2), 0)  # the same location as before
        assert snapshot.deleted() == [make_key(chunk=1), make_key(chunk=2)]
    store.close()


def test_what_is_deleted_or_replaced_is_in_no_file_any_more(tmp_path):
    store = SegmentStore(tmp_path / "kv")
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


def test_verify_finds_what_no_record_is_known_for(tmp_path):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=1), make_layers(num_tokens=300))])
    file, offset, length = store.admin.locate(make_key(chunk=1), NUM_LAYERS - 1)
    with file.open("r+b") as segment:
        segment.seek(offset + 4 * length)
        segment.write(b"left")
    (problem,) = store.admin.verify().problems
    assert "no record is known" in problem
    store.close()
    reopened = SegmentStore(tmp_path / "kv")  # cleans up after a process that was killed
    assert reopened.admin.verify().problems == []
    assert reopened.contains(make_key(chunk=1))
    reopened.close()


@pytest.mark.parametrize("keep", [0, 1000, 20_000])
def test_a_file_cut_off_is_a_miss_and_no_crash(tmp_path, keep):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=1), make_layers(num_tokens=300))])
    with store.snapshot() as snapshot:
        assert snapshot.get(make_key(chunk=1), 2) is not None
        os.truncate(store.admin.locate(make_key(chunk=1), 0)[0], keep)
        with pytest.raises(CorruptRecordError):
            snapshot.get(make_key(chunk=1), 2)
    assert any("layer 2" in problem for problem in store.admin.verify().problems)
    store.put([(make_key(chunk=1), make_layers(num_tokens=300))])
    assert store.admin.verify().problems == []
    store.close()


@pytest.mark.parametrize("loss", ["missing", "nonsense"])
def test_chunks_are_found_again_without_their_index(tmp_path, loss):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n, num_tokens=50 * n)) for n in range(1, 6)])
    store.put([(make_key(chunk=1, fingerprint=9), make_layers()[:2])])  # another model, of two layers
    store.put([(make_key(chunk=2), make_layers(seed=20, num_tokens=70))])
    store.delete([make_key(chunk=3).chunk_hash])
    segment, offset, _ = store.admin.locate(make_key(chunk=4), 1)
    store.close()
    with segment.open("r+b") as file:
        file.seek(offset + 1000)
        file.write(b"damage")
    if loss == "missing":
        (tmp_path / "kv" / "index.db").unlink()
    else:
        (tmp_path / "kv" / "index.db").write_bytes(b"not a database at all" * 1000)
    again = SegmentStore(tmp_path / "kv")
    assert set(again.chunk_hashes()) == {make_key(chunk=n).chunk_hash for n in (1, 2, 5)}
    assert again.contains(make_key(chunk=1, fingerprint=9))
    with again.snapshot() as snapshot:
        assert torch.equal(snapshot.get(make_key(chunk=2), 2).k, make_layers(seed=20, num_tokens=70)[2].k)
    assert again.admin.verify().problems == []
    again.put([(make_key(chunk=4), make_layers())])
    assert again.admin.verify().problems == []
    again.close()


def test_a_damaged_index_is_not_taken_away_from_another_process(tmp_path):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(), make_layers())])
    store.close()  # that moves all from the log into the file
    store = SegmentStore(tmp_path / "kv")
    index = tmp_path / "kv" / "index.db"
    whole = index.read_bytes()
    index.write_bytes(b"not a database at all" * 1000)
    code = (
        "import sys; from pathlib import Path; from ragkv.store.segment_store import SegmentStore;"
        "SegmentStore(Path(sys.argv[1]))"
    )
    refused = subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], capture_output=True, text=True)
    assert "another process uses it" in refused.stderr
    assert index.read_bytes() == b"not a database at all" * 1000
    index.write_bytes(whole)
    store.close()


def flip(file, offset, bit):
    with file.open("r+b") as opened:
        opened.seek(offset)
        (byte,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("text", [b"SQLite format", b"format3", b"3", b"value text", b"key blob primary", b"without"])
def test_a_bit_that_flips_in_the_index_keeps_no_store_from_opening(tmp_path, text, bit):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in (1, 2)])
    store.close()
    index = tmp_path / "kv" / "index.db"
    whole = index.read_bytes()
    flip(index, whole.index(b"format3") + 6 if text == b"3" else whole.index(text), bit)
    again = SegmentStore(tmp_path / "kv")
    with again.snapshot() as snapshot:
        for n in (1, 2):
            assert torch.equal(snapshot.get(make_key(chunk=n), 1).k, make_layers(seed=n)[1].k)
    assert again.admin.verify().problems == []
    again.close()


@pytest.mark.parametrize("bad", [4, 8, 12, 13])
def test_a_key_that_goes_bad_hides_no_other(tmp_path, bad):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in range(16)])
    store.close()
    index = tmp_path / "kv" / "index.db"
    flip(index, index.read_bytes().index(make_key(chunk=bad).prefix()), 7)
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=17), make_layers(seed=17))])
    assert all(store.contains(make_key(chunk=n)) for n in (*range(16), 17) if n != bad)
    store.close()


@pytest.mark.parametrize("keep", [3000, 5944, 9938])
def test_an_index_cut_off_in_use_is_a_clear_error(tmp_path, keep):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in range(1, 60)])
    store.close()
    store = SegmentStore(tmp_path / "kv")
    os.truncate(tmp_path / "kv" / "index.db", keep)
    uses = [
        lambda: list(store.chunk_hashes()),
        store.admin.stats,
        store.admin.verify,
        lambda: store.put([(make_key(chunk=99), make_layers())]),
        lambda: store.delete([make_key(chunk=3).chunk_hash]),
    ]
    num_errors = 0
    for use in uses:
        try:
            use()
        except StoreError as error:
            assert "start again" in str(error)
            num_errors += 1
    assert num_errors
    store.contains(make_key(chunk=1))
    store.close()
    again = SegmentStore(tmp_path / "kv")
    assert again.contains(make_key(chunk=1))
    assert again.admin.verify().problems == []
    again.close()


def test_a_first_chunk_that_was_half_written_is_not_taken_for_a_whole_one(tmp_path):
    code = (
        CHILD + "store = SegmentStore(Path(sys.argv[1]))\n"
        "store.disk.files.sync = lambda segments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.put([(make_key(chunk=1), make_layers()[:2])])"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "kv", os.path.dirname(__file__)])
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "kv" / "segments").iterdir())
    store = SegmentStore(tmp_path / "kv")
    assert list(store.chunk_hashes()) == []
    assert store.admin.verify().problems == []
    store.close()


def test_space_is_used_again(tmp_path):
    store = SegmentStore(tmp_path / "kv")
    for n in range(40):
        store.put([(make_key(chunk=n % 4), make_layers(seed=n, num_tokens=100 + 50 * (n % 5)))])
        if n % 3 == 0:
            store.delete([make_key(chunk=(n + 1) % 4).chunk_hash])
    assert store.admin.verify().problems == []
    assert max(file.stat().st_size for file in (tmp_path / "kv" / "segments").iterdir()) < 700_000
    store.close()


def test_two_processes_write_in_turn(tmp_path):
    store = SegmentStore(tmp_path / "kv")
    store.put([(make_key(chunk=0), make_layers(num_tokens=100))])
    code = (
        CHILD + "store = SegmentStore(Path(sys.argv[1]))\n"
        "for n in range(100, 160): store.put([(make_key(chunk=n), make_layers(seed=n, num_tokens=100))])\n"
        "store.delete([make_key(chunk=n).chunk_hash for n in range(100, 130)])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "kv", os.path.dirname(__file__)])
    for n in range(1, 60):
        store.put([(make_key(chunk=n), make_layers(seed=n, num_tokens=120))])
        store.delete([make_key(chunk=n - 1).chunk_hash])
    while process.poll() is None:
        store.put([(make_key(chunk=59), make_layers(seed=59, num_tokens=130))])
    assert process.returncode == 0
    assert set(store.chunk_hashes()) == {make_key(chunk=n).chunk_hash for n in (59, *range(130, 160))}
    assert store.admin.verify().problems == []
    with store.snapshot() as snapshot:
        assert torch.equal(snapshot.get(make_key(chunk=140), 1).k, make_layers(seed=140, num_tokens=100)[1].k)
    store.close()


def test_waits_for_whoever_makes_the_same_store(tmp_path):
    other = sqlite3.connect(tmp_path / "index.db", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")  # SQLite doesn't wait for it by itself to change the file's mode
    release = threading.Timer(0.3, other.close)
    release.start()
    SegmentStore(tmp_path).close()
    release.join()


def test_a_killed_writer_leaves_a_store_that_verifies(tmp_path):
    code = (
        CHILD + "store = SegmentStore(Path(sys.argv[1])); print('open', flush=True)\n"
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
    store = SegmentStore(tmp_path / "kv")
    assert store.admin.stats().num_records > 0
    assert store.admin.verify().problems == []
    store.close()


def test_keys_name_their_parts():
    key = make_key()
    assert len(key.layer(0)) == 54
    assert len({key.layer(0), key.layer(1), replace(key, heads=(1, 2)).layer(0)}) == 3
