import logging
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ragkv.errors import StoreError
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.index import HEADER, VectorIndex

Put = Callable[..., None]


def check(index: VectorIndex, catalog: Catalog) -> None:
    """The index holds exactly the catalogue's ids, and finds each chunk by its own vector."""
    assert set(index._ids()) == catalog.chunk_ids() and len(index) == len(catalog.chunk_ids())
    ids, vectors = catalog.vectors(catalog.chunk_ids())
    for id, vector in zip(ids, vectors, strict=True):
        (best, score), *_ = index.search(vector, 1)
        assert best == id and score == pytest.approx(1, abs=1e-5)


def test_sync_follows_the_catalog(tmp_path: Path, catalog: Catalog, put: Put) -> None:
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    assert len(index) == 0
    put(catalog, "a", "one fox", "two dogs")
    put(catalog, "b", "three cats")
    assert index.sync(catalog) and not index.sync(catalog)
    check(index, catalog)
    put(catalog, "a", "four birds")
    assert index.sync(catalog)
    check(index, catalog)
    catalog.delete_document("a")
    catalog.delete_document("b")
    assert index.sync(catalog) and len(index) == 0
    put(catalog, "c", "five fish")
    index.sync(catalog)
    check(index, catalog)


def test_batches(tmp_path: Path, catalog: Catalog, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.retriever.index.BATCH", 3)
    put(catalog, "a", *(f"word{i} other{i}" for i in range(10)))
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    check(index, catalog)


def test_search_orders_by_inner_product(tmp_path: Path, catalog: Catalog, put: Put, embedder) -> None:
    put(catalog, "a", "one fox", "two dogs", "one dog")
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    question = embedder.embed_question("one fox")
    found = index.search(question, 10)
    ids, vectors = catalog.vectors(catalog.chunk_ids())
    expected = sorted(zip(ids, (vectors @ question).tolist(), strict=True), key=lambda pair: -pair[1])
    assert [id for id, _ in found] == [id for id, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)
    assert index.search(question, 2) == found[:2]


def test_empty_index_finds_nothing(tmp_path: Path) -> None:
    assert VectorIndex(tmp_path / "index").search(np.ones(16, np.float32), 5) == []


def test_question_of_another_embedder(tmp_path: Path, catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "one")
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    with pytest.raises(StoreError, match="16 dimensions"):
        index.search(np.ones(8, np.float32), 1)


def test_saved_index_is_read_back(tmp_path: Path, catalog: Catalog, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put(catalog, "a", "one fox", "two dogs")
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    index.save()
    again = VectorIndex(tmp_path / "index")
    check(again, catalog)
    assert not again.sync(catalog), "nothing is read from the catalogue again"
    (tmp_path / "index").unlink()
    again.save()
    assert not (tmp_path / "index").exists(), "nothing is written again"
    put(catalog, "b", "three cats")
    asked: list[list[int]] = []
    vectors = Catalog.vectors
    monkeypatch.setattr(Catalog, "vectors", lambda self, ids: (asked.append(list(ids)), vectors(self, ids))[1])
    again.sync(catalog)
    assert [len(ids) for ids in asked] == [1], "only what is new"
    check(again, catalog)


def test_last_document_changes_its_dimension(tmp_path: Path, catalog: Catalog, put: Put, chunk) -> None:
    put(catalog, "a", "one fox")
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    catalog.put_document("a", "A", "d2", [chunk("x")], np.eye(1, 8, dtype=np.float32))
    index.sync(catalog)
    check(index, catalog)


def test_save_writes_only_changes(tmp_path: Path, catalog: Catalog, put: Put) -> None:
    index = VectorIndex(tmp_path / "index")
    index.save()
    assert not (tmp_path / "index").exists()
    put(catalog, "a", "one")
    index.sync(catalog)
    index.save()
    (tmp_path / "index").unlink()
    index.save()
    assert not (tmp_path / "index").exists()


def test_few_new_vectors_wait_for_more_or_for_a_removal(tmp_path: Path, catalog: Catalog, put: Put) -> None:
    """The file holds every vector: writing it after each of many uploads would take ever longer."""
    index, file = VectorIndex(tmp_path / "index"), tmp_path / "index"

    def writes(**few: bool) -> bool:
        before = file.read_bytes() if file.exists() else b""
        index.sync(catalog)
        index.save(**few)
        return file.read_bytes() != before

    put(catalog, "a", *(f"text {i}" for i in range(20)))
    assert writes(few=False)
    put(catalog, "b", "one more")
    assert not writes(few=False)
    catalog.delete_document("b")
    assert writes(few=False), "what is deleted must not stay in the file"
    put(catalog, "c", "two more", "and three")
    assert writes(few=False)
    put(catalog, "d", "the last")
    assert not writes(few=False) and writes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: HEADER.size],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: data[: HEADER.size + 8] + b"\xff" * 8 + data[HEADER.size + 16 :],
    ],
)
def test_damaged_file_is_rebuilt(tmp_path: Path, catalog: Catalog, put: Put, damage, caplog) -> None:
    put(catalog, "a", "one fox", "two dogs")
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    index.save()
    (tmp_path / "index").write_bytes(damage((tmp_path / "index").read_bytes()))
    with caplog.at_level(logging.WARNING):
        repaired = VectorIndex(tmp_path / "index")
    assert len(repaired) == 0 and "rebuilt" in caplog.text
    assert repaired.sync(catalog)
    check(repaired, catalog)
    repaired.save()
    check(VectorIndex(tmp_path / "index"), catalog)


def test_index_behind_and_ahead_of_the_catalog(tmp_path: Path, catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "one fox")
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    index.save()
    put(catalog, "b", "two dogs")  # a crash before the next save
    catalog.delete_document("a")
    late = VectorIndex(tmp_path / "index")
    assert late.sync(catalog)
    check(late, catalog)


def test_older_copy_of_the_catalog_put_back(tmp_path: Path, put: Put) -> None:
    path = tmp_path / "c.db"
    with Catalog(path) as catalog:
        put(catalog, "a", "one fox")
    backup = path.read_bytes()
    with Catalog(path) as catalog:
        put(catalog, "b", "two dogs")
        index = VectorIndex(tmp_path / "index")
        put(catalog, "c", "three cats")
        index.sync(catalog)
        index.save()
    path.write_bytes(backup)
    with Catalog(path) as catalog:
        put(catalog, "d", "four birds")  # gets the id that b's chunk had
        index = VectorIndex(tmp_path / "index")
        index.sync(catalog)
        check(index, catalog)


def test_index_of_another_catalog(tmp_path: Path, put: Put) -> None:
    index = VectorIndex(tmp_path / "index")
    with Catalog(tmp_path / "old.db") as old:
        put(old, "a", "one fox", "two dogs")
        index.sync(old)
        index.save()
    with Catalog(tmp_path / "new.db") as new:
        put(new, "a", "three cats", "four birds")
        index = VectorIndex(tmp_path / "index")
        assert index.sync(new)
        check(index, new)


def test_sync_goes_on_where_it_failed(tmp_path: Path, catalog: Catalog, put: Put, monkeypatch) -> None:
    monkeypatch.setattr("ragkv.retriever.index.BATCH", 2)
    put(catalog, "a", *(f"word{i}" for i in range(5)))
    index = VectorIndex(tmp_path / "index")
    with monkeypatch.context() as patch:
        vectors = Catalog.vectors

        def fail_late(self: Catalog, ids: list[int]) -> object:
            if len(index):
                raise StoreError("the disk went away")
            return vectors(self, ids)

        patch.setattr(Catalog, "vectors", fail_late)
        with pytest.raises(StoreError):
            index.sync(catalog)
    assert len(index) == 2
    assert index.sync(catalog)
    check(index, catalog)


def test_save_that_fails_leaves_the_old_file(tmp_path: Path, catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "one fox")
    index = VectorIndex(tmp_path / "index")
    index.sync(catalog)
    index.save()
    before = (tmp_path / "index").read_bytes()
    put(catalog, "b", "two dogs")
    index.sync(catalog)
    (tmp_path / "index.tmp").mkdir()
    with pytest.raises(StoreError, match="index"):
        index.save()
    assert (tmp_path / "index").read_bytes() == before
    (tmp_path / "index.tmp").rmdir()
    index.save()
    check(VectorIndex(tmp_path / "index"), catalog)


SAVE = """
import sys
from pathlib import Path
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.index import VectorIndex
path, catalog_path = map(Path, sys.argv[1:])
with Catalog(catalog_path) as catalog:
    for _ in range(10):
        existed = path.exists()
        index = VectorIndex(path)
        assert len(index) == (200 if existed else len(index)), "a half-written file was seen"
        catalog.put_document("bump", "", "", [], [])
        index.sync(catalog)
        index.save()
"""


def test_processes_save_at_once(tmp_path: Path, put: Put) -> None:
    with Catalog(tmp_path / "c.db") as catalog:
        put(catalog, "a", *(f"word{i}" for i in range(200)))
    command = [sys.executable, "-c", SAVE, tmp_path / "index", tmp_path / "c.db"]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.glob("index*")) == ["index", "index.lock"]


def test_threads_search_while_it_changes(tmp_path: Path, catalog: Catalog, put: Put, embedder, monkeypatch) -> None:
    vectors = Catalog.vectors
    monkeypatch.setattr(Catalog, "vectors", lambda self, ids: (time.sleep(0.001), vectors(self, ids))[1])
    put(catalog, "keep", "one fox")
    index = VectorIndex(tmp_path / "index")
    (keep,) = catalog.chunk_ids()
    question = embedder.embed_question("one fox")

    def change(i: int) -> None:
        put(catalog, f"d{i % 3}", f"word{i}", f"other{i}")
        index.sync(catalog)

    def search(_: int) -> None:
        index.sync(catalog)
        assert index.search(question, 3)[0][0] == keep

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, i) for i in range(40) for work in (change, search)]:
            future.result()
    index.sync(catalog)
    check(index, catalog)
