"""What operators do with entries, on real stores."""

import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from store_samples import NUM_LAYERS, drop_cached, make_key, make_layers

from ragkv.errors import ConfigError, StoreError
from ragkv.store.codecs import CODECS, FP8, INT4, INT8, RAW
from ragkv.store.control import Pair, codec_named
from ragkv.store.difference import differences
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import entry_bytes
from ragkv.store.record import LayerKV

CHUNK_BYTES = entry_bytes([128 + 2 * 2 * 100 * 8 * 4] * NUM_LAYERS)
LAYERS = make_layers(num_tokens=100)


@pytest.fixture
def store(tmp_path):
    store = DiskStore(tmp_path / "kv", memory_bytes=4 * CHUNK_BYTES)
    yield store
    store.close()


def put(store, *chunks, layers=LAYERS):
    keys = [make_key(chunk=n) for n in chunks]
    store.put([(key, layers) for key in keys])
    return keys


def hash_of(n):
    return make_key(chunk=n).chunk_hash


def info_of(store, key):
    (info,) = store.control.describe([key.chunk_hash])[key.chunk_hash]
    return info


def layers_of(store, key):
    with store.snapshot() as snapshot:
        return [snapshot.get(key, i).map(torch.clone) for i in range(NUM_LAYERS)]


def test_an_entry_is_described(store):
    before = time.time()
    key, other = put(store, 1, 2)
    store.touch([key, key])
    store._usage.flush()
    store.hint([key.chunk_hash], "session")
    info = info_of(store, key)
    assert (info.size_bytes, info.codec, info.is_cached, info.uses, info.hint) == (
        CHUNK_BYTES,
        "raw",
        True,
        3,
        "session",
    )
    assert before <= info.used_at <= time.time()
    drop_cached(store, [other])
    assert not info_of(store, other).is_cached
    assert not info_of(store, other).is_cached  # to describe it doesn't bring it near
    assert store.control.describe([hash_of(3)]) == {hash_of(3): []}


def test_a_pin_is_no_use(store):
    (key,) = put(store, 1)
    before = info_of(store, key)
    time.sleep(0.01)
    store.control.hint([key.chunk_hash], "pin", None)
    pinned = info_of(store, key)
    store.control.unpin([key.chunk_hash])
    assert pinned == replace(before, hint="pin") and info_of(store, key) == before


def test_more_pins_than_the_budget_holds_are_refused_with_both_sizes(store):
    put(store, 1, 2, 3)
    assert store.control.hint([hash_of(1)], "pin", 2 * CHUNK_BYTES) == CHUNK_BYTES
    with pytest.raises(ConfigError, match=r"GiB would be pinned with these .* store.disk_gib is .* GiB; .* Nothing"):
        store.control.hint([hash_of(2), hash_of(3)], "pin", 2 * CHUNK_BYTES)
    assert store.control.hints(map(hash_of, range(1, 5))) == {hash_of(1): "pin", hash_of(2): None, hash_of(3): None}
    assert store.control.hint([hash_of(1), hash_of(2)], "pin", 2 * CHUNK_BYTES) == 2 * CHUNK_BYTES
    assert store.control.unpin([hash_of(1)]) == CHUNK_BYTES == store.admin.gauges()["pinned_bytes"]


def test_pins_are_counted_as_entries_come_and_change_and_go(store):
    def pinned():
        with store._usage.writing():
            rows = store._usage.rows_of(store.chunk_hashes(evicted=True)).values()
        assert store.admin.gauges()["pinned_bytes"] == sum(row.size_bytes for row in rows if row.hint == "pin")
        return store.admin.gauges()["pinned_bytes"]

    put(store, 1, 2, 3)
    for hint, expected in (("pin", 2), ("pin", 2), ("session", 0), ("pin", 2)):
        store.hint([hash_of(1), hash_of(2)], hint)
        assert pinned() == expected * CHUNK_BYTES
    store.put([(make_key(chunk=1, anchor=9), LAYERS)])  # its mean
    assert pinned() == 3 * CHUNK_BYTES
    store.control.clear([make_key(chunk=1)])  # it comes back
    assert pinned() == 3 * CHUNK_BYTES
    size = store.control.recode(make_key(chunk=2), CODECS["int8"]).bytes_after
    assert pinned() == 2 * CHUNK_BYTES + size
    store.delete([hash_of(1)])
    assert pinned() == size
    store.hint([hash_of(2)], None)
    assert pinned() == 0


def test_pins_of_a_table_of_before_are_counted_when_it_is_opened(tmp_path):
    with closing(DiskStore(tmp_path / "kv")) as store:
        put(store, 1, 2)
        store.hint([hash_of(1)], "pin")
        with store._usage.writing():
            store._usage._totals.delete(b"pinned_bytes")
    with closing(DiskStore(tmp_path / "kv")) as store:
        assert store.admin.gauges()["pinned_bytes"] == CHUNK_BYTES


def test_what_is_pinned_beyond_a_smaller_budget_may_be_pinned_again(store):
    put(store, 1, 2)
    store.control.hint([hash_of(1), hash_of(2)], "pin", None)
    assert store.control.hint([hash_of(1)], "pin", CHUNK_BYTES) == 2 * CHUNK_BYTES


def test_unpinning_leaves_other_hints(store):
    put(store, 1, 2)
    store.hint([hash_of(1)], "ephemeral")
    store.control.unpin([hash_of(1), hash_of(2)])
    assert info_of(store, make_key(chunk=1)).hint == "ephemeral"


def test_an_entry_that_comes_later_has_its_chunks_hint(store):
    put(store, 1)
    store.control.hint([hash_of(1)], "pin", None)
    mean = make_key(chunk=1, anchor=9)
    store.put([(mean, LAYERS)])
    assert {info.hint for info in store.control.describe([hash_of(1)])[hash_of(1)]} == {"pin"}


def test_warm_and_demote_move_entries_in_and_out_of_the_page_cache(store):
    (key,) = put(store, 1)
    drop_cached(store, [key])
    assert store.control.warm(key) == CHUNK_BYTES and store.control.is_cached(key)
    assert store.control.demote([key, make_key(chunk=2)]) == CHUNK_BYTES
    assert not store.control.is_cached(key) and store.contains(key)
    assert store.control.demote([key]) == 0
    assert store.control.warm(make_key(chunk=2)) == 0


def test_entries_are_held_in_memory_without_a_use_and_given_up(store):
    keys = put(store, 1, 2)
    before = info_of(store, keys[0])
    assert store.hold([*keys, make_key(chunk=3)]) == keys
    assert store.held() == dict.fromkeys(keys, CHUNK_BYTES - 4096)  # the head isn't kept
    assert [kv.k.tolist() for kv in layers_of(store, keys[0])] == [kv.k.tolist() for kv in LAYERS]
    assert info_of(store, keys[0]) == before
    assert store.release([keys[0], make_key(chunk=3)]) == CHUNK_BYTES - 4096
    assert list(store.held()) == [keys[1]] and store.contains(keys[0])


def test_what_is_held_gives_way_to_what_is_warmed_but_for_what_is_pinned_or_spared(store):
    keys = put(store, *range(1, 8))
    store.control.hint([hash_of(1)], "pin", None)
    assert store.hold(keys[:2]) == keys[:2]
    assert store.hold(keys[2:4], spared=keys[:2]) == keys[2:4]
    held = store.hold(keys[4:6])
    assert held == keys[4:6] and keys[0] in store.held()
    assert store.hold([keys[6]], spared=list(store.held())) == []  # no room


def test_memory_lets_go_of_what_was_cleared(store):
    (key,) = put(store, 1)
    store.hold([key])
    store.control.clear([key])
    assert store.held() == {}


def test_warming_keeps_the_place_of_what_a_request_asked_for(store):
    keys = put(store, *range(1, 6))
    store.touch(keys[:4])
    for key in keys[:4]:
        layers_of(store, key)
    assert store.hold([keys[4]]) == []
    store.touch(keys[3:4])
    assert store.hold([keys[4]]) == [keys[4]]


@pytest.mark.parametrize("codec", [INT8, FP8, INT4])
def test_an_entry_is_encoded_anew(store, codec):
    v_std = torch.rand(100)
    (key,) = put(store, 1, layers=[replace(kv, v_std=v_std) for kv in LAYERS])
    store.touch([key])
    store._usage.flush()
    store.control.hint([key.chunk_hash], "pin", None)
    store.hold([key])
    before, old = info_of(store, key), layers_of(store, key)
    done = store.control.recode(key, codec)
    assert (done.outcome, done.bytes_before) == ("recoded", before.size_bytes) and done.bytes_after < before.size_bytes
    after = info_of(store, key)
    assert after == replace(before, codec=codec.name, size_bytes=done.bytes_after)
    assert store.admin.gauges()["disk_bytes"] == done.bytes_after == store.entries.size_on_disk()
    assert store.held() == {}  # what was in memory isn't what is stored
    for kv, was in zip(layers_of(store, key), old, strict=True):
        assert kv.base_position == was.base_position and torch.equal(kv.v_std, v_std)
        for part, original in zip(kv.decoded(), was.decoded(), strict=True):
            atol = 0.3 if codec is INT4 else 0.05
            torch.testing.assert_close(part.float(), original.float(), rtol=0.1, atol=atol)
    assert store.control.recode(key, codec).outcome == "same"
    assert store.admin.verify().problems == []


def test_recoding_keeps_the_difference_from_the_mean(store):
    means, alone = ([(kv.k, kv.v) for kv in make_layers(num_tokens=100, seed=seed)] for seed in (1, 2))
    added = differences(alone, means, INT8.share)
    layers = [LayerKV(k, v, 5, torch.rand(100), difference=each) for (k, v), each in zip(means, added, strict=True)]
    (key,) = put(store, 1, layers=layers)
    assert store.control.recode(key, INT8).outcome == "recoded"
    for kv, was in zip(layers_of(store, key), layers, strict=True):
        for one, other in zip(kv.difference.parts(), was.difference.parts(), strict=True):
            assert torch.equal(one, other)
        for part, original in zip(kv.mean().decoded(), was.mean().decoded(), strict=True):
            torch.testing.assert_close(part, original, rtol=0.1, atol=0.05)


def test_4_bits_are_for_means_only(store):
    """Also on the way over 8 bits. What means are made of, and what every prompt begins with, stays in 8."""
    mean, alone = make_key(chunk=1, anchor=9), make_key(chunk=1)
    store.put([(mean, [replace(kv, v_std=torch.rand(100)) for kv in LAYERS]), (alone, LAYERS)])
    sizes = {}
    for codec in (INT8, INT4):
        done = {key: store.control.recode(key, codec) for key in (mean, alone)}
        sizes[codec] = {key: each.bytes_after for key, each in done.items()}
    assert (done[mean].outcome, done[alone].outcome) == ("recoded", "same")
    assert sizes[INT4][mean] < 0.75 * sizes[INT8][mean] and sizes[INT4][alone] == sizes[INT8][alone]
    codecs = {info.key: info.codec for info in store.control.describe([mean.chunk_hash])[mean.chunk_hash]}
    assert codecs == {mean: "int4", alone: "int8"}


def test_encoding_in_half_precision_gives_what_was_stored_with_the_codec_at_once(tmp_path):
    layers = make_layers(num_tokens=100, dtype=torch.bfloat16)
    stores = [DiskStore(tmp_path / name, codec) for name, codec in (("a", "raw"), ("b", "int8"))]
    for store in stores:
        (key,) = put(store, 1, layers=layers)
    stores[0].control.recode(key, INT8)
    first, second = (store.admin.records(key) for store in stores)
    assert list(map(bytes, first)) == list(map(bytes, second))
    for store in stores:
        store.close()


PAIR = Pair(make_key(anchor=2), make_key(anchor=9), make_key(anchor=10))


@pytest.fixture
def pair(store):
    """The layers of a chunk after the anchor alone, and of its mean."""
    alone = make_layers(num_tokens=100)
    mean = [replace(kv, k=kv.k * 0.9, v=kv.v + 0.1, v_std=torch.rand(100)) for kv in alone]
    store.put([(PAIR.alone, alone), (PAIR.mean, mean)])
    return alone, mean


def test_two_entries_become_the_one_that_is_put_where_the_model_makes_it(store, pair, tmp_path):
    alone, mean = pair
    before = sum(store.admin.sizes().values())
    done = store.control.join(PAIR, INT8)
    assert (done.outcome, done.bytes_before) == ("joined", before) and done.bytes_after < 0.5 * before
    assert list(store.entries) == [PAIR.joined] and store.keys(evicted=True) == [PAIR.joined]
    assert store.admin.gauges()["disk_bytes"] == done.bytes_after == store.entries.size_on_disk()
    changes = differences([(kv.k, kv.v) for kv in alone], [(kv.k, kv.v) for kv in mean], INT8.share)
    with closing(DiskStore(tmp_path / "made", "int8")) as made:
        made.put([(PAIR.joined, [replace(kv, difference=d) for kv, d in zip(mean, changes, strict=True)])])
        expected = list(map(bytes, made.admin.records(PAIR.joined)))
    assert list(map(bytes, store.admin.records(PAIR.joined))) == expected
    assert store.control.join(PAIR, INT8).outcome == "changed"
    assert list(store.entries) == [PAIR.joined]


@pytest.mark.parametrize("key", [PAIR.alone, PAIR.mean])
def test_what_is_deleted_or_damaged_is_not_joined(store, pair, monkeypatch, key):
    write = store.entries.write

    def write_late(*arguments):
        store.delete_keys([key])
        return write(*arguments)

    with monkeypatch.context() as late:
        late.setattr(store.entries, "write", write_late)
        assert store.control.join(PAIR, INT8).outcome == "changed"
    (left,) = {PAIR.alone, PAIR.mean} - {key}
    assert list(store.entries) == [left] and store.admin.verify().problems == []
    store.put([(key, LAYERS)])
    store.entries.path(key).write_bytes(b"nothing")
    assert store.control.join(PAIR, INT8).outcome == "damaged" and len(list(store.entries)) == 2


def test_joining_that_is_killed_leaves_both_or_one(store, pair, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    for name in ("write", "publish", "delete"):
        with monkeypatch.context() as kill:
            kill.setattr(store.entries, name, killed)
            with pytest.raises(KeyboardInterrupt):
                store.control.join(PAIR, INT8)
        assert {PAIR.alone, PAIR.mean} <= set(store.entries) and store.admin.verify().problems == []
    assert store.control.join(PAIR, INT8).outcome == "joined"
    assert list(store.entries) == [PAIR.joined] and store.keys(evicted=True) == [PAIR.joined]
    assert store.admin.gauges()["disk_bytes"] == store.entries.size_on_disk()


def test_what_would_not_get_smaller_stays(store):
    (key,) = put(store, 1)
    store.control.recode(key, INT8)
    before = store.entries.path(key).read_bytes()
    for codec in (FP8, RAW):
        assert store.control.recode(key, codec).outcome == "no smaller"
    assert store.entries.path(key).read_bytes() == before
    with pytest.raises(ConfigError, match="nothing can be encoded as 'raw' again: .* are then made anew|clear"):
        codec_named("raw")
    with pytest.raises(ConfigError, match=f"unknown codec 'zip'; choose one of {', '.join(CODECS)}"):
        codec_named("zip")


def test_a_damaged_entry_stays_as_it_is(store):
    (key,) = put(store, 1)
    file = store.entries.path(key)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1 if content[-5] else 0
    content[4096 + 200] ^= 1
    file.write_bytes(content)
    assert store.control.recode(key, INT8).outcome == "damaged"
    assert file.read_bytes() == content


def test_what_is_deleted_while_it_is_encoded_stays_deleted(store, monkeypatch):
    """Nor does the old KV come back in place of what was put meanwhile."""
    first, second = put(store, 1, 2)
    write = store.entries.write

    def write_late(key, records):
        file = write(key, records)
        if key == first:
            store.delete([first.chunk_hash])
        else:
            store.put([(second, make_layers(seed=1, num_tokens=100))])
        return file

    monkeypatch.setattr(store.entries, "write", write_late)
    assert store.control.recode(first, INT8).outcome == "changed"
    monkeypatch.setattr(store.entries, "write", lambda key, records: (monkeypatch.undo(), write_late(key, records))[1])
    assert store.control.recode(second, INT8).outcome == "changed"
    assert not store.contains(first) and info_of(store, second).codec == "raw"
    assert store.admin.verify().problems == [] and store.admin.gauges()["disk_bytes"] == CHUNK_BYTES


def test_recoding_that_fails_leaves_what_was(store, monkeypatch):
    (key,) = put(store, 1)
    before = store.entries.path(key).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(store.entries, "publish", lambda files: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(StoreError, match="can't write to the KV store"):
            store.control.recode(key, INT8)
    assert store.entries.path(key).read_bytes() == before and store.admin.gauges()["disk_bytes"] == CHUNK_BYTES
    assert not list((store.path / "v5" / "new").iterdir())


def test_a_process_that_is_killed_between_name_and_row_is_made_good(store, monkeypatch):
    (key,) = put(store, 1)
    with monkeypatch.context() as patch:  # the row's transaction is lost
        patch.setattr(store._usage, "resize", lambda *_: None)
        size = store.control.recode(key, INT8).bytes_after
    assert store.admin.gauges()["disk_bytes"] == CHUNK_BYTES > size
    assert store.control.recode(key, INT8).outcome == "same"
    assert store.admin.gauges()["disk_bytes"] == size == info_of(store, key).size_bytes


RECODING = """
import sys
from pathlib import Path
from ragkv.store.codecs import INT8
from ragkv.store.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]))
print("begins", flush=True)
for key in store.keys():
    store.control.recode(key, INT8)
    print(key.chunk_hash, flush=True)
"""


@pytest.mark.parametrize("num_done", [0, 1, 7, 20])
def test_recoding_that_is_killed_goes_on_where_it_stopped(tmp_path, num_done):
    with closing(DiskStore(tmp_path / "kv")) as store:
        keys = put(store, *range(1, 40))
    with subprocess.Popen([sys.executable, "-c", RECODING, store.path], stdout=subprocess.PIPE, text=True) as process:
        said = [process.stdout.readline() for _ in range(1 + num_done)]
        process.kill()
    with closing(DiskStore(tmp_path / "kv")) as store:
        assert store.admin.verify().problems == [] and set(store.keys()) == set(keys)
        outcomes = [store.control.recode(key, INT8).outcome for key in keys]
        assert num_done <= outcomes.count("same") < 39 and set(outcomes) <= {"same", "recoded"} and all(said)
        assert store.admin.gauges()["disk_bytes"] == store.entries.size_on_disk()
        assert not list((store.path / "v5" / "new").iterdir())


def test_readers_beside_recoding_read_one_or_the_other(store):
    """Never a mixture, never a miss."""
    keys, wrong, stop = put(store, *range(1, 20)), [], threading.Event()
    other = DiskStore(store.path)

    def read():
        while not stop.is_set():
            for key in keys:
                with other.snapshot() as snapshot:
                    kinds = {snapshot.get(key, i).k.dtype for i in range(NUM_LAYERS)}
                if len(kinds) != 1:
                    wrong.append(kinds)

    reader = threading.Thread(target=read)
    reader.start()
    outcomes = {store.control.recode(key, INT8).outcome for key in keys}
    stop.set()
    reader.join()
    other.close()
    assert outcomes == {"recoded"} and not wrong


def test_cleared_entries_come_back_with_their_uses_and_hints(store):
    (key,) = put(store, 1)
    store.touch([key] * 4)
    store._usage.flush()
    store.control.hint([key.chunk_hash], "pin", None)
    assert store.control.clear([key, make_key(chunk=2)]) == CHUNK_BYTES
    assert not store.contains(key) and store.keys(evicted=True) == [key]
    put(store, 1)
    assert (info_of(store, key).uses, info_of(store, key).hint) == (6, "pin")


def test_what_reads_and_writes_says_so(store):
    put(store, 1)
    store.control.try_reading()
    store.control.try_writing()
    assert store.admin.verify().problems == []
    unfinished = store.path / "v5" / "new"
    unfinished.rmdir()
    with pytest.raises(StoreError, match="can't write to the KV store"):
        store.control.try_writing()
    (store.path / "v5").rename(store.path / "gone")
    with pytest.raises(StoreError, match="can't read the KV store"):
        store.control.try_reading()
    (store.path / "gone").rename(store.path / "v5")


def test_the_last_verification_is_remembered(store):
    assert store.admin.last_verification() is None
    (key,) = put(store, 1)
    before = time.time()
    store.admin.verify()
    found = store.admin.last_verification()
    assert before <= found.at <= time.time() and (found.num_records, found.num_problems) == (NUM_LAYERS, 0)
    store.entries.path(key).write_bytes(b"nothing")
    store.admin.verify()
    assert store.admin.last_verification().num_problems == 1
    (store.path / "verified.json").write_bytes(b"[1,")
    assert store.admin.last_verification() is None
