import functools
import json
import random

import pytest

from ragkv.errors import ConfigError
from ragkv.evals.workloads.cache import ALL_POLICIES, Access, load, mooncake, replay, zipf_documents


def hits(keys, capacity, policy):
    accesses = [Access(key, 1, 1.0) for key in keys]
    (row,) = replay("test", accesses, [capacity / len(set(keys))], [policy])
    assert row["capacity_tokens"] == capacity
    return round(row["hit_rate"] * len(keys))


def best(keys, capacity):
    """By trying everything."""

    @functools.cache
    def most(i, held):
        if i == len(keys):
            return 0
        if keys[i] in held:
            return 1 + most(i + 1, held)
        grown = held | {keys[i]}
        choices = [grown] if len(grown) <= capacity else [grown - {key} for key in grown]
        return max(most(i + 1, choice) for choice in choices)

    return most(0, frozenset())


@pytest.mark.parametrize("seed", range(5))
def test_belady_is_the_best_there_is(seed):
    keys = random.Random(seed).choices(range(6), k=24)
    assert hits(keys, 3, "belady") == best(keys, 3)
    assert all(hits(keys, 3, policy) <= best(keys, 3) for policy in ALL_POLICIES)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_all_hits_but_the_first_where_everything_fits(policy):
    assert hits([0, 1, 2, 0, 1, 2, 2], 3, policy) == 4


def test_traces(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 2])))
    accesses = mooncake(file)
    assert [access.key for access in accesses] == [0, 1, 0, 2]
    assert accesses[1].cost_ms > accesses[0].cost_ms
    small = {"num_requests": 50, "num_documents": 40, "drift_every": 20}
    assert zipf_documents(**small) == zipf_documents(**small)
    assert len(zipf_documents(**small)) == 300
    with pytest.raises(ConfigError, match="nowhere"):
        load(str(tmp_path / "nowhere"))
