"""Exact prefixes: saved by one engine, loaded by the next, and never anything but what vLLM would have computed."""

import time

import pytest
from engine_harness import Harness, assert_same

from ragkv.engine.prefixes import EXACT
from ragkv.store.entries import EntryFolder
from ragkv.store.record import FORMAT_VERSION

pytestmark = pytest.mark.engine


def files_of(store):
    entries = EntryFolder(store / f"v{FORMAT_VERSION}")
    return [entries.path(key) for key in entries if key.anchor_hash == EXACT]


def wait_for_files(store, number):
    for _ in range(100):
        if len(files_of(store)) == number:
            return
        time.sleep(0.05)
    assert len(files_of(store)) == number


def test_a_conversation_goes_on_after_a_restart(runner, smollm, tmp_path, text):
    """Greedy, float32: tokens and log-probabilities are those of an engine that has computed everything."""
    opened = lambda: Harness(runner, smollm, tmp_path, max_model_len=4096)  # noqa: E731
    first, other = text[:700], text[1000:1600]
    harness = opened()
    told = harness.ask_now(first, max_tokens=60, salt="a", prefix="session")
    assert_same(told, harness.ask_now(first, max_tokens=60))
    harness.ask_now(other, salt="a")
    wait_for_files(tmp_path, 3)  # 256, 512 and 640 tokens: 700 of the prompt and 59 of the answer, in blocks of 128
    later = [*first, *told.token_ids, *text[2000:2100]]
    expected = harness.ask_now(later)
    stranger = harness.ask_now(later, salt="b")
    harness.close()

    harness = opened()
    try:
        harness.ask_now(text[:10])  # the worker has said that it can load
        found = harness.ask_now(later, salt="a", prefix="session")
        assert_same(found, expected)
        assert found.report.tokens.exact == 640 and found.report.tokens.prefix == 0
        assert harness.ask_now(later, salt="b").report is None
        assert harness.ask_now(other, salt="a").report is None
        again = harness.ask_now(later, salt="a")  # vLLM's own cache has it
        assert_same(again, expected)
        assert again.report is None
        assert_same(harness.ask_now(later, salt="b"), stranger)
    finally:
        harness.close()


def test_damage_costs_a_prefix_and_no_token(runner, smollm, tmp_path, text):
    harness = Harness(runner, smollm, tmp_path, max_model_len=4096)
    try:
        prompt = text[:900]
        harness.ask_now(prompt, salt="a", prefix="session")
        wait_for_files(tmp_path, 4)
        expected = harness.ask_now(prompt)
        for i, path in enumerate(sorted(files_of(tmp_path))):
            data = bytearray(path.read_bytes())
            data[(2 * i + 1) * len(data) // 11] ^= 1 << i
            path.write_bytes(data)
        harness.run(harness.engine._llm.reset_prefix_cache())
        found = harness.ask_now(prompt, salt="a")
        assert_same(found, expected)
        assert found.report.failed and found.report.tokens.exact == 0
        assert len(files_of(tmp_path)) == 3
    finally:
        harness.close()
