from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ragkv.errors import ConfigError
from ragkv.retriever.catalog import Catalog, Chunk
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.keywords import KeywordIndex
from ragkv.retriever.retriever import Hit, Retriever, merged

Put = Callable[..., None]


@pytest.fixture
def retriever(catalog: Catalog, embedder) -> Retriever:
    return Retriever(catalog, VectorIndex(catalog), embedder.embed_question)


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


class Digits:
    """Embeds each part of a text (a|b) as the sum of its digits' unit vectors: words don't matter."""

    def embed_question(self, question: str) -> npt.NDArray[np.float32]:
        parts = [[int(digit) for digit in part if digit.isdigit()] for part in question.split("|")]
        vectors = np.stack([np.eye(10, dtype=np.float32)[digits].sum(axis=0) for digits in parts])
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def test_of_a_long_question_whatever_part_is_nearest_counts(catalog: Catalog, chunk) -> None:
    for text in ("1", "12", "3", "34", "5"):
        catalog.put_document(text, text, "digest", [chunk(text)], Digits().embed_question(text))
    retriever = Retriever(catalog, VectorIndex(catalog), Digits().embed_question)
    hits = retriever.search("77|77|1|77|34", 3)
    assert found(hits)[:2] in (["1", "34"], ["34", "1"])
    assert [hit.score for hit in hits][:2] == pytest.approx([1, 1])
    after = retriever.search("77|5", 5, ["3|3"])  # the earlier question stays beside each part
    assert found(after)[:2] == ["5", "3"]
    words = Retriever(catalog, VectorIndex(catalog), Digits().embed_question, KeywordIndex(catalog))
    assert {hit.chunk.text.strip(): round(hit.score, 3) for hit in words.search("77|5", 5)}["5"] == 1


Search = Callable[..., list[Hit]]


@pytest.fixture
def hybrid(catalog: Catalog, chunk) -> Search:
    """Searches, by vectors and words, documents of one text each, where the word is found in the farthest ones."""
    for text in ("a0 fox", "a01 cat", "a02 owl", "a03 hen", "a07 bird", "a012 zebra", "a7 zebra zebra"):
        catalog.put_document(text, text, "digest", [chunk(text)], Digits().embed_question(text))

    def search(question: str, top_k: int, earlier: Sequence[str] = (), **options: int) -> list[Hit]:
        index = VectorIndex(catalog)
        return Retriever(catalog, index, Digits().embed_question, KeywordIndex(catalog), **options).search(
            question, top_k, earlier
        )

    return search


def test_hybrid_fuses_ranks(hybrid: Search, catalog: Catalog) -> None:
    by_vector = Retriever(catalog, VectorIndex(catalog), Digits().embed_question).search("q0 zebra", 7)
    assert found(by_vector)[0] == "a0 fox" and found(by_vector)[5:] == ["a012 zebra", "a7 zebra zebra"]
    # 1/67 + 1/61, 1/66 + 1/62, 1/61
    hits = hybrid("q0 zebra", 3)
    assert found(hits) == ["a7 zebra zebra", "a012 zebra", "a0 fox"]
    assert [hit.score for hit in hits] == pytest.approx([0, 3**-0.5, 1], abs=1e-6)
    assert found(hybrid("q0 gnu", 7)) == found(by_vector)  # no chunk has a word of it
    assert len(hybrid("q0 zebra", 100)) == 7


def test_candidates_are_what_each_search_brings(hybrid: Search) -> None:
    hits = hybrid("q0 zebra", 2, candidates=1)  # two are asked for: the fox and another, both zebras
    assert found(hits) == ["a0 fox", "a7 zebra zebra"]
    assert [hit.score for hit in hits] == pytest.approx([1, 0], abs=1e-6)
    assert found(hybrid("q0 zebra", 1, candidates=1)) == ["a0 fox"]
    assert found(hybrid("q0 zebra", 1)) == ["a7 zebra zebra"]


def test_vectors_of_earlier_questions_weigh_less(catalog: Catalog, hybrid: Search) -> None:
    by_vector = Retriever(catalog, VectorIndex(catalog), Digits().embed_question)
    scores = {hit.chunk.text.strip(): hit.score for hit in by_vector.search("q0", 7, ["q2", "q7"])}
    length = (1 + 0.09**2 + 0.3**2) ** 0.5
    assert scores["a0 fox"] == pytest.approx(1 / length)
    assert scores["a7 zebra zebra"] == pytest.approx(0.3 / length)
    assert scores["a02 owl"] == pytest.approx(1.09 / length / 2**0.5)


def test_hybrid_heeds_the_words_of_earlier_questions(hybrid: Search) -> None:
    assert found(hybrid("q0 owl", 1)) == ["a02 owl"]
    assert set(found(hybrid("q0 owl", 3, ["q0 zebra"]))) == {"a02 owl", "a7 zebra zebra", "a012 zebra"}
    assert "a7 zebra zebra" not in found(hybrid("q0 owl", 3, ["q0 zebra", *["q0"] * 6]))  # too long ago


def test_hybrid_with_shared_and_deleted_texts(hybrid: Search, catalog: Catalog, chunk, monkeypatch) -> None:
    for i in range(10):
        vectors = Digits().embed_question("a7 zebra zebra")
        catalog.put_document(f"copy{i}", "", "digest", [chunk("a7 zebra zebra")], vectors)
    assert found(hybrid("q0 zebra", 2, candidates=2)) == ["a0 fox", "a7 zebra zebra"]  # the copies count once
    assert found(hybrid("q0 zebra", 3)) == ["a7 zebra zebra", "a012 zebra", "a0 fox"]
    search = KeywordIndex.search

    def search_then_delete(self: KeywordIndex, *arguments) -> list[tuple[int, float]]:
        result = search(self, *arguments)
        catalog.delete_document("a012 zebra")
        return result

    monkeypatch.setattr(KeywordIndex, "search", search_then_delete)
    assert found(hybrid("q0 zebra", 2)) == ["a7 zebra zebra", "a0 fox"]


def test_chunk_deleted_between_search_and_its_vector(catalog: Catalog, hybrid: Search, monkeypatch) -> None:
    retriever = Retriever(catalog, VectorIndex(catalog), Digits().embed_question, KeywordIndex(catalog), candidates=1)
    retriever.search("q2", 1)  # the index has its vectors from now on
    vectors = Catalog.vectors

    def delete_then_read(self: Catalog, ids: Iterable[int]) -> tuple[list[int], npt.NDArray[np.float32]]:
        catalog.delete_document("a7 zebra zebra")
        return vectors(self, ids)

    monkeypatch.setattr(Catalog, "vectors", delete_then_read)
    assert found(retriever.search("q2 zebra", 1)) == ["a02 owl"]
    assert "a7 zebra zebra" not in {document.name for document in catalog.documents()}


def hit_of(score, text, scope=""):
    return Hit(
        Chunk(
            1,
            "d",
            0,
            text,
            tuple(text.encode()),
            text + scope,
        ),
        score,
        scope,
    )


def test_hits_of_several_catalogues() -> None:
    own, shared = [hit_of(0.9, "a"), hit_of(0.2, "b")], [hit_of(0.5, "c", "x"), hit_of(0.3, "b", "x")]
    by_score = merged([own, shared], 3, by_rank=False)
    assert [(hit.chunk.text, hit.scope) for hit in by_score] == [("a", ""), ("c", "x"), ("b", "")]
    assert [hit.chunk.text for hit in merged([shared, own], 2, by_rank=True)] == ["c", "a"]
    assert merged([own], 1, by_rank=False) == own[:1] and merged([[], []], 3, by_rank=True) == []
