import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ragkv.errors import StoreError
from ragkv.retriever.catalog import MIGRATIONS, Catalog, Chunk, DocumentInfo
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash

Put = Callable[..., None]


def all_chunks(catalog: Catalog) -> list[Chunk]:
    return catalog.chunks(sorted(catalog.chunk_ids()))


def texts(catalog: Catalog) -> list[str]:
    return [chunk.text.strip() for chunk in all_chunks(catalog)]


def hashes_of(*texts: str) -> set[str]:
    return {chunk_hash(tuple(f"{text}\n\n".encode())) for text in texts}


def test_chunk_hash_is_fixed() -> None:
    assert chunk_hash((1, 2, 70000)) == chunk_hash(np.array([1, 2, 70000])) == "64add97e97a8e23d60a4ea405258b5c1"
    assert chunk_hash([1, 2]) != chunk_hash([2, 1])


def test_document_comes_back_as_it_was(catalog: Catalog, put: Put, embedder) -> None:
    assert catalog.document_digest("a") is None
    put(catalog, "a", "one fox", "two dogs", digest="d1")
    assert catalog.document_digest("a") == "d1"
    assert catalog.documents() == [DocumentInfo("a", "A", 2, 19)]
    first, second = all_chunks(catalog)
    assert (first.document_id, first.ordinal, first.text) == ("a", 0, "one fox\n\n")
    assert first.token_ids == tuple(b"one fox\n\n") and first.chunk_hash == chunk_hash(first.token_ids)
    ids, vectors = catalog.vectors([second.id, first.id, 99])
    np.testing.assert_array_equal(
        vectors, embedder.embed(["one fox", "two dogs"])[[ids.index(first.id), ids.index(second.id)]]
    )
    assert catalog.document_chunks("a") == [first, second]


def test_chunks_come_in_the_order_asked(catalog: Catalog, put: Put) -> None:
    put(catalog, "a", *(f"text {i}" for i in range(1000)))
    ids = sorted(catalog.chunk_ids(), key=lambda id: id * 7919 % 1000)
    assert [chunk.id for chunk in catalog.chunks([ids[0], 10**9, *ids])] == [ids[0], *ids]
    assert [chunk.id for chunk in all_chunks(catalog)] == sorted(ids)
    assert catalog.chunks([]) == [] and catalog.vectors([])[0] == []


def test_replaced_document_leaves_nothing_behind(catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "one", "two", "three", digest="d1")
    old_ids = catalog.chunk_ids()
    put(catalog, "a", "two", "four", digest="d2")
    assert texts(catalog) == ["two", "four"]
    assert catalog.document_digest("a") == "d2"
    assert not old_ids & catalog.chunk_ids(), "ids are never used again"
    assert catalog.unreferenced(hashes_of("one", "two", "three", "four")) == hashes_of("one", "three")


def test_deleted_document(catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "one")
    put(catalog, "b", "two")
    last = max(catalog.chunk_ids())
    assert catalog.delete_document("b") and not catalog.delete_document("b")
    assert texts(catalog) == ["one"] and [info.name for info in catalog.documents()] == ["a"]
    put(catalog, "c", "three")
    assert max(catalog.chunk_ids()) > last


def test_shared_chunk_is_referenced_until_both_are_gone(catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "shared", "mine")
    put(catalog, "b", "shared")
    assert catalog.chunk_hashes() == hashes_of("shared", "mine")
    catalog.delete_document("a")
    assert catalog.unreferenced(hashes_of("shared", "mine", "never seen")) == hashes_of("mine", "never seen")
    catalog.delete_document("b")
    assert catalog.unreferenced(hashes_of("shared")) == hashes_of("shared")
    assert catalog.chunk_hashes() == set() and catalog.unreferenced([]) == set()


def test_documents_of_a_name(catalog: Catalog, put: Put) -> None:
    for id in ("a", "a!", "a#", "a#1", "a#é", "a#\U0010ffff", "a$", "a.txt", "A#1", "b#1"):
        put(catalog, id, id)
    assert catalog.document_ids_of("a") == ["a", "a#", "a#1", "a#é", "a#\U0010ffff"]
    assert catalog.document_ids_of("a#1") == ["a#1"] and catalog.document_ids_of("b") == ["b#1"]
    assert catalog.document_ids_of("") == catalog.document_ids_of("c") == []


def test_document_without_chunks(catalog: Catalog) -> None:
    catalog.put_document("a", "A", "d", [], np.empty((0, 0), np.float32))
    assert catalog.documents() == [DocumentInfo("a", "A", 0, 0)]


def test_failed_put_changes_nothing(catalog: Catalog, put: Put, chunk: Callable[[str], ChunkText]) -> None:
    put(catalog, "a", "one")
    put(catalog, "b", "other")
    version = catalog.data_version
    with pytest.raises(ValueError, match="2 chunks"):
        catalog.put_document("a", "A", "d2", [chunk("x"), chunk("y")], np.ones((1, 16), np.float32))
    with pytest.raises(StoreError, match="8 dimensions"):
        catalog.put_document("a", "A", "d2", [chunk("x")], np.ones((1, 8), np.float32))
    with pytest.raises(StoreError):
        catalog.put_document("a", None, "d2", [chunk("x")], np.ones((1, 16), np.float32))  # type: ignore[arg-type]
    assert texts(catalog) == ["one", "other"] and catalog.document_digest("a") == "digest"
    assert catalog.data_version == version


def test_last_document_may_change_its_dimension(catalog: Catalog, put: Put, chunk: Callable[[str], ChunkText]) -> None:
    put(catalog, "a", "one")
    catalog.put_document("a", "A", "d2", [chunk("x")], np.ones((1, 8), np.float32))
    assert catalog.vectors(catalog.chunk_ids())[1].shape == (1, 8)


def test_two_connections_see_each_other(tmp_path: Path, put: Put) -> None:
    with Catalog(tmp_path / "c.db") as one, Catalog(tmp_path / "c.db") as two:
        before = two.data_version
        put(one, "a", "one")
        assert two.data_version == one.data_version > before
        assert texts(two) == ["one"]
        between = one.data_version
        two.put_setting("embedder", "x")
        two.delete_document("missing")
        assert one.data_version == between and one.get_setting("embedder") == "x"
        two.delete_document("a")
        assert one.data_version > between and one.documents() == []


def test_settings(catalog: Catalog) -> None:
    assert catalog.get_setting("embedder") is None
    catalog.put_setting("embedder", "a")
    catalog.put_setting("embedder", "b")
    assert catalog.get_setting("embedder") == "b"


def test_reopened_catalog_is_the_same(tmp_path: Path, put: Put) -> None:
    with Catalog(tmp_path / "new" / "c.db") as catalog:
        put(catalog, "a", "one")
        before = (catalog.data_version, all_chunks(catalog))
    with Catalog(tmp_path / "new" / "c.db") as catalog:
        assert (catalog.data_version, all_chunks(catalog)) == before
    with pytest.raises(StoreError, match="closed"):
        catalog.documents()


WRITE = """
import sys
import numpy as np
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import ChunkText
path, name = sys.argv[1:]
with Catalog(path) as catalog:
    for i in range(10):
        chunks = [ChunkText("shared", (0,)), ChunkText(name, (i,))]
        catalog.put_document(f"{name}{i}", name, "digest", chunks, np.ones((2, 16), np.float32))
"""

DIE_WHILE_WRITING = """
import os, signal, sys
from ragkv.retriever.catalog import Catalog
catalog = Catalog(sys.argv[1])
assert catalog.delete_document("b")
with catalog._writing() as run:
    run("DELETE FROM documents")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_write_at_once(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", WRITE, tmp_path / "c.db", name] for name in "abc"]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    with Catalog(tmp_path / "c.db") as catalog:
        assert len(catalog.documents()) == 30 and len(catalog.chunk_ids()) == 60 and catalog.data_version == 30


def test_many_make_the_same_file_at_once(tmp_path: Path) -> None:
    for i in range(100):
        start = threading.Barrier(6)

        def open_it(path: Path = tmp_path / f"{i}.db", start: threading.Barrier = start) -> list[tuple[int]]:
            start.wait(60)
            with Catalog(path) as catalog:
                return catalog._rows("SELECT revision FROM catalog")

        with ThreadPoolExecutor(6) as pool:
            assert [opened.result() for opened in [pool.submit(open_it) for _ in range(6)]] == [[(0,)]] * 6


def test_waits_for_whoever_makes_the_same_file(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")  # SQLite doesn't wait for it by itself to change the file's mode
    release = threading.Timer(0.3, other.close)
    release.start()
    Catalog(tmp_path / "c.db").close()
    release.join()


def test_killed_process_leaves_what_was_committed(tmp_path: Path, put: Put) -> None:
    with Catalog(tmp_path / "c.db") as catalog:
        put(catalog, "a", "one")
        put(catalog, "b", "two")
    assert subprocess.run([sys.executable, "-c", DIE_WHILE_WRITING, tmp_path / "c.db"]).returncode == -9
    with Catalog(tmp_path / "c.db") as catalog:
        assert texts(catalog) == ["one"]


def test_threads_share_one_catalog(catalog: Catalog, put: Put) -> None:
    stop = threading.Event()

    def read() -> int:
        reads = 0
        while not stop.is_set() or not reads:
            for info in catalog.documents():
                assert info.num_chunks == 3
            ordinals = [chunk.ordinal for chunk in catalog.document_chunks("d0")]
            assert ordinals in ([], [0, 1, 2])
            reads += 1
        return reads

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        writers = [pool.submit(put, catalog, f"d{i % 5}", f"a{i}", f"b{i}", f"c{i}") for i in range(40)]
        for writer in writers:
            writer.result()
        stop.set()
        assert all(reader.result() > 0 for reader in readers)
    assert len(catalog.documents()) == 5 and catalog.data_version == 40


def test_newer_catalog_is_refused(tmp_path: Path) -> None:
    Catalog(tmp_path / "c.db").close()
    db = sqlite3.connect(tmp_path / "c.db")
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StoreError, match="newer"):
        Catalog(tmp_path / "c.db")


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "other.db")
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    (tmp_path / "text.db").write_text("not a database at all, but long enough to be read as one " * 20)
    for name, says in (("other.db", "another program"), ("text.db", "not a database")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(StoreError, match=says):
            Catalog(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(StoreError, match="path"):
        Catalog(tmp_path)


def test_writes_are_synced(catalog: Catalog) -> None:
    assert catalog._rows("PRAGMA journal_mode") == [("wal",)]
    assert catalog._rows("PRAGMA synchronous") == [(2,)]
    assert catalog._rows("PRAGMA foreign_keys") == [(1,)]


def test_importing_the_catalog_loads_nothing_heavy() -> None:
    code = (
        "import sys; import ragkv.retriever.catalog, ragkv.retriever.parse, ragkv.retriever.encoders\n"
        "print(*sorted({'torch', 'faiss', 'sentence_transformers', 'transformers', 'selectolax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
