"""Chunks found in the tokens of prompts: whole, cut, repeated, beside each other, and never where they aren't."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ragkv.retriever import tokens
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.tokens import SEAM, WINDOW, FoundChunk, TokenIndex


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog(tmp_path / "catalog.sqlite") as catalog:
        yield catalog


@pytest.fixture
def index(catalog: Catalog) -> TokenIndex:
    return TokenIndex(catalog)


def drawn(drawing: random.Random, count: int, vocabulary: int = 50_000) -> list[int]:
    return [drawing.randrange(vocabulary) for _ in range(count)]


def put(catalog: Catalog, document: str, *chunks: Sequence[int]) -> None:
    texts = [ChunkText("", tuple(chunk)) for chunk in chunks]
    catalog.put_document(document, document, "", texts, np.ones((len(chunks), 2), np.float32))


def whole(chunk: Sequence[int], start: int) -> FoundChunk:
    return FoundChunk(start, start + len(chunk), chunk_hash(chunk), 0, len(chunk))


def test_whole_chunks_are_found_where_they_stand(catalog: Catalog, index: TokenIndex) -> None:
    drawing = random.Random(1)
    a, b, c = (drawn(drawing, n) for n in (WINDOW, 40, 300))
    put(catalog, "document", a, b, c)
    between = drawn(drawing, 7)
    assert index.search([*between, *c, *b, *between, *a, *c]) == [
        whole(c, 7),
        whole(b, 307),
        whole(a, 354),
        whole(c, 354 + WINDOW),
    ]
    assert index.search(drawn(drawing, 2000)) == []
    assert index.search(a[:-1]) == [] and index.search([]) == []


def test_of_a_chunk_with_other_tokens_at_its_seams_the_inner_ones_are_found(
    catalog: Catalog, index: TokenIndex
) -> None:
    drawing = random.Random(2)
    chunk = drawn(drawing, 200)
    put(catalog, "document", chunk)
    prompt = [5, 6, *chunk[SEAM:-SEAM], 7, 8]
    assert index.search(prompt) == [FoundChunk(2, 194, chunk_hash(chunk), SEAM, 200)]


def test_of_a_chunk_that_is_cut_the_end_that_is_there_is_found(catalog: Catalog, index: TokenIndex) -> None:
    drawing = random.Random(3)
    chunk = drawn(drawing, 200)
    put(catalog, "document", chunk)
    name = chunk_hash(chunk)
    assert index.search([1, *chunk[:100], 2]) == [FoundChunk(1, 101, name, 0, 200)]
    assert index.search([1, *chunk[100:], 2]) == [FoundChunk(1, 101, name, 100, 200)]
    changed = [*chunk[:90], 3, *chunk[91:]]
    assert index.search(changed) == [FoundChunk(0, 90, name, 0, 200), FoundChunk(91, 200, name, 91, 200)]
    assert index.search(chunk[50:150]) == []  # neither window is there


def test_of_chunks_that_overlap_the_longest_is_found_whole(catalog: Catalog, index: TokenIndex) -> None:
    drawing = random.Random(4)
    text = drawn(drawing, 300)
    long, short = text[:200], text[150:300]
    put(catalog, "document", long, short, text[20:60])
    rest = FoundChunk(200, 300, chunk_hash(short), 50, 150)
    assert index.search(text) == [whole(long, 0), rest]


def test_chunks_that_begin_alike_are_told_apart(catalog: Catalog, index: TokenIndex) -> None:
    drawing = random.Random(5)
    head = drawn(drawing, 50)
    chunks = [[*head, *drawn(drawing, 50)] for _ in range(40)]
    put(catalog, "document", *chunks)
    for chunk in chunks:
        assert index.search([1, *chunk, 2]) == [whole(chunk, 1)]


def test_it_follows_the_catalogue(catalog: Catalog, index: TokenIndex) -> None:
    drawing = random.Random(6)
    a, b, c = (drawn(drawing, 60) for _ in range(3))
    assert index.search([*a, *b]) == []
    put(catalog, "first", a)
    assert index.search([*a, *b]) == [whole(a, 0)]
    put(catalog, "second", a, b)
    assert index.search([*a, *b]) == [whole(a, 0), whole(b, 60)]
    catalog.delete_document("first")
    assert index.search([*a, *b]) == [whole(a, 0), whole(b, 60)]  # the second has it too
    put(catalog, "second", c)
    assert index.search([*a, *b, *c]) == [whole(c, 120)]


@pytest.mark.parametrize("vocabulary", [2, 50_000])
def test_whatever_is_found_is_there_and_whole_chunks_are_found(
    catalog: Catalog, index: TokenIndex, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BATCH", 7)
    drawing = random.Random(7)
    chunks = [drawn(drawing, drawing.randrange(WINDOW, 200), vocabulary) for _ in range(100)]
    for i, start in enumerate(range(0, 100, 10)):
        put(catalog, f"document {i}", *chunks[start : start + 10])
        index.sync()
    tokens_of = {chunk_hash(chunk): chunk for chunk in chunks}
    for _ in range(50):
        parts = [
            part
            for _ in range(10)
            for part in (drawn(drawing, drawing.choice([0, 1, 30]), vocabulary), drawing.choice(chunks))
        ]
        prompt = [token for part in parts for token in part]
        found, end = index.search(prompt), 0
        for each in found:
            assert end <= each.start < each.end <= len(prompt)
            chunk, end = tokens_of[each.chunk_hash], each.end
            assert len(chunk) == each.num_tokens
            assert prompt[each.start : each.end] == chunk[each.offset : each.offset + each.end - each.start]
        if vocabulary > 2:
            assert sum(each.end - each.start for each in found) >= sum(map(len, parts[1::2]))


def test_a_prompt_of_one_token_over_and_over_ends(catalog: Catalog, index: TokenIndex) -> None:
    put(catalog, "document", [9] * 300)
    found = index.search([9] * 20_000)
    assert found[0].start == 0 and all(each.chunk_hash == chunk_hash([9] * 300) for each in found)
