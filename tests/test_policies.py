import pytest
import torch

from ragkv.errors import ConfigError
from ragkv.policies import (
    DESCRIPTIONS,
    Policy,
    Selection,
    chunk_heads,
    evenness,
    top_deviating,
    top_voted,
    voting_layers,
)


def test_parsing():
    assert Policy.parse("query:0.15") == Policy(Selection.QUERY, 0.15)
    assert Policy.parse("none") == Policy(Selection.NONE)
    assert Policy.parse("query+shift:0.15") == Policy(Selection.QUERY, 0.15, shift=True)
    assert Policy.parse("query-std:0.1") == Policy(Selection.QUERY, 0.1, weigh_by_std=True)
    assert Policy.parse("guided:0.1") == Policy(Selection.QUERY, 0.1, weigh_by_std=True, shift=True)
    assert Policy.parse("query-std+shift:0.1") == Policy.parse("guided:0.1")
    assert Policy.parse("epic+shift") == Policy(Selection.EPIC, shift=True)
    assert Policy.of("query+shift", 0.2) == Policy(Selection.QUERY, 0.2, shift=True)


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "full",
        "query:0.15",
        "query-std:0.1",
        "cacheblend-gradual:0.02",
        "epic+shift:0.05",
        "guided:0.05",
    ],
)
def test_a_label_is_what_was_parsed(text):
    assert Policy.parse(text).label == text
    assert Policy.parse(Policy.parse(text).label) == Policy.parse(text)


def test_policies_are_alike_but_for_the_budget():
    assert Policy.parse("guided:0.05").is_like(Policy.parse("guided:0.4"))
    assert not Policy.parse("guided:0.05").is_like(Policy.parse("query+shift:0.05"))


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_every_policy_can_be_had_by_its_name(name):
    assert Policy.parse(name).name == name


@pytest.mark.parametrize(
    "text",
    [
        "none+shift",
        "full+shift",
        "cacheblend-std",
        "epic-std+shift",
        "query:2",
    ],
)
def test_what_means_nothing_is_refused(text):
    with pytest.raises(ConfigError, match=r"has no effect on|outside 0\.\.1"):
        Policy.parse(text)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 30])
def test_at_least_one_layer_votes(num_layers):
    layers = voting_layers(num_layers)
    assert 0 <= layers.start < layers.stop == num_layers
    assert voting_layers(30) == range(10, 30)


@pytest.mark.parametrize(
    "text",
    [
        "quary",
        "query:x",
        "query:",
        "query:1.5",
        "query:-0.1",
        "query:nan",
        "",
        "adaptive",
        "query+full",
        "query[0.5-1]",
    ],
)
def test_what_cannot_be_used_is_named(text):
    with pytest.raises(ConfigError, match="choose one of|not a number|outside 0..1"):
        Policy.parse(text)


def test_the_most_voted_are_chosen_in_order_of_position():
    votes = torch.zeros(100)
    votes[[70, 10, 40]] = torch.tensor([3.0, 2.0, 1.0])
    assert top_voted(votes, torch.ones(100, dtype=torch.bool), 2).tolist() == [10, 70]


def test_only_eligible_tokens_are_chosen():
    eligible = torch.zeros(100, dtype=torch.bool)
    eligible[50:60] = True
    votes = torch.arange(100.0)
    assert top_voted(votes, eligible, 3).tolist() == [57, 58, 59]
    assert top_voted(votes, eligible, 50).tolist() == list(range(50, 60))
    assert top_voted(votes, eligible, 0).tolist() == []


def test_short_gaps_are_filled_without_going_over_the_number():
    votes = torch.zeros(100)
    votes[[10, 12, 30, 33, 60, 80]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    chosen = top_voted(votes, torch.ones(100, dtype=torch.bool), 8)
    assert chosen.tolist()[:7] == [10, 11, 12, 30, 31, 32, 33]
    assert len(chosen) <= 8


@pytest.mark.parametrize("seed", range(20))
def test_never_more_than_asked_and_close_to_it(seed):
    generator = torch.Generator().manual_seed(seed)
    votes = torch.rand(1000, generator=generator)
    eligible = torch.rand(1000, generator=generator) > 0.2
    for num_tokens in (1, 2, 50, 400):
        chosen = top_voted(votes, eligible, num_tokens)
        assert 0.8 * num_tokens <= len(chosen) <= num_tokens
        assert bool(eligible[chosen].all())
        assert torch.equal(chosen, chosen.unique())


def test_the_most_deviating_are_chosen_as_they_are():
    deviations = torch.zeros(50)
    deviations[[3, 5, 40]] = torch.tensor([1.0, 3.0, 2.0])
    eligible = torch.ones(50, dtype=torch.bool)
    assert top_deviating(deviations, eligible, 2).tolist() == [5, 40]
    eligible[5] = False
    assert top_deviating(deviations, eligible, 2).tolist() == [3, 40]


def test_attention_is_even_or_not():
    eligible = torch.ones(100, dtype=torch.bool)
    eligible[90:] = False
    assert evenness(torch.ones(100), eligible) == pytest.approx(1)
    assert evenness(torch.ones(100) * 1e-6, eligible) == pytest.approx(1)
    peaked = torch.zeros(100)
    peaked[[3, 95]] = 1
    assert evenness(peaked, eligible) == pytest.approx(0)
    assert evenness(torch.zeros(100), eligible) == 0
    assert evenness(torch.ones(100), torch.zeros_like(eligible)) == 1


def test_heads_of_chunks_share_the_budget():
    assert chunk_heads([(10, 20), (20, 30)], 4).tolist() == [10, 11, 20, 21]
    assert chunk_heads([(10, 20), (20, 30)], 5).tolist() == [10, 11, 12, 20, 21]
    assert chunk_heads([(10, 12), (20, 30)], 10).tolist() == [10, 11, 20, 21, 22, 23, 24]
    assert chunk_heads([], 5).tolist() == []
