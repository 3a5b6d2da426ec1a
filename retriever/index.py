"""Search by vectors, in FAISS. A copy of the catalogue's vectors; knows nothing about texts.

The file: magic, the catalogue's identity, the revision that was copied, FAISS's own bytes, XXH3-128 of all before.
"""

import logging
import os
import struct
import threading
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import filelock
import numpy as np
import numpy.typing as npt
import xxhash

from ragkv.errors import StoreError
from ragkv.files import atomic_write
from ragkv.retriever.catalog import Catalog

log = logging.getLogger(__name__)

BATCH = 4096  # vectors read from the catalogue at a time
MANY = 0.1  # added vectors, as a share of those in the file, from which on `save(few=False)` writes
BLOCK = 1 << 20
DIGEST_BYTES = 16
HEADER = struct.Struct("<8s32sq")  # magic, identity, revision
MAGIC = b"ragkvix1"


class VectorIndex:
    """Exact search by inner product over the catalogue's vectors. Usable from many threads.

    Reads `path` if it is sound. A missing or damaged file, or one of another catalogue, costs no more than a rebuild at
    the next `sync`. Nothing is written before `save`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.RLock()
        self._index: Any = None  # faiss.IndexIDMap2, whose stubs don't know NumPy's arrays
        self._identity = ""
        self._revision = -1
        self._saved_revision, self._num_saved = -1, 0
        try:
            self._read()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("the vector index '%s' is rebuilt from the catalogue: %s", self._path, error)

    def __len__(self) -> int:
        """Return the number of chunks that can be found."""
        with self._lock:
            return self._index.ntotal if self._index is not None else 0

    def sync(self, catalog: Catalog) -> bool:
        """Bring the index to exactly the catalogue's chunks. Returns False if nothing had changed: one small query.

        If it fails halfway, the next call continues. Raises StoreError if the catalogue fails.
        """
        with self._lock:
            revision = catalog.data_version
            if (self._identity, self._revision) == (catalog.identity, revision):
                return False
            if self._identity != catalog.identity or self._revision > revision:
                # another catalogue, or an older copy put back: the same ids may mean other chunks
                self._index, self._identity = None, catalog.identity
                self._saved_revision, self._num_saved = -1, 0
            present, indexed = catalog.chunk_ids(), set(self._ids())
            if deleted := sorted(indexed - present):
                self._index.remove_ids(np.array(deleted, np.int64))
                self._num_saved = 0  # the file must not keep them
            missing = sorted(present - indexed)
            for start in range(0, len(missing), BATCH):
                self._add(*catalog.vectors(missing[start : start + BATCH]))
            self._revision = revision
            return True

    def search(self, vector: npt.NDArray[np.float32], top_k: int) -> list[tuple[int, float]]:
        """Return up to `top_k` pairs (chunk id, inner product) for `vector` `[dim]`, best first.

        Raises StoreError if the vector's dimension isn't the index's.
        """
        with self._lock:
            if not (top_k := min(top_k, len(self))):
                return []
            if vector.shape != (self._index.d,):
                raise StoreError(
                    f"a question of {vector.shape} doesn't fit an index of {self._index.d} dimensions; use the "
                    "embedder that the documents were indexed with"
                )
            scores, ids = self._index.search(np.asarray(vector, np.float32)[None], top_k)
            return list(zip(ids[0].tolist(), scores[0].tolist(), strict=True))

    def save(self, *, few: bool = True) -> None:
        """Write the file, all or nothing, if anything has changed since it was read or written.

        few: write also if no more than a few vectors were added, which a later process' `sync` would add again. Of two
        processes that save, the later one wins. Raises StoreError if there's no space left.
        """
        with self._lock:
            if self._index is None or self._revision == self._saved_revision:
                return
            if not few and len(self) < (1 + MANY) * self._num_saved:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with filelock.FileLock(f"{self._path}.lock"), atomic_write(self._path) as file:
                    self._write(file)
            except (OSError, RuntimeError) as error:
                raise StoreError(
                    f"can't write '{self._path}' ({error}); free some space or check its rights"
                ) from error
            self._saved_revision, self._num_saved = self._revision, len(self)

    def _ids(self) -> list[int]:
        ids: list[int] = faiss.vector_to_array(self._index.id_map).tolist() if self._index is not None else []
        return ids

    def _add(self, ids: list[int], vectors: npt.NDArray[np.float32]) -> None:
        if not ids:
            return
        if self._index is None or not self._index.ntotal:
            self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), np.array(ids, np.int64))

    def _read(self) -> None:
        with self._path.open("rb") as file:
            _check_digest(file)
            magic, identity, revision = HEADER.unpack(file.read(HEADER.size))
            if magic != MAGIC:
                raise ValueError("it is of another version")
            index = faiss.read_index(faiss.PyCallbackIOReader(file.read))  # type: ignore[attr-defined]
        if not isinstance(index, faiss.IndexIDMap2):
            raise ValueError(f"it holds a {type(index).__name__}")
        self._index, self._identity, self._revision = index, identity.decode("ascii"), revision
        self._saved_revision, self._num_saved = revision, index.ntotal

    def _write(self, file: BinaryIO) -> None:
        digest = xxhash.xxh3_128()

        def write(data: bytes) -> int:
            digest.update(data)
            return file.write(data)

        write(HEADER.pack(MAGIC, self._identity.encode("ascii"), self._revision))
        faiss.write_index(self._index, faiss.PyCallbackIOWriter(write))  # type: ignore[attr-defined]
        file.write(digest.digest())


def _check_digest(file: BinaryIO) -> None:
    """Compare the file with its last bytes and rewind it. FAISS must not parse damaged bytes: it trusts their sizes."""
    remaining = file.seek(0, os.SEEK_END) - DIGEST_BYTES
    if remaining < HEADER.size:
        raise ValueError("it is cut short")
    file.seek(0)
    digest = xxhash.xxh3_128()
    while remaining:
        block = file.read(min(BLOCK, remaining))
        digest.update(block)
        remaining -= len(block)
    if file.read() != digest.digest():
        raise ValueError("it is damaged")
    file.seek(0)
