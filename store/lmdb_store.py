"""The KV store on disk: one LMDB environment, one writer at a time, any number of readers in other processes.

LMDB commits by copy-on-write and fsync: a process killed at any moment leaves the last committed state. A value is read
in place from the page cache, without a copy.
"""

import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb

from ragkv.errors import StoreError
from ragkv.store.base import StoreStats, Verification
from ragkv.store.codecs import RAW, Codec
from ragkv.store.record import FORMAT_VERSION, ChunkKey, LayerKV, decode, encode
from ragkv.store.verification import HASH_BYTES, verify_records

_FORMAT_KEY = b"format"
_DEFAULT_MAP_BYTES = 1 << 40  # address space, not disk: the file grows as records come
_NEARLY_FULL_BYTES = 64 << 20
_PAST_EVERY_KEY = b"\xff" * 64  # appended to a chunk's hash: sorts behind all of that chunk's keys


class LmdbStore:
    """Chunk KV in the folder `path`. codec: how records are written; those that are there may have others.

    A process may open a folder once; any number of processes may have it open. Raises StoreError if the folder holds
    something else, was made by another version, or can't be written.
    """

    def __init__(self, path: Path, map_bytes: int = _DEFAULT_MAP_BYTES, codec: Codec = RAW) -> None:
        self.path, self._codec = path, codec
        self._write_lock = threading.Lock()
        try:
            path.mkdir(parents=True, exist_ok=True)
            # readahead pays for whole-record reads; max_dbs: one for records, one for what the store says of itself
            self._env = lmdb.open(str(path), map_size=map_bytes, max_dbs=2, max_readers=512)
            self._records = self._env.open_db(b"records")
            self._meta = self._env.open_db(b"meta")
            self._check_format()
        except (lmdb.Error, OSError) as error:
            raise self._storage_error("open", error) from error

    def _check_format(self) -> None:
        expected = str(FORMAT_VERSION).encode()
        with self._env.begin(db=self._meta) as txn:
            found = txn.get(_FORMAT_KEY)
        if found is None:
            with self._env.begin(db=self._meta, write=True) as txn:
                txn.put(_FORMAT_KEY, expected)
        elif found != expected:
            self._env.close()
            raise StoreError(
                f"{self.path} holds KV records of format {found.decode(errors='replace')}; this release reads format "
                f"{FORMAT_VERSION}. Use the release that wrote it, another --home, or delete the folder and index again"
            )

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        try:
            with self._write_lock, self._env.begin(db=self._records, write=True) as txn:
                for key, layers in chunks:
                    for i, kv in enumerate(layers):
                        txn.put(key.layer(i), encode(key.layer(i), kv, self._codec))
        except (lmdb.Error, OSError) as error:
            raise self._storage_error("write to", error) from error

    def contains(self, key: ChunkKey) -> bool:
        with self._env.begin(db=self._records, buffers=True) as txn:
            return txn.get(key.layer(0)) is not None

    @contextmanager
    def snapshot(self) -> Iterator["_LmdbSnapshot"]:
        with self._env.begin(db=self._records, buffers=True) as txn:
            yield _LmdbSnapshot(txn)

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        num_deleted = 0
        try:
            with self._write_lock, self._env.begin(db=self._records, write=True) as txn, txn.cursor() as cursor:
                for prefix in map(bytes.fromhex, chunk_hashes):
                    while cursor.set_range(prefix) and cursor.key().startswith(prefix):
                        cursor.delete()
                        num_deleted += 1
        except (lmdb.Error, OSError) as error:
            raise self._storage_error("delete from", error) from error
        return num_deleted

    def chunk_hashes(self) -> Iterator[str]:
        with self._env.begin(db=self._records, buffers=True) as txn, txn.cursor() as cursor:
            found = cursor.first()
            while found:
                prefix = bytes(cursor.key())[:HASH_BYTES]
                yield prefix.hex()
                found = cursor.set_range(prefix + _PAST_EVERY_KEY)

    def stats(self) -> StoreStats:
        with self._env.begin(db=self._records, buffers=True) as txn, txn.cursor() as cursor:
            size_bytes = sum(len(value) for value in cursor.iternext(keys=False))
            num_records = txn.stat(self._records)["entries"]
        file_bytes = sum(file.stat().st_blocks * 512 for file in self.path.iterdir())
        return StoreStats(len(list(self.chunk_hashes())), num_records, size_bytes, file_bytes)

    def verify(self) -> Verification:
        with self._env.begin(db=self._records, buffers=True) as txn, txn.cursor() as cursor:
            return verify_records((bytes(key), value) for key, value in cursor)

    def close(self) -> None:
        self._env.close()

    def _storage_error(self, verb: str, error: Exception) -> StoreError:
        free = shutil.disk_usage(self.path).free if self.path.exists() else 0
        full = isinstance(error, lmdb.MapFullError) or free < _NEARLY_FULL_BYTES  # a full disk is EIO to LMDB
        remedy = "Free some space, or choose another --home" if full else "Is it a ragkv store that you may write to?"
        return StoreError(
            f"can't {verb} the KV store {self.path} ({free >> 20} MiB free on its disk): {error}. {remedy}"
        )


class _LmdbSnapshot:
    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        value = self._txn.get(key.layer(layer))
        return None if value is None else decode(key.layer(layer), value)
