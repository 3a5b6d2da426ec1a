"""The order of requests that share text, beside every other order of small batches and all that could be shared."""

import random
from itertools import permutations

import pytest

from ragkv.batch.sharing import Item, by_popularity, in_order, shared_tokens

BLOCK = 16


def item(text, max_tokens=8):
    return Item(tuple((text[: end + 1], BLOCK) for end in range(len(text))), BLOCK * len(text) + 5, max_tokens)


def saved_in(order, items, room):
    """Return how many tokens aren't computed in an order, by a memory of `room` blocks that forgets the oldest."""
    memory, num_tokens = {}, 0
    for number in order:
        names = [name for name, _ in items[number].parts]
        num_tokens += BLOCK * next((i for i, name in enumerate(names) if name not in memory), len(names))
        for name in reversed(names):  # as vLLM frees them: the beginning last
            memory.pop(name, None)
            memory[name] = True
        while len(memory) > room:
            del memory[next(iter(memory))]
    return num_tokens


def random_items(chance, num, depth, letters="ab"):
    return [item("".join(chance.choice(letters) for _ in range(chance.randint(0, depth)))) for _ in range(num)]


@pytest.mark.parametrize("room", [4, 5, 8])
@pytest.mark.parametrize("seed", range(20))
def test_the_order_saves_nearly_as_much_as_the_best_one(seed, room):
    items = random_items(random.Random(seed), 6, 4)
    order = in_order(items)
    assert sorted(order) == list(range(6))
    assert saved_in(order, items, room) >= 0.9 * max(saved_in(each, items, room) for each in permutations(range(6)))


def test_with_little_memory_nearly_all_that_can_be_shared_is():
    chance = random.Random(0)
    items = [item("".join(chance.choice("abcd") for _ in range(6))) for _ in range(2000)]
    saved = saved_in(in_order(items), items, 16)
    assert saved >= 0.9 * shared_tokens(items)
    assert saved_in(range(2000), items, 16) < 0.6 * saved


def test_with_enough_memory_all_that_can_be_shared_is():
    items = random_items(random.Random(1), 300, 6)
    assert saved_in(in_order(items), items, 10_000) == shared_tokens(items) > 0


def test_what_generates_most_comes_first_unless_it_shares():
    items = [item("a", 1), item("b", 50), item("ac", 90), item("d", 1), item("", 7)]
    assert in_order(items) == [1, 0, 2, 4, 3]


def test_chunks_in_any_order_begin_with_the_most_frequent():
    ranked = by_popularity([[("b", 3), ("a", 2)], [("c", 1), ("a", 2)], [("a", 2)]])
    assert [parts[0] for parts in ranked] == [("a", 2)] * 3
    assert shared_tokens([Item(parts, 10, 1) for parts in ranked]) == 4
