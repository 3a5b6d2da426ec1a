"""The catalogue of documents, chunks and vectors: one SQLite file, which indexes copy. Knows nothing about KV."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ragkv.errors import StoreError
from ragkv.files import Database
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash

APPLICATION_ID = 0x7261676B  # "ragk"

# Entry i brings a file from version i to i + 1 (PRAGMA user_version). Never edit an entry that was released: append.
MIGRATIONS = (
    (
        "CREATE TABLE catalog (revision INTEGER NOT NULL)",
        "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE documents (id TEXT PRIMARY KEY, title TEXT NOT NULL, digest TEXT NOT NULL)",
        """CREATE TABLE chunks (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,
            text TEXT NOT NULL,
            token_ids BLOB NOT NULL,
            hash TEXT NOT NULL,
            vector BLOB NOT NULL,
            UNIQUE (document_id, ordinal)
        )""",
        "CREATE INDEX chunks_by_hash ON chunks (hash)",
    ),
)

_CHUNK = "SELECT id, document_id, ordinal, text, token_ids, hash FROM chunks"


@dataclass(frozen=True)
class Chunk:
    """An indexed chunk. Its `id` is never given to another chunk; chunks of the same tokens share a `chunk_hash`."""

    id: int
    document_id: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    chunk_hash: str


@dataclass(frozen=True)
class DocumentInfo:
    """A document as `Catalog.documents` lists it."""

    name: str
    title: str
    num_chunks: int
    num_tokens: int


class Catalog:
    """An open catalogue. Many threads may share it, and many processes may open the same file.

    Opening makes the file if there is none. What a method has written survives kill -9 and loss of power. Every method
    raises StoreError if SQLite fails: no space left, a damaged file, or another process that writes for longer than a
    minute. scope: that of `chunk_hash`, always the same for the same file.
    """

    def __init__(self, path: str | Path, scope: str = "") -> None:
        self.path, self.scope = Path(path), scope
        with self._translated():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = Database(self.path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    @property
    def data_version(self) -> int:
        """A number that grows with every change to documents, by any process. Costs microseconds."""
        return int(self._rows("SELECT revision FROM catalog")[0][0])

    def document_digest(self, id: str) -> str | None:
        """Return the digest that the document was put with, None if it isn't in the catalogue."""
        rows = self._rows("SELECT digest FROM documents WHERE id = ?", id)
        return str(rows[0][0]) if rows else None

    def put_document(
        self, id: str, title: str, digest: str, chunks: Sequence[ChunkText], vectors: npt.NDArray[np.float32]
    ) -> None:
        """Write the document with its chunks and their vectors `[n, dim]` in place of an earlier version, or nothing.

        Raises ValueError unless there is a vector per chunk, StoreError if other documents' vectors have another `dim`.
        """
        vectors = np.asarray(vectors, "<f4")
        if len(chunks) != len(vectors) or (len(chunks) and vectors.ndim != 2):
            raise ValueError(f"{len(chunks)} chunks need as many vectors; the array is {vectors.shape}")
        statement = "INSERT INTO chunks (document_id, ordinal, text, token_ids, hash, vector) VALUES (?, ?, ?, ?, ?, ?)"
        with self._writing() as run:
            run("DELETE FROM documents WHERE id = ?", id)
            other = run("SELECT length(vector) / 4 FROM chunks LIMIT 1")
            if len(chunks) and other and other[0][0] != vectors.shape[1]:
                raise StoreError(
                    f"vectors of {vectors.shape[1]} dimensions don't fit the {other[0][0]} of '{self.path}'; use the "
                    "embedder it was made with, or delete its documents first"
                )
            run("INSERT INTO documents (id, title, digest) VALUES (?, ?, ?)", id, title, digest)
            for i, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True)):
                token_ids, hash = np.asarray(chunk.token_ids, "<i4"), chunk_hash(chunk.token_ids, self.scope)
                run(statement, id, i, chunk.text, token_ids.tobytes(), hash, vector.tobytes())
            run("UPDATE catalog SET revision = revision + 1")

    def delete_document(self, id: str) -> bool:
        """Delete the document and its chunks. Returns whether the catalogue had it."""
        with self._writing() as run:
            deleted = run("DELETE FROM documents WHERE id = ? RETURNING id", id)
            if deleted:
                run("UPDATE catalog SET revision = revision + 1")
        return bool(deleted)

    def empty_log(self) -> None:
        """Remove what was deleted from SQLite's log too. Raises StoreError if another process reads for too long."""
        if self._rows("PRAGMA wal_checkpoint(TRUNCATE)")[0][0]:
            raise StoreError(
                f"what was deleted is still in '{self.path}-wal': another process reads the catalogue. Stop it, and "
                "run `ragkv store gc`"
            )

    @property
    def has_documents(self) -> bool:
        return bool(self._rows("SELECT 1 FROM documents LIMIT 1"))

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """Return documents sorted by id: up to `limit` of those whose ids follow `after`."""
        return self._infos("id > ? ORDER BY id LIMIT ?", after, -1 if limit is None else limit)

    def document_infos(self, ids: Iterable[str]) -> list[DocumentInfo]:
        """Return those of these documents that the catalogue has, sorted by id."""
        return self._infos("id IN (SELECT value FROM json_each(?))", json.dumps(list(ids)))

    @property
    def text_bytes(self) -> int:
        """The size of all chunks' texts in UTF-8. Reads them all."""
        return int(self._rows("SELECT coalesce(sum(length(CAST(text AS BLOB))), 0) FROM chunks")[0][0])

    def document_ids(self) -> list[str]:
        return [str(row[0]) for row in self._rows("SELECT id FROM documents ORDER BY id")]

    def document_ids_of(self, name: str) -> list[str]:
        """Return `name` if it is a document's id, and the ids that begin with `name#`; uses the index."""
        query = "SELECT id FROM documents WHERE id = ? OR (id >= ? AND id < ?) ORDER BY id"
        return [str(row[0]) for row in self._rows(query, name, f"{name}#", f"{name}$")]  # '$' comes after '#'

    def titles(self, ids: Iterable[str]) -> dict[str, str]:
        """Return titles by id, of those of these documents that the catalogue has."""
        return dict(self._rows_in("SELECT id, title FROM documents WHERE id", ids))

    def chunks(self, ids: Iterable[int]) -> list[Chunk]:
        """Return the chunks in the order of `ids`, without deleted ones."""
        ids = list(ids)
        row_of = {row[0]: row for row in self._rows_in(f"{_CHUNK} WHERE id", ids)}
        return [_chunk(row_of[id]) for id in ids if id in row_of]

    def document_chunks(self, id: str) -> list[Chunk]:
        """Return the document's chunks in their order; none if it isn't in the catalogue."""
        return [_chunk(row) for row in self._rows(f"{_CHUNK} WHERE document_id = ? ORDER BY ordinal", id)]

    def chunk_of(self, hash: str) -> Chunk | None:
        """Return any chunk with this hash, as all of them have the same text; None if there is none."""
        rows = self._rows(f"{_CHUNK} WHERE hash = ? LIMIT 1", hash)
        return _chunk(rows[0]) if rows else None

    def num_tokens(self, hashes: Iterable[str]) -> dict[str, int]:
        """Return the lengths in tokens, by hash, of those of these chunks that the catalogue has."""
        return dict(self._rows_in("SELECT hash, length(token_ids) / 4 FROM chunks WHERE hash", hashes))

    def chunk_ids(self) -> set[int]:
        return {row[0] for row in self._rows("SELECT id FROM chunks")}

    def ids_after(self, id: int) -> list[int]:
        """Return the chunks' ids above `id`, sorted: those of chunks that came later."""
        return [row[0] for row in self._rows("SELECT id FROM chunks WHERE id > ? ORDER BY id", id)]

    def chunk_hashes(self) -> set[str]:
        return {row[0] for row in self._rows("SELECT DISTINCT hash FROM chunks")}

    def chunk_hashes_of(self, document_ids: Iterable[str]) -> set[str]:
        return {row[0] for row in self._rows_in("SELECT hash FROM chunks WHERE document_id", document_ids)}

    def hashes_by_document(self, document_ids: Iterable[str]) -> dict[str, list[str]]:
        """Return the hashes of the chunks of each of these documents that has any."""
        hashes: dict[str, list[str]] = {}
        for id, hash in self._rows_in("SELECT document_id, hash FROM chunks WHERE document_id", document_ids):
            hashes.setdefault(id, []).append(hash)
        return hashes

    def documents_with(self, hashes: Iterable[str]) -> set[str]:
        """Return the ids of the documents that have any of these chunks."""
        return {row[0] for row in self._rows_in("SELECT DISTINCT document_id FROM chunks WHERE hash", hashes)}

    def unreferenced(self, hashes: Iterable[str]) -> set[str]:
        """Return those of `hashes` that no chunk of any document has."""
        hashes = set(hashes)
        return hashes - {row[0] for row in self._rows_in("SELECT hash FROM chunks WHERE hash", hashes)}

    def vectors(self, ids: Iterable[int]) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Return those of `ids` that aren't deleted, and their vectors `[n, dim]` in the same order."""
        rows = self._rows_in("SELECT id, vector FROM chunks WHERE id", ids)
        vectors = np.frombuffer(b"".join(row[1] for row in rows), "<f4")
        return [row[0] for row in rows], vectors.reshape(len(rows), -1) if rows else vectors.reshape(0, 0)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Return texts by id, of those of `ids` that aren't deleted."""
        return dict(self._rows_in("SELECT id, text FROM chunks WHERE id", ids))

    def tokens(self, ids: Iterable[int]) -> dict[int, tuple[str, npt.NDArray[np.int32]]]:
        """Return hash and token ids `[T]`, by id, of those of `ids` that aren't deleted."""
        rows = self._rows_in("SELECT id, hash, token_ids FROM chunks WHERE id", ids)
        return {id: (hash, np.frombuffer(token_ids, "<i4")) for id, hash, token_ids in rows}

    def get_setting(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM settings WHERE name = ?", name)
        return str(rows[0][0]) if rows else None

    def put_setting(self, name: str, value: str) -> None:
        with self._writing() as run:
            run("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", name, value)

    def _open(self) -> None:
        """Check whose file this is before anything is written to it, then bring it to this version."""
        self._check()
        with self._translated():
            self._db.make_durable()  # a commit that got lost could give a chunk id out twice: indexes rely on it
            self._db.run("PRAGMA foreign_keys = ON")
            self._db.run("PRAGMA secure_delete = ON")  # zeros where a deleted document was
        with self._writing() as run:
            version = self._check()
            for statement in chain.from_iterable(MIGRATIONS[version:]):
                run(statement)
            if version == 0:
                run("INSERT INTO catalog (revision) VALUES (0)")
                run(f"PRAGMA application_id = {APPLICATION_ID}")
            run(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _check(self) -> int:
        """Return the file's version, 0 for a new one. Raises StoreError for files that aren't ours to change."""
        ((application, version, num_tables),) = self._rows(  # one statement, or another process may write between two
            "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
            "FROM pragma_application_id, pragma_user_version"
        )
        if application != APPLICATION_ID and (num_tables or version):
            raise StoreError(f"'{self.path}' is another program's database; choose another place for the catalogue")
        if version > len(MIGRATIONS):
            raise StoreError(
                f"'{self.path}' was made by a newer ragkv (version {version}, this one knows {len(MIGRATIONS)}); "
                "upgrade ragkv"
            )
        return int(version)

    def _infos(self, which: str, *parameters: object) -> list[DocumentInfo]:
        rows = self._rows(
            "SELECT d.id, d.title, count(c.id), coalesce(sum(length(c.token_ids)) / 4, 0) "
            f"FROM (SELECT * FROM documents WHERE {which}) d "
            "LEFT JOIN chunks c ON c.document_id = d.id GROUP BY d.id ORDER BY d.id",
            *parameters,
        )
        return [DocumentInfo(*row) for row in rows]

    def _rows(self, query: str, *parameters: object) -> list[Any]:
        with self._translated():
            return self._db.run(query, *parameters)

    def _rows_in(self, query: str, values: Iterable[int] | Iterable[str]) -> list[Any]:
        """Run a query that ends in a column's name, for the rows that have one of `values` there."""
        return self._rows(f"{query} IN (SELECT value FROM json_each(?))", json.dumps(list(values)))

    @contextmanager
    def _writing(self) -> Iterator[Callable[..., list[Any]]]:
        with self._translated(), self._db.writing():
            yield self._db.run

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the catalogue '{self.path}' can't be used: {error}; {_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    message = str(error)
    for sign, remedy in (
        ("locked", "wait for the other process that is writing, or stop it"),
        ("full", "free some space"),
        ("not a database", "choose another place for the catalogue"),
        ("malformed", "remove it and index the documents again"),
    ):
        if sign in message:
            return remedy
    return "check the path and its rights"


def _chunk(row: Sequence[Any]) -> Chunk:
    id, document_id, ordinal, text, token_ids, hash = row
    return Chunk(id, document_id, ordinal, text, tuple(np.frombuffer(token_ids, "<i4").tolist()), hash)
