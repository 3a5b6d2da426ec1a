import pytest
import torch

from ragkv.errors import ConfigError
from ragkv.policies import Policy, top_voted


def test_parsing():
    assert Policy.parse("query:0.15") == Policy("query", 0.15)
    assert Policy.parse("none") == Policy("none")
    assert Policy.parse("query:0.15").label == "query:0.15"


@pytest.mark.parametrize("text", ["quary", "query:x", "query:1.5", "query:-0.1", "query:nan", ""])
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
