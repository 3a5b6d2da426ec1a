"""BM25 over the catalogue: what it finds in any language, and that it follows the catalogue."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv.retriever import keywords
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.keywords import KeywordIndex, words

Put = Callable[..., None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The TTFT-ms of v1.2, don't_split", ["the", "ttft", "ms", "of", "v1", "2", "don", "t_split"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("cafe\u0301 café ＡＢＣ ﬁne", ["café", "café", "abc", "fine"]),
        ("हिन्दी में किताब", ["हिन्दी", "में", "किताब"]),
        ("В Москве, быстро", ["в", "москве", "быстро"]),
        ("GPU東京の学生。はい", ["gpu", "東京", "京の", "の学", "学生", "はい"]),
        ("水 データ", ["水", "デー", "ータ"]),
        ("ไทย 2025", ["ไท", "ทย", "2025"]),
        ("— … !", []),
    ],
)
def test_words_in_any_language(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def texts(catalog: Catalog, found: list[tuple[int, float]]) -> list[str]:
    return [chunk.text.strip() for chunk in catalog.chunks(id for id, _ in found)]


def bm25(texts: list[str], question: str, text: str) -> float:
    """Robertson and Zaragoza (2009) with the idf of Lucene, from the formula."""
    bags = [text.split() for text in texts]
    bag, mean = text.split(), sum(map(len, bags)) / len(bags)
    total = 0.0
    for word in question.split():
        having = sum(word in other for other in bags)
        idf = math.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
        total += idf * bag.count(word) / (bag.count(word) + 1.5 * (0.25 + 0.75 * len(bag) / mean))
    return total


def test_scores_are_bm25s(catalog: Catalog, put: Put) -> None:
    all_texts = ["one fox and one fox", "two dogs and a fox that sleeps", "three cats", "..."]
    put(catalog, "a", *all_texts)
    index = KeywordIndex(catalog)
    assert index.sync() and len(index) == 3  # the fourth has no words
    with_words = all_texts[:3]
    found = index.search([("one fox", 1.0)], 10)
    assert texts(catalog, found) == ["one fox and one fox", "two dogs and a fox that sleeps"]
    assert [score for _, score in found] == pytest.approx([bm25(with_words, "one fox", t) for t in with_words[:2]])
    found = index.search([("cats", 1.0), ("fox fox", 0.3)], 10)
    expected = [bm25(with_words, "cats", "three cats"), *(0.3 * bm25(with_words, "fox", t) for t in with_words[:2])]
    assert [score for _, score in found] == pytest.approx(expected)
    assert texts(catalog, index.search([("fox", 1.0)], 1)) == ["one fox and one fox"]


def test_nothing_to_find(catalog: Catalog, put: Put) -> None:
    index = KeywordIndex(catalog)
    assert index.search([("fox", 1.0)], 5) == []
    index.sync()
    assert index.search([("fox", 1.0)], 5) == [] and len(index) == 0
    put(catalog, "a", "...")
    index.sync()
    assert index.search([("fox", 1.0)], 5) == [] and len(index) == 0
    put(catalog, "b", "one fox")
    index.sync()
    assert index.search([("dogs", 1.0), ("?", 1.0)], 5) == []


def test_sync_follows_the_catalog(catalog: Catalog, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    index, read = KeywordIndex(catalog), []

    def counted(text: str) -> list[str]:
        read.append(text.strip())
        return words(text)

    monkeypatch.setattr(keywords, "words", counted)
    put(catalog, "a", "one fox", "two dogs")
    assert index.sync() and not index.sync()
    assert sorted(read) == ["one fox", "two dogs"]
    put(catalog, "b", "three cats")
    assert index.sync() and read[2:] == ["three cats"]
    catalog.delete_document("a")
    assert index.sync() and read[3:] == []
    assert index.search([("fox dogs", 1.0)], 5) == []
    assert texts(catalog, index.search([("cats", 1.0)], 5)) == ["three cats"]
    assert "fox" not in index._built.scores.vocab_dict and list(index._words.values()) == [["three", "cats"]]


def test_a_search_does_not_wait_for_another_ones_rebuild(
    catalog: Catalog, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = KeywordIndex(catalog)
    put(catalog, "a", "one fox")
    index.sync()
    put(catalog, "b", "two dogs")
    begun, go_on = threading.Event(), threading.Event()
    build = keywords._build

    def slowly(words_of: dict[int, list[str]]) -> object:
        begun.set()
        assert go_on.wait(10)
        return build(words_of)

    monkeypatch.setattr(keywords, "_build", slowly)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(index.sync)
        assert begun.wait(30)
        assert not index.sync()
        assert texts(catalog, index.search([("fox dogs", 1.0)], 5)) == ["one fox"]
        go_on.set()
        assert future.result()
    assert set(texts(catalog, index.search([("fox dogs", 1.0)], 5))) == {"one fox", "two dogs"}
