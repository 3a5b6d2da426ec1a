"""Two homes that share a bucket, from documents to answers: a real engine, a real S3 server."""

import asyncio

import pytest

from ragkv.answer import Answer, AnswerOptions
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, Config
from ragkv.controller.cost_model import Profile
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy
from ragkv.store.fetching import ABSENT, LATE, OUTAGE

pytestmark = pytest.mark.engine

QUESTION = "When was the Akashi bridge opened?"
TEXTS = {
    "bees": "Honey bees build hexagonal cells of wax. A colony has one queen; workers forage up to five kilometres.",
    "bridge": "The Akashi bridge spans 1,991 metres between two towers. It was opened in 1998 and links Kobe to Awaji.",
    "tea": "Darjeeling tea is picked four times a year. The first flush in March gives a light and floral cup.",
}
# As of a machine that takes 20 s for each prefill, so that an answer may wait for 1 s.
SLOW = Profile(Policy.parse("none"), prefill=(20_000.0, 0.0, 0.0), fused=(0.0,) * 6, cold_ms=0.0)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n" + "\n\n".join([text] * 6))
    return folder


def config_of(home, smollm, bucket):
    home.mkdir()
    (home / "models").symlink_to(smollm.parent)
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 0.5}
    index = {"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 96, "num_contexts": 2}
    store = {"remote": bucket.url, "remote_timeout_s": 20, "memory_gib": 0}
    return Config(home=home, model=model, index=index, store=store)


def files_of(store):
    return {key: store.entries.read(key) for key in store.entries}


def ask(runner, pipeline):
    async def run():
        options = AnswerOptions(Policy.parse("none"), 3, 12, fresh=True)
        return [event async for event in pipeline.answer(QUESTION, options)][-1]

    answer = runner.run(run())
    assert isinstance(answer, Answer)
    return answer


def lose_all(pipeline):
    """Take the entries from the disk only, as eviction does."""
    store = pipeline.workspace.store
    for key in list(store.entries):
        store.discard(key)


def wait_until(runner, condition):
    async def run():
        for _ in range(600):
            if condition():
                return True
            await asyncio.sleep(0.1)
        return False

    assert runner.run(run())


def test_what_one_home_indexed_the_other_answers_from(runner, smollm, tmp_path, bucket, corpus):
    first = runner.run(Pipeline.open(config_of(tmp_path / "first", smollm, bucket)))
    report = runner.run(first.ingest([corpus]))
    assert report.chunks_prefilled > 3 and report.entries_fetched == report.entries_unsent == 0
    files = files_of(first.workspace.store)
    assert sorted(bucket.objects().values()) == sorted(files.values())
    expected = ask(runner, first)
    runner.run(first.close())

    second = runner.run(Pipeline.open(config_of(tmp_path / "second", smollm, bucket)))
    report = runner.run(second.ingest([corpus]))
    assert (report.documents_new, report.chunks_prefilled, report.entries_unsent) == (3, 0, 0)
    assert report.entries_fetched == len(files) - 1  # the anchor comes before the chunks
    assert files_of(second.workspace.store) == files
    answer = ask(runner, second)
    assert (answer.text, answer.usage) == (expected.text, expected.usage) and answer.usage.reused_tokens > 200

    misses = second.workspace.tier.traffic.misses
    assert not misses.total()
    second._router.profile = SLOW
    lose_all(second)
    assert ask(runner, second).usage == expected.usage  # they came in time
    assert not misses.total()
    used = {key: data for key, data in files_of(second.workspace.store).items() if data == files[key]}
    assert len(used) == 1 + 3

    bucket.proxy.set(bytes_per_s=sum(map(len, used.values())) / 60)  # they would take a minute
    lose_all(second)
    traffic = second.workspace.tier.traffic
    num_read = traffic.entries_read
    answer = ask(runner, second)
    assert traffic.entries_read < num_read + len(used)  # it didn't wait for all of them
    assert answer.text and misses[LATE] and answer.usage.reused_tokens < 200
    bucket.proxy.set()
    wait_until(runner, lambda: used.items() <= files_of(second.workspace.store).items())
    assert traffic.entries_read >= num_read + len(used)  # none of them was precomputed again
    assert ask(runner, second).usage == expected.usage

    lose_all(second)
    bucket.proxy.set("closed")
    for _ in range(2):
        assert ask(runner, second).usage.reused_tokens == 0
    assert misses[OUTAGE] and not misses[ABSENT]
    report = runner.run(second.ingest([corpus]))
    assert report.entries_fetched == 0 and report.chunks_prefilled
    deletion = runner.run(second.indexer.delete([str(corpus / "tea.md")]))
    assert deletion.num_unreached == deletion.num_chunks + 1 > 0
    needed = second.catalog.chunk_hashes() | {second.workspace.anchor_hash}
    tea = [data[4096:8192] for key, data in files.items() if key.chunk_hash not in needed]  # of its first records
    bucket.proxy.set()
    wait_until(runner, lambda: not second.workspace.tier.num_pending_deletions)
    assert len(bucket.objects()) == len(files) - deletion.num_chunks
    places = [path.read_bytes() for path in (tmp_path / "second").rglob("*") if path.is_file()]
    places += bucket.objects().values()
    assert tea and not [place for place in places for data in tea if data in place]
    runner.run(second.close())
