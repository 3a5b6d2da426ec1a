"""KV in memory: never more than its budget, never other than what is stored."""

import random
from contextlib import closing

import pytest
import torch
from store_samples import NUM_LAYERS, make_key, make_layers

from ragkv.errors import StoreError
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import EntryFile, Layout
from ragkv.store.memory import Pool
from ragkv.store.record import CorruptRecordError, LayerKV, decode, encode, record_bytes

LAYERS = make_layers(num_tokens=40)
LAYOUT = Layout(tuple(record_bytes(kv) for kv in LAYERS), (0, 0))
CHUNK_BYTES = LAYOUT.size_bytes


def put(pool, key, layout, layer, kv, in_use=frozenset()):
    """As a snapshot does that reads it."""
    slot = pool.slot(key, layout, layer, in_use)
    if slot is not None:
        slot[:] = encode(key.layer(layer), kv)
        pool.keep(key, layer, decode(key.layer(layer), slot))


def fill(pool, key, layers=LAYERS, layout=LAYOUT, in_use=frozenset()):
    for layer, kv in enumerate(layers):
        put(pool, key, layout, layer, kv, in_use)


def ask(pool, *chunks, hint=None):
    keys = [make_key(chunk) for chunk in chunks]
    pool.request(dict.fromkeys(keys, hint))
    for key in keys:
        fill(pool, key)


def chunks_in(pool):
    return {int(key.chunk_hash, 16) for key in pool._held}


def same(a, b):
    spreads = (a.v_std is None and b.v_std is None) or torch.equal(a.v_std, b.v_std)
    return torch.equal(a.k, b.k) and torch.equal(a.v, b.v) and a.base_position == b.base_position and spreads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_kept_is_what_was_read(dtype):
    pool = Pool(1 << 20)
    chunks = {make_key(n): make_layers(n, num_tokens=7 * n, dtype=dtype) for n in (1, 2, 3)}
    for layers in chunks.values():
        layers[1] = LayerKV(layers[1].k, layers[1].v, 3, v_std=torch.rand(layers[1].k.shape[1]))
    pool.request(dict.fromkeys(chunks))
    layouts = {key: Layout(tuple(record_bytes(kv) for kv in layers), (0, 0)) for key, layers in chunks.items()}
    for key, layers in chunks.items():
        fill(pool, key, layers, layouts[key])
    for key, layers in chunks.items():
        held = [pool.get(key, layouts[key], layer) for layer in range(NUM_LAYERS)]
        assert all(map(same, held, layers))


def test_only_what_a_request_wants_is_kept():
    pool = Pool(1 << 20)
    fill(pool, make_key(1))
    ask(pool, 2, hint="ephemeral")
    assert not chunks_in(pool) and pool.get(make_key(1), LAYOUT, 0) is None
    ask(pool, 1)
    assert chunks_in(pool) == {1}


def test_chunks_of_one_request_dont_drive_each_other_out():
    pool = Pool(2 * CHUNK_BYTES)
    for _ in range(3):
        ask(pool, 1, 2, 3)
        assert chunks_in(pool) == {1, 2}
    ask(pool, 3)
    assert 3 in chunks_in(pool) and len(chunks_in(pool)) == 2


def test_what_is_in_use_and_what_is_pinned_stays():
    pool = Pool(2 * CHUNK_BYTES)
    ask(pool, 1, hint="pin")
    ask(pool, 2)
    pool.request({make_key(3): None})
    fill(pool, make_key(3), in_use={make_key(2)})
    assert chunks_in(pool) == {1, 2}
    ask(pool, 3)
    assert chunks_in(pool) == {1, 3}
    ask(pool, 1)  # not pinned any more
    ask(pool, 4, 5)
    assert chunks_in(pool) == {4, 5}


def test_what_is_used_often_stays():
    pool = Pool(2 * CHUNK_BYTES)
    for chunk in (1, 1, 1, 2, 3, 4):
        ask(pool, chunk)
    assert chunks_in(pool) == {1, 4}


def test_another_place_is_another_chunk():
    pool = Pool(1 << 20)
    ask(pool, 1)
    assert pool.get(make_key(1), Layout(LAYOUT.lengths, (0, 1)), 0) is None  # of another version
    assert not chunks_in(pool) and pool._eviction.size_bytes == 0


def test_changes_are_told_once():
    pool = Pool(2 * CHUNK_BYTES)
    ask(pool, 1, 2)
    name = {n: make_key(n).chunk_hash for n in range(6)}
    assert pool.take_changes() == ([name[1], name[2]], [])
    ask(pool, 3)
    ask(pool, 4)
    ask(pool, 5)
    entered, left = pool.take_changes()
    assert {name[1], name[2], *entered} - set(left) == {name[n] for n in chunks_in(pool)}
    assert pool.take_changes() == ([], [])


def test_layers_never_overlap_and_never_leave_the_budget():
    """Random requests over chunks of all sizes: whatever is given back is what was put."""
    rng = random.Random(0)
    pool = Pool(20 * CHUNK_BYTES + 123)
    chunks = {n: make_layers(n, num_tokens=rng.choice([1, 9, 40, 200, 350])) for n in range(40)}
    layouts = {n: Layout(tuple(record_bytes(kv) for kv in layers), (0, n)) for n, layers in chunks.items()}
    num_held = 0
    for _ in range(300):
        requested = rng.sample(range(40), rng.randrange(1, 6))
        pool.request({make_key(n): rng.choice([None, None, "pin" if n < 3 else None]) for n in requested})
        for layer in range(NUM_LAYERS):
            for n in requested:
                held = pool.get(make_key(n), layouts[n], layer)
                assert held is None or same(held, chunks[n][layer])
                num_held += held is not None
                if held is None:
                    put(pool, make_key(n), layouts[n], layer, chunks[n][layer], {make_key(i) for i in requested})
        assert pool._eviction.size_bytes <= 20 * CHUNK_BYTES + 123
        if rng.random() < 0.1 and chunks_in(pool):
            pool.drop(make_key(rng.choice(sorted(chunks_in(pool)))))
    assert num_held > 300


# Through the store


@pytest.fixture
def store(tmp_path):
    with closing(DiskStore(tmp_path, memory_bytes=1 << 20)) as store:
        store.put([(make_key(n), make_layers(n)) for n in (1, 2)])
        yield store


def read(store, *chunks, request=True):
    keys = [make_key(n) for n in chunks]
    if request:
        store.touch(keys)
    with store.snapshot() as snapshot:
        return [[snapshot.get(key, layer) for layer in range(NUM_LAYERS)] for key in keys]


def test_a_request_reads_the_disk_once(store, monkeypatch):
    first = read(store, 1, 2)
    assert store.in_memory(make_key(1))
    monkeypatch.setattr(EntryFile, "read_into", lambda *_: pytest.fail("read again"))
    again = read(store, 1, 2)
    assert all(same(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))


def test_reads_without_a_request_keep_nothing(store):
    read(store, 1, request=False)
    assert not store.in_memory(make_key(1)) and store.memory_changes() == ([], [])


@pytest.mark.parametrize("by_another", [False, True])
@pytest.mark.parametrize("change", ["delete", "discard", "replace"])
def test_what_changes_on_disk_isnt_given_from_memory(store, tmp_path, change, by_another):
    read(store, 1, 2)
    with closing(DiskStore(tmp_path)) as other:
        writer = other if by_another else store
        if change == "delete":
            writer.delete([make_key(1).chunk_hash])
        elif change == "discard":
            writer.discard(make_key(1))
        else:
            writer.put([(make_key(1), make_layers(9))])
    (found,) = read(store, 1)
    if change == "replace":
        assert all(map(same, found, make_layers(9)))
    else:
        assert found == [None] * NUM_LAYERS and not store.in_memory(make_key(1))
    assert store.in_memory(make_key(2))


def test_what_is_deleted_leaves_memory_with_the_next_request(store, tmp_path):
    read(store, 1, 2)
    with closing(DiskStore(tmp_path)) as other:
        other.delete([make_key(1).chunk_hash])
    store.touch([make_key(2)])
    assert not store.in_memory(make_key(1)) and store.memory_changes()[1] == [make_key(1).chunk_hash]


def test_a_hint_reaches_what_is_in_memory(tmp_path):
    with closing(DiskStore(tmp_path, memory_bytes=2 * CHUNK_BYTES)) as store:
        store.put([(make_key(n), LAYERS) for n in (1, 2, 3)])
        store.hint([make_key(1).chunk_hash], "pin")
        store.hint([make_key(3).chunk_hash], "ephemeral")
        for n in (1, 3, 2, 2, 2, 3):
            read(store, n)
        assert store.in_memory(make_key(1)) and store.in_memory(make_key(2)) and not store.in_memory(make_key(3))


def test_a_hint_of_another_process_reaches_what_is_in_memory(tmp_path):
    with closing(DiskStore(tmp_path, memory_bytes=2 * CHUNK_BYTES)) as store, closing(DiskStore(tmp_path)) as other:
        store.put([(make_key(n), LAYERS) for n in (1, 2, 3)])
        read(store, 1)
        other.hint([make_key(1).chunk_hash], "pin")
        for n in (2, 3, 2, 3):
            read(store, n)
        assert store.in_memory(make_key(1))


def test_memory_that_cant_be_had_is_refused_by_name(tmp_path):
    with pytest.raises(StoreError, match=r"no 1.04858e\+06 GiB of memory for KV.*store.memory_gib"):
        DiskStore(tmp_path, memory_bytes=1 << 50)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_chunk_that_goes_bad_leaves_memory_and_its_room_is_free(store, layer):
    file, offset, length = store.admin.locate(make_key(1), layer)
    with file.open("r+b") as segment:
        segment.seek(offset + length - 1)
        last = segment.read(1)
        segment.seek(offset + length - 1)
        segment.write(bytes([last[0] ^ 1]))
    with pytest.raises(CorruptRecordError):
        read(store, 2, 1)
    assert not store.in_memory(make_key(1)) and store.in_memory(make_key(2))
    assert store.memory_changes()[1] == ([make_key(1).chunk_hash] if layer else [])
    store.put([(make_key(1), make_layers(9))])
    (found,) = read(store, 1)
    assert all(map(same, found, make_layers(9))) and store.in_memory(make_key(1))


def test_a_chunk_that_is_read_for_the_first_time_is_announced(store, monkeypatch):
    announced = []
    monkeypatch.setattr(EntryFile, "prefetch", lambda _, layer: announced.append(layer))
    store.touch([make_key(1)])
    for _ in range(2):
        with store.snapshot() as snapshot:
            for layer in range(NUM_LAYERS):
                snapshot.prefetch(make_key(1), layer + 1)
                snapshot.get(make_key(1), layer)
    assert len(announced) == NUM_LAYERS - 1
