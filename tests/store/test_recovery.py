"""What a KV store survives: kills, damage, other processes."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
from store_samples import make_key, make_layers

from ragkv.errors import StoreError
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import CorruptRecordError

CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_samples import *
from ragkv.store.disk_store import DiskStore
"""


@pytest.mark.parametrize("name", ["new/left", "00/left.kv"])
def test_verify_finds_what_is_no_entry(tmp_path, name):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=1), make_layers(num_tokens=300))])
    left = tmp_path / "kv" / "v5" / name
    left.write_bytes(b"left")
    assert len(store.admin.verify().problems) == (not name.startswith("new/"))  # its writer may be alive
    os.utime(left, (0, 0))
    (problem,) = store.admin.verify().problems
    assert f"{name} is no entry" in problem
    store.close()
    reopened = DiskStore(tmp_path / "kv")  # cleans up after a process that was killed
    assert (reopened.admin.verify().problems == []) == name.startswith("new/")
    assert reopened.contains(make_key(chunk=1))
    reopened.close()


def test_what_another_process_is_writing_stays(tmp_path):
    with closing(DiskStore(tmp_path / "kv")) as store:
        file = store.entries.write(make_key(), [b"a", b"b"])
        with closing(DiskStore(tmp_path / "kv")):
            assert file.exists()
    with closing(DiskStore(tmp_path / "kv")):
        assert not file.exists()


@pytest.mark.parametrize("keep", [0, 1000, 20_000])
def test_a_file_cut_off_is_a_miss_and_no_crash(tmp_path, keep):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=1), make_layers(num_tokens=300))])
    with store.snapshot() as snapshot:
        assert snapshot.get(make_key(chunk=1), 2) is not None
        os.truncate(store.admin.locate(make_key(chunk=1), 0)[0], keep)
        with pytest.raises(CorruptRecordError):
            snapshot.get(make_key(chunk=1), 2)
    assert any("layer 2" in problem or "head" in problem for problem in store.admin.verify().problems)
    store.put([(make_key(chunk=1), make_layers(num_tokens=300))])
    assert store.admin.verify().problems == []
    store.close()


@pytest.mark.parametrize("loss", ["missing", "nonsense", "of an earlier release"])
def test_a_lost_table_loses_nothing_but_history(tmp_path, loss):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n, num_tokens=50 * n)) for n in range(1, 6)])
    store.delete([make_key(chunk=3).chunk_hash])
    file, offset, _ = store.admin.locate(make_key(chunk=4), 0)
    sizes = store.admin.sizes()
    store.close()
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"damage")
    if loss == "missing":
        (tmp_path / "kv" / "usage.mdb").unlink()
    elif loss == "of an earlier release":
        (tmp_path / "kv" / "usage.mdb").rename(tmp_path / "kv" / "usage.db")
    else:
        (tmp_path / "kv" / "usage.mdb").write_bytes(b"not a database at all" * 1000)
    again = DiskStore(tmp_path / "kv")
    assert set(again.chunk_hashes()) == {make_key(chunk=n).chunk_hash for n in (1, 2, 5)}
    assert not (tmp_path / "kv" / "usage.db").exists()
    del sizes[make_key(chunk=4)]
    gauges = {"entries": 3, "evicted_entries": 0, "disk_bytes": sum(sizes.values()), "pinned_bytes": 0}
    assert again.admin.gauges() == gauges
    with again.snapshot() as snapshot:
        assert torch.equal(snapshot.get(make_key(chunk=2), 2).k, make_layers(seed=2, num_tokens=100)[2].k)
    assert again.admin.verify().problems == []
    again.put([(make_key(chunk=4), make_layers())])
    assert again.admin.verify().problems == []
    again.close()


def test_a_damaged_table_is_not_taken_away_from_another_process(tmp_path):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(), make_layers())])
    table = tmp_path / "kv" / "usage.mdb"
    whole = table.read_bytes()
    table.write_bytes(b"not a database at all" * 1000)
    code = (
        "import sys; from pathlib import Path; from ragkv.store.disk_store import DiskStore;"
        "DiskStore(Path(sys.argv[1]))"
    )
    refused = subprocess.run([sys.executable, "-c", code, tmp_path / "kv"], capture_output=True, text=True)
    assert "another process uses it" in refused.stderr
    assert table.read_bytes() == b"not a database at all" * 1000
    table.write_bytes(whole)
    store.close()


def flip(file, offset, bit):
    with file.open("r+b") as opened:
        opened.seek(offset)
        (byte,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("text", [b"\xde\xc0\xef\xbe", b"rows", b"stored_bytes", make_key(chunk=1).prefix()])
def test_a_bit_that_flips_in_the_table_keeps_no_store_from_opening(tmp_path, text, bit):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in (1, 2)])
    store.close()
    table = tmp_path / "kv" / "usage.mdb"
    flip(table, table.read_bytes().index(text), bit)
    again = DiskStore(tmp_path / "kv")
    with again.snapshot() as snapshot:
        for n in (1, 2):
            assert torch.equal(snapshot.get(make_key(chunk=n), 1).k, make_layers(seed=n)[1].k)
    assert again.admin.verify().problems == []
    again.close()


@pytest.mark.parametrize("byte", [0, 5, 30, 60, 64, 72])
def test_a_head_that_goes_bad_costs_its_entry_alone(tmp_path, byte):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in range(16)])
    flip(store.entries.path(make_key(chunk=4)), byte, 3)
    with store.snapshot() as snapshot:
        snapshot.prefetch(make_key(chunk=4), 0)
        with pytest.raises(CorruptRecordError, match="head"):
            snapshot.get(make_key(chunk=4), 0)
        assert torch.equal(snapshot.get(make_key(chunk=5), 1).k, make_layers(seed=5)[1].k)
    (problem,) = store.admin.verify().problems
    assert make_key(chunk=4).chunk_hash in problem
    assert store.in_page_cache(make_key(chunk=4)) and store.admin.stats().num_chunks == 15
    store.put([(make_key(chunk=4), make_layers(seed=17))])
    assert store.admin.verify().problems == []
    store.close()


def test_a_head_that_the_disk_cannot_read_is_a_damaged_entry(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(DiskStore(tmp_path / "kv")) as store:
        store.put([(make_key(), make_layers())])
        with store.snapshot() as snapshot, monkeypatch.context() as broken:
            broken.setattr(os, "pread", fails)
            with pytest.raises(CorruptRecordError):
                snapshot.get(make_key(), 0)


@pytest.mark.parametrize("keep", [0, 3000, 9938, 20_000])
def test_a_table_cut_off_in_use_is_a_clear_error(tmp_path, keep):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=n), make_layers(seed=n)) for n in range(1, 120)])
    store.close()
    store = DiskStore(tmp_path / "kv")
    os.truncate(tmp_path / "kv" / "usage.mdb", keep)
    uses = [
        lambda: list(store.chunk_hashes(evicted=True)),
        store.admin.gauges,
        lambda: store.put([(make_key(chunk=999), make_layers())]),
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
    assert store.contains(make_key(chunk=1))
    store.close()
    again = DiskStore(tmp_path / "kv")
    assert again.contains(make_key(chunk=1))
    assert again.admin.verify().problems == []
    again.close()


def test_a_first_chunk_that_was_half_written_is_not_taken_for_a_whole_one(tmp_path):
    code = (
        CHILD + "store = DiskStore(Path(sys.argv[1]))\n"
        "os.fdatasync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.put([(make_key(chunk=1), make_layers()[:2])])"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "kv", os.path.dirname(__file__)])
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "kv" / "v5" / "new").iterdir())
    store = DiskStore(tmp_path / "kv")
    assert list(store.chunk_hashes()) == []
    assert store.admin.verify().problems == []
    store.close()


def test_two_processes_write_in_turn(tmp_path):
    store = DiskStore(tmp_path / "kv")
    store.put([(make_key(chunk=0), make_layers(num_tokens=100))])
    code = (
        CHILD + "store = DiskStore(Path(sys.argv[1]))\n"
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


def test_a_killed_writer_leaves_a_store_that_verifies(tmp_path):
    code = (
        CHILD + "store = DiskStore(Path(sys.argv[1])); print('open', flush=True)\n"
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
    store = DiskStore(tmp_path / "kv")
    assert store.admin.stats().num_records > 0
    assert store.admin.verify().problems == []
    store.close()
