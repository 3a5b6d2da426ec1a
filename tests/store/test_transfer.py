"""KV out of one store, through a file, into another."""

import io
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from ragkv.errors import StoreError
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import head_bytes
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV
from ragkv.store.transfer import export_chunks, import_chunks, open_export

NUM_LAYERS = 3


def make_key(chunk, anchor=7):
    return ChunkKey(f"{chunk:032x}", f"{anchor:032x}", f"{8:032x}", heads=(0, 2))


def make_layers(seed, num_tokens=300):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, num_tokens, 8, generator=generator) for _ in "kv")
    return [LayerKV(k + i, v, base_position=5, v_std=torch.ones(num_tokens)) for i in range(NUM_LAYERS)]


@pytest.fixture
def source(tmp_path):
    store = DiskStore(tmp_path / "source")
    store.put([(make_key(n), make_layers(n)) for n in (1, 2, 3)])
    store.put([(make_key(2, anchor=9), make_layers(20))])
    yield store
    store.close()


@pytest.fixture
def target(tmp_path):
    store = DiskStore(tmp_path / "target")
    yield store
    store.close()


def exported(store):
    file = io.BytesIO()
    done = export_chunks(store, file)
    return bytearray(file.getvalue()), done


def imported(data, store):
    return import_chunks(open_export(io.BytesIO(data), "the file"), store)


def records_of(store):
    return {key: store.admin.records(key) for key in store.admin.sizes()}


def title_offset(data, chunk):
    """Return where the name of a chunk's member is, in the header of a tar archive."""
    in_header = data.index(make_key(chunk).chunk_hash.encode())
    return in_header - in_header % 512


def test_everything_arrives_as_it_was(source, target):
    data, done = exported(source)
    assert len(done.chunks) == 3 and done.size_bytes == sum(source.admin.sizes().values()) and not done.problems
    told = []
    found = import_chunks(open_export(io.BytesIO(data), "the file"), target, told.append)
    assert (found.chunks, found.size_bytes, found.kept, found.problems) == (done.chunks, done.size_bytes, set(), [])
    assert len(told) == 4 and 0.9 * done.size_bytes < sum(told) < len(data)
    assert records_of(target) == records_of(source)
    assert target.admin.verify().problems == []


def test_an_import_obeys_the_budget(source, tmp_path):
    data, _ = exported(source)
    budget = sum(source.admin.sizes().values()) // 2
    pinned = make_key(9)
    with closing(DiskStore(tmp_path / "small", disk_bytes=budget)) as small:
        small.put([(pinned, make_layers(9))])
        small.hint([pinned.chunk_hash], "pin")
        imported(data, small)
        assert sum(small.admin.sizes().values()) <= budget and small.contains(pinned)
        small.hint([make_key(n).chunk_hash for n in (1, 2, 3)], "pin")
        done = imported(data, small)
        assert sum(small.admin.sizes().values()) <= budget
        assert done.problems and all("budget has no room" in problem for problem in done.problems)


def test_codecs_are_kept(source, target, tmp_path):
    small = DiskStore(tmp_path / "small", codec="int8")
    small.put([(make_key(5), make_layers(5))])
    imported(exported(small)[0], target)
    target.put([(make_key(6), make_layers(6)), (make_key(7), make_layers(7))])
    assert records_of(target)[make_key(5)] == records_of(small)[make_key(5)]
    assert target.admin.codecs() == {"int8": NUM_LAYERS, "raw": 2 * NUM_LAYERS}
    small.close()


def test_chunks_that_are_there_stay(source, target):
    target.put([(make_key(2), make_layers(99))])
    before = target.admin.records(make_key(2))
    found = imported(exported(source)[0], target)
    assert found.kept == {make_key(2).chunk_hash} and len(found.chunks) == 3  # 2 after the other anchor is new
    assert target.admin.records(make_key(2)) == before
    again = imported(exported(source)[0], target)
    assert (len(again.kept), again.chunks, again.size_bytes) == (3, set(), 0)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("at", [0, 40, 1000])
def test_a_damaged_record_costs_its_chunk_alone(source, target, layer, at):
    data, _ = exported(source)
    offset = title_offset(data, 1) + 512 + head_bytes(NUM_LAYERS) + at
    offset += layer * len(source.admin.records(make_key(1))[0])
    data[offset] ^= 1
    found = imported(data, target)
    (problem,) = found.problems
    assert make_key(1).chunk_hash in problem
    assert set(target.admin.sizes()) == set(source.admin.sizes()) - {make_key(1)}
    assert target.admin.verify().problems == []


def test_a_damaged_title_costs_its_chunk_alone(source, target):
    data, _ = exported(source)
    data[title_offset(data, 1) + 100] ^= 1
    assert imported(data, target).problems == [f"chunk {make_key(1).chunk_hash}: its title is damaged"]
    assert set(target.admin.sizes()) == set(source.admin.sizes()) - {make_key(1)}


def test_a_file_cut_off_gives_what_it_has(source, target):
    data, _ = exported(source)
    start = title_offset(data, 3)
    *_, last = imported(data[:start], target).problems
    assert "cut off" in last and "export it again" in last
    *_, last = imported(data[: start + 5000], target).problems
    assert "cut off" in last
    assert set(target.admin.sizes()) == set(source.admin.sizes()) - {make_key(3)}


@pytest.mark.parametrize("data", [b"", b"x", b"RKV1" * 5000, os.urandom(9000)])
def test_something_else_is_refused_by_name(target, data):
    with pytest.raises(StoreError, match="the file is not an export of a KV store; make one with `ragkv store export"):
        imported(data, target)


def test_another_format_is_refused_by_name(source, target, monkeypatch):
    data, _ = exported(source)
    monkeypatch.setattr("ragkv.store.transfer.FORMAT_VERSION", 6)
    with pytest.raises(StoreError, match=r"format 5; this release reads format 6"):
        imported(data, target)


def test_damage_in_the_store_is_not_exported(source, target):
    file, offset, _ = source.admin.locate(make_key(1), 1)
    with file.open("r+b") as segment:
        segment.seek(offset + 500)
        segment.write(b"damage")
    data, done = exported(source)
    (problem,) = done.problems
    assert make_key(1).chunk_hash in problem and len(done.chunks) == 2
    assert imported(data, target).problems == []
    assert set(target.admin.sizes()) == set(source.admin.sizes()) - {make_key(1)}


def test_a_record_that_does_not_verify_is_not_put(source, target):
    records = source.admin.records(make_key(1))
    for bad in ([*records[:-1], records[0]], [records[0], b"", records[2]]):
        with pytest.raises(CorruptRecordError):
            target.put_records(make_key(1), bad)
    with pytest.raises(CorruptRecordError):
        target.put_records(make_key(2), records)
    assert not target.admin.sizes() and target.admin.verify().problems == []


def test_a_killed_import_leaves_whole_chunks_and_goes_on(source, target, tmp_path):
    data, _ = exported(source)
    (tmp_path / "file").write_bytes(data)
    code = (
        "import os, signal, sys; from pathlib import Path; from ragkv.store.disk_store import DiskStore\n"
        "from ragkv.store.transfer import import_chunks, open_export\n"
        "store, calls = DiskStore(Path(sys.argv[1])), []\n"
        "sync = os.fdatasync\n"
        "os.fdatasync = lambda s: (calls.append(s), sync(s), len(calls) > 2 and os.kill(os.getpid(), 9))\n"
        "import_chunks(open_export(open(sys.argv[2], 'rb'), 'x'), store)"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "other", tmp_path / "file"])
    assert killed.returncode == -signal.SIGKILL
    other = DiskStore(tmp_path / "other")
    assert len(other.admin.sizes()) == 2 and other.admin.verify().problems == []
    assert len(imported(data, other).kept) == 2
    assert records_of(other) == records_of(source)
    other.close()


def test_keys_are_deleted_alone(source):
    source.delete_keys([make_key(2, anchor=9), make_key(1)])
    assert set(source.admin.sizes()) == {make_key(2), make_key(3)}
    assert source.admin.verify().problems == []
