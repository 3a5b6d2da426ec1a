import random

import pytest

from ragkv.errors import ConfigError
from ragkv.store.eviction import POLICIES, Eviction, parse_hint


def filled(name, sizes=(1, 1, 1), costs=(1, 1, 1)):
    eviction = Eviction(name)
    for key, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        eviction.add(key, size, cost)
    return eviction


def order(eviction):
    return list(iter(eviction.evict, None))


def test_least_recently_used():
    eviction = filled("lru")
    eviction.touch(0)
    assert order(eviction) == [1, 2, 0]


def test_least_frequently_used_then_least_recently():
    eviction = filled("lfu")
    eviction.touch(0)
    eviction.touch(0)
    eviction.touch(1)
    assert order(eviction) == [2, 1, 0]
    assert order(filled("lfu")) == [0, 1, 2]


def test_what_is_dear_for_its_size_stays():
    assert order(filled("gdsf", sizes=(1, 10, 10), costs=(1, 1, 100))) == [1, 0, 2]


@pytest.mark.parametrize("name", ["gdsf", "lfuda"])
def test_what_was_popular_once_grows_old(name):
    eviction = filled(name, sizes=(1,), costs=(1,))
    for _ in range(20):
        eviction.touch(0)
    evicted = []
    for key in range(1, 60):
        eviction.add(key, 1, 1)
        eviction.touch(key)
        evicted.append(eviction.evict())
    assert 0 in evicted
    forever = filled("lfu", sizes=(1,), costs=(1,))
    for _ in range(20):
        forever.touch(0)
    for key in range(1, 60):
        forever.add(key, 1, 1)
        forever.evict()
    assert order(forever) == [0]


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_add_up_whatever_happens(name):
    rng, eviction, sizes = random.Random(1), Eviction(name), {}
    for step in range(3000):
        key = rng.randrange(60)
        match rng.choice(["add", "use", "remove", "evict"]):
            case "add":
                sizes[key] = rng.randrange(1, 50)
                eviction.add(key, sizes[key], rng.random())
            case "use":
                assert eviction.touch(key) == (key in sizes)
            case "remove":
                eviction.remove(key)
                sizes.pop(key, None)
            case _ if step % 3 == 0:
                evicted = eviction.evict()
                assert (evicted is None) == (not sizes)
                sizes.pop(evicted, None)
        assert (eviction.size_bytes, set(eviction._entries)) == (sum(sizes.values()), set(sizes))


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="gdsf, lru"):
        Eviction("fifo")


def test_unknown_hints_are_named():
    assert parse_hint(None) is None and parse_hint("pin") == "pin"
    with pytest.raises(ConfigError, match="unknown hint 'keep'; choose one of pin, session, ephemeral"):
        parse_hint("keep")
