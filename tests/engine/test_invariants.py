"""What fusion must never break, on layers of the real SmolLM2 through real vLLM, in float32."""

import asyncio
import math
import random
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from engine_harness import CHUNK_TOKENS, FINGERPRINT, NUM_LAYERS, QUESTIONS, assert_same, lay_out
from store_samples import drop_cached
from tokenizers import Tokenizer

from ragkv.engine.task import Span
from ragkv.engine.worker import slice_tokens
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey

pytestmark = pytest.mark.engine

NUM_CHUNKS = 6
MIDDLE, LAST = NUM_LAYERS // 2, NUM_LAYERS - 1


@pytest.fixture(scope="module")
def chunks(harness, anchor, text):
    chunks = [text[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS] for i in range(NUM_CHUNKS)]
    harness.precompute(anchor, chunks)
    return chunks


@pytest.mark.parametrize("num_chunks", [1, 6])
def test_full_equals_vllm(harness, anchor, chunks, question, num_chunks):
    token_ids, task = lay_out(anchor, chunks[:num_chunks], question, "full")
    fused = harness.ask_now(token_ids, task)
    assert fused.report.tokens.recomputed == len(token_ids) - 1
    assert_same(fused, harness.ask_now(token_ids))


def test_one_chunk_behind_its_anchor_is_exact_without_recomputing(harness, anchor, chunks, question):
    token_ids, task = lay_out(anchor, chunks[2:3], question, "none")
    fused = harness.ask_now(token_ids, task)
    assert fused.report.tokens.reused == len(anchor) + CHUNK_TOKENS
    assert fused.report.tokens.recomputed == len(question) - 1
    assert_same(fused, harness.ask_now(token_ids))


def test_recomputing_all_that_is_cached_is_exact(harness, anchor, chunks, question):
    """`query:1.0` goes the whole way: load, rotate, vote, recompute everything that isn't exact already."""
    token_ids, task = lay_out(anchor, chunks[:4], question, "query:1.0")
    fused = harness.ask_now(token_ids, task)
    assert fused.report.tokens.reused == len(anchor) + CHUNK_TOKENS
    assert_same(fused, harness.ask_now(token_ids))


def test_text_without_kv_is_computed_where_it_stands(harness, anchor, chunks, question, text):
    """A chunk that nobody precomputed, between chunks that are cached."""
    unknown = text[5000:5200]
    token_ids, task = lay_out(anchor, [chunks[0], unknown, chunks[1]], question, "query:1.0")
    fused = harness.ask_now(token_ids, task)
    assert fused.report.chunks.missing == 1
    assert_same(fused, harness.ask_now(token_ids))
    nothing, task = lay_out(anchor, [unknown], question, "none")
    assert_same(harness.ask_now(nothing, task), harness.ask_now(nothing))


def drift(found, expected):
    """KL(full ‖ fused) of the first token, over the whole vocabulary."""
    p, q = expected.logprobs[0], found.logprobs[0]
    return sum(math.exp(p[t]) * (p[t] - q[t]) for t in p)


def test_drift_falls_as_the_budget_grows(harness, layout, anchor, chunks):
    policies, questions = ["none", "query:0.05", "query:0.3", "query:1.0"], QUESTIONS[:4]
    totals = dict.fromkeys(policies, 0.0)
    for seed, text in enumerate(questions):
        order = random.Random(seed).sample(chunks, NUM_CHUNKS)
        question = layout.question_tokens(text)
        exact = harness.ask_now(lay_out(anchor, order, question, "none")[0], max_tokens=1, logprobs=-1)
        for policy in policies:
            token_ids, task = lay_out(anchor, order, question, policy)
            totals[policy] += drift(harness.ask_now(token_ids, task, max_tokens=1, logprobs=-1), exact)
    none, low, high, everything = totals.values()
    assert none > low > high > everything
    assert everything / len(questions) < 1e-5


def test_sixteen_at_once_answer_as_one_at_a_time(harness, layout, anchor, chunks):
    requests = []
    for seed in range(16):
        order = random.Random(seed).sample(chunks, 4)
        question = layout.question_tokens(QUESTIONS[seed % len(QUESTIONS)])
        requests.append(lay_out(anchor, order, question, ("query:0.15", "none", "full")[seed % 3]))
    alone = [harness.ask_now(*request) for request in requests]

    async def together():
        return await asyncio.gather(*(harness.ask(*request) for request in requests))

    for found, expected in zip(harness.run(together()), alone, strict=True):
        assert_same(found, expected)


def test_slices_while_others_decode_change_nothing(harness, anchor, chunks, question):
    token_ids, task = lay_out(anchor, chunks, question, "query:0.4")
    alone = harness.ask_now(token_ids, task)
    max_batch_tokens = harness.engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    assert alone.report.tokens.recomputed > slice_tokens(max_batch_tokens, 8, 8)

    async def beside_decodes():
        others = [asyncio.create_task(harness.ask(token_ids[:100], max_tokens=60)) for _ in range(8)]
        await asyncio.sleep(1)
        found = await harness.ask(token_ids, task)
        return found, await asyncio.gather(*others)

    found, others = harness.run(beside_decodes())
    assert [len(other.token_ids) for other in others] == [60] * 8
    assert_same(found, alone)


def test_a_slice_is_the_smaller_the_more_wait_for_it():
    assert slice_tokens(2048, 0, 0) == 2048
    assert [slice_tokens(2048, n, n) for n in (1, 3, 7, 15, 255)] == [512, 511, 255, 127, 64]
    assert slice_tokens(2048, 2, 2000) == 64  # vLLM prefills somebody's prompt in the same step


def test_a_second_identical_request_takes_its_kv_from_the_prefix_cache(harness, anchor, chunks, question):
    token_ids, task = lay_out(anchor, chunks[:4], question, "query:0.15")
    first, second = (harness.ask_now(token_ids, task, salt="shared") for _ in range(2))
    assert first.report.tokens.prefix == 0
    assert second.report is None or second.report.tokens.prefix >= 128
    # the tail behind the last whole block is chosen anew, by a question that has seen the fused cache: policy drift
    assert_same(second, first, tolerance=0.05)
    plain = harness.ask_now(token_ids)
    assert plain.report is None


def test_an_aborted_request_leaves_the_engine_well(harness, anchor, chunks, question):
    token_ids, task = lay_out(anchor, chunks, question, "full")
    expected = harness.ask_now(token_ids, task)

    async def abort_some():
        tasks = [asyncio.create_task(harness.ask(token_ids, task)) for _ in range(4)]
        await asyncio.sleep(0.4)  # some are loading, some are waiting
        for pending in tasks[1:]:
            pending.cancel()
        return await tasks[0]

    assert_same(harness.run(abort_some()), expected)
    assert_same(harness.ask_now(token_ids, task), expected)


def test_what_waits_for_its_turn_is_read_meanwhile(harness, anchor, text, question):
    chunks = [text[i : i + 150] for i in range(7000, 7600, 150)]
    harness.precompute(anchor, chunks)
    long, waiting = lay_out(anchor, [text[:6000]], question, "full"), lay_out(anchor, chunks, question, "query:0.15")
    keys = [key_of(harness, chunk, anchor) for chunk in chunks]

    async def both(store):
        requests = [asyncio.create_task(harness.ask(*request, max_tokens=1)) for request in (long, waiting)]
        while not all(map(store.in_page_cache, keys)) and not requests[0].done():
            await asyncio.sleep(0.01)
        in_time = not requests[0].done()
        await asyncio.gather(*requests)
        return in_time

    with closing(open_store(harness)) as store:
        drop_cached(store, keys)
        assert harness.run(both(store))


def open_store(harness):
    extra = harness.engine._llm.vllm_config.kv_transfer_config.kv_connector_extra_config
    return DiskStore(Path(extra["store"]))


def key_of(harness, chunk, anchor):
    return ChunkKey(chunk_hash(chunk), chunk_hash(anchor), FINGERPRINT, harness.engine.kv_heads)


def damaged(harness, chunk, anchor, layer):
    """Flip one byte of a stored record, as a failing disk would."""
    with closing(open_store(harness)) as store:
        segment, offset, length = store.admin.locate(key_of(harness, chunk, anchor), layer)
    with segment.open("r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)[0]
        file.seek(offset + length // 2)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("layer", "policy"),
    [(0, "query:1.0"), (MIDDLE, "query:1.0"), (LAST, "query:1.0"), (MIDDLE, "query:0.15"), (LAST, "none")],
)
def test_damaged_bytes_cost_time_and_not_the_answer(harness, anchor, text, question, policy, layer):
    chunks = [text[i : i + 150] for i in range(6000, 6600, 150)]
    harness.precompute(anchor, chunks)
    token_ids, task = lay_out(anchor, chunks, question, policy)
    damaged(harness, chunks[2], anchor, layer)
    found = harness.ask_now(token_ids, task)
    assert (found.report.chunks.corrupt, found.report.chunks.missing) == (1, 0)
    assert harness.engine.counters["corrupt_chunks"] >= 1
    # the same request with that chunk never precomputed
    unknown_anchor = Span(*[getattr(task.spans[3], name) for name in ("start", "end")], "a" * 32, "b" * 32)
    without = type(task)((*task.spans[:3], unknown_anchor, *task.spans[4:]), task.policy)
    assert_same(found, harness.ask_now(token_ids, without))
    if policy == "query:1.0":
        assert_same(found, harness.ask_now(token_ids))


def test_serving_holds_no_second_copy_of_the_context(harness, anchor, text, question):
    """While 7,000 tokens are fused, the process grows by less than a few layers of their KV."""
    chunks = [text[i : i + 500] for i in range(0, 7000, 500)]
    harness.precompute(anchor, chunks)
    token_ids, task = lay_out(anchor, chunks, question, "query:0.02")
    harness.ask_now(token_ids, task, max_tokens=1)  # whatever a first request allocates for good
    processes = psutil.Process().children(recursive=True)

    def anonymous_bytes():
        lines = [line for p in processes for line in Path(f"/proc/{p.pid}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    async def watch():
        before, peak = anonymous_bytes(), 0
        request = asyncio.create_task(harness.ask(token_ids, task, max_tokens=1))
        while not request.done():
            peak = max(peak, anonymous_bytes())
            await asyncio.sleep(0.005)
        await request
        return peak - before

    layer_bytes = 2 * 7000 * 3 * 64 * 4
    assert harness.run(watch()) < 5 * layer_bytes < NUM_LAYERS * layer_bytes


def test_the_tokenizer_is_the_models_own(smollm, anchor):
    text = Tokenizer.from_file(str(smollm / "tokenizer.json")).decode(anchor, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system")
