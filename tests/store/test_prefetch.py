"""Whether chunks are in the page cache, and prefetching them."""

import time
from contextlib import closing

import torch
from store_samples import drop_cached

from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV

KEYS = [ChunkKey(f"{n:032x}", "0" * 32, "1" * 32, (0, 2)) for n in range(4)]
LAYERS = [LayerKV(torch.randn(2, 500, 64), torch.randn(2, 500, 64), 0) for _ in range(3)]


def test_what_will_be_read_is_brought_into_the_page_cache(tmp_path):
    with closing(DiskStore(tmp_path)) as store:
        store.put([(key, LAYERS) for key in KEYS[:3]])
        drop_cached(store, KEYS[:3])
        store.prefetch([KEYS[0], KEYS[2], KEYS[3]])  # the last one is not stored
        end = time.monotonic() + 30
        while not (store.in_page_cache(KEYS[0]) and store.in_page_cache(KEYS[2])) and time.monotonic() < end:
            time.sleep(0.01)
        assert list(map(store.in_page_cache, KEYS[:3])) == [True, False, True]
        with store.snapshot() as snapshot:
            assert torch.equal(snapshot.get(KEYS[2], 2).k, LAYERS[2].k)


def test_to_ask_whether_a_chunk_is_cached_does_not_bring_it(tmp_path):
    with closing(DiskStore(tmp_path)) as store:
        store.put([(KEYS[0], LAYERS)])
        drop_cached(store, KEYS[:1])
        for _ in range(5):
            assert not store.in_page_cache(KEYS[0])
            time.sleep(0.05)  # for what would be read ahead


def test_a_store_closes_while_it_reads(tmp_path):
    store = DiskStore(tmp_path)
    store.put([(key, LAYERS) for key in KEYS])
    drop_cached(store, KEYS)
    store.prefetch(KEYS)
    store.close()
    with closing(DiskStore(tmp_path)) as again:
        assert again.admin.verify().problems == []
