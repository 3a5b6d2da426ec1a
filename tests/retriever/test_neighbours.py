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


def test_a_context_is_a_near_chunk_among_two_others():
    pool = names(*range(20))
    contexts = contexts_of(names(0)[0], names(1, 2, 3), pool)
    assert [len(set(context)) for context in contexts] == [3, 3, 3]
    assert all(
        near in context and names(0)[0] not in context for near, context in zip(names(1, 2, 3), contexts, strict=True)
    )
    assert contexts == contexts_of(names(0)[0], names(1, 2, 3), pool) != contexts_of(names(4)[0], names(1, 2, 3), pool)
    many = contexts_of(names(0)[0], names(*range(1, 9)), pool)
    places = {context.index(near) for near, context in zip(names(*range(1, 9)), many, strict=True)}
    assert places == {0, 1, 2}


@pytest.mark.parametrize(("pool", "expected"), [([], [1]), ([0], [1]), ([0, 1], [1]), ([0, 1, 2], [1, 2])])
def test_a_small_pool_gives_what_it_has(pool, expected):
    (context,) = contexts_of(names(0)[0], names(1), names(*pool))
    assert sorted(context) == sorted(names(*expected))
