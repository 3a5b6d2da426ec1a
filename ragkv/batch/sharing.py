"""In which order the requests of a batch run, so that as little as possible of what they share is computed twice.

Every request begins with parts that others may have too, such as the blocks of its prompt. Together they make a prefix
tree, and requests run as one walks through it: whoever begins alike follows one another, at every level of the tree, so
that what is shared needs memory only for so long. Knows nothing about models or engines.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

Part = tuple[Hashable, int]  # a name, and the number of its tokens


@dataclass(frozen=True)
class Item:
    """A request. parts: what others may share, in order.

    num_tokens: of the prompt, with what nobody can share. max_tokens: of the answer.
    """

    parts: tuple[Part, ...]
    num_tokens: int
    max_tokens: int


def by_popularity(parts: Sequence[Sequence[Part]]) -> list[tuple[Part, ...]]:
    """Return parts that may stand in any order, such as the chunks of prompts, with the most frequent ones first.

    So requests with common parts begin alike (FP-trees, https://doi.org/10.1145/335191.335372).
    """
    frequencies = Counter(name for each in parts for name in {name for name, _ in each})
    ranks = {name: rank for rank, (name, _) in enumerate(frequencies.most_common())}
    return [tuple(sorted(each, key=lambda part: ranks[part[0]])) for each in parts]


def in_order(items: Sequence[Item]) -> list[int]:
    """Return the numbers of the items in the order in which they are to run.

    Of those that share no beginning, the ones with the most to generate for each token of their prompts come first, as
    BatchLLM (https://arxiv.org/abs/2412.03594) has them: what they generate is computed in the same steps as the
    prompts of those that follow.
    """
    ids: dict[Hashable, int] = {}
    keys = [[ids.setdefault(name, len(ids)) for name, _ in item.parts] for item in items]
    walk = sorted(range(len(items)), key=lambda number: keys[number])
    trees = [list(tree) for _, tree in groupby(walk, lambda number: keys[number][:1] or number)]
    trees.sort(key=lambda tree: -_generated([items[number] for number in tree]))
    return [number for tree in trees for number in tree]


def shared_tokens(items: Sequence[Item]) -> int:
    """Return how many tokens of the prompts needn't be computed if nothing is computed twice: no order saves more."""
    nodes: dict[tuple[int, Hashable], int] = {}  # the number of each, by its parent's number and its name
    num_tokens = 0
    for item in items:
        node = 0
        for name, size in item.parts:
            num_tokens += size if (node, name) in nodes else 0
            node = nodes.setdefault((node, name), len(nodes) + 1)
    return num_tokens


def _generated(items: Sequence[Item]) -> float:
    """Return how many tokens are generated for each one of the prompts, of which what is shared counts once."""
    num_computed = sum(item.num_tokens for item in items) - shared_tokens(items)
    return sum(item.max_tokens for item in items) / max(1, num_computed)
