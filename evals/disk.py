"""`ragkv eval store`: how fast a store writes and reads, beside its disk, a copy in memory, and the checksum alone.

Chunks are read as the fusions of a queue read them: a layer of several chunks at a time, the next layer announced, and
the next request's chunks brought near while it waits. Needs no model.
"""

import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash

from ragkv.store.record import ChunkKey, LayerKV
from ragkv.store.segment_store import SegmentStore

_LAYERS = 8
_AT_A_TIME = 8  # chunks of a request
_HEAD_SIZE = 64
_HEADER_BYTES = 4096  # more than a record has beside its numbers
_THREADS = 4


def run(folder: Path, record_kib: Sequence[int], mib: int, churn: float, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each size of a record: of `mib` MiB in a store of its own under `folder`, in MB/s.

    churn: how many times the store's size is deleted and written anew, chunk by chunk. Reads are medians over the
    rounds, each of which reads in every way. Raises StoreError where there is no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kib in record_kib:
        with tempfile.TemporaryDirectory(dir=folder, prefix="eval-store-") as home:
            yield {"record_kib": kib, "mib": mib, **_measure(Path(home), kib << 10, mib << 20, churn, repeats)}


def _measure(home: Path, record_bytes: int, total_bytes: int, churn: float, repeats: int) -> dict[str, Any]:
    num_chunks = max(1, total_bytes // (record_bytes * _LAYERS))
    keys = [_key(i) for i in range(num_chunks)]
    num_tokens = max(1, (record_bytes - _HEADER_BYTES) // (2 * 4 * _HEAD_SIZE))
    shape = (1, num_tokens, _HEAD_SIZE)
    layers = [LayerKV(torch.randn(shape), torch.randn(shape), base_position=0) for _ in range(_LAYERS)]
    size = num_chunks * sum(kv.size_bytes for kv in layers)
    order = random.Random(0)

    def mb_s(do: Callable[[], object], num_bytes: float = size) -> float:
        begin = time.perf_counter()
        do()
        return num_bytes / (time.perf_counter() - begin) / 1e6

    def write(store: SegmentStore) -> None:
        for group in _requests(keys):
            store.put((key, layers) for key in group)

    row: dict[str, Any] = {"chunks": num_chunks, "layers": _LAYERS}
    store = SegmentStore(home / "kv")
    pooled = SegmentStore(home / "kv", memory_bytes=2 * total_bytes)
    try:
        row["write"] = mb_s(lambda: write(store))
        file, target, source = store.admin.locate(keys[0], 0)[0], torch.zeros(size // 4), torch.randn(size // 4)
        parts = target.view(num_chunks, _LAYERS, 2, *shape)
        copies = [[(part[0], part[1]) for part in chunk] for chunk in parts]
        pooled.touch(keys)
        _read(pooled, keys)
        seen: dict[str, list[float]] = {}
        for _ in range(repeats):
            order.shuffle(keys)
            store.admin.drop_cached(keys)
            ways: dict[str, Callable[[], object]] = {
                "cold": lambda: _read(store, keys),
                "warm": lambda: _read(store, keys),
                "memory": lambda: _read(pooled, keys, copies),
                "copy": lambda: target.copy_(source),
                "checksum": lambda: xxhash.xxh3_64_intdigest(source.numpy().data),
            }
            for way, do in ways.items():
                seen.setdefault(way, []).append(mb_s(do))
            for threads in (1, _THREADS):
                with suppress(OSError):  # a file system that can't
                    seen.setdefault(f"disk_{threads}", []).append(_of_disk(file, record_bytes, threads))
        row |= {way: median(values) for way, values in seen.items() if values}
        if num_rounds := round(churn * num_chunks):
            row["churn"] = mb_s(lambda: _churn(store, keys, layers, order, num_rounds), size / num_chunks * num_rounds)
        stats = store.admin.stats()
        row["file_mib"], row["record_mib"] = stats.file_bytes / (1 << 20), stats.size_bytes / (1 << 20)
    finally:
        pooled.close()
        store.close()
    return {name: round(value) for name, value in row.items()}


def _key(index: int) -> ChunkKey:
    return ChunkKey(f"{index:032x}", "0" * 32, "f" * 32, (0, 1))


def _requests(keys: Sequence[ChunkKey]) -> Iterator[Sequence[ChunkKey]]:
    return (keys[start : start + _AT_A_TIME] for start in range(0, len(keys), _AT_A_TIME))


_Copies = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]  # K and V, by chunk and layer


def _read(store: SegmentStore, keys: Sequence[ChunkKey], copies: _Copies = ()) -> None:
    """All layers of all chunks; copied, as whoever computes with them would, if it is said where to."""
    requests = [*_requests(keys)]
    store.prefetch(requests[0])
    for number, request in enumerate(requests):
        for following in requests[number + 1 : number + 2]:
            store.prefetch(following)
        with store.snapshot() as snapshot:
            for layer in range(_LAYERS):
                for key in request:
                    snapshot.prefetch(key, layer + 1)
                for i, key in enumerate(request, number * _AT_A_TIME):
                    kv = snapshot.get(key, layer)
                    assert kv is not None
                    if copies:
                        k, v = copies[i][layer]
                        k.copy_(kv.k)
                        v.copy_(kv.v)


def _of_disk(file: Path, record_bytes: int, num_threads: int) -> float:
    """What the disk gives, in MB/s: pieces as large as a record at random places, past the page cache (O_DIRECT)."""
    offsets = list(range(0, file.stat().st_size - record_bytes + 1, record_bytes))
    random.Random(1).shuffle(offsets)

    def read(part: Sequence[int]) -> None:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, record_bytes) as aligned:
                for offset in part:
                    os.preadv(descriptor, [aligned], offset)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(num_threads) as pool:
        begin = time.perf_counter()
        list(pool.map(read, (offsets[i::num_threads] for i in range(num_threads))))
        return len(offsets) * record_bytes / (time.perf_counter() - begin) / 1e6


def _churn(
    store: SegmentStore, keys: Sequence[ChunkKey], layers: Sequence[LayerKV], order: random.Random, num_rounds: int
) -> None:
    for _ in range(num_rounds):
        key = order.choice(keys)
        store.delete_keys([key])
        store.put([(key, layers)])
