"""Arrivals at random, and what is told of rates: for `eval load` and `eval rag`."""

import asyncio
import time

import pytest

from ragkv.evals import tables
from ragkv.evals.arrivals import as_they_come, gaps, rates_at_equal_p90, sustained


def rows(system, *points):
    return [{"part": "rate", "system": system, "rate": rate, "ttft_p90_ms": ms} for rate, ms in points]


def test_arrivals_are_the_same_at_every_rate_but_stretched():
    slow, quick = (gaps(50, rate, seed=0) for rate in (0.5, 5.0))
    assert slow == pytest.approx([10 * gap for gap in quick]) and 1 < sum(slow) / 50 < 3
    assert gaps(50, 0.5, seed=1) != slow


def test_a_request_is_sent_whether_those_before_it_are_answered_or_not():
    async def ask(number):
        await asyncio.sleep(0.5 - number / 10)
        return number, time.monotonic()

    answers = asyncio.run(as_they_come(ask, [1, 2, 3], [0.0, 0.01, 0.01]))
    assert [number for number, _ in answers] == [1, 2, 3]
    assert answers[2][1] < answers[1][1] < answers[0][1]  # the last one, which takes least, is answered first


def test_what_is_sustained_lies_between_two_rates():
    found = rows("ragkv", (0.3, 9000.0), (0.1, 1000.0), (0.2, 3000.0))
    assert sustained(found, "ragkv", 2000) == pytest.approx(0.15)
    assert sustained(found, "ragkv", 6000) == pytest.approx(0.25)
    assert sustained(found, "ragkv", 500) is None and sustained(found, "ragkv", 9500) is None
    assert sustained(found, "vllm", 2000) is None


def test_rates_at_which_both_are_as_soon():
    ragkv = rows("ragkv", (1.0, 1000.0), (2.0, 3000.0))
    (row, rate, is_bound), (slow, most, is_most) = rates_at_equal_p90(
        ragkv + rows("vLLM", (0.2, 2000.0), (0.4, 8000.0)) + rows("LMCache", (0.3, 10.0))
    )
    assert (row["rate"], rate, is_bound) == (0.2, pytest.approx(1.5), False)
    assert (slow["rate"], most, is_most) == (0.4, 2.0, True)  # all that was tried is quick enough
    assert rates_at_equal_p90(ragkv + rows("vLLM", (0.2, 500.0))) == []


def test_the_table_says_what_is_won(capsys):
    def row(part, system, ttft_ms, **more):
        names = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "normalised_ms")
        return {
            "part": part,
            "system": system,
            "questions": 9,
            "reused_share": 0.5,
            **dict.fromkeys(names, ttft_ms),
            **more,
        }

    tables.rag(
        [
            row("alone", "ragkv", 100.0),
            row("alone", "vLLM", 800.0),
            row("rate", "ragkv", 200.0, rate=2.0),
            row("rate", "vLLM", 900.0, rate=0.5),
            row("long", "ragkv", 100.0, rate=1.0, **{"from": 100}),
        ]
    )
    text = capsys.readouterr().out
    assert "the first token comes 8.0× as soon as vLLM's" in text
    assert "at least 4.0× its rate of 30.0 a minute" in text and "from 100" in text and "50%" in text
