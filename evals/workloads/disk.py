"""`ragkv eval store`: how fast a store writes and reads, next to its disk, a copy in memory, and the checksum alone.

Chunks are read as the fusions of a queue read them: a layer of several chunks at a time, the next layer announced, and
the next request's chunks prefetched while it waits. Needs no model.
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

import torch
import xxhash

from ragkv.config import Config
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Store
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV

_LAYERS = 8
_AT_A_TIME = 8  # chunks of a request
_HEAD_SIZE = 64
_HEADER_BYTES = 4096  # more than a record has next to its numbers
_THREADS = 4


def run(config: Config, wanted: Store, progress: Progress) -> Iterator[Row]:
    """Yield a row for each size of a record: of `mib` MiB in a store of its own in the home, in MB/s.

    churn: how many times the store's size is deleted and written anew, chunk by chunk. Reads are medians over the
    rounds, each of which reads in every way. Raises StoreError where there is no room.
    """
    config.home.mkdir(parents=True, exist_ok=True)
    for kib in wanted.records:
        progress.update(f"records of {kib} KiB")
        with tempfile.TemporaryDirectory(dir=config.home, prefix="eval-store-") as folder:
            yield {"record_kib": kib, "mib": wanted.mib, **_measure(Path(folder), kib << 10, wanted)}


def _measure(folder: Path, record_bytes: int, wanted: Store) -> Row:
    total_bytes = wanted.mib << 20
    num_chunks = max(1, total_bytes // (record_bytes * _LAYERS))
    keys = [_key(i) for i in range(num_chunks)]
    num_tokens = max(1, (record_bytes - _HEADER_BYTES) // (2 * 4 * _HEAD_SIZE))
    shape = (1, num_tokens, _HEAD_SIZE)
    layers = [LayerKV(torch.randn(shape), torch.randn(shape), base_position=0) for _ in range(_LAYERS)]
    size = num_chunks * sum(kv.size_bytes for kv in layers)
    order = random.Random(0)

    def write(store: DiskStore) -> None:
        for group in _requests(keys):
            store.put((key, layers) for key in group)

    row: Row = {"chunks": num_chunks, "layers": _LAYERS}
    store = DiskStore(folder / "kv")
    pooled = DiskStore(folder / "kv", memory_bytes=2 * total_bytes)
    try:
        row["write"] = _mb_s(lambda: write(store), size)
        file, target, source = store.admin.locate(keys[0], 0)[0], torch.zeros(size // 4), torch.randn(size // 4)
        parts = target.view(num_chunks, _LAYERS, 2, *shape)
        copies = [[(part[0], part[1]) for part in chunk] for chunk in parts]
        pooled.touch(keys)
        _read(pooled, keys)
        seen: dict[str, list[float]] = {}
        for _ in range(wanted.repeats):
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
                seen.setdefault(way, []).append(_mb_s(do, size))
            for threads in (1, _THREADS):
                with suppress(OSError):  # a file system that can't
                    seen.setdefault(f"disk_{threads}", []).append(_of_disk(file, record_bytes, threads))
        row |= {way: median(values) for way, values in seen.items() if values}
        if num_rounds := round(wanted.churn * num_chunks):
            row["churn"] = _mb_s(lambda: _churn(store, keys, layers, order, num_rounds), size / num_chunks * num_rounds)
        stats = store.admin.stats()
        row["file_mib"], row["record_mib"] = stats.file_bytes / (1 << 20), stats.size_bytes / (1 << 20)
    finally:
        pooled.close()
        store.close()
    return {name: round(value) for name, value in row.items()}


def _mb_s(do: Callable[[], object], num_bytes: float) -> float:
    begin = time.perf_counter()
    do()
    return num_bytes / (time.perf_counter() - begin) / 1e6


def _key(index: int) -> ChunkKey:
    return ChunkKey(f"{index:032x}", "0" * 32, "f" * 32, (0, 1))


def _requests(keys: Sequence[ChunkKey]) -> Iterator[Sequence[ChunkKey]]:
    return (keys[start : start + _AT_A_TIME] for start in range(0, len(keys), _AT_A_TIME))


_Copies = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]  # K and V, by chunk and layer


def _read(store: DiskStore, keys: Sequence[ChunkKey], copies: _Copies = ()) -> None:
    """Read all layers of all chunks, and copy them into `copies`, if given, as whoever computes with them would."""
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
    """Return the disk's MB/s for pieces as large as a record, at random offsets, past the page cache (O_DIRECT)."""
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
    store: DiskStore, keys: Sequence[ChunkKey], layers: Sequence[LayerKV], order: random.Random, num_rounds: int
) -> None:
    for _ in range(num_rounds):
        key = order.choice(keys)
        store.delete_keys([key])
        store.put([(key, layers)])
