"""Requests that vLLM preempts: whichever way they come back, the answers are vLLM's own."""

import asyncio
import itertools

import pytest
from engine_harness import Harness, assert_same, lay_out
from prometheus_client import REGISTRY

pytestmark = pytest.mark.engine

NUM_REQUESTS, NUM_IN, NUM_OUT = 4, 250, 24  # two blocks each, then three
NUM_BLOCKS = 7  # one of which vLLM keeps for itself
_salts = itertools.count()


def preemptions():
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


@pytest.fixture(scope="module")
def opened(runner, small_smollm, tmp_path_factory):
    """Starts engines with memory for 6 blocks, or for all, one after another, unless the last one is like that."""
    started = {}

    def start(num_blocks=NUM_BLOCKS, **args):
        like = str((num_blocks, args))
        if like not in started:
            while started:
                started.popitem()[1].close()
            arguments = {"max_model_len": 512, "num_gpu_blocks_override": num_blocks, "disable_log_stats": False}
            started[like] = Harness(runner, small_smollm, tmp_path_factory.mktemp("kv"), **arguments, **args)
        return started[like]

    yield start
    while started:
        started.popitem()[1].close()


def ask_at_once(harness, prompts, task=None):
    """Returns the answers, and how often a request was preempted."""

    async def ask():
        salts = [f"together-{next(_salts)}" for _ in prompts]
        asked = (harness.ask(prompt, task, NUM_OUT, salt) for prompt, salt in zip(prompts, salts, strict=True))
        return await asyncio.gather(*asked)

    before = preemptions()
    return harness.run(ask()), preemptions() - before


@pytest.fixture(scope="module")
def prompts(text):
    return [text[NUM_IN * i : NUM_IN * (i + 1)] for i in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(opened, prompts):
    """What vLLM answers without a connector, and with memory for all."""
    answers, times = ask_at_once(opened(32, alone=True), prompts)
    assert times == 0
    return answers


@pytest.mark.parametrize("way", ["recompute", "load"])  # `auto` is the one or the other
def test_answers_are_vllms_whichever_way_requests_come_back(opened, expected, prompts, way):
    harness = opened(preemption=way)
    found, times = ask_at_once(harness, prompts)
    assert times >= 1
    for answer, right in zip(found, expected, strict=True):
        assert_same(answer, right)
    num_resumed = [answer.num_resumed for answer in found]
    assert all(answer.report is None for answer in found)
    if way == "recompute":
        assert not any(num_resumed)
    else:  # a copy takes a small part of the time that prefill does
        assert sum(map(bool, num_resumed)) >= 1
        assert harness.engine.counters["resumed_tokens"] == sum(num_resumed)


def test_fused_requests_come_back_as_they_were(opened, text, anchor, question):
    """Their answers go on over the same fused KV, and their reports tell of the prompt only."""
    num_tokens = (NUM_IN - len(anchor) - len(question)) // 2
    chunks = [text[4000 + 150 * i :][:num_tokens] for i in range(2 * NUM_REQUESTS)]
    laid_out = [lay_out(anchor, chunks[2 * i : 2 * i + 2], question, "none") for i in range(NUM_REQUESTS)]

    harness, before = opened(preemption="load"), preemptions()
    harness.precompute(anchor, chunks)

    async def ask_all(num_at_once):
        answers = []
        for i in range(0, NUM_REQUESTS, num_at_once):
            asked = (harness.ask(*each, NUM_OUT, f"fused-{next(_salts)}") for each in laid_out[i : i + num_at_once])
            answers += await asyncio.gather(*asked)
        return answers

    right = harness.run(ask_all(1))
    assert preemptions() == before and not any(answer.num_resumed for answer in right)
    found = harness.run(ask_all(NUM_REQUESTS))
    assert preemptions() > before and sum(bool(answer.num_resumed) for answer in found) >= 1
    for answer, other in zip(found, right, strict=True):
        assert_same(answer, other)
        assert answer.report.tokens.reused == other.report.tokens.reused > 100
        assert answer.report.policy is not None and answer.report.tokens.exact == 0
