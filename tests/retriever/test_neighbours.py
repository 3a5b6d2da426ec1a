import numpy as np
import pytest

from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash
from ragkv.retriever.index import VectorIndex, contexts_of, nearest


def at(*degrees):
    angles = np.deg2rad(np.array(degrees, dtype=np.float32))
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def chunk(i):
    return ChunkText(f"chunk {i}", (i, i + 1, i + 2))


@pytest.fixture
def catalog(tmp_path):
    catalog = Catalog(tmp_path / "catalog.sqlite")
    catalog.put_document("old", "old", "digest", [chunk(0), chunk(1), chunk(2)], at(10, 50, 95))
    yield catalog
    catalog.close()


@pytest.fixture
def index(catalog):
    index = VectorIndex(catalog)
    index.sync()
    return index


def names(*numbers):
    return [chunk_hash(chunk(i).token_ids) for i in numbers]


def test_the_nearest_of_old_and_new_best_first(catalog, index):
    found = nearest(range(2), names(7, 8), at(12, 47), catalog, index, 2)
    assert found == {names(7)[0]: names(0, 8), names(8)[0]: names(1, 7)}


def test_a_chunk_is_not_its_own_neighbour_even_if_it_was_there_before(catalog, index):
    assert nearest([0], names(1), at(50), catalog, index, 2) == {names(1)[0]: names(0, 2)}


def test_the_first_chunk_of_all_has_none(tmp_path):
    catalog = Catalog(tmp_path / "catalog.sqlite")
    assert nearest([0], names(1), at(50), catalog, VectorIndex(catalog), 3) == {names(1)[0]: []}
    catalog.close()


def test_lengths_are_known_by_hash(catalog):
    assert catalog.num_tokens([*names(0), "f" * 32]) == {names(0)[0]: 3}


def test_contexts_are_of_one_to_three_chunks_the_near_one_among_others():
    pool, near = names(*range(20)), names(*range(1, 10))
    contexts = contexts_of(names(0)[0], near, pool)
    pairs = list(zip(near, contexts, strict=True))
    assert sorted(len(set(context)) for context in contexts) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(each in context for each, context in pairs if len(context) > 1)
    assert not any(names(0)[0] in context for context in contexts)
    assert contexts == contexts_of(names(0)[0], near, pool) != contexts_of(names(10)[0], near, pool)
    many = [contexts_of(name, near, pool) for name in names(*range(10, 20))]
    placed = [(len(c), c.index(each)) for of in many for each, c in zip(near, of, strict=True) if each in c]
    assert {place for length, place in placed if length == 3} == {0, 1, 2}
    assert 0 < sum(length == 1 for length, _ in placed) < 20  # of 30: else one of the others stands there


@pytest.mark.parametrize(("pool", "expected"), [([], [1]), ([0], [1]), ([0, 1], [1]), ([0, 1, 2], [1, 2])])
def test_a_small_pool_gives_what_it_has(pool, expected):
    (context,) = contexts_of(names(0)[0], names(1), names(*pool))
    assert sorted(context) == sorted(names(*expected))
