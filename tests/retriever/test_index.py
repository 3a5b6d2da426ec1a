import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ragkv.errors import StoreError
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.index import VectorIndex

Put = Callable[..., None]


def check(index: VectorIndex, catalog: Catalog) -> None:
    """The index holds exactly the catalogue's ids, and finds each chunk by its own vector."""
    assert index._ids() == catalog.chunk_ids() and len(index) == len(catalog.chunk_ids())
    ids, vectors = catalog.vectors(catalog.chunk_ids())
    for id, vector in zip(ids, vectors, strict=True):
        (best, score), *_ = index.search(vector, 1)
        assert best == id and score == pytest.approx(1, abs=1e-5)


def test_sync_follows_the_catalog(catalog: Catalog, put: Put) -> None:
    index = VectorIndex(catalog)
    index.sync()
    assert len(index) == 0
    put(catalog, "a", "one fox", "two dogs")
    put(catalog, "b", "three cats")
    assert index.sync() and not index.sync()
    check(index, catalog)
    put(catalog, "a", "four birds")
    assert index.sync()
    check(index, catalog)
    catalog.delete_document("a")
    catalog.delete_document("b")
    assert index.sync() and len(index) == 0
    put(catalog, "c", "five fish")
    index.sync()
    check(index, catalog)


def test_batches(catalog: Catalog, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.retriever.index.BATCH", 3)
    put(catalog, "a", *(f"word{i} other{i}" for i in range(10)))
    index = VectorIndex(catalog)
    index.sync()
    check(index, catalog)


def test_search_orders_by_inner_product(catalog: Catalog, put: Put, embedder) -> None:
    put(catalog, "a", "one fox", "two dogs", "one dog")
    index = VectorIndex(catalog)
    index.sync()
    question = embedder.embed_question("one fox")[0]
    found = index.search(question, 10)
    ids, vectors = catalog.vectors(catalog.chunk_ids())
    expected = sorted(zip(ids, (vectors @ question).tolist(), strict=True), key=lambda pair: -pair[1])
    assert [id for id, _ in found] == [id for id, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)
    assert index.search(question, 2) == found[:2]


def test_empty_index_finds_nothing(catalog: Catalog) -> None:
    assert VectorIndex(catalog).search(np.ones(16, np.float32), 5) == []


def test_question_of_another_embedder(catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "one")
    index = VectorIndex(catalog)
    index.sync()
    with pytest.raises(StoreError, match="16 dimensions"):
        index.search(np.ones(8, np.float32), 1)


def test_only_what_is_new_is_read(catalog: Catalog, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put(catalog, "a", "one fox", "two dogs")
    index = VectorIndex(catalog)
    index.sync()
    put(catalog, "b", "three cats")
    asked: list[list[int]] = []
    vectors = Catalog.vectors
    monkeypatch.setattr(Catalog, "vectors", lambda self, ids: (asked.append(list(ids)), vectors(self, ids))[1])
    index.sync()
    assert [len(ids) for ids in asked] == [1]
    check(index, catalog)


def test_last_document_changes_its_dimension(catalog: Catalog, put: Put, chunk) -> None:
    put(catalog, "a", "one fox")
    index = VectorIndex(catalog)
    index.sync()
    catalog.put_document("a", "A", "d2", [chunk("x")], np.eye(1, 8, dtype=np.float32))
    index.sync()
    check(index, catalog)


def test_sync_goes_on_where_it_failed(catalog: Catalog, put: Put, monkeypatch) -> None:
    monkeypatch.setattr("ragkv.retriever.index.BATCH", 2)
    put(catalog, "a", *(f"word{i}" for i in range(5)))
    index = VectorIndex(catalog)
    with monkeypatch.context() as patch:
        vectors = Catalog.vectors

        def fail_late(self: Catalog, ids: list[int]) -> object:
            if len(index):
                raise StoreError("the disk went away")
            return vectors(self, ids)

        patch.setattr(Catalog, "vectors", fail_late)
        with pytest.raises(StoreError):
            index.sync()
    assert len(index) == 2
    assert index.sync()
    check(index, catalog)


def test_threads_search_while_it_changes(catalog: Catalog, put: Put, embedder, monkeypatch) -> None:
    vectors = Catalog.vectors
    monkeypatch.setattr(Catalog, "vectors", lambda self, ids: (time.sleep(0.001), vectors(self, ids))[1])
    put(catalog, "keep", "one fox")
    index = VectorIndex(catalog)
    (keep,) = catalog.chunk_ids()
    question = embedder.embed_question("one fox")[0]

    def change(i: int) -> None:
        put(catalog, f"d{i % 3}", f"word{i}", f"other{i}")
        index.sync()

    def search(_: int) -> None:
        index.sync()
        assert index.search(question, 3)[0][0] == keep

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, i) for i in range(40) for work in (change, search)]:
            future.result()
    index.sync()
    check(index, catalog)
