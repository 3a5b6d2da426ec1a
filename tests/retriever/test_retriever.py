from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragkv.errors import ConfigError
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.retriever import Hit, Retriever

Put = Callable[..., None]


@pytest.fixture
def retriever(tmp_path: Path, catalog: Catalog, embedder) -> Retriever:
    return Retriever(catalog, VectorIndex(tmp_path / "index"), embedder)


def found(hits: list[Hit]) -> list[str]:
    return [hit.chunk.text.strip() for hit in hits]


def test_best_chunk_comes_first(retriever: Retriever, catalog: Catalog, put: Put) -> None:
    put(catalog, "a", "the quick fox", "lazy dogs sleep", "chunks of keys")
    put(catalog, "b", "a fox sleeps")
    hits = retriever.search("lazy dogs sleep", 2)
    assert found(hits)[0] == "lazy dogs sleep" and len(hits) == 2
    assert hits[0].score == pytest.approx(1, abs=1e-5) and hits[0].score > hits[1].score
    assert hits[0].chunk == catalog.chunks([hits[0].chunk.id])[0]


def test_empty_and_small_catalogs(retriever: Retriever, catalog: Catalog, put: Put) -> None:
    assert retriever.search("anything", 5) == []
    put(catalog, "a", "one fox", "two dogs")
    assert len(retriever.search("anything", 100)) == 2
    with pytest.raises(ConfigError, match="top_k"):
        retriever.search("anything", 0)


def test_another_process_changes_the_catalog(retriever: Retriever, catalog: Catalog, put: Put, tmp_path: Path) -> None:
    put(catalog, "a", "one fox")
    assert found(retriever.search("two dogs", 1)) == ["one fox"]
    with Catalog(tmp_path / "catalog.db") as other:
        put(other, "b", "two dogs")
        assert found(retriever.search("two dogs", 1)) == ["two dogs"]
        put(other, "b", "three cats")
        assert set(found(retriever.search("two dogs", 5))) == {"one fox", "three cats"}
        other.delete_document("a")
        assert found(retriever.search("one fox", 5)) == ["three cats"]


def test_shared_text_comes_once(retriever: Retriever, catalog: Catalog, put: Put) -> None:
    for i in range(10):
        put(catalog, f"copy{i}", "one fox")
    put(catalog, "a", "two dogs", "three cats")
    hits = retriever.search("one fox", 2)
    assert found(hits)[0] == "one fox" and len(hits) == 2
    assert set(found(retriever.search("one fox", 3))) == {"one fox", "two dogs", "three cats"}
    assert len(retriever.search("one fox", 1)) == 1


def test_chunk_deleted_between_search_and_read(retriever: Retriever, catalog: Catalog, put: Put, monkeypatch) -> None:
    put(catalog, "a", "one fox")
    put(catalog, "b", "two dogs")
    put(catalog, "c", "one cat")
    search = VectorIndex.search

    def search_then_delete(self: VectorIndex, *arguments) -> list[tuple[int, float]]:
        result = search(self, *arguments)
        catalog.delete_document("a")
        return result

    monkeypatch.setattr(VectorIndex, "search", search_then_delete)
    assert set(found(retriever.search("one fox", 2))) == {"one cat", "two dogs"}


def test_threads(retriever: Retriever, catalog: Catalog, put: Put) -> None:
    put(catalog, "keep", "one fox")

    def change(i: int) -> None:
        put(catalog, f"d{i % 3}", f"word{i}", f"other{i}")

    def search(_: int) -> None:
        assert found(retriever.search("one fox", 3))[0] == "one fox"

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, i) for i in range(30) for work in (change, search)]:
            future.result()
