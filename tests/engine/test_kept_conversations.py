"""Conversations of the real pipeline whose prefixes outlive vLLM's cache and the process, in float32."""

import pytest

from ragkv.answer import AnswerOptions, Conversation, Turn
from ragkv.config import EMBEDDED_EMBEDDER, EMBEDDED_MODEL, Config
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy

pytestmark = pytest.mark.engine

TOPICS = {
    "bees": "Honey bees build hexagonal cells of wax. A colony has one queen; workers forage up to five kilometres.",
    "volcano": "Mount Etna is the tallest active volcano in Europe. It stands in Sicily, and it erupted in 2021.",
    "bridge": "The Akashi bridge spans 1,991 metres between two towers. It was opened in 1998 and links Kobe to Awaji.",
}
QUESTIONS = ["How tall is Etna?", "When was the Akashi bridge opened?", "How do bees build?", "How far do bees fly?"]


@pytest.fixture(scope="module")
def config(home):
    model = {"name": EMBEDDED_MODEL, "dtype": "float32", "max_model_len": 2048, "kv_cache_gib": 1}
    index = {"embedder": EMBEDDED_EMBEDDER, "chunk_tokens": 128}
    return Config(home=home, model=model, index=index, answer={"controller": False})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, text in TOPICS.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n" + "\n\n".join([text] * 6))
    return folder


class Talk:
    """A conversation, as a client has it."""

    def __init__(self, policy):
        self.policy, self.turns = Policy.parse(policy), ()

    async def ask(self, pipeline, question, **options):
        asked = Conversation(question, self.turns)
        async for event in pipeline.answer(asked, AnswerOptions(self.policy, 3, 16, **options)):
            answer = event
        self.turns = (*self.turns, Turn(question, answer.text))
        return answer


def kept(config):
    return [file for file in (config.home / "prefixes").rglob("*.kv") if file.is_file()]


@pytest.mark.parametrize("policy", ["full", "guided:0.05"])
def test_a_conversation_goes_on_from_the_disk(runner, config, corpus, policy):
    async def until_the_third_turn():
        pipeline = await Pipeline.open(config)
        await pipeline.ingest([corpus])
        talk, other = Talk(policy), Talk(policy)
        for question in QUESTIONS[:3]:
            await talk.ask(pipeline, question)
        await other.ask(pipeline, QUESTIONS[1], keep="once")
        expected = Talk(policy)
        expected.turns = talk.turns
        answer = await expected.ask(pipeline, QUESTIONS[3])  # from vLLM's own cache, and a tail; it takes the thread
        await pipeline.close()
        return talk, answer

    talk, expected = runner.run(until_the_third_turn())
    assert expected.usage.prefix_tokens > 256 and expected.usage.stored_prefix_tokens < 128
    assert kept(config)

    async def after_a_restart():
        pipeline = await Pipeline.open(config)
        other = Talk(policy)
        await other.ask(pipeline, "Who is the queen?", keep="once")  # vLLM's worker has said what it can
        talk.turns = (*talk.turns, Turn(QUESTIONS[3], expected.text))
        fifth = await talk.ask(pipeline, "Why?", explain=True)
        fresh = Talk("full")
        fresh.turns = talk.turns[:-1]
        exact = await fresh.ask(pipeline, "Why?", fresh=True)
        report = await pipeline.indexer.delete([pipeline.catalog.documents(limit=1)[0].name])
        left = kept(config)
        await pipeline.close()
        return fifth, exact, report, left

    fifth, exact, report, left = runner.run(after_a_restart())
    usage = fifth.usage
    assert usage.stored_prefix_tokens > 256
    stored = [run for run in fifth.origins.runs if run.kind == "stored"]
    assert sum(run.end - run.start for run in stored) == usage.stored_prefix_tokens
    assert usage.prompt_tokens == usage.prefix_tokens + usage.reused_tokens + usage.recomputed_tokens
    assert exact.usage.prefix_tokens == 0
    if policy == "full":
        assert fifth.text == exact.text
    assert report.num_chunks > 0 and left == []
