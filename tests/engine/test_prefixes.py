"""Exact prefixes: stored by one engine, loaded by the next, and never anything but what vLLM would have computed."""

import asyncio
import time

import pytest
from engine_harness import Harness, assert_same, lay_out

from ragkv.engine.task import PrefixUse
from ragkv.store.entries import EntryFolder
from ragkv.store.prefixes import clear_prefixes
from ragkv.store.record import FORMAT_VERSION

pytestmark = pytest.mark.engine


def files_of(folder):
    entries = EntryFolder(folder / f"v{FORMAT_VERSION}")
    return [entries.path(key) for key in entries]


def wait_for_files(folder, number):
    for _ in range(600):
        if len(files_of(folder)) == number:
            return
        time.sleep(0.05)
    assert len(files_of(folder)) == number


@pytest.fixture(scope="module")
def opened(runner, small_smollm, tmp_path_factory):
    """Starts engines that keep their prefixes in a folder, one after another."""
    started = []

    def start(folder, **args):
        while started:
            started.pop().close()
        options = {"folder": str(folder), "disk_bytes": 1 << 30, "bytes_per_hour": 1 << 34}
        store = tmp_path_factory.mktemp("store")
        started.append(Harness(runner, small_smollm, store, max_model_len=4096, prefixes=options, **args))
        started[0].ask_now([1, 2, 3])  # the worker has said that it can load
        return started[0]

    yield start
    while started:
        started.pop().close()


@pytest.fixture(scope="module")
def harness(opened, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefixes")
    found = opened(folder)
    found.prefixes = folder
    return found


def forget_all(harness):
    """Have vLLM forget the blocks that it has, as if other requests had needed them."""
    harness.run(harness.engine.forget_prefixes())
    clear_prefixes(harness.prefixes)


def test_damage_costs_a_prefix_and_no_token(harness, text):
    prompt = text[:900]
    harness.ask_now(prompt, salt="a", keep="session")
    wait_for_files(harness.prefixes, 4)
    expected = harness.ask_now(prompt)
    for i, path in enumerate(sorted(files_of(harness.prefixes))):
        data = bytearray(path.read_bytes())
        data[(2 * i + 1) * len(data) // 11] ^= 1 << i
        path.write_bytes(data)
    harness.run(harness.engine.forget_prefixes())
    found = harness.ask_now(prompt, salt="a")
    assert_same(found, expected)
    assert found.report.failed and found.report.tokens.exact == 0
    assert len(files_of(harness.prefixes)) == 3


def test_what_comes_back_is_kept(harness, text):
    """Without being told: an instruction that others begin with too, and a conversation that goes on."""
    forget_all(harness)
    instruction = text[3000:3430]
    for i in range(3):
        harness.ask_now([*instruction, *text[100 * i : 100 * i + 60]], salt="b", keep=None)
    wait_for_files(harness.prefixes, 3)  # 256 tokens, 128 of the next 174, and 32 of the 46 behind them
    asked = [*instruction, *text[700:790]]
    harness.run(harness.engine.forget_prefixes())
    found = harness.ask_now(asked, salt="b", keep="once")
    assert found.report.tokens.exact == 416 and found.report.tokens.prefix == 0
    assert_same(found, harness.ask_now(asked, salt="alone", keep="once"))
    told = harness.ask_now(text[:600], salt="c", max_tokens=60, keep=None)
    harness.ask_now([*text[:600], *told.token_ids, *text[700:800]], salt="c", keep=None)
    wait_for_files(harness.prefixes, 7)  # 256, 512, 640 and 736 of 766 tokens


def test_an_instruction_shorter_than_a_block_comes_back(harness, text):
    forget_all(harness)
    instruction = text[5000:5100]
    for i in range(2):
        harness.ask_now([*instruction, *text[60 * i : 60 * i + 20]], salt="short", keep=None)
    wait_for_files(harness.prefixes, 1)
    asked = [*instruction, *text[700:720]]
    harness.run(harness.engine.forget_prefixes())
    found = harness.ask_now(asked, salt="short", keep="once")
    assert found.report.tokens.exact == 96
    expected = harness.ask_now(asked, salt="another's", keep="once")
    assert expected.report is None
    assert_same(found, expected)


def test_who_leaves_before_the_kv_is_there_leaves_the_engine_well_and_nothing_stored(harness, anchor, text, question):
    forget_all(harness)
    chunks = [text[i : i + 160] for i in range(0, 3200, 160)]
    harness.precompute(anchor, chunks)
    token_ids, task = lay_out(anchor, chunks, question, "full")

    async def abort_some():
        beside = asyncio.create_task(harness.ask(text[:100], max_tokens=200))  # so that the others are fused in slices
        await asyncio.sleep(0.5)
        leave = [asyncio.create_task(harness.ask(token_ids, task, salt=f"fused-{i}", keep="session")) for i in range(4)]
        await asyncio.sleep(0.4)
        assert not any(each.done() for each in (beside, *leave))
        for pending in leave:
            pending.cancel()
        await asyncio.gather(*leave, return_exceptions=True)
        return await beside

    harness.run(abort_some())
    harness.ask_now(text[:900], salt="d", keep="session")
    wait_for_files(harness.prefixes, 4)  # those of this one alone


@pytest.mark.parametrize("num_tokens", [300, 430])  # vLLM has 256 or 384 of them: a whole segment, and a part of one
def test_a_tail_is_loaded_behind_what_vllm_has(harness, text, num_tokens):
    forget_all(harness)
    instruction, salt = text[6000 : 6000 + num_tokens], f"behind {num_tokens}"
    harness.ask_now([*instruction, *text[:40]], salt=salt, keep="once")
    harness.ask_now([*instruction, *text[100:140]], salt=salt, keep=None)
    wait_for_files(harness.prefixes, 2 if num_tokens == 300 else 3)
    asked = [*instruction, *text[700:740]]
    found = harness.ask_now(asked, salt=salt, keep="once")
    assert (found.report.tokens.prefix, found.report.tokens.exact) == (num_tokens // 128 * 128, 32)
    assert_same(found, harness.ask_now(asked, salt="alone again", keep="once"))


def test_what_is_deleted_isnt_stored_by_requests_that_began_before(harness, text):
    forget_all(harness)

    async def ask_and_clear():
        pieces = harness.engine.generate(text[:600], max_tokens=40, salt="d", prefix=PrefixUse("session"))
        async for _ in pieces:
            clear_prefixes(harness.prefixes)

    harness.run(ask_and_clear())
    harness.ask_now(text[1000:1600], salt="d", keep="session")  # written after it
    wait_for_files(harness.prefixes, 3)
    harness.run(harness.engine.forget_prefixes())
    assert harness.ask_now(text[:600], salt="d").report is None
    assert harness.ask_now(text[1000:1600], salt="d").report.tokens.exact == 576


def test_a_slow_disk_isnt_waited_for(harness, text):
    forget_all(harness)
    harness.ask_now(text[:900], salt="e", keep="session")
    wait_for_files(harness.prefixes, 4)
    harness.run(harness.engine.forget_prefixes())
    assert harness.ask_now(text[:900], salt="e").report.tokens.exact == 896
    harness.run(harness.engine.forget_prefixes())
    quick = PrefixUse(prefill_ms=1e-6)  # for a thousand tokens
    assert harness.run(ask_with(harness, text[:900], "e", quick)) is None


def test_what_cant_be_written_is_counted(harness, text):
    folder, away = harness.prefixes / f"v{FORMAT_VERSION}", harness.prefixes / "away"
    folder.rename(away)
    folder.touch()
    try:
        found = harness.ask_now(text[:900], salt="lost", keep="session")
        for _ in range(600):
            if harness.engine.counters["lost_prefixes"]:
                break
            time.sleep(0.05)
            harness.ask_now([1, 2, 3])  # what was lost is told with the next answer
        assert harness.engine.counters["lost_prefixes"] == 1
    finally:
        folder.unlink()
        away.rename(folder)
    harness.run(harness.engine.forget_prefixes())
    assert_same(harness.ask_now(text[:900]), found)


async def ask_with(harness, token_ids, salt, prefix):
    report = None
    async for output in harness.engine.generate(token_ids, max_tokens=1, salt=salt, prefix=prefix):
        report = output.report or report
    return report


def test_a_conversation_goes_on_after_a_restart(opened, tmp_path, text):
    """Greedy, float32: tokens and log-probabilities are those of an engine that has computed everything."""
    small = {"block_size": 32}  # the other tests have vLLM's own, 128 on CPU
    first, other = text[:700], text[1000:1600]
    harness = opened(tmp_path, **small)
    told = harness.ask_now(first, max_tokens=60, salt="a", keep="session")
    assert_same(told, harness.ask_now(first, max_tokens=60))
    harness.ask_now(other, salt="a")
    wait_for_files(tmp_path, 3)  # 256, 512 and 736 tokens: 700 of the prompt and 59 of the answer
    later = [*first, *told.token_ids, *text[2000:2100]]
    expected = harness.ask_now(later)
    stranger = harness.ask_now(later, salt="b")

    harness = opened(tmp_path, **small)
    found = harness.ask_now(later, salt="a", keep="session")
    assert_same(found, expected)
    assert found.report.tokens.exact == 736 and found.report.tokens.prefix == 0
    assert harness.ask_now(later, salt="b").report is None
    assert harness.ask_now(other, salt="a").report is None
    again = harness.ask_now(later, salt="a")  # vLLM's own cache has it
    assert_same(again, expected)
    assert again.report is None
    assert_same(harness.ask_now(later, salt="b"), stranger)
