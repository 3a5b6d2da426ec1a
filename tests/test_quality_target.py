"""The quality target: what an estimate says, and what it holds back."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest

from ragkv.policies import FULL, Policy
from ragkv.quality_target import NUM_TOKENS, begun_within, disagreement, raised


class Generated(SimpleNamespace):
    """A generation of one token for each text."""

    def __init__(self):
        super().__init__(tokens=[], drift_estimate=None, num_released=0)

    def released(self):
        self.num_released += 1

    async def texts(self, num_tokens):
        for i in range(num_tokens):
            self.tokens.append(i)
            yield f"{i} "


def begin(num_tokens, drift, max_drift=0.1):
    """Return the texts that come through, after how many tokens the drift was estimated, and the generation."""
    generated, estimated_at = Generated(), []

    async def estimate():
        estimated_at.append(len(generated.tokens))
        return drift

    async def collect():
        return [text async for text in begun_within(generated, generated.texts(num_tokens), estimate, max_drift)]

    return asyncio.run(collect()), estimated_at, generated


@pytest.mark.parametrize("num_tokens", [0, 3, NUM_TOKENS, NUM_TOKENS + 5])
def test_an_answer_within_the_target_loses_nothing_and_is_estimated_once(num_tokens):
    texts, estimated_at, generated = begin(num_tokens, drift=0.1)
    assert "".join(texts) == "".join(f"{i} " for i in range(num_tokens))
    assert estimated_at == [min(num_tokens, NUM_TOKENS)]
    assert (generated.drift_estimate, generated.num_released) == (0.1, 1)


def test_the_first_tokens_come_together_and_the_others_one_by_one():
    texts, _, _ = begin(NUM_TOKENS + 5, drift=0.0)
    assert [len(text.split()) for text in texts] == [NUM_TOKENS, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("num_tokens", [3, NUM_TOKENS + 5])
def test_of_an_answer_above_the_target_nothing_comes_through(num_tokens):
    texts, _, generated = begin(num_tokens, drift=0.11)
    assert texts == []
    assert len(generated.tokens) == min(num_tokens, NUM_TOKENS)


def test_an_estimate_that_cannot_be_had_holds_nothing_back():
    texts, _, generated = begin(NUM_TOKENS + 1, drift=None)
    assert len("".join(texts).split()) == NUM_TOKENS + 1
    assert generated.drift_estimate is None


def test_the_budget_rises_threefold_up_to_full_prefill():
    assert raised(Policy.parse("guided:0.05")).label == "guided:0.15"
    assert raised(raised(Policy.parse("query:0.05"))) == FULL
    assert raised(Policy.parse("none")) == FULL


def test_disagreement_is_the_kl_where_all_tokens_are_reported():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    steps = [{i: math.log(x) for i, x in enumerate(p)}, {i: math.log(x) for i, x in enumerate(q)}]
    rows = np.log(np.stack([q, q])).astype(np.float32)
    assert disagreement(steps, rows) == pytest.approx(float((p * np.log(p / q)).sum()) / 2, rel=1e-5)


def test_disagreement_takes_the_tokens_that_are_not_reported_for_one():
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.4, 0.4])
    steps = [{0: math.log(p[0])}]
    expected = 0.6 * math.log(0.6 / 0.2) + 0.4 * math.log(0.4 / 0.8)
    assert disagreement(steps, np.log(q)[None].astype(np.float32)) == pytest.approx(expected, rel=1e-5)


def test_disagreement_survives_a_token_that_the_other_rules_out():
    rows = np.array([[-np.inf, 0.0]], dtype=np.float32)
    assert disagreement([{0: 0.0}], rows) == pytest.approx(math.log(1e12))


def test_nothing_disagrees_about_no_tokens():
    assert disagreement([], np.zeros((0, 3), dtype=np.float32)) == 0
