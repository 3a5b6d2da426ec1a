"""Documents to answers, end to end: the real pipeline and the real endpoint, in float32."""

import asyncio
import random
import re
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import httpx
import pytest
from engine_harness import NUM_LAYERS
from transformers import AutoTokenizer

from ragkv.answer import Answer, AnswerOptions, Conversation, Delta, Reasoning, Retrieved, Sampling, Turn
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, MAIN, Config
from ragkv.errors import ContextTooLongError, EngineStoppedError, StoreError
from ragkv.pipeline import Pipeline
from ragkv.policies import FULL, Policy
from ragkv.prompt import Prompt, PromptLayout
from ragkv.server import create_app
from ragkv.server.tenants import Tenants

pytestmark = pytest.mark.engine

TOPICS = {
    "bees": "Honey bees build hexagonal cells of wax. A colony has one queen; workers forage up to five kilometres.",
    "volcano": "Mount Etna is the tallest active volcano in Europe. It stands in Sicily, and it erupted in 2021.",
    "bridge": "The Akashi bridge spans 1,991 metres between two towers. It was opened in 1998 and links Kobe to Awaji.",
    "tea": "Darjeeling tea is picked four times a year. The first flush in March gives a light and floral cup.",
    "chess": "In chess the rook moves along ranks and files. Castling moves the king two squares towards a rook.",
    "glass": "Window glass is made by floating molten glass on tin. The float process was invented by Pilkington.",
}
QUESTIONS = [
    "How tall is Etna?",
    "When was the Akashi bridge opened?",
    "How do bees build?",
    "Who invented float glass?",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TOPICS.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n" + "\n\n".join([text] * 6))
    return folder


@pytest.fixture(scope="module")
def config(home):
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 1}
    return Config(home=home, model=model, index={"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 128})


@pytest.fixture(scope="module")
def pipeline(runner, config, corpus):
    pipeline = runner.run(Pipeline.open(config))
    report = runner.run(pipeline.ingest([corpus]))
    assert (report.documents_new, report.rejected) == (len(TOPICS), [])
    assert report.chunks_prefilled > len(TOPICS)
    yield pipeline
    runner.run(pipeline.close())


def rewrite(store):
    """As it was, at another place."""
    keys = store.keys()
    for key in keys:
        store.put_records(key, store.admin.records(key))


async def events_of(pipeline, question, policy="query:0.15", top_k=6, max_tokens=12, **options):
    return await drained(pipeline.answer(question, AnswerOptions(Policy.parse(policy), top_k, max_tokens, **options)))


async def drained(events):
    return [event async for event in events]


def test_an_answer_streams_with_sources_and_figures(runner, pipeline):
    first, *deltas, answer = runner.run(events_of(pipeline, "When was the Akashi bridge opened?", fresh=True))
    assert isinstance(first, Retrieved) and first.sources[0].title == "bridge"
    assert isinstance(answer, Answer) and answer.sources == first.sources
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == answer.text
    usage, timings = answer.usage, answer.timings
    assert usage.prompt_tokens == usage.prefix_tokens + usage.reused_tokens + usage.recomputed_tokens
    assert usage.reused_tokens > usage.recomputed_tokens > 0 and usage.completion_tokens > 0
    assert answer.policy.label == "query:0.15" and answer.fallback is None
    assert timings.ttft_ms >= timings.load_ms + timings.probe_ms + timings.recompute_ms
    assert min(timings.load_ms, timings.probe_ms, timings.recompute_ms, timings.retrieve_ms) > 0


def test_a_model_that_ends_while_it_thinks_has_no_answer(runner, pipeline, smollm, tmp_path, monkeypatch):
    """A model that was never taught to think doesn't stop either."""
    for file in smollm.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    opened = tokenizer.chat_template + "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(opened)
    layout = PromptLayout(tmp_path)
    assert layout.anchor == pipeline.workspace.layout.anchor
    monkeypatch.setattr(pipeline.workspace, "layout", layout)
    _, *thoughts, answer = runner.run(events_of(pipeline, QUESTIONS[1]))
    assert thoughts and all(isinstance(each, Reasoning) for each in thoughts)
    assert (answer.text, answer.finish_reason, answer.fallback) == ("", "length", None)
    assert answer.reasoning == "".join(each.text for each in thoughts) and answer.usage.reused_tokens


def test_every_chunk_has_its_capture_and_an_average(runner, pipeline, config):
    stats = pipeline.workspace.store.admin.stats()
    assert config.index.num_contexts > 1
    assert stats.num_records == NUM_LAYERS * stats.num_chunks  # the average's entry has the difference of the capture
    *_, answer = runner.run(events_of(pipeline, QUESTIONS[0], "guided:0.1", fresh=True))
    assert (answer.policy.label, answer.fallback) == ("guided:0.1", None)


def test_a_chunk_takes_its_average_unless_it_is_exact_or_there_is_none(runner, pipeline):
    kv, store = pipeline.workspace.chunk_kv(runner.run(pipeline.start())), pipeline.workspace.store
    known, end = sorted(set(store.chunk_hashes()) - {kv.anchor_hash})[:2], kv.anchor_span.end
    prompt = Prompt([], end, [(end, end + 5), (end + 5, end + 9), (end + 9, end + 12)])
    task = kv.task(prompt, [*known, "f" * 32], Policy("none"), store)
    assert [span.anchor_hash for span in task.spans[1:]] == [kv.anchor_hash, kv.mean_hash, kv.anchor_hash]
    other = kv.over_other_kv(task)
    assert {span.anchor_hash for span in other.spans[1:]} == {kv.anchor_hash}
    assert kv.over_other_kv(other) is None


def test_a_conversation_goes_on_from_its_own_kv(runner, pipeline):
    """All recomputed, a second turn answers as it would alone; with less, the first's KV is kept for it alone."""

    def ask(question, turns=(), policy="query:1.0", **options):
        asked = Conversation(question, turns, "Be kind.")
        return runner.run(events_of(pipeline, asked, policy, 2, **options))[-1]

    for policy in ("query:1.0", "query:0.2"):
        first = ask(QUESTIONS[1], policy=policy)
        turns = (Turn(QUESTIONS[1], first.text.strip()),)
        exact = ask(QUESTIONS[2], turns, policy, fresh=True)
        second = ask(QUESTIONS[2], turns, policy)
        again = ask(QUESTIONS[3], turns, policy)
        assert second.sources[0].title == "bees" and again.sources[0].title == "glass"
        assert second.usage.prefix_tokens >= 128 * (first.usage.prompt_tokens // 128) > 0
        assert again.usage.prefix_tokens == 0  # another's question isn't answered from it
        assert ask(QUESTIONS[1], policy=policy).text == first.text
        assert ask(QUESTIONS[0], turns, policy).usage.prefix_tokens == 0  # nor that of who asks the first one again
        assert second.usage.prompt_tokens == exact.usage.prompt_tokens > first.usage.prompt_tokens
        if policy == "query:1.0":
            assert second.text == exact.text  # full prefill differs by the 8 bits of the first chunk's KV
        third = ask(QUESTIONS[3], (*turns, Turn(QUESTIONS[2], second.text)), policy)
        assert third.usage.prefix_tokens >= 128 * (second.usage.prompt_tokens // 128)


def test_an_answer_above_its_quality_target_is_begun_again_up_to_full_prefill(runner, pipeline):
    def ask(policy, **options):
        return runner.run(events_of(pipeline, QUESTIONS[2], policy, fresh=True, max_tokens=24, **options))

    async def timed(events):
        """Return when the first text came, in milliseconds, and the last event."""
        begin, first_ms = time.perf_counter(), None
        async for event in events:
            if first_ms is None and isinstance(event, Delta):
                first_ms = (time.perf_counter() - begin) * 1e3
        return first_ms, event

    full, plain = ask("full")[-1], ask("guided:0.05")[-1]
    options = AnswerOptions(Policy.parse("guided:0.05"), 6, 24, fresh=True, max_drift=100.0)
    first_ms, content = runner.run(timed(pipeline.answer(QUESTIONS[2], options)))
    assert first_ms / 2 < content.timings.ttft_ms <= first_ms  # what it takes to estimate is in it
    assert (content.attempts, content.policy.label, content.text) == (1, "guided:0.05", plain.text)
    assert 0 < content.drift_estimate < 100 and plain.drift_estimate is None
    _, *deltas, strict = ask("guided:0.05", max_drift=1e-9)
    assert (strict.attempts, strict.policy, strict.drift_estimate) == (3, FULL, 0.0)
    assert strict.text == full.text == "".join(delta.text for delta in deltas)
    *_, more = ask("guided:0.2", max_drift=100.0)
    assert more.drift_estimate < content.drift_estimate


def test_there_is_no_estimate_where_all_kv_is_exact(runner, pipeline):
    *_, answer = runner.run(events_of(pipeline, QUESTIONS[2], "guided:0.05", 1, fresh=True, max_drift=1e-9))
    assert (answer.attempts, answer.drift_estimate) == (1, None)


def test_tokens_are_drawn_as_asked(runner, pipeline):
    def ask(**sampling):
        options = AnswerOptions(Policy.parse("query:0.15"), 2, 24, fresh=True, sampling=Sampling(**sampling))
        *_, answer = runner.run(drained(pipeline.answer(QUESTIONS[0], options)))
        return answer

    greedy = ask()
    drawn = [ask(temperature=1.5, seed=seed).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and greedy.text not in drawn
    word = greedy.text.split()[2]
    stopped = ask(stop=(word,))
    assert stopped.text == greedy.text[: greedy.text.index(word)] and stopped.finish_reason == "stop"


def test_openais_client_gets_the_same_answer(runner, pipeline, config):
    async def ask():
        transport = httpx.ASGITransport(create_app(Tenants(config, {MAIN: pipeline}, {MAIN: config.home / "uploads"})))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
            body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": 12}
            chosen = {"policy": "query", "budget": 0.15, "top_k": 6}
            done = (await client.post("/v1/chat/completions", json={**body, "ragkv": chosen})).json()
            plain = (
                await client.post("/v1/answer", json={"question": QUESTIONS[1], "max_tokens": 12, **chosen})
            ).json()
        return done, plain

    done, plain = runner.run(ask())
    assert done["choices"][0]["message"]["content"] == plain["answer"]
    assert done["ragkv"]["sources"] == plain["sources"]


def test_full_is_full_prefill(runner, pipeline):
    *_, answer = runner.run(events_of(pipeline, QUESTIONS[0], "full", fresh=True))
    assert (answer.usage.reused_tokens, answer.policy.label) == (0, "full")


def test_indexing_again_does_nothing(runner, pipeline, corpus):
    report = runner.run(pipeline.ingest([corpus]))
    assert (report.documents_unchanged, report.chunks_prefilled, report.chunks_deleted) == (len(TOPICS), 0, 0)


def test_documents_change_and_go_and_their_kv_with_them(runner, pipeline, tmp_path):
    store = pipeline.workspace.store
    before = set(store.chunk_hashes())
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "a.txt").write_text("Cod live in the cold North Atlantic.")
    (folder / "b.txt").write_text("Cod live in the cold North Atlantic.")  # the same chunk
    assert runner.run(pipeline.ingest([folder])).chunks_prefilled == 1
    shared = set(store.chunk_hashes()) - before
    assert len(shared) == 1
    (folder / "a.txt").write_text("Herring live in the Baltic.")
    report = runner.run(pipeline.ingest([folder]))
    assert (report.documents_changed, report.documents_unchanged, report.chunks_deleted) == (1, 1, 0)
    assert shared < set(store.chunk_hashes())  # b.txt still has it
    (folder / "b.txt").unlink()
    report = runner.run(pipeline.ingest([folder]))
    assert (report.documents_removed, report.chunks_deleted) == (1, 1)
    assert not shared & set(store.chunk_hashes())
    (folder / "a.txt").unlink()
    runner.run(pipeline.ingest([folder], allow_empty=True))
    assert set(store.chunk_hashes()) == before


def test_one_bad_document_loses_nothing(runner, pipeline, tmp_path):
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "junk.txt").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "rows.jsonl").write_text('{"id": "x", "text": "Storks nest on roofs."}\nnot json\n')
    report = runner.run(pipeline.ingest([tmp_path]))
    assert report.documents_new == 1
    assert len(report.rejected) == 3 and all(isinstance(error, str) for error in report.rejected)
    sources = runner.run(events_of(pipeline, "Where do storks nest?"))[0].sources
    assert sources[0].text.startswith("Storks")


def test_a_question_longer_than_the_context_is_refused_with_the_limit(runner, pipeline):
    with pytest.raises(ContextTooLongError) as error:
        runner.run(events_of(pipeline, "why " * 5000))
    assert error.value.num_tokens > error.value.limit > 1000


def test_chunks_that_do_not_fit_are_left_out(runner, pipeline):
    first, *_, answer = runner.run(events_of(pipeline, "bee " * 1500, top_k=50))
    assert 0 < len(first.sources) < 50
    assert answer.usage.prompt_tokens + 12 <= 2048
    assert re.match(r"\d+ of \d+ sources left out: the context of 2048 tokens has no room for them", answer.fallback)


def test_where_nothing_is_indexed_the_answer_says_so(runner, pipeline):
    first, *_, answer = runner.run(events_of(pipeline.for_tenant("nobody"), QUESTIONS[0]))
    assert first.sources == answer.sources == [] and answer.text
    assert answer.fallback.startswith("nothing is indexed, so the answer rests on no document: upload some, or run")


def test_max_tokens_is_a_limit(runner, pipeline):
    """It takes sources no room that it may not need, and the question none at all."""

    async def sources():
        options = AnswerOptions(Policy.parse("query:0.15"), top_k=6, max_tokens=100_000)
        async with aclosing(pipeline.answer(QUESTIONS[1], options)) as events:
            return (await anext(events)).sources

    assert len(runner.run(sources())) == 6
    *_, answer = runner.run(events_of(pipeline, "bee " * 1900, max_tokens=100_000))
    assert answer.sources == [] and answer.fallback.startswith("6 of 6 sources left out")
    usage = answer.usage
    assert answer.finish_reason == "stop" or usage.prompt_tokens + usage.completion_tokens == 2048


def test_questions_are_tokenised_and_fitted_beside_the_event_loop(runner, pipeline, monkeypatch):
    threads, tokenizer = set(), pipeline.workspace.layout._plain
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: threads.add(threading.current_thread()) or encode(text))
    asked = Conversation(QUESTIONS[2], (Turn("bee " * 200_000, "wax " * 200_000), Turn(QUESTIONS[0], "Very.")))
    *_, answer = runner.run(events_of(pipeline, asked, explain=True))
    assert answer.sources[0].title == "bees" and answer.usage.prompt_tokens < 2048
    assert threads and threading.main_thread() not in threads


def test_an_answer_that_vllm_gives_up_is_an_error(runner, pipeline, monkeypatch):
    engine = runner.run(pipeline.start())
    generate = engine.generate

    async def aborted(*args, **options):
        async for output in generate(*args, **options):
            yield replace(output, finish_reason=output.finish_reason and "abort")

    monkeypatch.setattr(engine, "generate", aborted)
    with pytest.raises(EngineStoppedError, match="before its answer was complete"):
        runner.run(events_of(pipeline, QUESTIONS[0]))


def test_lost_kv_costs_time_and_is_made_again_by_the_next_index(runner, pipeline, corpus):
    *_, before = runner.run(events_of(pipeline, QUESTIONS[1], "query:1.0", fresh=True))
    store = pipeline.workspace.store
    lost = list(store.chunk_hashes())
    store.delete(lost)
    *_, without = runner.run(events_of(pipeline, QUESTIONS[1], "query:1.0", fresh=True))
    assert without.text == before.text and without.usage.reused_tokens == 0 and "no usable KV" in without.fallback
    assert pipeline.counters["missing_chunks"] >= 1
    report = runner.run(pipeline.ingest([corpus]))
    assert report.chunks_prefilled > 0 and store.admin.verify().problems == []
    *_, after = runner.run(events_of(pipeline, QUESTIONS[1], "query:1.0", fresh=True))
    assert replace(after.usage, memory_tokens=0) == replace(before.usage, memory_tokens=0)


def test_the_second_request_for_a_chunk_finds_it_in_memory(runner, pipeline, corpus):
    store = pipeline.workspace.store
    rewrite(store)
    policy = "guided:0.15"
    first, second = (runner.run(events_of(pipeline, QUESTIONS[1], policy, fresh=True))[-1] for _ in range(2))
    usage = second.usage
    assert first.fallback is None and first.usage.memory_tokens == 0
    assert usage.memory_tokens > usage.reused_tokens > 0
    assert second.text == first.text and replace(usage, memory_tokens=0) == first.usage
    chunks = {chunk.chunk_hash for s in second.sources for chunk in pipeline.workspace.main.catalog.chunks([s.chunk])}
    assert chunks <= pipeline.workspace.engine.in_memory
    store.delete(chunks)
    *_, third = runner.run(events_of(pipeline, QUESTIONS[1], policy, fresh=True))
    assert third.usage.reused_tokens == 0 and "no usable KV" in third.fallback
    assert not chunks & pipeline.workspace.engine.in_memory
    runner.run(pipeline.ingest([corpus]))


def test_kv_that_went_bad_is_captured_again_in_the_background(runner, pipeline, corpus):
    store = pipeline.workspace.store
    *_, before = runner.run(events_of(pipeline, QUESTIONS[1], "query:1.0", fresh=True))
    verified, chunks = store.admin.verify(), set(store.chunk_hashes())
    rewrite(store)  # or the worker has it in memory
    keys = [key for key in store.entries if key.anchor_hash != "0" * 32]  # not of the anchor
    for key in keys[::2]:
        path, offset, length = store.admin.locate(key, 3)
        with path.open("r+b") as file:
            file.seek(offset + length - 1)
            (byte,) = file.read(1)
            file.seek(offset + length - 1)
            file.write(bytes([byte ^ 1]))
    *_, without = runner.run(events_of(pipeline, QUESTIONS[1], "query:1.0", fresh=True))
    assert without.text == before.text and "no usable KV" in without.fallback
    deadline = time.monotonic() + 120
    after = without
    while after.fallback is not None and time.monotonic() < deadline:
        runner.run(asyncio.sleep(3))
        *_, after = runner.run(events_of(pipeline, QUESTIONS[1], "query:1.0", fresh=True))
    assert after.fallback is None and after.text == before.text
    assert replace(after.usage, memory_tokens=0) == replace(before.usage, memory_tokens=0)
    assert pipeline.counters["restored_chunks"] >= 1
    store.delete(chunks)  # for the tests that follow
    runner.run(pipeline.ingest([corpus]))
    assert store.admin.verify().num_records == verified.num_records


def test_eight_http_requests_at_once_answer_as_one_at_a_time(runner, pipeline, config):
    bodies = [
        {
            "question": QUESTIONS[i % 4],
            "top_k": 3 + i % 4,
            "budget": random.Random(i).choice([0.05, 0.2]),
            "max_tokens": 10,
        }
        for i in range(8)
    ]

    async def post_all():
        transport = httpx.ASGITransport(create_app(Tenants(config, {MAIN: pipeline}, {MAIN: config.home / "uploads"})))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
            alone = [(await client.post("/v1/answer", json=body)).json() for body in bodies]
            at_once = await asyncio.gather(*(client.post("/v1/answer", json=body) for body in bodies))
            refused = await client.post("/v1/answer", json={"question": "why " * 5000})
            return alone, [response.json() for response in at_once], refused

    alone, at_once, refused = runner.run(post_all())
    assert [response["answer"] for response in at_once] == [response["answer"] for response in alone]
    assert refused.status_code == 413 and refused.json()["error"]["limit"] > 1000


def test_a_budget_smaller_than_the_corpus_costs_time_only(runner, pipeline, corpus, config, tmp_path):
    asked = {"question": QUESTIONS[2], "policy": "query:1.0", "max_tokens": 4, "fresh": True}
    *_, expected = runner.run(events_of(pipeline, **asked))
    (tmp_path / "models").symlink_to(config.home / "models")
    budget = pipeline.workspace.store.admin.stats().size_bytes * 5 // 14
    small = config.model_copy(
        update={"home": tmp_path, "store": config.store.model_copy(update={"disk_gib": budget / (1 << 30)})}
    )

    async def run():
        other = await Pipeline.open(small)
        try:
            await other.ingest([corpus])
            stored = other.workspace.store.admin.stats()
            answers = [(await events_of(other, **asked))[-1] for _ in range(2)]
            again = await other.ingest([corpus])
            return stored, answers, again, other.workspace.store.admin.verify().problems
        finally:
            await other.close()

    stored, answers, again, problems = runner.run(run())
    assert 0 < stored.size_bytes <= budget and problems == []
    assert [answer.text for answer in answers] == [expected.text] * 2
    assert "no usable KV" in answers[0].fallback
    assert again.documents_unchanged == len(TOPICS) and again.chunks_prefilled == 0


def test_hints_reach_the_store_and_are_refused_beyond_the_budget(runner, pipeline, corpus, monkeypatch):
    def hints():
        store = pipeline.workspace.store
        return {key.chunk_hash: store._usage.hint_of(key) for key in store.entries}

    runner.run(pipeline.ingest([corpus / "tea.md"], hint="pin"))
    tea = {
        chunk.chunk_hash
        for chunk in pipeline.workspace.main.catalog.document_chunks(str((corpus / "tea.md").resolve()))
    }
    assert {digest for digest, hint in hints().items() if hint == "pin"} == tea | {pipeline.workspace.anchor_hash}
    *_, answer = runner.run(events_of(pipeline, "When is Darjeeling tea picked?", top_k=2, hint="ephemeral"))
    found = {pipeline.workspace.main.catalog.chunks([source.chunk])[0].chunk_hash for source in answer.sources}
    assert found and {digest for digest, hint in hints().items() if hint == "ephemeral"} == found
    assert answer.hint_refused is None
    tiny = pipeline.config.store.model_copy(update={"disk_gib": 1e-6})
    monkeypatch.setattr(pipeline, "config", pipeline.config.model_copy(update={"store": tiny}))
    *_, answer = runner.run(events_of(pipeline, "When is Darjeeling tea picked?", top_k=2, hint="pin"))
    assert "would be pinned with these" in answer.hint_refused
    assert {digest for digest, hint in hints().items() if hint == "ephemeral"} == found


def test_a_home_of_another_model_is_refused_by_name(runner, pipeline, config):
    other = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(StoreError, match=f"was indexed with the model {EMBEDDED_MODEL}"):
        runner.run(Pipeline.open(other))


def test_the_controller_plans_by_a_profile_of_this_machine(runner, pipeline, corpus):
    *_, before = runner.run(events_of(pipeline, QUESTIONS[0], "guided:0.05", top_k=6, fresh=True))
    assert (before.plan, before.fallback) == (None, None)
    chunks = set(pipeline.workspace.store.chunk_hashes())
    try:
        profile = runner.run(pipeline.profile())
        assert profile.prefill_ms(2000) > profile.prefill_ms(500) > 0
        assert set(pipeline.workspace.store.chunk_hashes()) == chunks  # what was precomputed for it is gone
        assert pipeline._profiles.load() == profile
        *_, after = runner.run(events_of(pipeline, QUESTIONS[0], "guided:0.05", top_k=6, fresh=True))
        assert after.plan.predicted_ms <= after.plan.prefill_ms
        assert after.fallback is None
        if after.plan.way == "fuse":
            assert after.policy == before.policy and after.text == before.text
        pipeline._router.profile = replace(profile, fused=(1e6,) * 6)  # fusion takes for ever
        *_, left = runner.run(events_of(pipeline, QUESTIONS[0], "guided:0.05", top_k=6, fresh=True))
        *_, full = runner.run(events_of(pipeline, QUESTIONS[0], "full", top_k=6, fresh=True))
        assert (left.plan.way, left.policy.label, left.usage.reused_tokens) == ("prefill", "full", 0)
        assert left.text == full.text and full.plan is None
        assert left.fallback is None  # all of it is stored
        pipeline._router.profile = profile
        pipeline.workspace.store.delete(chunks)
        *_, lost = runner.run(events_of(pipeline, QUESTIONS[0], "guided:0.05", top_k=6, fresh=True))
        assert lost.plan.way == "prefill" and "no usable KV" in lost.fallback and lost.text == full.text
        assert pipeline._restorer._missing  # though the worker was never asked
        runner.run(pipeline.ingest([corpus]))
        *_, other = runner.run(events_of(pipeline, QUESTIONS[0], "none", top_k=6, fresh=True))
        assert other.plan is None and other.policy.label == "none"
    finally:
        pipeline._router.profile = None
