"""Two homes that share exact prefixes in a bucket: a real engine, a real S3 server, float32."""

import asyncio

import pytest

from ragkv.answer import AnswerOptions
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, Config
from ragkv.controller.cost_model import Profile
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy
from ragkv.store.fetching import OUTAGE

pytestmark = pytest.mark.engine

TEA = "Darjeeling tea is picked four times a year. The first flush in March gives a light and floral cup."
QUESTION = "When is it picked? " + " ".join(f"Mind the note number {i} on tea, too." for i in range(50))
# As of a machine that takes minutes for each prefill, so that an answer may wait for 10 s.
SLOW = Profile(Policy.parse("none"), prefill=(200_000.0, 0.0, 0.0), fused=(0.0,) * 6, cold_ms=0.0)


def config_of(home, small_smollm, bucket):
    home.mkdir()
    (home / "models").symlink_to(small_smollm.parent)
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 0.5}
    store = {"remote": bucket.url, "remote_prefixes": True, "remote_timeout_s": 20, "memory_gib": 0}
    index = {"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 96, "num_contexts": 1}
    return Config(home=home, model=model, index=index, store=store)


async def opened(config, corpus):
    pipeline = await Pipeline.open(config)
    await pipeline.ingest([corpus])
    pipeline._router.profile = SLOW
    return pipeline


async def ask(pipeline, **options):
    asked = AnswerOptions(Policy.parse("full"), 2, 12, **options)
    return [event async for event in pipeline.answer(QUESTION, asked)][-1]


async def until(condition):
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it doesn't come true")


def prefixes_in(bucket):
    return [name for name in bucket.objects() if "/prefixes/" in name]


def test_what_one_machine_has_prefilled_another_loads(runner, small_smollm, tmp_path, bucket):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "tea.md").write_text(TEA)

    async def first():
        pipeline = await opened(config_of(tmp_path / "first", small_smollm, bucket), corpus)
        expected = await ask(pipeline, fresh=True)  # vLLM's own
        await ask(pipeline, keep="shared")
        stored = pipeline.workspace.tier.derived.store
        await until(lambda: stored.keys() and len(prefixes_in(bucket)) == len(stored.keys()))
        await pipeline.close()
        return expected

    expected = runner.run(first())
    num_segments = len(prefixes_in(bucket))
    assert num_segments > 1 and expected.usage.prompt_tokens > 512

    async def second():
        pipeline = await opened(config_of(tmp_path / "second", small_smollm, bucket), corpus)
        shared = pipeline.workspace.tier.derived
        await asyncio.to_thread(shared.send)  # which lists what is there
        found = await ask(pipeline)
        num_read = shared.traffic.entries_read
        shared.store.control.clear(shared.store.keys())  # as if they had been evicted
        await pipeline.workspace.engine._llm.reset_prefix_cache()
        bucket.proxy.set("closed")
        in_outage = await ask(pipeline)
        num_missed = shared.traffic.misses[OUTAGE]
        deletion = await pipeline.indexer.delete([str(corpus / "tea.md")])
        left = prefixes_in(bucket)
        bucket.proxy.set()
        await until(lambda: not pipeline.workspace.tier.num_pending_deletions)
        await pipeline.close()
        return found, num_read, in_outage, num_missed, deletion, left

    found, num_read, in_outage, num_missed, deletion, left = runner.run(second())
    assert found.usage.stored_prefix_tokens >= 512 and num_read == num_segments
    assert (found.text, found.usage.completion_tokens) == (expected.text, expected.usage.completion_tokens)
    assert in_outage.usage.stored_prefix_tokens == 0 and in_outage.text == expected.text and num_missed
    assert deletion.num_unreached == deletion.num_chunks + 1 and len(left) == num_segments
    assert not prefixes_in(bucket)
